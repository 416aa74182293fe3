// Controls for the fields of a request, made from the schema in /openapi.json: names, bounds and descriptions are the
// server's own. A field that is left empty is not sent.

import { h, newId } from "./dom.js";

const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop",
  "presence_penalty", "frequency_penalty", "repetition_penalty"];
// Fields that the chat fills itself, or whose answers it does not show.
const OWN = new Set(["model", "messages", "stream", "stream_options", "tools", "n", "best_of", "use_beam_search",
  "length_penalty", "early_stopping", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "max_completion_tokens",
  "return_tokens_as_token_ids", "return_token_ids", "return_prompt_text", "add_generation_prompt"]);
const NO_EFFECT = /^(Not in this build|No effect)/;
const EXACT = Number.MAX_SAFE_INTEGER;

/** Return controls for the fields of the chat request that OpenAPI document describes. */
export function controls(document) {
  const schema = bodyOf(document);
  const fields = Object.entries(schema.properties)
    .filter(([name, field]) => !OWN.has(name) && !NO_EFFECT.test(field.description ?? ""))
    .map(([name, field]) => control(name, simple(field, document), field.description ?? ""))
    .filter(Boolean);
  const first = FIRST.map((name) => fields.find((field) => field.name === name)).filter(Boolean);
  const rest = fields.filter((field) => !first.includes(field));
  const json = jsonField("Further fields", "A JSON object, sent as it is. It wins over the controls.", "{}");
  const element = h("div", { class: "controls" },
    first.map((field) => field.element),
    h("details", null, h("summary", null, `More (${rest.length})`), rest.map((field) => field.element)),
    json.element);
  return {
    element,
    /** Return the fields that are set. Throws an Error that names a field that is wrong. */
    values() {
      const found = {};
      for (const field of fields) {
        const value = field.value();
        if (value !== undefined) found[field.name] = value;
      }
      return { ...found, ...(json.value() ?? {}) };
    },
  };
}

function bodyOf(document) {
  const { schema } = document.paths["/v1/chat/completions"].post.requestBody.content["application/json"];
  return resolve(schema, document);
}

function resolve(schema, document) {
  return schema.$ref ? document.components.schemas[schema.$ref.split("/").at(-1)] : schema;
}

/** Return the first form of a field that has a control: a number, a truth, one of several texts, a text, or a list. */
function simple(field, document) {
  const forms = (field.anyOf ?? [field]).flatMap((form) => form.oneOf ?? [form]).map((form) => resolve(form, document));
  const enumerated = forms.find((form) => form.enum);
  const list = forms.find((form) => form.type === "array" && ["string", "integer"].includes(form.items?.type));
  const scalar = forms.find((form) => ["number", "integer", "boolean", "string"].includes(form.type));
  return enumerated ?? list ?? scalar;
}

function control(name, form, description) {
  if (!form) return null;
  const id = newId(name);
  const shared = { id, name, "aria-describedby": `${id}-about` };
  const [input, value] = (form.enum ? choice : form.type === "array" ? lines : form.type === "boolean" ? truth
    : form.type === "string" ? text : number)(name, form, shared);
  const element = h("div", { class: `control ${form.type}` },
    h("label", { for: id }, name), input, h("small", { id: `${id}-about` }, description));
  return { name, element, value };
}

function number(name, form, shared) {
  const bound = (value) => (Math.abs(value) <= EXACT ? value : undefined);
  const input = h("input", { ...shared, type: "number", step: form.type === "integer" ? 1 : "any", placeholder: "default",
    min: bound(form.minimum ?? form.exclusiveMinimum), max: bound(form.maximum ?? form.exclusiveMaximum) });
  return [input, () => {
    if (!input.checkValidity()) throw new Error(`${name}: ${input.validationMessage}`);
    return input.value === "" ? undefined : Number(input.value);
  }];
}

function text(name, form, shared) {
  const input = h("input", { ...shared, type: "text", placeholder: "default", autocomplete: "off" });
  return [input, () => input.value || undefined];
}

function select(values, labels, shared) {
  const input = h("select", shared, h("option", { value: "" }, "default"),
    values.map((each, i) => h("option", { value: i }, labels[i])));
  return [input, () => (input.value === "" ? undefined : values[Number(input.value)])];
}

function choice(name, form, shared) {
  return select(form.enum, form.enum.map(String), shared);
}

function truth(name, form, shared) {
  return select([true, false], ["yes", "no"], shared);
}

function lines(name, form, shared) {
  const input = h("textarea", { ...shared, rows: 1, placeholder: "one in each line" });
  return [input, () => {
    const found = input.value.split("\n").filter((line) => line !== "");
    if (!found.length) return undefined;
    const values = form.items.type === "integer" ? found.map(Number) : found;
    if (values.some((each) => typeof each === "number" && !Number.isInteger(each))) throw new Error(`${name}: whole numbers, one in each line.`);
    return values;
  }];
}

/** Return a field for JSON. `value()` is undefined for an empty one, and throws an Error for one that is not JSON. */
export function jsonField(label, about, placeholder) {
  const id = newId("json");
  const input = h("textarea", { id, rows: 3, spellcheck: "false", class: "mono", placeholder, "aria-describedby": `${id}-about` });
  const element = h("div", { class: "control array" }, h("label", { for: id }, label), input, h("small", { id: `${id}-about` }, about));
  return { element, input, value() {
    if (!input.value.trim()) return undefined;
    try {
      return JSON.parse(input.value);
    } catch (error) {
      throw new Error(`${label}: ${error.message}`);
    }
  } };
}
