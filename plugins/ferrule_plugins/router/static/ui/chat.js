// The chat: a conversation, the controls of its requests, and what can be done with each message.

import { call, events, json } from "./api.js";
import { showCode } from "./code.js";
import { controls, jsonField } from "./controls.js";
import { h, button, newId, notice } from "./dom.js";
import { message, take, view, wire } from "./message.js";

const EXAMPLE = [{ type: "function", function: { name: "weather", description: "The weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const RESTS = 3; // times as long as showing an answer took, the page then does not show it: it stays usable
const NEAR_END = 80; // pixels from the end within which the view follows the stream

export function chat() {
  return new Chat();
}

class Chat {
  constructor() {
    this.messages = [];
    this.views = [];
    this.abort = null; // of the answer that is being written
    this.fields = null; // controls, once the document has come
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.status = h("p", { class: "sr", role: "status" });
    this.input = h("textarea", { id: "prompt", rows: 2, placeholder: "Write a message", onkeydown: (event) => this.typed(event) });
    this.sendButton = h("button", { class: "main", type: "submit" }, "Send");
    this.stopButton = h("button", { class: "main", type: "button", hidden: true, onclick: () => this.stop() }, "Stop");
    this.model = h("select", { id: newId("model") });
    this.system = h("textarea", { id: newId("system"), rows: 3, placeholder: "none" });
    this.tools = jsonField("Tools", "A JSON list of functions, as the API takes them.", "[]");
    this.problem = h("div");
    this.element = h("div", { class: "chat" },
      h("section", { class: "talk", "aria-label": "Chat" }, h("h1", { class: "sr" }, "Chat"), this.log, this.status, this.composer()),
      this.panel());
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.abort) this.stop();
    });
    this.draw();
  }

  composer() {
    return h("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.send(); } },
      h("label", { for: "prompt", class: "sr" }, "Message"), this.input,
      h("div", { class: "row" },
        h("small", { class: "muted wide" }, "Enter sends · Shift+Enter makes a line · Esc stops"),
        h("span", { class: "spring" }),
        button("New chat", () => this.clear()), button("Code", () => this.code()), this.stopButton, this.sendButton));
  }

  panel() {
    this.place = h("div", null, h("p", { class: "muted" }, "The controls come with the description of the API."));
    return h("aside", { "aria-label": "Settings of the request" },
      h("details", { open: matchMedia("(min-width: 900px)").matches },
        h("summary", null, "Settings"),
        this.problem,
        h("div", { class: "control string" }, h("label", { for: this.model.id }, "model"), this.model),
        h("div", { class: "control array" }, h("label", { for: this.system.id }, "System prompt"), this.system),
        this.place,
        this.tools.element,
        button("Insert an example", () => { this.tools.input.value = JSON.stringify(EXAMPLE, null, 2); })));
  }

  show() {
    this.input.focus({ preventScroll: true });
    this.load();
  }

  /** Read which models there are, and once what a request can have. */
  async load() {
    try {
      const served = (await json("v1/models")).data;
      const chosen = served.some((each) => each.id === this.model.value) ? this.model.value : served[0]?.id;
      const choices = (some) => some.map((each) => h("option", { value: each.id, selected: each.id === chosen }, each.id));
      const adapters = served.filter((each) => each.parent);
      this.model.replaceChildren(...choices(served.filter((each) => !each.parent)),
        ...(adapters.length ? [h("optgroup", { label: "Adapters" }, choices(adapters))] : []));
      const described = this.fields ? null : await json("openapi.json");
      if (!this.fields) {
        this.fields = controls(described);
        this.place.replaceChildren(this.fields.element);
      }
      this.problem.replaceChildren();
    } catch (error) {
      this.problem.replaceChildren(notice(error));
    }
  }

  typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  /** Return the body of the request for some messages. Throws an Error that names what is wrong. */
  body(messages) {
    const system = this.system.value.trim() ? [{ role: "system", content: this.system.value }] : [];
    const tools = this.tools.value();
    return {
      model: this.model.value || undefined,
      messages: [...system, ...messages.map(wire)],
      ...(tools ? { tools } : {}),
      ...this.fields?.values(),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /** Show the request for what is written now, or else the last one. */
  code() {
    const written = this.input.value.trim();
    const asked = this.messages.findLastIndex((one) => one.role !== "assistant") + 1;
    try {
      showCode(this.body(written ? [...this.messages, message("user", written)] : this.messages.slice(0, asked)));
      this.problem.replaceChildren();
    } catch (error) {
      this.tell(error);
    }
  }

  send() {
    const text = this.input.value;
    if (!text.trim() || this.abort) return;
    this.messages.push(message("user", text));
    this.input.value = "";
    this.answer();
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.draw();
    this.input.focus();
  }

  /** Let the model answer the messages so far. */
  async answer() {
    let body;
    try {
      body = this.body(this.messages);
    } catch (error) {
      this.draw();
      this.tell(error);
      return;
    }
    const answer = message("assistant");
    answer.model = this.model.length > 1 ? body.model : "";
    answer.made = { begun: performance.now(), first: null, last: 0, usage: null, ended: false };
    this.messages.push(answer);
    this.busy(new AbortController());
    this.draw();
    await this.read(answer, body);
  }

  async read(answer, body) {
    const { signal } = this.abort;
    const update = () => this.views[this.messages.indexOf(answer)]?.update(); // what is drawn anew has another view
    let [due, from] = [false, 0]; // whether an update is on its way, and when the next one may come
    const later = () => {
      due = false;
      const begun = performance.now();
      this.follow(update);
      from = performance.now() + RESTS * (performance.now() - begun);
    };
    try {
      for await (const event of events(await call("v1/chat/completions", { body, signal }))) {
        take(answer, event, performance.now());
        if (!due) setTimeout(() => requestAnimationFrame(later), from - performance.now());
        due = true;
      }
      this.status.textContent = "The answer is complete.";
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopping it here";
      else answer.error = error.message;
      this.status.textContent = error.name === "AbortError" ? "Stopped." : "";
    }
    answer.made.ended = true;
    if (signal === this.abort?.signal) this.busy(null);
    this.follow(update);
    if (answer.calls.length && this.messages.at(-1) === answer) this.draw();
  }

  busy(abort) {
    const pressed = [this.sendButton, this.stopButton].includes(document.activeElement); // it is hidden now
    this.abort = abort;
    this.stopButton.hidden = !abort;
    this.sendButton.hidden = Boolean(abort);
    this.log.setAttribute("aria-busy", String(Boolean(abort)));
    if (pressed) this.input.focus({ preventScroll: true });
  }

  tell(error) {
    this.problem.replaceChildren(notice(error));
    this.problem.closest("details").open = true;
    this.problem.scrollIntoView({ block: "nearest" });
  }

  /** Change what is shown, and stay at the end if the reader was there. */
  follow(change) {
    const { log } = this;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  draw() {
    this.views = this.messages.map((one, i) => view(one, this.actions(i)));
    const hello = h("div", { class: "hello" }, h("p", null, "Ask the model something."),
      h("p", { class: "muted" }, "The conversation stays in this tab and is gone when it is reloaded."));
    const results = this.results();
    this.log.replaceChildren(...(this.views.length ? this.views.map((each) => each.element) : [hello]), ...(results ? [results] : []));
    this.log.scrollTop = this.log.scrollHeight;
  }

  actions(i) {
    const one = this.messages[i];
    const edit = ["Edit", () => this.edit(i)];
    const retry = ["Retry", () => this.again(i)];
    return one.role === "assistant" ? [retry, edit] : [edit];
  }

  /** Answer again, from the message before an answer. */
  again(i) {
    this.stop();
    this.messages.length = i;
    this.answer();
  }

  /** Edit a message in its place. A changed question is asked again; behind a changed message the conversation ends. */
  edit(i) {
    const one = this.messages[i];
    const input = h("textarea", { rows: Math.min(12, one.content.split("\n").length + 1), "aria-label": "Edit the message" });
    input.value = one.content;
    const done = () => {
      this.stop();
      this.messages.length = i + 1;
      one.content = input.value;
      if (one.role === "assistant") this.draw();
      else this.answer();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
      if (event.key === "Escape") { event.stopPropagation(); this.draw(); }
    });
    const save = button(one.role === "assistant" ? "Save" : "Save and ask", done, { class: "main" });
    const row = h("div", { class: "row end" }, button("Cancel", () => this.draw()), save);
    this.views[i].text.replaceWith(h("div", { class: "text" }, input, row)); // an answer may go on meanwhile, unseen
    input.focus();
  }

  /** Return a form for the results of the tools that the last answer calls, or null. */
  results() {
    const last = this.messages.at(-1);
    if (!last?.made?.ended || !last.calls.length) return null;
    const inputs = last.calls.map((each) => [each, h("textarea", { rows: 2, class: "mono", "aria-label": `Result of ${each.name}` })]);
    return h("form", { class: "message tool", onsubmit: (event) => {
      event.preventDefault();
      for (const [each, input] of inputs) this.messages.push({ ...message("tool", input.value), call: each });
      this.answer();
    } },
    inputs.map(([each, input]) => h("div", { class: "control array" }, h("span", null, "Result of ", h("code", null, each.name)), input)),
    h("div", { class: "row end" }, h("button", { class: "main", type: "submit" }, "Send the results")));
  }
}
