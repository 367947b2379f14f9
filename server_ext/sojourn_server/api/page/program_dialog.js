// One program: its turns over time, and the explanation of a turn, as `sojourn explain` gives it.

import { TIERS } from "./live_state.js";
import { getJson, programPath } from "./live_stream.js";
import { leaseText } from "./program_table.js";
import { count, duration, element, setText, size } from "./text_format.js";

const SVG = "http://www.w3.org/2000/svg";
const PHASES = ["queued", "prefilling", "decoding"];
const DECODING = { running: "goes on", prefilled: "at the decode engine, not measured here" };
const NO_TOOL_SEEN = "no tool seen (if one ran, name it: @sojourn.tool)"; // as in metrics/turn_explanation.py
const NOT_LOST = { // as in cli/explain.py
  changed: "differ from the previous context; computed again",
  unread: "computed again, because the request may not read cached KV",
};
const TURNS = 40; // newest turns shown
// Parts of a prompt, as `sojourn explain` names them (cli/explain.py).
const SOURCES = {
  device: "reused",
  host: "reused, loaded from host memory, disk or another engine",
  new: "computed for the first time",
  tail: "in a partial block, which is never kept",
};

const seconds = (value) => (value === null || value === undefined ? "–" : duration(value));
const part = (name) => `\u2003${name}`; // a row below another
const whole = (value) => Number(value).toLocaleString("en");

function table(caption, heads, rows) {
  const numeric = (index) => (heads[index].number ? "number" : "");
  return element("div", { className: "scroll", tabindex: 0, role: "region", ariaLabel: caption },
    element("table", {},
      element("caption", { className: "hidden" }, caption),
      element("thead", {}, element("tr", {}, ...heads.map((head, index) => element("th", { scope: "col", className: numeric(index) }, head.name)))),
      element("tbody", {}, ...rows.map(({ cells, current }) => {
        const row = element("tr", {}, ...cells.map((cell, index) =>
          element(index ? "td" : "th", { className: numeric(index), ...(index ? {} : { scope: "row" }) }, cell)));
        if (current) row.setAttribute("aria-current", "true");
        return row;
      }))));
}

export class ProgramDialog {
  constructor(live) {
    this.live = live;
    this.dialog = document.getElementById("program-dialog");
    this.title = document.getElementById("program-title");
    this.status = document.getElementById("program-status");
    this.body = document.getElementById("program-body");
    this.abort = null;
    document.getElementById("newest").addEventListener("click", () => this.load(null));
    document.getElementById("close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.abort?.abort());
  }

  open(row) {
    setText(this.title, row.name && row.name !== row.program_id ? `${row.name} ${row.program_id}` : row.program_id);
    this.body.replaceChildren();
    this.row = row;
    this.dialog.showModal();
    this.load(null);
  }

  async load(turn) {
    this.abort?.abort();
    const abort = new AbortController();
    this.abort = abort;
    setText(this.status, "asking the engine");
    const id = this.row.program_id;
    const more = turn === null ? "/explain" : `/explain?turn=${turn}`;
    const told = await Promise.allSettled([
      getJson(programPath(id), abort.signal),
      getJson(programPath(id, more), abort.signal),
    ]);
    if (abort.signal.aborted) return;
    const [program, explanation] = told.map((one) => one.value ?? null);
    const failures = told.filter((one) => one.reason).map(({ reason }) => [reason.message, reason.next].filter(Boolean).join(": "));
    setText(this.status, failures.join("; "));
    this.draw(program?.engine && typeof program.engine === "object" ? program.engine : program, explanation);
  }

  draw(program, explanation) {
    const focused = document.activeElement?.dataset?.turn;
    const ledger = (program?.ledger ?? []).slice(-TURNS);
    const chosen = explanation?.turn;
    this.body.replaceChildren(
      this.facts(),
      ...(ledger.length ? [element("h3", {}, "Timeline"), this.timeline(ledger, chosen), this.timelineKey(), this.turns(ledger, chosen)] : []),
      ...(explanation ? this.explanation(explanation) : []),
    );
    if (focused !== undefined) this.body.querySelector(`button[data-turn="${Number(focused)}"]`)?.focus();
  }

  facts() {
    const row = this.live.rows.get(this.row.key) ?? this.row;
    const facts = [
      row.state + (row.tool ? ` (${row.tool})` : ""),
      `for ${duration(this.live.forS(row))}`,
      `${row.turns} turns`,
      `context of ${count(row.context_tokens)} tokens`,
      `KV: ${TIERS.filter((tier) => row[`${tier}_blocks`]).map((tier) => `${tier} ${size(this.live.kvBytes(row, tier))}`).join(", ") || "none"}`,
      ...(this.live.showsLeases ? [this.leaseFact(row)] : []),
      `${count(row.reused_tokens)} tokens reused, ${count(row.lost_tokens)} computed again`,
      ...(row.saved_s ? [`about ${duration(row.saved_s)} saved`] : []),
    ];
    if (row.parent_program_id) facts.push(`started by ${row.parent_program_id}`);
    return element("p", {}, facts.join(" · "));
  }

  leaseFact(row) {
    if (row.lease_until_s === null) return "no lease";
    return `lease ${leaseText(this.live.leaseLeftS(row))}` + (row.lease_reason ? ` (${row.lease_reason})` : "");
  }

  timeline(ledger, chosen) {
    const spans = [];
    for (const turn of ledger) {
      let at = turn.arrived_s;
      if (turn.gap_s) spans.push({ kind: "tool", from: at - turn.gap_s, to: at, title: `gap${turn.tool_before ? ` (${turn.tool_before})` : ""} before turn ${turn.turn}: ${seconds(turn.gap_s)}` });
      const begin = at;
      for (const phase of PHASES) {
        const took = turn.seconds[phase];
        if (took > 0) spans.push({ kind: phase, from: at, to: at + took, title: `turn ${turn.turn} ${phase}: ${seconds(took)}` });
        at += took;
      }
      if (turn.turn === chosen) spans.push({ kind: "chosen", from: begin, to: at, title: `turn ${turn.turn}` });
    }
    const from = Math.min(...spans.map((span) => span.from));
    const length = Math.max(...spans.map((span) => span.to)) - from || 1;
    const picture = document.createElementNS(SVG, "svg");
    const sums = (kind) => duration(spans.filter((span) => span.kind === kind).reduce((sum, span) => sum + span.to - span.from, 0));
    for (const [name, value] of Object.entries({
      class: "timeline", viewBox: "0 0 1000 50", preserveAspectRatio: "none", role: "img",
      "aria-label": `Timeline of ${ledger.length} turns over ${duration(length)}: gaps ${sums("tool")}, queued ${sums("queued")}, prefilling ${sums("prefilling")}, decoding ${sums("decoding")}. The table below has each turn.`,
    })) picture.setAttribute(name, value);
    for (const span of spans) {
      const box = document.createElementNS(SVG, "rect");
      const thin = span.kind === "tool";
      const width = Math.max(1.5, (1000 * (span.to - span.from)) / length);
      for (const [name, value] of Object.entries({
        class: span.kind, x: (1000 * (span.from - from)) / length, y: thin ? 18 : 6, width, height: thin ? 14 : 38,
      })) box.setAttribute(name, value);
      const title = document.createElementNS(SVG, "title");
      title.textContent = span.title;
      box.append(title);
      picture.append(box);
    }
    return picture;
  }

  timelineKey() {
    return element("p", { className: "note" }, ...["tool", ...PHASES].flatMap((kind) => [element("span", { className: `key ${kind}`, ariaHidden: "true" }), kind === "tool" ? "gap" : kind]));
  }

  turns(ledger, chosen) {
    const heads = [{ name: "turn" }, { name: "tool before" }, ...["gap", "queued", "prefilling", "decoding", "prompt", "reused", "computed again"].map((name) => ({ name, number: true })), { name: "why" }];
    return table("Turns, newest first", heads, ledger.toReversed().map((turn) => {
      const tokens = turn.tokens ?? {};
      const lost = Object.entries(tokens.lost ?? {}).filter(([, number]) => number);
      const why = lost.map(([cause, number]) => `${cause} ${count(number)}`);
      if (turn.evictor) why.push(`taken by ${turn.evictor}`);
      if (turn.preemptions) why.push(`${turn.preemptions} preemptions`);
      const button = element("button", { type: "button", onclick: () => this.load(turn.turn) }, `Turn ${turn.turn}`);
      button.dataset.turn = turn.turn;
      return {
        current: turn.turn === chosen,
        cells: [
          button, turn.tool_before ?? "–", seconds(turn.gap_s), ...PHASES.map((phase) => seconds(turn.seconds[phase])),
          count(tokens.prompt ?? 0), count((tokens.device ?? 0) + (tokens.host ?? 0)),
          count(lost.reduce((sum, [, number]) => sum + number, 0)), why.join(", "),
        ],
      };
    }));
  }

  explanation(found) {
    const tokens = found.tokens ?? {};
    const { before } = found;
    const rows = [];
    const add = (where, time, number, note) => rows.push({ cells: [where, time, number, note] });
    if (before.gap_s !== null) add("gap", seconds(before.gap_s), "", (before.tool ?? NO_TOOL_SEEN) + (before.leased_at_return ? "; lease held" : this.live.showsLeases ? "; no lease" : ""));
    if (typeof before.tool_s === "number") {
      add(part("with a tool"), seconds(before.tool_s), "", "");
      add(part("without"), seconds(Math.max(0, before.gap_s - before.tool_s)), "", "");
    }
    add("queued", seconds(found.seconds.queued), "", "");
    add("prefilling", seconds(found.seconds.prefilling), tokens.prompt ? whole(tokens.prompt) : "", "prompt");
    for (const [source, note] of Object.entries(SOURCES)) if (tokens[source]) add(part(source), "", whole(tokens[source]), note);
    for (const [cause, number] of Object.entries(tokens.lost ?? {})) {
      if (cause in NOT_LOST) add(part(cause), "", whole(number), NOT_LOST[cause]);
      else add(part(`lost: ${cause}`), "", whole(number), `computed again${found.lost_to ? `; taken by ${found.lost_to}` : ""}`);
    }
    add("decoding", seconds(found.seconds.decoding), "", DECODING[found.outcome] ?? `ended: ${found.outcome}`);
    const parts = [
      element("h3", {}, `Explanation of turn ${found.turn}`),
      element("p", { className: "explanation" }, found.text),
      table("Where the time and the tokens of the turn went", [{ name: "where" }, { name: "time", number: true }, { name: "tokens", number: true }, { name: "note" }], rows),
    ];
    const list = (title, lines) => lines.length && parts.push(element("h3", {}, title), element("ul", {}, ...lines.map((line) => element("li", {}, line))));
    list("What a hint would have changed", found.advice.map((one) =>
      (one.hint ? `${one.hint}: ` : "") + one.text + (one.saves_s ? ` Saves about ${seconds(one.saves_s)} (estimate).` : "")));
    list("Decisions", found.decision_lines);
    list("Unknown", found.unknown);
    return parts;
  }
}
