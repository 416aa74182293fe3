// The engine as it is: figures, the map of the cache, the last steps, and who runs and waits. The server takes one picture
// a second for all pages together, and none while no page shows this view.

import { json } from "./api.js";
import { h, button, notice, svg, table } from "./dom.js";

const PERIOD_MS = 1000;
const HISTORY = 120; // pictures that the curves show
const RUNNING = [["request", "mono"], ["phase"], ["prompt", "num"], ["cached", "num"], ["computed", "num"], ["generated", "num"],
  ["blocks", "num"], ["age", "num"], ["first token", "num"], ["per token", "num"]];
const ADAPTERS = [["adapter", "mono"], ["state"], ["running", "num"], ["waiting", "num"]];
const WAITING = [["request", "mono"], ["prompt", "num"], ["generated", "num"], ["age", "num"], ["preempted", "num"], ["state"]];

export function live() {
  return new Live();
}

class Live {
  constructor() {
    this.history = [];
    this.timer = 0;
    this.shown = false;
    this.paused = false;
    this.figures = h("dl", { class: "figures" });
    [this.problem, this.cache, this.steps, this.adapters, this.running, this.waiting] = Array.from({ length: 6 }, () => h("div"));
    [this.numRunning, this.numWaiting] = [h("span", { class: "muted num" }), h("span", { class: "muted num" })];
    this.pause = button("Pause", () => this.toggle());
    this.element = h("div", { class: "page" },
      h("div", { class: "row" }, h("h1", null, "Live"), h("span", { class: "spring" }), this.pause),
      this.problem, this.figures,
      h("div", { class: "two" },
        h("section", { "aria-label": "Cache" }, h("h2", null, "Cache"), this.cache),
        h("section", { "aria-label": "Steps" }, h("h2", null, "Last steps"), this.steps)),
      this.adapters,
      h("h2", null, "Running ", this.numRunning), this.running,
      h("h2", null, "Waiting ", this.numWaiting), this.waiting);
    document.addEventListener("visibilitychange", () => this.go());
  }

  show() {
    this.shown = true;
    this.go();
  }

  hide() {
    this.shown = false;
  }

  toggle() {
    this.paused = !this.paused;
    this.pause.textContent = this.paused ? "Go on" : "Pause";
    this.go();
  }

  /** Ask now and again, as long as somebody can see the answer. */
  async go() {
    clearTimeout(this.timer);
    const number = (this.number ?? 0) + 1;
    this.number = number; // of a later call this one is not to go on
    if (!this.shown || this.paused || document.hidden) return;
    try {
      this.draw(await json("ui/api/live"));
      this.problem.replaceChildren();
    } catch (error) {
      this.problem.replaceChildren(notice(error));
    }
    if (this.number === number) this.timer = setTimeout(() => this.go(), PERIOD_MS);
  }

  draw(picture) {
    if (this.history.at(-1)?.now === picture.now) return; // another page has just asked
    if (this.history.length && picture.now < this.history.at(-1).now) this.history = []; // another engine
    this.history.push({ now: picture.now, figures: picture.figures });
    this.history = this.history.slice(-HISTORY);
    this.figures.replaceChildren(...cards(picture, this.history));
    this.cache.replaceChildren(...cacheMap(picture));
    this.steps.replaceChildren(...timeline(picture));
    this.adapters.replaceChildren(...adapters(picture));
    const more = further(picture);
    const shown = (columns, cells) => [[...columns, ...more.map(([title, kind]) => [title, kind])], (row) => [...cells(row), ...more.map(([, , cell]) => cell(row))]];
    const [runs, runningRow] = shown(RUNNING, running);
    const [waits, waitingRow] = shown(WAITING, waiting);
    rows(this.running, this.numRunning, "Running", runs, picture.running?.map(runningRow), picture.figures.running);
    rows(this.waiting, this.numWaiting, "Waiting", waits, picture.waiting?.map(waitingRow), picture.figures.waiting);
  }
}

// ----------------------------------------------------------------------------------------------------------- figures

function cards(picture, history) {
  const { figures, limits } = picture;
  const have = (name) => figures[name] ?? 0;
  const total = have("blocks_total");
  const asked = have("prefix_queries");
  const took = picture.steps.map((step) => step[1]);
  const first = (picture.running ?? []).map((row) => row.first_token).filter((value) => value !== null);
  const per = (picture.running ?? []).map((row) => row.inter_token).filter((value) => value !== null);
  const generated = rates(history, "generation_tokens");
  const read = rates(history, "prompt_tokens");
  return [
    card("Running", `${have("running")}`, `of ${limits.max_num_seqs}`),
    card("Waiting", `${have("waiting")}`, have("paused") ? `${have("paused")} paused` : ""),
    card("Generated", fixed(generated.at(-1)), "tokens/s", curve("Generated tokens per second", generated)),
    card("Prompts", fixed(read.at(-1)), "tokens/s", curve("Prompt tokens per second", read)),
    card("First token", ms(middle(first)), "median, running"),
    card("Per token", ms(middle(per)), "median, running"),
    card("Step", ms(middle(took)), took.length ? `95 %: ${ms(part(took, 0.95))}` : ""),
    card("Cache in use", total ? percent(have("blocks_used") / total) : "–", total ? `${have("blocks_used")} of ${total} blocks` : ""),
    card("Prefix hits", asked ? percent(have("prefix_hits") / asked) : "–", "of prompt tokens"),
    card("Preemptions", `${have("preemptions")}`, "since the start"),
    ...guesses(figures, history),
  ];
}

/** Return the cards of speculative decoding: of the time that the curves show, or since the start if nothing was guessed then. */
function guesses(figures, history) {
  if (!figures.draft_tokens) return [];
  const right = (of) => (of.accepted_by_place ?? []).reduce((a, b) => a + b, 0);
  const seen = history[0].figures;
  const lately = figures.draft_tokens > (seen.draft_tokens ?? 0);
  const grown = (read) => read(figures) - (lately ? read(seen) : 0);
  const [rows, tokens, held] = [(of) => of.drafts ?? 0, (of) => of.draft_tokens ?? 0, right].map(grown);
  const when = lately ? "lately" : "since the start";
  return [
    card("Tokens a step", (1 + held / rows).toFixed(2), `with guesses, ${when}`),
    card("Guesses that hold", percent(held / tokens), `${held.toLocaleString("en")} of ${tokens.toLocaleString("en")}, ${when}`),
  ];
}

function card(name, value, remark, more) {
  return h("div", { class: "card" }, h("dt", null, name), h("dd", null, h("span", { class: "value num" }, value), " ",
    h("span", { class: "muted" }, remark ?? ""), more));
}

/** Return the growth of a counter in each second between two pictures. */
function rates(history, name) {
  return history.slice(1).map((each, i) => {
    const grown = (each.figures[name] ?? 0) - (history[i].figures[name] ?? 0);
    return Math.max(0, grown) / (each.now - history[i].now);
  });
}

function curve(label, values) {
  const most = Math.max(1, ...values);
  const at = (value, i) => `${(i * 100) / (HISTORY - 1)},${(20 - (value / most) * 18).toFixed(1)}`;
  return svg("svg", { class: "curve", viewBox: "0 0 100 22", preserveAspectRatio: "none", role: "img", "aria-label": `${label}, at most ${fixed(most)}` },
    svg("polyline", { points: values.map(at).join(" "), "vector-effect": "non-scaling-stroke" }));
}

// ------------------------------------------------------------------------------------------------------------- cache

const STATES = [["shared", "shared"], ["used", "in use"], ["cached", "cached"]];

function cacheMap({ blocks, limits, figures }) {
  if (!blocks) return [missing("the blocks of its cache")];
  const count = blocks.used.length;
  if (!count) return [h("p", { class: "muted" }, "This model keeps no cache.")];
  const columns = Math.ceil(Math.sqrt(count * 3));
  const lines = Math.ceil(count / columns);
  const marks = [];
  for (let i = 0; i < count; i += 1) {
    const size = Math.min(blocks.per_cell, blocks.looked_at - i * blocks.per_cell);
    let top = 0;
    for (const [name] of STATES) {
      const share = blocks[name][i] / size;
      if (share) marks.push(svg("rect", { class: name, x: i % columns, y: Math.floor(i / columns) + top * 0.85, width: 0.85, height: share * 0.85 }));
      top += share;
    }
  }
  const sums = STATES.map(([name, label]) => [name, label, blocks[name].reduce((a, b) => a + b, 0) * blocks.stride]);
  const free = blocks.total - (figures.blocks_used ?? 0) - (figures.blocks_cached ?? 0);
  const legend = [...sums, ["free", "free", free]];
  const each = blocks.per_cell * blocks.stride;
  const unit = `${each === 1 ? "one block" : `${each} blocks`} of ${limits.block_size} tokens`;
  return [
    svg("svg", { class: "map", viewBox: `0 0 ${columns} ${lines}`, role: "img", "aria-label": legend.map(([, label, n]) => `${n} blocks ${label}`).join(", ") },
      svg("rect", { class: "free", width: columns, height: lines }), marks),
    h("ul", { class: "legend" }, legend.map(([name, label, n]) => h("li", null, h("span", { class: `swatch ${name}` }), label, " ", h("span", { class: "num" }, n.toLocaleString("en"))))),
    h("p", { class: "muted" }, `Each cell is ${unit}.${blocks.stride > 1 ? ` One of ${blocks.stride} blocks is looked at.` : ""}`),
  ];
}

// ------------------------------------------------------------------------------------------------------------- steps

function timeline({ steps }) {
  if (!steps.length) return [h("p", { class: "muted" }, "No step in the last seconds.")];
  const longest = Math.max(...steps.map((step) => step[1]));
  const width = 120;
  const bars = steps.map(([, seconds, tokens, decoding, guesses], i) => {
    const high = Math.max(0.6, (seconds / longest) * 38);
    const [prompt, guessed] = tokens ? [(tokens - decoding - guesses) / tokens, guesses / tokens] : [0, 0];
    const x = width - steps.length + i;
    const bar = (kind, top, share) => share > 0 && svg("rect", { class: kind, x, y: 40 - high * (1 - top), width: 0.8, height: Math.max(0.6, high * share) });
    return [bar("decode", 0, 1), bar("guess", prompt, guessed), bar("prefill", 0, prompt)];
  });
  const [, seconds, tokens, decoding, guesses] = steps.at(-1);
  const guessed = steps.some((step) => step[4]);
  const last = `Last: ${ms(seconds)}, ${tokens - decoding - guesses} prompt tokens, ${decoding} decoding${guessed ? `, ${guesses} guesses` : ""}.`;
  return [
    svg("svg", { class: "steps", viewBox: `0 0 ${width} 40`, preserveAspectRatio: "none", role: "img", "aria-label": `${steps.length} steps, the longest ${ms(longest)}. ${last}` }, bars),
    h("ul", { class: "legend" }, h("li", null, h("span", { class: "swatch prefill" }), "share of prompt tokens"),
      h("li", null, h("span", { class: "swatch decode" }), "share of decoding rows"),
      guessed && h("li", null, h("span", { class: "swatch guess" }), "share of guesses"), h("li", null, "highest ", h("span", { class: "num" }, ms(longest)))),
    h("p", { class: "muted num" }, last),
  ];
}

// ---------------------------------------------------------------------------------------------------------- adapters

function adapters({ adapters: found, limits }) {
  if (!found) return [];
  const loaded = found.filter((each) => each.loaded).length;
  const count = h("span", { class: "muted num" }, `${loaded} of ${limits.adapter_slots} ${limits.adapter_slots === 1 ? "slot" : "slots"} taken`);
  const cells = found.map((each) => [each.name, each.loaded ? "loaded" : h("span", { class: "muted" }, "waits for a slot"), each.running, each.waiting]);
  return [h("h2", null, "Adapters ", count), found.length ? table("Adapters", ADAPTERS, cells) : h("p", { class: "muted" }, "None is loaded: the first request that names one loads it.")];
}

// -------------------------------------------------------------------------------------------------------------- rows

/** Return columns that not every server needs: [title, class, cell of a row]. */
function further(picture) {
  const all = [...(picture.running ?? []), ...(picture.waiting ?? [])];
  const held = (row) => row.guesses && row.guesses.accepted_by_place.reduce((a, b) => a + b, 0) / row.guesses.draft_tokens;
  return [
    picture.adapters && ["adapter", "mono", (row) => row.adapter ?? "–"],
    all.some((row) => row.guesses) && ["guesses held", "num", (row) => (row.guesses ? percent(held(row)) : "–")],
  ].filter(Boolean);
}

function running(row) {
  return [row.id, h("span", { class: `phase ${row.phase}` }, row.phase), row.prompt, row.cached, row.computed, row.generated,
    row.blocks, seconds(row.age), row.first_token === null ? "–" : ms(row.first_token), row.inter_token === null ? "–" : ms(row.inter_token)];
}

function waiting(row) {
  return [row.id, row.prompt, row.generated, seconds(row.age), row.preemptions, row.paused ? "paused: its output is not read" : "waits"];
}

function rows(place, count, label, columns, found, total = 0) {
  count.textContent = found && found.length < total ? `${found.length} of ${total} shown` : `${total}`;
  if (!found) place.replaceChildren(missing("its requests"));
  else if (!found.length) place.replaceChildren(h("p", { class: "muted" }, "None."));
  else place.replaceChildren(table(label, columns, found.map((row) => row.map((cell) => (typeof cell === "number" ? cell.toLocaleString("en") : cell)))));
}

function missing(what) {
  return h("p", { class: "muted" }, `This server's scheduler is a plugin that does not show ${what}.`);
}

// ----------------------------------------------------------------------------------------------------------- numbers

function part(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];
}

function middle(values) {
  return part(values, 0.5);
}

function fixed(value) {
  return value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

function ms(value) {
  return value === undefined ? "–" : `${(value * 1000).toLocaleString("en", { maximumFractionDigits: value < 0.01 ? 2 : 0 })} ms`;
}

function seconds(value) {
  return `${value.toFixed(1)} s`;
}

function percent(share) {
  return `${(share * 100).toFixed(1)} %`;
}
