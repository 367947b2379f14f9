// The table of programs: one page of rows, so that ten thousand programs cost no more than fifty.

import { STATES, tierOf } from "./live_state.js";
import { count, duration, element, programLabel, setText, size } from "./text_format.js";

const dash = "–";

// text: the cell's text. key: the sort key, a number or a string. number: right-aligned, and first sorted from the largest,
// unless upFirst. loss: marked if the program has lost tokens. when: whether the column is shown.
const COLUMNS = [
  { name: "program", text: programLabel, key: (row) => row.program_id },
  { name: "state", text: (row) => row.state, key: (row) => STATES.indexOf(row.state) },
  { name: "tool", text: (row) => row.tool ?? "", key: (row) => row.tool ?? "\uffff" },
  { name: "for", text: (row, live) => duration(live.forS(row)), key: (row, live) => live.forS(row), number: true },
  { name: "tier", text: (row) => tierOf(row) ?? dash, key: (row) => tierOf(row) ?? "\uffff" },
  { name: "KV", text: (row, live) => (row.device_blocks ? size(live.kvBytes(row)) : dash), key: (row, live) => live.kvBytes(row), number: true },
  { name: "lease", text: (row, live) => leaseText(live.leaseLeftS(row)), key: (row, live) => live.leaseLeftS(row) ?? Infinity, number: true, upFirst: true, when: (live) => live.showsLeases },
  { name: "context", text: (row) => count(row.context_tokens), key: (row) => row.context_tokens, number: true },
  { name: "turns", text: (row) => count(row.turns), key: (row) => row.turns, number: true },
  { name: "first token", text: (row) => (row.ttft_s === null ? dash : duration(row.ttft_s)), key: (row) => row.ttft_s ?? -1, number: true },
  { name: "reused", text: (row) => count(row.reused_tokens), key: (row) => row.reused_tokens, number: true },
  { name: "computed again", text: (row) => count(row.lost_tokens), key: (row) => row.lost_tokens, number: true, loss: true },
  { name: "time saved", text: (row) => (row.saved_s ? duration(row.saved_s) : dash), key: (row) => row.saved_s, number: true },
  { name: "tenant", text: (row) => row.tenant ?? dash, key: (row) => row.tenant ?? "", when: (live) => live.hasTenants },
  { name: "engine", text: (row) => row.engine, key: (row) => row.engine, when: (live) => live.engines.size > 1 },
];

export function leaseText(left) {
  if (left === null) return dash;
  return left > 0 ? duration(left) : "due";
}

function matches(row, needle) {
  return [row.program_id, row.name, row.tenant, row.tool, row.state, row.engine].some((word) => word?.toLowerCase().includes(needle));
}

export class ProgramTable {
  constructor(live, onOpen) {
    this.live = live;
    this.onOpen = onOpen;
    this.page = 0;
    this.column = COLUMNS[1];
    this.up = true;
    this.order = [];
    const find = (id) => document.getElementById(id);
    this.table = find("program-table");
    this.body = this.table.tBodies[0];
    this.filter = find("filter");
    this.state = find("state");
    this.pageSize = find("page-size");
    this.previous = find("previous");
    this.next = find("next");
    this.shown = find("shown");
    this.status = find("table-status");
    this.none = find("no-programs");
    this.state.append(...STATES.map((state) => element("option", {}, state)));
    this.heads = COLUMNS.map((column) => {
      const head = element("th", { scope: "col", className: column.number ? "number" : "" },
        element("button", { type: "button", onclick: () => this.sortBy(column) }, column.name));
      this.table.tHead.rows[0].append(head);
      return head;
    });
    const again = () => {
      this.page = 0;
      this.draw(true);
      this.say();
    };
    this.filter.addEventListener("input", again);
    this.state.addEventListener("change", again);
    this.pageSize.addEventListener("change", again);
    this.previous.addEventListener("click", () => this.turn(-1));
    this.next.addEventListener("click", () => this.turn(1));
    this.markSorted();
  }

  sortBy(column) {
    this.up = column === this.column ? !this.up : !column.number || Boolean(column.upFirst);
    this.column = column;
    this.page = 0;
    this.markSorted();
    this.draw(true);
    this.say();
  }

  turn(pages) {
    this.page += pages;
    this.draw(true);
    this.say();
  }

  markSorted() {
    COLUMNS.forEach((column, index) => {
      const sorted = column === this.column;
      if (sorted) this.heads[index].setAttribute("aria-sort", this.up ? "ascending" : "descending");
      else this.heads[index].removeAttribute("aria-sort");
      setText(this.heads[index].firstChild, column.name + (sorted ? (this.up ? " ▲" : " ▼") : ""));
    });
  }

  say() {
    setText(this.status, `${this.shown.textContent}, sorted by ${this.column.name}, ${this.up ? "ascending" : "descending"}`);
  }

  // Rows keep their order while the focus or the pointer is in them, so that a click hits the row that it was meant for.
  get held() {
    return this.body.contains(document.activeElement) || this.body.matches(":hover");
  }

  sorted() {
    const needle = this.filter.value.trim().toLowerCase();
    const state = this.state.value;
    const found = [];
    for (const row of this.live.rows.values()) {
      if ((state && row.state !== state) || (needle && !matches(row, needle))) continue;
      found.push([this.column.key(row, this.live), row]);
    }
    const sign = this.up ? 1 : -1;
    found.sort(([a, one], [b, two]) => (a < b ? -sign : a > b ? sign : one.program_id < two.program_id ? -1 : 1));
    return found.map(([, row]) => row.key);
  }

  draw(changed = false) {
    if (changed || !this.held) this.order = this.sorted();
    COLUMNS.forEach(({ when }, index) => {
      const hidden = Boolean(when && !when(this.live));
      if (this.heads[index].hidden === hidden) return;
      this.heads[index].hidden = hidden;
      for (const row of this.body.rows) row.cells[index].hidden = hidden;
    });
    const rowsShown = Number(this.pageSize.value);
    const pages = Math.max(1, Math.ceil(this.order.length / rowsShown));
    this.page = Math.min(Math.max(0, this.page), pages - 1);
    const from = this.page * rowsShown;
    const keys = this.order.slice(from, from + rowsShown);
    while (this.body.rows.length > keys.length) this.body.rows[keys.length].remove();
    keys.forEach((key, index) => this.drawRow(this.body.rows[index] ?? this.newRow(), this.live.rows.get(key)));
    setText(this.shown, keys.length ? `${from + 1} to ${from + keys.length} of ${this.order.length}` : this.live.rows.size ? "no program matches" : "no programs");
    this.none.hidden = this.live.rows.size > 0;
    this.previous.disabled = !this.page;
    this.next.disabled = this.page >= pages - 1;
  }

  newRow() {
    const made = this.body.insertRow();
    made.addEventListener("click", (event) => {
      // The button has the keyboard and the name; a pointer may hit the row anywhere. A selection is no click.
      if (made.row && (event.target.closest("button") || getSelection().isCollapsed)) this.onOpen(made.row);
    });
    COLUMNS.forEach((column, index) => {
      const cell = element(index ? "td" : "th", { className: column.number ? "number" : "", hidden: this.heads[index].hidden });
      if (!index) {
        cell.scope = "row";
        cell.append(element("button", { type: "button" }));
      } else if (column.name === "state") cell.append(element("span"));
      made.append(cell);
    });
    return made;
  }

  drawRow(made, row) {
    if (!row) return; // forgotten while the order is held
    made.row = row;
    COLUMNS.forEach((column, index) => {
      const cell = made.cells[index];
      const text = column.text(row, this.live);
      if (column.loss) cell.classList.toggle("loss", row.lost_tokens > 0);
      if (column.name === "state") {
        cell.firstChild.className = `state ${row.state}`;
      }
      setText(cell.firstElementChild ?? cell, text);
      if (!index) {
        const whole = row.name ? `${row.name} ${row.program_id}` : row.program_id;
        if (cell.title !== whole) cell.title = whole;
      }
    });
  }
}
