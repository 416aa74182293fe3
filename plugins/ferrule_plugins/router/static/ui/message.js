// One message of a conversation: its state, how a stream becomes it, and its element.

import { h, button, copyButton } from "./dom.js";
import { codeBlock, show } from "./markdown.js";

/** Return a message. `made` has the figures of an answer, `model` who gave it where there are several. */
export function message(role, content = "") {
  return { role, content, reasoning: "", calls: [], call: null, error: "", finish: null, made: null, model: "" };
}

/** Add an event of the stream to an answer. */
export function take(answer, event, now) {
  if (event.usage) answer.made.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const known = answer.calls[part.index] ??= { id: "", name: "", arguments: "" };
    known.id ||= part.id ?? "";
    known.name += part.function?.name ?? "";
    known.arguments += part.function?.arguments ?? "";
  }
  if (delta.content || delta.reasoning || delta.reasoning_content || delta.tool_calls) answer.made.first ??= now;
  answer.made.last = now;
  answer.finish = choice.finish_reason ?? answer.finish;
}

/** Return the message as the API takes it. */
export function wire(one) {
  if (one.role === "tool") return { role: "tool", tool_call_id: one.call.id, content: one.content };
  if (!one.calls.length) return { role: one.role, content: one.content };
  const calls = one.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return { role: "assistant", content: one.content, tool_calls: calls };
}

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/** Return the view of a message: its element, and `update()`, which shows what has come since. */
export function view(one, actions) {
  const text = h("div", { class: "text" });
  const thought = h("div", { class: "text" });
  const thoughts = h("details", { class: "fold" }, h("summary", null, "Thoughts"), thought);
  const calls = h("div");
  const wrote = one.role === "assistant";
  const foot = h("footer", null);
  const title = one.role === "tool" ? `${NAMES.tool}: ${one.call.name}` : NAMES[one.role];
  const tools = h("div", { class: "row actions" }, copyButton(() => one.content), actions.map(([label, act]) => button(label, () => act(update))));
  const element = h("article", { class: `message ${one.role}`, "aria-label": title },
    h("header", null, h("strong", null, title), one.model && h("span", { class: "muted" }, one.model), tools), wrote && thoughts, text, wrote && [calls, foot]);

  function update() {
    if (!wrote) {
      text.replaceChildren(h("p", { class: "plain" }, one.content));
      return;
    }
    thoughts.hidden = !one.reasoning;
    show(thought, one.reasoning);
    show(text, one.content);
    const open = [...calls.children].map((each) => each.open);
    calls.replaceChildren(...one.calls.map((call, i) => callView(call, open[i] ?? false)));
    foot.replaceChildren(...figures(one));
  }
  update();
  return { element, update, text };
}

function callView(call, open) {
  let body = call.arguments;
  try {
    body = JSON.stringify(JSON.parse(body), null, 2);
  } catch { /* it has not come as a whole, or is not JSON: shown as it is */ }
  return h("details", { class: "fold", open }, h("summary", null, "Tool call ", h("code", null, call.name)), codeBlock(body, "JSON"));
}

function figures(one) {
  if (one.error) return [h("p", { class: "notice", role: "alert" }, one.error)];
  if (!one.made) return [];
  const { begun, first, last, usage, ended } = one.made;
  if (!first && !ended) return [h("span", { class: "muted" }, "…")];
  const parts = [first ? `${Math.round(first - begun)} ms to the first token` : "no text"];
  if (usage) {
    const seconds = (last - first) / 1000;
    parts.unshift(`${usage.completion_tokens} tokens`);
    if (seconds > 0.05 && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`prompt ${usage.prompt_tokens}`);
  }
  if (one.finish && one.finish !== "stop") parts.push(`ended by ${one.finish}`);
  return [h("span", { class: "muted num" }, parts.join(" · "))];
}
