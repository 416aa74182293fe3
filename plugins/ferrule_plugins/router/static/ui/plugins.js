// The plugins of this server by kind: where each comes from, and whether it can be used.

import { json } from "./api.js";
import { h, newId, notice, table } from "./dom.js";

const COLUMNS = [["name", "mono"], ["distribution"], ["code", "mono"], ["state"]];

export function plugins() {
  const id = newId("filter");
  const filter = h("input", { id, type: "search", placeholder: "kind, name or distribution", oninput: draw });
  const count = h("span", { class: "muted num", role: "status" });
  const place = h("div");
  const element = h("div", { class: "page" },
    h("h1", null, "Plugins"),
    h("div", { class: "row" }, h("label", { for: id }, "Filter"), filter, count),
    place);
  let found = null;

  function draw() {
    if (!found) return;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = found.data.filter((row) => words.every((word) => `${row.kind}:${row.name} ${row.origin} ${row.state}`.toLowerCase().includes(word)));
    count.textContent = `${rows.length} of ${found.data.length}`;
    const kinds = [...new Set(rows.map((row) => row.kind))];
    place.replaceChildren(
      ...found.problems.map((text) => h("p", { class: "notice" }, text)),
      ...found.refusals.map((text) => h("p", { class: "remark" }, text)),
      ...kinds.map((kind) => group(kind, rows.filter((row) => row.kind === kind))));
  }

  async function show() {
    try {
      found = await json("ui/api/plugins");
      draw();
    } catch (error) {
      place.replaceChildren(notice(error));
    }
  }

  return { element, show };
}

function group(kind, rows) {
  const id = newId("kind");
  return h("section", { class: "aligned", "aria-labelledby": id },
    h("h2", { id }, kind, " ", h("span", { class: "muted num" }, String(rows.length))),
    table(`Plugins of the kind ${kind}`, COLUMNS, rows.map((row) => [
      row.chosen ? [h("strong", null, row.name), " ", h("span", { class: "tag" }, "chosen")] : row.name,
      row.origin, row.target, state(row)])));
}

function state(row) {
  return [h("span", { class: `dot ${row.state === "available" ? "good" : "off"}` }), row.state, row.reason && h("span", { class: "muted" }, `: ${row.reason}`)];
}
