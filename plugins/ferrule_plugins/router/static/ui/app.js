// The frame: views by the hash of the address, the theme, the state of the server, and the key.

import { askKey, NEW_KEY } from "./api.js";
import { h } from "./dom.js";
import { chat } from "./chat.js";
import { live } from "./live.js";
import { options } from "./options.js";
import { plugins } from "./plugins.js";

const VIEWS = { chat, live, plugins, options }; // each makes {element, show?, hide?} when it is first visited
const STATE_MS = 5000;
const THEMES = ["system", "light", "dark"];

const main = document.getElementById("main");
const made = {};
let current = null;

function show() {
  const name = location.hash.replace(/^#\/?/, "");
  if (name === "main") return main.focus(); // the link that skips the bar
  const view = Object.hasOwn(VIEWS, name) ? name : "chat";
  if (current === view) return undefined;
  made[current]?.hide?.();
  made[view] ??= VIEWS[view]();
  current = view;
  main.replaceChildren(made[view].element);
  main.dataset.view = view;
  made[view].show?.();
  for (const link of document.querySelectorAll(".bar nav a")) {
    const here = link.getAttribute("href") === `#/${view}`;
    if (here) {
      link.setAttribute("aria-current", "page");
      document.title = `${link.textContent} · Ferrule`;
    } else link.removeAttribute("aria-current");
  }
  return undefined;
}

const state = document.getElementById("state");

/** Have the view read again what it shows: another key, and a server that was started anew, may see other things. */
function reload() {
  const view = made[current];
  if (view.load) view.load();
  else view.show?.();
}

/** Show whether the server takes requests. The route needs no key. */
async function watchState() {
  let text = "ready";
  let kind = "good";
  try {
    const response = await fetch("health", { cache: "no-store", credentials: "omit" });
    if (!response.ok) [text, kind] = [(await response.json()).error.message, "bad"];
  } catch {
    [text, kind] = ["no answer", "bad"];
  }
  if (state.title !== text) {
    if (state.title && kind === "good") reload();
    state.title = text;
    state.replaceChildren(h("span", { class: `dot ${kind}` }), h("span", { class: "wide" }, text));
  }
  setTimeout(watchState, STATE_MS);
}

const theme = document.getElementById("theme");

function applyTheme(name) {
  if (name === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("ferrule-theme");
  } else {
    document.documentElement.dataset.theme = name;
    localStorage.setItem("ferrule-theme", name);
  }
  const shown = name === "system" ? "auto" : name;
  theme.replaceChildren(h("span", { class: "wide" }, "Theme: "), shown);
  theme.setAttribute("aria-label", `Theme: ${shown}`);
}

theme.addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "system";
  applyTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
document.getElementById("key").addEventListener("click", () => askKey(""));
document.getElementById("key").title = "Give another key. An empty tab has none.";
document.addEventListener(NEW_KEY, reload);

applyTheme(document.documentElement.dataset.theme ?? "system");
addEventListener("hashchange", show);
show();
watchState();
