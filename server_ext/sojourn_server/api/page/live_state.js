// The state of the page: the newest rows, and samples of the last half hour. Its memory is bounded.

import { programLabel } from "./text_format.js";

// The version of the frames that this page reads, and the fields in the order of ProgramRow (metrics/live_frame.py), which sends a row as an array.
export const FRAME_VERSION = 2;
export const FIELDS = [
  "program_id", "tenant", "status", "name", "parent_program_id", "turns", "context_tokens", "requests",
  "tool", "since_s", "running", "placed", "device_blocks", "lease_blocks", "lease_until_s", "lease_reason",
  "reused_tokens", "lost_tokens", "saved_s", "ttft_s", "host_blocks", "disk_blocks", "tool_ended", "engine",
];
export const STATES = ["thinking", "waiting", "gated", "tool", "idle", "silent", "ended"];
const SAMPLE_S = 1;
const MAX_SAMPLES = 1800;
const TOP_PROGRAMS = 12; // kept by name in a sample; the others are one sum
export const TIERS = ["device", "host", "disk"];

export function tierOf(row) {
  if (row.placed) return row.placed;
  if (row.device_blocks || row.lease_blocks) return "device";
  return row.host_blocks ? "host" : row.disk_blocks ? "disk" : null;
}

// The words of `sojourn top` (cli/top_view.py); a test compares the two.
export function stateOf(row) {
  if (row.status === "reasoning") return row.running ? "thinking" : "waiting";
  if (row.status === "acting") return row.tool ? "tool" : "idle";
  return row.status === "expired" ? "silent" : row.status;
}

export class LiveState {
  constructor() {
    this.clear();
  }

  clear() {
    this.rows = new Map();
    this.engines = new Map();
    this.samples = [];
    this.frame = null;
    this.active = new Set();
    this.hasTenants = false;
    this.showsLeases = true;
  }

  apply(frame) {
    if (frame.full) {
      this.rows = new Map();
      this.active = new Set();
    }
    this.frame = frame;
    this.engines = new Map(frame.engines.map((engine) => [engine.engine, engine]));
    const active = new Set();
    // A policy grants leases, or a lease exists: the rule of `sojourn top`.
    this.showsLeases = frame.engines.some((engine) => (engine.grants_leases && !engine.error) || engine.leases || engine.blocks.leased);
    for (const values of frame.programs) {
      const row = {};
      for (let i = 0; i < FIELDS.length; i += 1) row[FIELDS[i]] = values[i] ?? null;
      if (row.tool_ended) row.tool = null; // no tool runs
      row.key = `${row.tenant ?? ""}\n${row.program_id}`;
      row.state = stateOf(row);
      this.hasTenants ||= row.tenant !== null;
      this.showsLeases ||= row.lease_blocks > 0;
      this.rows.set(row.key, row);
      if (row.requests || row.lease_blocks) active.add(row.key);
    }
    // A program that a delta leaves out has neither request nor lease.
    for (const key of this.active) {
      const row = this.rows.get(key);
      if (active.has(key) || !row) continue;
      Object.assign(row, { requests: 0, running: false, lease_blocks: 0, lease_until_s: null, lease_reason: null });
      row.state = stateOf(row);
    }
    this.active = active;
    const last = this.samples.at(-1);
    if (!last || frame.unix_s - last.unix_s >= 0.9 * SAMPLE_S) this.sample(frame, last);
  }

  // Bytes of a program's KV in a tier. Blocks in host memory may be on the device too.
  kvBytes(row, tier = "device") {
    return row[`${tier}_blocks`] * (this.engines.get(row.engine)?.block_bytes ?? 0);
  }

  // Seconds in the present state, and seconds left of the lease, on the clock of the row's engine.
  forS(row) {
    return Math.max(0, (this.engines.get(row.engine)?.now_s ?? row.since_s) - row.since_s);
  }

  leaseLeftS(row) {
    return row.lease_until_s === null ? null : row.lease_until_s - (this.engines.get(row.engine)?.now_s ?? row.since_s);
  }

  totals() {
    const sum = { prompt: 0, reused: 0, fresh: 0, lost: 0, preempted: 0, requests: 0, running: 0, leases: 0, causes: {}, known: false };
    for (const engine of this.engines.values()) {
      const lost = Object.values(engine.lost_tokens).reduce((total, tokens) => total + tokens, 0);
      sum.prompt += engine.prompt_tokens;
      sum.reused += engine.device_tokens + engine.host_tokens;
      sum.fresh += engine.new_tokens + engine.tail_tokens;
      sum.lost += lost;
      sum.preempted += engine.preempted_tokens;
      sum.requests += engine.requests;
      sum.running += engine.running_requests;
      sum.leases += engine.leases;
      sum.known ||= Object.keys(engine.blocks).length > 0;
      for (const [cause, tokens] of Object.entries(engine.lost_tokens)) sum.causes[cause] = (sum.causes[cause] ?? 0) + tokens;
    }
    if (sum.known) return sum;
    // This viewer sees no totals of engines, so the numbers of the programs are added up.
    for (const row of this.rows.values()) {
      sum.reused += row.reused_tokens;
      sum.lost += row.lost_tokens;
      sum.requests += row.requests;
      sum.running += row.running ? 1 : 0;
      sum.leases += row.lease_blocks ? 1 : 0;
    }
    return sum;
  }

  sample(frame, last) {
    if (last && frame.unix_s - last.unix_s > 20 * SAMPLE_S) this.samples.push({ unix_s: last.unix_s + SAMPLE_S, gap: true });
    const tiers = {};
    const add = (tier, states, bytes) => {
      tiers[tier] ??= {};
      for (const [state, blocks] of Object.entries(states)) tiers[tier][state] = (tiers[tier][state] ?? 0) + blocks * bytes;
    };
    for (const engine of this.engines.values()) {
      if (Object.keys(engine.blocks).length) add("device", engine.blocks, engine.block_bytes);
      for (const tier of TIERS.slice(1)) if (engine.tiers[tier]) add(tier, engine.tiers[tier], engine.block_bytes);
    }
    // By tier: the programs with the most KV, and the KV of all.
    const held = {};
    for (const tier of TIERS) {
      const holders = [];
      let sum = 0;
      for (const row of this.rows.values()) {
        const bytes = this.kvBytes(row, tier);
        if (!bytes) continue;
        sum += bytes;
        holders.push([row.key, bytes, programLabel(row)]);
      }
      holders.sort((a, b) => b[1] - a[1]);
      held[tier] = { top: holders.slice(0, TOP_PROGRAMS), sum };
    }
    const { prompt, reused, fresh, lost, known } = this.totals();
    this.samples.push({ unix_s: frame.unix_s, tiers, held, tokens: known ? { prompt, reused, fresh, lost } : null });
    if (this.samples.length > MAX_SAMPLES) this.samples.shift();
  }

  since(seconds) {
    const from = (this.samples.at(-1)?.unix_s ?? 0) - seconds;
    return this.samples.filter((sample) => sample.unix_s >= from);
  }
}
