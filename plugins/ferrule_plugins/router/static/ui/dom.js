// Elements are made here, and only here. Text becomes text nodes: nothing on this page is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element. `props` are attributes, listeners (`onclick`) and `class`; null, undefined and false are left out. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Return an element of SVG. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return a button. */
export function button(label, onclick, props = {}) {
  return h("button", { type: "button", class: "quiet", onclick, ...props }, label);
}

/** Return a button that copies what `text()` returns. */
export function copyButton(text, props = {}) {
  const made = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed"; // a page without TLS has no clipboard, except on localhost
    }
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  }, props);
  return made;
}

let numbers = 0;

/** Return an id that no other element has. */
export function newId(name) {
  numbers += 1;
  return `${name}-${numbers}`;
}

/** Return a table in a region that scrolls. `columns` are [title, class]; `rows` are lists of texts or nodes. */
export function table(label, columns, rows) {
  const head = columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title));
  const body = rows.map((row) => h("tr", null, row.map((cell, i) => h("td", { class: columns[i][1] }, cell))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}

/** Return the sentence of an error. */
export function notice(error) {
  return h("p", { class: "notice", role: "alert" }, error instanceof Error ? error.message : String(error));
}
