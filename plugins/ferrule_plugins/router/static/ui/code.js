// A request as code: curl and Python. The key is never in it: both read $FERRULE_API_KEY.

import { h, button } from "./dom.js";
import { codeBlock } from "./markdown.js";

// Parameters of openai's `chat.completions.create`; what it does not know goes through `extra_body`.
const OPENAI = new Set(["model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop",
  "presence_penalty", "frequency_penalty", "logit_bias", "response_format", "tools", "tool_choice", "parallel_tool_calls",
  "reasoning_effort", "user", "metadata", "stream", "stream_options", "n", "logprobs", "top_logprobs"]);

/** Return the address that the API has from outside. */
function base() {
  return new URL("v1", document.baseURI).href;
}

/** Return a command for a shell. */
export function curl(body) {
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${base()}/chat/completions \\\n  -H "Authorization: Bearer $FERRULE_API_KEY" \\\n`
    + `  -H "Content-Type: application/json" \\\n  -d '${text}'`;
}

/** Return a Python program for the package openai. */
export function python(body) {
  const { stream, stream_options: unused, ...rest } = body;
  const known = Object.entries(rest).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(rest).filter(([name]) => !OPENAI.has(name)));
  const given = known.map(([name, value]) => `    ${name}=${literal(value, 4)},\n`);
  if (Object.keys(extra).length) given.push(`    extra_body=${literal(extra, 4)},\n`);
  if (stream) given.push("    stream=True,\n");
  const read = stream
    ? 'for chunk in answer:\n    for choice in chunk.choices:\n        print(choice.delta.content or "", end="", flush=True)\nprint()\n'
    : "print(answer.choices[0].message.content)\n";
  return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=${literal(base(), 0)}, `
    + `api_key=os.environ.get("FERRULE_API_KEY", "none"))\nanswer = client.chat.completions.create(\n${given.join("")})\n${read}`;
}

function literal(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value); // texts of JSON are texts of Python, surrogates escaped
  const pad = " ".repeat(indent + 4);
  const parts = Array.isArray(value)
    ? value.map((part) => `${pad}${literal(part, indent + 4)},\n`)
    : Object.entries(value).map(([name, part]) => `${pad}${JSON.stringify(name)}: ${literal(part, indent + 4)},\n`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return parts.length ? `${open}\n${parts.join("")}${" ".repeat(indent)}${close}` : `${open}${close}`;
}

/** Show a request as code. */
export function showCode(body) {
  const dialog = h("dialog", { class: "large", "aria-labelledby": "code-title", onclose: () => dialog.remove() },
    h("div", { class: "row" }, h("h2", { id: "code-title" }, "This request as code"), button("Close", () => dialog.close())),
    h("p", { class: "muted" }, "The key is read from the variable FERRULE_API_KEY."),
    codeBlock(curl(body), "curl"), codeBlock(python(body), "Python"));
  document.body.append(dialog);
  dialog.showModal();
}
