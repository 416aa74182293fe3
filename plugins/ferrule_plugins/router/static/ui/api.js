// Calls of this server. The key is typed once in each tab and kept in its sessionStorage: a reload survives, the tab's
// end does not, and it goes nowhere but into the header Authorization.

import { h, button } from "./dom.js";

const KEY = "ferrule-key";
export const NEW_KEY = "ferrule-new-key"; // the event of a document in which a key was given
let asking = null;

/** An answer that is an error. `status` is that of HTTP; 0 where there was no answer. */
export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Call the server and return the response. Asks for the key when it is missing. Throws Failure, and AbortError. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const init = { headers, signal, cache: "no-store", credentials: "omit" };
    if (body !== undefined) {
      init.method = "POST";
      init.body = JSON.stringify(body);
      headers["content-type"] = "application/json";
    }
    let response;
    try {
      response = await fetch(path, init);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server does not answer.", 0);
    }
    if (response.ok) return response;
    const message = await messageOf(response);
    if (response.status !== 401) throw new Failure(message, response.status);
    if (sessionStorage.getItem(KEY) !== key) continue; // another call has asked meanwhile
    if (!(await askKey(key ? "That key was refused." : ""))) throw new Failure("This server needs a key: the button Key asks for it.", 401);
  }
}

/** Return the JSON of an answer. */
export async function json(path, options) {
  return (await call(path, options)).json();
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 500) || `The server answers ${response.status}.`;
  }
}

/** Yield the JSON of a response's server-sent events, up to [DONE]. Throws Failure for an event that is an error, and for
 * a stream that ends without [DONE]: the server, or a proxy, is gone.
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Failure("The connection was lost before the answer was complete.", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // a comment keeps the connection alive
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(event.error.message, event.error.code ?? 500);
      yield event;
    }
  }
}

/** Ask for the key, once however many calls need it. Returns whether one was given. */
export function askKey(remark) {
  asking ??= new Promise((resolve) => {
    const input = h("input", { type: "password", id: "key-input", autocomplete: "off", required: true });
    const dialog = h("dialog", { "aria-labelledby": "key-title", onclose: () => {
      const given = dialog.returnValue === "use" && input.value;
      if (given) sessionStorage.setItem(KEY, given);
      dialog.remove();
      asking = null;
      resolve(Boolean(given));
      if (given) document.dispatchEvent(new Event(NEW_KEY));
    } },
    h("form", { method: "dialog" },
      h("h2", { id: "key-title" }, "API key"),
      remark && h("p", { class: "notice" }, remark),
      h("label", { for: "key-input" }, "This server needs a key. It stays in this tab and is forgotten with it."),
      input,
      h("div", { class: "row end" },
        button("Cancel", () => dialog.close("")),
        h("button", { value: "use", class: "main" }, "Use it"))));
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
  return asking;
}
