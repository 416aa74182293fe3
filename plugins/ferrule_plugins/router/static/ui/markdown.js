// Markdown as models write it, made into elements. What is not understood stays text; HTML is text; images are named and
// never loaded; links lead to http and https only. The work is linear in the text, but for nesting, which has a limit.

import { h, copyButton } from "./dom.js";

const DEEPEST = 8;
const TRIES = 16; // ends that are tried for one piece of emphasis
const LONGEST_LINK = 2000;

/** Show a text in an element. Blocks that are there already stay, so that a stream only adds. */
export function show(element, text) {
  const blocks = split(text.replace(/\r\n?/g, "\n").split("\n"));
  const before = element.blocks ?? [];
  let same = 0;
  while (same < blocks.length && before[same] === blocks[same].source) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(make(block, 0));
  element.blocks = blocks.map((block) => block.source);
}

// ------------------------------------------------------------------------------------------------------------ blocks

const BULLET = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;

function split(lines) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [kind, end, more] = next(lines, at);
    found.push({ kind, lines: lines.slice(at, end), ...more, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return found;
}

/** Return the kind of the block that begins at a line, the line behind it, and what its maker must know. */
function next(lines, at) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) return code(lines, at, fence);
  if (headingOf(line)) return ["heading", at + 1];
  if (isRule(line)) return ["rule", at + 1];
  if (line.trimStart().startsWith(">")) return ["quote", upTo(lines, at, (each) => !each.trimStart().startsWith(">"))];
  if (BULLET.test(line)) return ["list", endOfList(lines, at)];
  if (isTable(lines, at)) return ["table", upTo(lines, at, (each) => !each.includes("|"))];
  return ["text", upTo(lines, at + 1, (each, i) => !each.trim() || begins(lines, i))];
}

function upTo(lines, at, ends) {
  let end = at;
  while (end < lines.length && !ends(lines[end], end)) end += 1;
  return end;
}

function begins(lines, at) {
  const line = lines[at];
  return Boolean(fenceOf(line) || headingOf(line) || isRule(line) || BULLET.test(line)) || line.startsWith(">") || isTable(lines, at);
}

function fenceOf(line) {
  const found = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line);
  return found && !(found[1][0] === "`" && found[2].includes("`")) ? { mark: found[1], language: found[2].trim() } : null;
}

function code(lines, at, { mark, language }) {
  const closes = (line) => {
    const word = line.trim();
    return word.length >= mark.length && word === mark[0].repeat(word.length);
  };
  const end = upTo(lines, at + 1, closes);
  return ["code", Math.min(end + 1, lines.length), { language, body: lines.slice(at + 1, end).join("\n") }];
}

function headingOf(line) {
  return /^ {0,3}(#{1,6})(?: (.*))?$/.exec(line);
}

function isRule(line) {
  const bare = line.replaceAll(" ", "").replaceAll("\t", "");
  return bare.length >= 3 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
}

function isTable(lines, at) {
  const below = lines[at + 1];
  return lines[at].includes("|") && below !== undefined && below.includes("-") && below.includes("|") && /^[\s|:-]+$/.test(below);
}

/** A list goes on with its next items, and with lines that are indented or follow a line of text at once. */
function endOfList(lines, at) {
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      const after = lines[end + 1];
      if (after === undefined || !(after.startsWith("  ") || BULLET.test(after))) return end;
    } else if (!BULLET.test(line) && !line.startsWith("  ") && (!lines[end - 1].trim() || begins(lines, end))) return end;
    end += 1;
  }
  return end;
}

function make(block, depth) {
  switch (block.kind) {
    case "code": return codeBlock(block.body, block.language);
    case "rule": return h("hr");
    case "heading": {
      const [, marks, text = ""] = headingOf(block.lines[0]);
      // The view has the h1.
      return h(`h${Math.min(6, marks.length + 1)}`, null, inline(text.replace(/ #+ *$/, "")));
    }
    case "quote": return h("blockquote", null, inner(block.lines.map((line) => line.trimStart().slice(1).replace(/^ /, "")), depth));
    case "list": return list(block.lines, depth);
    case "table": return tableOf(block.lines);
    default: return h("p", null, inline(block.lines.map((line) => line.trimStart()).join("\n")));
  }
}

function inner(lines, depth) {
  return depth < DEEPEST ? split(lines).map((block) => make(block, depth + 1)) : [h("p", null, lines.join("\n"))];
}

/** Return a block of code with its language and a button that copies it. */
export function codeBlock(body, language) {
  return h("figure", { class: "code" },
    h("figcaption", null, h("span", null, language || "text"), copyButton(() => body)),
    h("pre", { tabindex: "0" }, h("code", null, body)));
}

function list(lines, depth) {
  const items = [];
  let own = 0;
  for (const line of lines) {
    const found = BULLET.exec(line);
    if (found && (!items.length || found[1].length < own)) {
      own = found[0].length + (found[3] ? 0 : 1);
      items.push([line.slice(found[0].length)]);
    } else items.at(-1).push(line.slice(Math.min(own, line.length - line.trimStart().length)));
  }
  const number = /^ *(\d+)/.exec(lines[0]);
  const made = items.map((item) => h("li", null, tight(inner(item, depth))));
  return number ? h("ol", { start: Number(number[1]) }, made) : h("ul", null, made);
}

/** An item that begins with a paragraph shows its text without the paragraph. */
function tight(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function tableOf(lines) {
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "mid" : "num") : null));
  const row = (line, tag) => h("tr", null, cells(line).slice(0, sides.length).map((cell, i) => h(tag, { class: sides[i] }, inline(cell))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", null, h("thead", null, row(lines[0], "th")), h("tbody", null, lines.slice(2).map((line) => row(line, "td")))));
}

function cells(line) {
  const found = line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/);
  return found.map((cell) => cell.replaceAll("\\|", "|").trim());
}

// ------------------------------------------------------------------------------------------------------------ inline

const EMPHASIS = [["***", "strong em"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const PUNCTUATION = "\\`*_{}[]()#+-.!|<>~\"'";

/** Return the nodes of a text within a block. */
export function inline(text, depth = 0) {
  const nodes = [];
  const hopeless = new Set(); // marks that do not end in the rest of this text
  let plain = "";
  let at = 0;
  const flush = () => { if (plain) nodes.push(plain); plain = ""; };
  while (at < text.length) {
    const found = depth < DEEPEST ? piece(text, at, depth, hopeless) : null;
    if (found) {
      flush();
      nodes.push(found.node);
      at = found.end;
    } else if (text[at] === "\\" && PUNCTUATION.includes(text[at + 1] ?? " ")) {
      plain += text[at + 1];
      at += 2;
    } else if (text[at] === "`" || text[at] === "*" || text[at] === "_" || text[at] === "~") {
      const run = runAt(text, at);
      plain += run;
      at += run.length;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return nodes;
}

function piece(text, at, depth, hopeless) {
  switch (text[at]) {
    case "`": return codeSpan(text, at, hopeless);
    case "*": case "_": case "~": return emphasis(text, at, depth, hopeless);
    case "[": return link(text, at);
    case "!": return text[at + 1] === "[" ? image(text, at) : null;
    case "<": return bareLink(text, at + 1, ">");
    case "h": return /\w/.test(text[at - 1] ?? " ") ? null : bareLink(text, at, "");
    case "\n": return text.slice(at - 2, at) === "  " ? { node: h("br"), end: at + 1 } : null;
    default: return null;
  }
}

function runAt(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return text.slice(at, end);
}

function codeSpan(text, at, hopeless) {
  const run = runAt(text, at);
  if (hopeless.has(run)) return null;
  for (let end = text.indexOf(run, at + run.length); end >= 0; end = text.indexOf(run, end)) {
    const closing = runAt(text, end);
    if (closing === run) {
      const body = text.slice(at + run.length, end).replaceAll("\n", " ");
      return { node: h("code", null, /^ .* $/.test(body) && body.trim() ? body.slice(1, -1) : body), end: end + run.length };
    }
    end += closing.length;
  }
  hopeless.add(run);
  return null;
}

function emphasis(text, at, depth, hopeless) {
  for (const [mark, tags] of EMPHASIS) {
    if (!text.startsWith(mark, at) || hopeless.has(mark) || /\s|^$/.test(text[at + mark.length] ?? "")) continue;
    if (mark[0] === "_" && /\w/.test(text[at - 1] ?? " ")) continue;
    let end = text.indexOf(mark, at + mark.length + 1);
    if (end < 0) hopeless.add(mark);
    for (let tries = 0; end >= 0 && tries < TRIES; tries += 1) {
      const run = runAt(text, end);
      const closes = !/\s/.test(text[end - 1]) && (run.length === mark.length || mark.length === 3)
        && !(mark[0] === "_" && /\w/.test(text[end + mark.length] ?? " "));
      if (closes) {
        const inside = inline(text.slice(at + mark.length, end), depth + 1);
        const node = tags.split(" ").reduceRight((nodes, tag) => [h(tag, null, nodes)], inside)[0];
        return { node, end: end + mark.length };
      }
      end = text.indexOf(mark, end + run.length);
    }
  }
  return null;
}

/** Return the text and the target of `[text](target)`, or null. */
function bracketed(text, at) {
  const near = text.slice(at, at + LONGEST_LINK);
  const middle = near.indexOf("](");
  const end = middle < 0 ? -1 : near.indexOf(")", middle);
  if (end < 0) return null;
  return { label: near.slice(1, middle), target: near.slice(middle + 2, end).trim().split(/\s/)[0], end: at + end + 1 };
}

function link(text, at) {
  const found = bracketed(text, at);
  const target = found && safe(found.target.replace(/^<|>$/g, ""));
  return target ? { node: anchor(target, inline(found.label, DEEPEST)), end: found.end } : null;
}

function image(text, at) {
  const found = bracketed(text, at + 1);
  if (!found) return null;
  const target = safe(found.target);
  const label = `image: ${found.label || "without a name"}`;
  return { node: h("span", { class: "image" }, target ? anchor(target, [label]) : label), end: found.end };
}

function bareLink(text, at, closing) {
  if (!text.startsWith("http://", at) && !text.startsWith("https://", at)) return null;
  const rest = /^[^\s<>"'`*]{1,2000}/.exec(text.slice(at, at + LONGEST_LINK))[0];
  const address = closing ? rest : rest.replace(/[.,;:!?)\]]+$/, "");
  const target = safe(address);
  if (!target || (closing && text[at + address.length] !== closing)) return null;
  return { node: anchor(target, [address]), end: at + address.length + closing.length };
}

function safe(address) {
  try {
    const url = new URL(address);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null; // not an address, or a relative one, which would lead to this server
  }
}

function anchor(target, children) {
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
