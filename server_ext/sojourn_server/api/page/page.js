// The page: connects the live stream to the numbers, the charts, the tables and the dialog.

import { FRAME_VERSION, LiveState, STATES, TIERS } from "./live_state.js";
import { LiveStream, apiKey, keepKey } from "./live_stream.js";
import { ProgramDialog } from "./program_dialog.js";
import { ProgramTable } from "./program_table.js";
import { StackChart, clock, patternOf } from "./stack_chart.js";
import { count, duration, element, percent, setText, size } from "./text_format.js";

const find = (id) => document.getElementById(id);
const DRAW_MS = 500; // between two drawings
const CALM_MS = 5000; // between two drawings of the charts with reduced motion
const HIDDEN_MS = 60000; // a page that is hidden for this long closes its stream
const RELOADED_FOR = "sojourn-reloaded-for"; // in the tab's session storage: a frame version
const SLOW_ANSWER_S = 1;
const STALE_S = 5;
const PROGRAM_LAYERS = 8;
const RATE_SAMPLES = 5;
const MEMORY_STATES = [
  { name: "running", colour: "c0", pattern: 0 },
  { name: "leased", colour: "c2", pattern: 1 },
  { name: "cached", colour: "c4", pattern: 2 },
  { name: "used", colour: "c4", pattern: 2 },
  { name: "free", colour: "free", pattern: 0 },
];
const TOKEN_LAYERS = [
  { key: "reused", name: "reused", colour: "c2", pattern: 0 },
  { key: "fresh", name: "new", colour: "c4", pattern: 2 },
  { key: "lost", name: "computed again", colour: "c5", pattern: 1 },
];
const ENGINE_COLUMNS = [
  ["engine", (engine) => engine.engine],
  ["health", (engine) => engine.error ?? (engine.answer_s > SLOW_ANSWER_S ? `slow: answers after ${duration(engine.answer_s)}` : "answers")],
  ["policy", (engine) => engine.policy ?? "–"],
  ["answers in", (engine) => (engine.answer_s === null ? "–" : duration(engine.answer_s)), true],
  ["running", (engine) => count(engine.running_requests), true],
  ["waiting", (engine) => count(engine.requests - engine.running_requests), true],
  ["mean running", (engine) => engine.mean_running.toFixed(1), true],
  ["share of prefill", (engine) => percent(engine.prefill_share, 1), true],
  ["leases", (engine) => count(engine.leases), true],
  ["device memory", (engine) => memoryText(engine.blocks, engine.block_bytes), "memory"],
  ["host", (engine) => memoryText(engine.tiers.host, engine.block_bytes), "memory"],
  ["disk", (engine) => memoryText(engine.tiers.disk, engine.block_bytes), "memory"],
  ["turns", (engine) => count(engine.turns), true],
  ["reused", (engine) => percent(engine.device_tokens + engine.host_tokens, engine.prompt_tokens), true],
];

// The CSS class of a cell, by the third entry of its column in ENGINE_COLUMNS.
const cellClass = (kind) => (kind === true ? "number" : (kind ?? ""));

function memoryText(states, blockBytes) {
  const total = Object.values(states ?? {}).reduce((sum, blocks) => sum + blocks, 0);
  if (!total) return "–";
  const parts = Object.entries(states).filter(([, blocks]) => blocks).map(([state, blocks]) => `${state} ${percent(blocks, total)}`);
  return `${size(total * blockBytes)}: ${parts.join(", ")}`;
}

// Fades the right edge of a table that can be scrolled to further columns.
function markCut(box) {
  box.classList?.toggle("more", box.matches(".scroll") && box.scrollWidth - box.scrollLeft - box.clientWidth > 1);
}

class Page {
  constructor() {
    this.live = new LiveState();
    this.table = new ProgramTable(this.live, (row) => this.dialog.open(row));
    this.dialog = new ProgramDialog(this.live);
    this.memory = new StackChart(find("memory-chart"), {
      label: "KV memory", format: size, steps: Array.from({ length: 50 }, (_, power) => 2 ** power),
    });
    this.tokens = new StackChart(find("token-chart"), {
      label: "Prompt tokens per second", format: count,
      steps: Array.from({ length: 36 }, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3)),
    });
    this.stream = new LiveStream((frame) => this.take(frame), (state, failure) => this.connection(state, failure));
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.layersOfPrograms = new Map();
    this.drawnMs = this.chartsMs = -Infinity;
    this.paused = this.waiting = false;
    this.receivedMs = 0;
    this.known = "";
    this.listen();
    setText(find("source"), location.host);
    for (const node of document.querySelectorAll(".own-url")) setText(node, new URL(".", location.href).href.replace(/\/$/, ""));
    this.stream.start();
    setInterval(() => this.age(), 1000);
  }

  listen() {
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      keepKey(find("key").value.trim());
      find("key").value = "";
      this.stream.start();
    });
    find("forget").addEventListener("click", () => {
      keepKey(null);
      this.live.clear();
      this.stream.start();
    });
    find("pause").addEventListener("click", () => {
      this.paused = !this.paused;
      find("pause").setAttribute("aria-pressed", String(this.paused));
      if (this.paused) {
        this.stream.stop();
        this.connection("paused");
      } else this.stream.start();
    });
    find("theme").addEventListener("change", () => {
      const chosen = find("theme").value;
      if (chosen) document.documentElement.dataset.theme = chosen;
      else delete document.documentElement.dataset.theme;
      this.restyle();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
    for (const id of ["tier", "split", "window"]) find(id).addEventListener("change", () => this.charts());
    document.addEventListener("scroll", ({ target }) => markCut(target), true);
    let timer = null;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(timer);
      if (document.hidden) timer = setTimeout(() => this.stream.stop(), HIDDEN_MS);
      else if (!this.paused) this.stream.abort ? this.plan() : this.stream.start();
    });
  }

  restyle() {
    this.memory.restyle();
    this.tokens.restyle();
  }

  // -- input -----------------------------------------------------------------------------

  take(frame) {
    if (frame.v !== FRAME_VERSION) {
      this.reload(frame.v);
      return;
    }
    this.live.apply(frame);
    this.receivedMs = performance.now();
    this.plan();
  }

  // The server was upgraded, and its page reads its frames. Once for each version, since a proxy may still have the old page.
  reload(version) {
    this.stream.stop();
    if (sessionStorage.getItem(RELOADED_FOR) === String(version)) {
      this.connection("outdated");
      return;
    }
    sessionStorage.setItem(RELOADED_FOR, version);
    location.reload();
  }

  connection(state, failure) {
    const words = {
      connecting: "connecting",
      live: failure ? `live, but rarely: ${failure.message}` : "live",
      waiting: `not connected: ${failure?.message}; trying again`,
      denied: "an API key is needed",
      paused: "paused",
      outdated: "this page is of another release than the server; empty the browser's cache and load the page again",
    };
    this.state = state;
    setText(find("connection"), words[state]);
    const denied = state === "denied";
    if (denied) {
      const tried = apiKey() !== null;
      keepKey(null);
      setText(find("key-reason"), tried ? `The server refused this key: ${failure.message}.` : "This server asks for an API key.");
    }
    const asked = find("key-form").hidden === denied;
    find("key-form").hidden = !denied;
    if (denied && asked) find("key").focus();
    if (denied) find("data").hidden = true;
    find("forget").hidden = apiKey() === null;
    this.notices();
  }

  plan() {
    if (this.waiting || document.hidden) return;
    this.waiting = true;
    setTimeout(() => requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    }), Math.max(0, this.drawnMs + DRAW_MS - performance.now()));
  }

  // -- drawing -----------------------------------------------------------------------------

  draw() {
    if (!this.live.frame || this.state === "denied") return;
    this.drawnMs = performance.now();
    find("data").hidden = false;
    this.notices();
    this.numbers();
    this.table.draw();
    this.engines();
    document.querySelectorAll(".scroll").forEach(markCut);
    if (this.drawnMs - this.chartsMs >= (this.calm.matches ? CALM_MS : DRAW_MS)) this.charts();
  }

  age() {
    if (this.state !== "live") return;
    const age = (performance.now() - this.receivedMs) / 1000;
    const interval = this.live.frame?.interval_s ?? 1;
    if (age > Math.max(STALE_S, 3 * interval)) setText(find("connection"), `live; the data are ${duration(age)} old`);
  }

  notices() {
    const { frame } = this.live;
    const found = [];
    for (const engine of frame?.engines ?? []) {
      if (engine.error) found.push(`Engine ${engine.engine} ${engine.error}.`);
      else if (engine.answer_s > SLOW_ANSWER_S) found.push(`Engine ${engine.engine} answers after ${duration(engine.answer_s)}: the data are that old.`);
      if (engine.forgotten) found.push(`Engine ${engine.engine} has removed ${engine.forgotten} programs from its full table.`);
    }
    if (frame && frame.total > this.live.rows.size) found.push(`${this.live.rows.size} of ${frame.total} programs are shown.`);
    if (frame && !this.live.totals().known && frame.engines.some((engine) => !engine.error)) found.push("This key sees no totals of the engines.");
    const text = found.join("\n");
    if (text === this.known) return;
    this.known = text;
    find("notices").replaceChildren(...found.map((line) => element("li", {}, line)));
  }

  numbers() {
    const { live } = this;
    const sums = live.totals();
    const states = {};
    let savedS = 0;
    for (const row of live.rows.values()) {
      states[row.state] = (states[row.state] ?? 0) + 1;
      savedS += row.saved_s;
    }
    const device = live.samples.at(-1)?.tiers?.device ?? {};
    const total = Object.values(device).reduce((sum, bytes) => sum + bytes, 0);
    const causes = Object.entries(sums.causes).filter(([, tokens]) => tokens).sort((a, b) => b[1] - a[1]);
    const recent = this.recentRate();
    const policies = [...new Set(live.frame.engines.map((engine) => engine.policy).filter(Boolean))];
    const hidden = "this key does not see it";
    const saving = savedS ? `about ${duration(savedS)} of computing, by the programs shown` : "";
    const shown = [
      ["Programs", live.frame.total.toLocaleString("en"), STATES.filter((state) => states[state]).map((state) => `${states[state]} ${state}`).join(", ") || "none yet"],
      ["Requests", `${sums.running} running`, `${sums.requests - sums.running} waiting${live.showsLeases ? `; leases: ${sums.leases}` : ""}`],
      ["Hit rate", sums.prompt ? percent(sums.reused, sums.prompt) : "–", !sums.known ? hidden : recent === null ? "of all prompt tokens of programs" : `of all prompt tokens; ${recent} in the last 10 minutes`],
      ["Tokens saved", count(sums.reused), [sums.known ? `of ${count(sums.prompt)} prompt tokens` : "", saving].filter(Boolean).join("; ")],
      ["Computed again", count(sums.lost), causes.map(([cause, tokens]) => `${cause} ${count(tokens)}`).join(", ") || (sums.lost ? "their KV had been lost" : "none was lost")],
      ["Device KV in use", total ? percent(total - (device.free ?? 0), total) : "–", !sums.known ? hidden : total ? `of ${size(total)}: ${Object.entries(device).filter(([, bytes]) => bytes).map(([state, bytes]) => `${state} ${percent(bytes, total)}`).join(", ")}` : "–"],
      ["Engines", `${live.frame.engines.filter((engine) => !engine.error).length} of ${live.frame.engines.length} answer`, policies.length ? `policy ${policies.join(", ")}` : ""],
    ];
    const list = find("numbers");
    if (list.children.length !== shown.length) list.replaceChildren(...shown.map(([name]) => element("div", {}, element("dt", {}, name), element("dd"), element("dd"))));
    shown.forEach(([, value, note], index) => {
      setText(list.children[index].children[1], value);
      setText(list.children[index].children[2], note);
    });
  }

  // The hit rate of the last ten minutes, from the differences of the totals.
  recentRate() {
    const known = this.live.since(600).filter((sample) => sample.tokens);
    if (known.length < 2) return null;
    const prompt = known.at(-1).tokens.prompt - known[0].tokens.prompt;
    return prompt > 0 ? percent(known.at(-1).tokens.reused - known[0].tokens.reused, prompt) : null;
  }

  engines() {
    const table = find("engine-table");
    const columns = ENGINE_COLUMNS.filter(([name]) => name !== "leases" || this.live.showsLeases);
    const body = table.tBodies[0];
    if (table.tHead.rows[0].cells.length !== columns.length) {
      table.tHead.rows[0].replaceChildren(...columns.map(([name, , kind]) => element("th", { scope: "col", className: cellClass(kind) }, name)));
      body.replaceChildren();
    }
    const engines = [...this.live.engines.values()];
    while (body.rows.length > engines.length) body.rows[engines.length].remove();
    engines.forEach((engine, index) => {
      const row = body.rows[index] ?? body.insertRow();
      columns.forEach(([, text, kind], column) => {
        if (!row.cells[column]) row.append(element(column ? "td" : "th", { className: cellClass(kind), ...(column ? {} : { scope: "row" }) }));
        setText(row.cells[column], engine.error && column > 1 ? "–" : text(engine));
        if (column === 1) row.cells[column].classList.toggle("loss", Boolean(engine.error));
      });
    });
  }

  charts() {
    if (!this.live.samples.length) return;
    this.chartsMs = performance.now();
    const samples = this.live.since(Number(find("window").value));
    const times = samples.map((sample) => sample.unix_s);
    const tiers = TIERS.filter((tier) => samples.some((sample) => sample.tiers?.[tier] || sample.held?.[tier].sum));
    const names = tiers.length ? tiers : ["device"];
    const select = find("tier");
    if ([...select.options].map((option) => option.value).join() !== names.join()) {
      const kept = select.value;
      select.replaceChildren(...names.map((tier) => element("option", { value: tier }, tier)));
      if (names.includes(kept)) select.value = kept;
    }
    const tier = select.value;
    const byProgram = find("split").value === "program";
    this.memory.draw(times, byProgram ? this.programLayers(samples, tier) : stateLayers(samples, tier, this.live.showsLeases));
    let note = "The largest programs are named. KV that several programs share counts for each of them.";
    if (byProgram && tier !== "device") note += " An estimate: only some blocks of a long context are looked up.";
    if (!byProgram) note = tier === "device" ? `Running: of requests that run. ${this.live.showsLeases ? "Leased: kept for a program. " : ""}Cached: kept while there is room.` : "Used: copies of blocks. Some of the blocks are on the device too.";
    const [{ unix_s: openedS }] = this.live.samples;
    const cut = this.live.frame.unix_s - openedS < Number(find("window").value);
    setText(find("memory-note"), note + (cut ? ` This page has recorded since ${clock.format(openedS * 1000)}, when it was opened.` : ""));
    this.tokens.draw(times, tokenLayers(samples));
  }

  programLayers(samples, tier) {
    const weight = new Map();
    const labels = new Map();
    for (const sample of samples) {
      for (const [key, bytes, id] of sample.held?.[tier].top ?? []) {
        weight.set(key, (weight.get(key) ?? 0) + bytes);
        labels.set(key, id);
      }
    }
    const chosen = [...weight].sort((a, b) => b[1] - a[1]).slice(0, PROGRAM_LAYERS).map(([key]) => key);
    // A program keeps its colour for as long as it is named.
    for (const key of this.layersOfPrograms.keys()) if (!chosen.includes(key)) this.layersOfPrograms.delete(key);
    for (const key of chosen) {
      if (this.layersOfPrograms.has(key)) continue;
      const taken = new Set(this.layersOfPrograms.values());
      this.layersOfPrograms.set(key, [...Array(PROGRAM_LAYERS).keys()].find((index) => !taken.has(index)));
    }
    const layers = [...this.layersOfPrograms].sort((a, b) => a[1] - b[1]).map(([key, index]) => ({
      name: labels.get(key), colour: `c${index}`, pattern: patternOf(index), key,
      values: samples.map((sample) => (sample.gap ? null : (sample.held[tier].top.find(([held]) => held === key)?.[1] ?? 0))),
    }));
    const named = samples.map((sample, index) => layers.reduce((sum, layer) => sum + (layer.values[index] ?? 0), 0));
    layers.push({
      name: "other programs", colour: "other", pattern: 3,
      values: samples.map((sample, index) => (sample.gap ? null : Math.max(0, sample.held[tier].sum - named[index]))),
    });
    return layers;
  }
}

function stateLayers(samples, tier, leases) {
  return MEMORY_STATES.filter(({ name }) => (leases || name !== "leased") && samples.some((sample) => sample.tiers?.[tier]?.[name] !== undefined)).map((state) => ({
    ...state,
    values: samples.map((sample) => (sample.gap ? null : (sample.tiers[tier]?.[state.name] ?? 0))),
  }));
}

// Tokens per second, from the differences of the totals. Each value is the mean over RATE_SAMPLES samples.
function tokenLayers(samples) {
  return TOKEN_LAYERS.map(({ key, ...layer }) => ({
    ...layer,
    values: samples.map((sample, index) => {
      const before = samples[Math.max(0, index - RATE_SAMPLES)];
      if (sample.gap || !sample.tokens) return null;
      if (!before.tokens || before === sample) return 0;
      return Math.max(0, sample.tokens[key] - before.tokens[key]) / (sample.unix_s - before.unix_s);
    }),
  }));
}

new Page();
