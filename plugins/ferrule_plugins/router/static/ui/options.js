// The models that this server answers for, and its options as they were resolved. Secrets do not leave the server.

import { json } from "./api.js";
import { h, newId, notice, table } from "./dom.js";

const MODELS = [["id", "mono"], ["adapter of", "mono"], ["context", "num"], ["root", "mono"], ["owner"]];
const OPTIONS = [["option", "mono"], ["value", "mono"], ["source"], ["default", "mono"]];

export function options() {
  const [id, changed] = [newId("filter"), newId("changed")];
  const filter = h("input", { id, type: "search", placeholder: "option, value or source", oninput: draw });
  const only = h("input", { id: changed, type: "checkbox", onchange: draw });
  const count = h("span", { class: "muted num", role: "status" });
  const [models, place, version] = [h("div"), h("div"), h("span", { class: "muted num" })];
  const element = h("div", { class: "page" },
    h("h1", null, "Models and options ", version),
    h("h2", null, "Models"), models,
    h("h2", null, "Options"),
    h("div", { class: "row" }, h("label", { for: id }, "Filter"), filter,
      h("span", { class: "row" }, only, h("label", { for: changed }, "only what is not a default")), count),
    place);
  let found = [];

  function draw() {
    const word = filter.value.toLowerCase();
    const rows = found
      .filter((row) => !only.checked || row.source !== "default")
      .map((row) => [`--${row.name.replaceAll("_", "-")}`, text(row.value), row.source, text(row.default)])
      .filter((row) => row.slice(0, 3).join(" ").toLowerCase().includes(word));
    count.textContent = `${rows.length} of ${found.length}`;
    const cells = rows.map(([name, value, source, byDefault]) => [name, value, source === "default" ? h("span", { class: "muted" }, source) : h("strong", null, source),
      h("span", { class: "muted" }, byDefault)]);
    place.replaceChildren(table("Options", OPTIONS, cells));
  }

  async function show() {
    try {
      const served = await json("v1/models");
      models.replaceChildren(table("Models", MODELS, served.data.map((each) => [each.id, each.parent ?? "–", number(each.max_model_len), each.root, each.owned_by])));
      const answer = await json("ui/api/options");
      version.textContent = answer.version;
      found = answer.options;
      draw();
    } catch (error) {
      place.replaceChildren(notice(error));
    }
  }

  return { element, show };
}

function text(value) {
  if (value === null || value === "") return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function number(value) {
  return typeof value === "number" ? value.toLocaleString("en") : "–";
}
