"""Writes a run as a Chrome JSON trace, which Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

A process is a group of programs, such as a run; a thread is a program. Slices of one thread must nest, so
parallel turns get further threads (lanes). Times are microseconds since the first event."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .trace_file import write_packed

_SLACK_S = 1e-4


class Slice(NamedTuple):
    """A turn or a tool call. Times are seconds on the run's clock."""

    name: str
    start_s: float
    end_s: float
    arguments: Mapping[str, Any]
    parts: Sequence[tuple[str, float, float]] = ()
    """(name, start, end) of the turn's phases, in order; empty for a tool call."""


class PerfettoTrace:
    """Collects events of one or more runs. Times are seconds on the clock of the run."""

    def __init__(self) -> None:
        self._groups: list[list[dict[str, Any]]] = []
        """Events that are kept or cut together; the first is the earliest."""
        self._ids: dict[tuple[int, str, int], int] = {}
        """(pid, 0 for a process; name; lane) → id of the process or thread."""

    def process(self, name: str) -> int:
        """Return the pid of the process ``name``. A new name creates a process."""
        return self._ids.setdefault((0, name, 0), len(self._ids) + 1)

    def add_program(self, pid: int, program_id: str, slices: Iterable[Slice]) -> None:
        """Add the turns and tools of one program."""
        free_from: list[float] = []
        for found in sorted(slices, key=lambda one: (one.start_s, -one.end_s)):
            free = (n for n, end_s in enumerate(free_from) if end_s <= found.start_s + _SLACK_S)
            lane, first_s, last_s = next(free, len(free_from)), found.start_s, found.end_s
            if lane < len(free_from):  # rounded times may overlap by a microsecond
                first_s = max(first_s, min(free_from[lane], last_s))
            free_from[lane:lane + 1] = [last_s]  # fmt: skip
            parts = [("phase", name, max(a, first_s), min(b, last_s), None) for name, a, b in found.parts]
            whole = ("turn" if parts else "tool", found.name, first_s, last_s, dict(found.arguments))
            at = self._thread(pid, program_id, lane)
            events: list[dict[str, Any]] = []
            for kind, name, a, b, arguments in (whole, *(part for part in parts if part[3] > part[2])):
                duration_us = round((b - a) * 1e6, 1)
                event = {"ph": "X", **at, "cat": kind, "name": name, "ts": a, "dur": duration_us}
                events.append(event | ({} if arguments is None else {"args": arguments}))
            self._groups.append(events)

    def add_instant(
        self, pid: int, program_id: str | None, name: str, at_s: float, arguments: Mapping[str, Any]
    ) -> None:
        """Add a decision: on its program's thread, or on the process if it belongs to no program."""
        at = {"pid": pid, "tid": 0} if program_id is None else self._thread(pid, program_id, 0)
        scope = "p" if program_id is None else "t"
        event = {"ph": "i", "s": scope, **at, "cat": "decision", "name": name, "ts": at_s}
        self._groups.append([{**event, "args": dict(arguments)}])

    def add_lease(
        self, pid: int, program_id: str, start_s: float, end_s: float, arguments: Mapping[str, Any]
    ) -> None:
        """Add a lease as an asynchronous slice, since leases overlap turns."""
        at = {"cat": "lease", "name": f"lease {program_id}", "id": len(self._groups) + 1}
        at |= self._thread(pid, program_id, 0)
        begin = {"ph": "b", **at, "ts": start_s, "args": dict(arguments)}
        self._groups.append([begin, {"ph": "e", **at, "ts": max(start_s, end_s)}])

    def document(
        self, *, max_events: int = 200_000, notes: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the trace as JSON data, with ``notes`` in its ``otherData``. The oldest events above
        ``max_events`` are left out; ``otherData`` says how many. Perfetto becomes slow with many more."""
        groups = sorted(self._groups, key=lambda group: -group[0]["ts"])
        sizes = itertools.accumulate(map(len, groups))
        kept = groups[: sum(total <= max_events for total in sizes)]
        cut = sum(map(len, groups[len(kept) :]))
        zero_s = kept[-1][0]["ts"] if kept else 0.0
        shown = itertools.chain.from_iterable(reversed(kept))
        events = [event | {"ts": round((event["ts"] - zero_s) * 1e6, 1)} for event in shown]
        metadata = []
        for (pid, name, lane), number in self._ids.items():
            at = {"ph": "M", "pid": pid or number, "tid": number if pid else 0}
            kind, label = "thread" if pid else "process", f"{name} ({lane + 1})" if lane else name
            metadata.append({**at, "name": f"{kind}_name", "args": {"name": label}})
            metadata.append({**at, "name": f"{kind}_sort_index", "args": {"sort_index": number}})
        about = {**(notes or {}), "cut_events": cut, "zero_s": zero_s}
        return {"traceEvents": [*metadata, *events], "displayTimeUnit": "ms", "otherData": about}

    def _thread(self, pid: int, program_id: str, lane: int) -> dict[str, Any]:
        return {"pid": pid, "tid": self._ids.setdefault((pid, program_id, lane), len(self._ids) + 1)}


def write_perfetto(path: Path, document: Mapping[str, Any]) -> None:
    """Write the trace, gzipped if the name ends in ``.gz``; Perfetto opens both."""
    write_packed(path, json.dumps(document, separators=(",", ":")).encode())


def add_ledger_program(
    trace: PerfettoTrace, pid: int, program: Mapping[str, Any], *, since_s: float = float("-inf")
) -> None:
    """Add the turns, gaps and leases of ``program``, an answer of ``GET /sojourn/v1/programs/{id}``, without
    turns that ended before ``since_s``. Gaps are ``inferred``: the engine sees the time between two requests;
    the tool may have been shorter."""
    program_id = str(program["program_id"])
    slices: list[Slice] = []
    turns = [one for one in program["ledger"] if one["arrived_s"] + one["seconds"]["wall"] >= since_s]
    for turn, following in itertools.zip_longest(turns, turns[1:]):
        start_s, seconds = turn["arrived_s"], turn["seconds"]
        end_s = start_s + seconds["wall"]
        spent = (seconds[part] for part in ("queued", "prefilling", "decoding"))
        marks = list(itertools.accumulate(spent, initial=start_s))
        parts = list(zip(("queued", "prefill", "decode"), marks, marks[1:], strict=False))
        arguments = {key: value for key, value in turn.items() if value is not None and key != "seconds"}
        slices.append(Slice(f"turn {turn['turn']}", start_s, end_s, arguments, parts))
        if gap_s := turn.get("gap_s"):
            said = {"inferred": True, "gap_s": gap_s}
            slices.append(Slice(turn.get("tool_before") or "gap", start_s - gap_s, start_s, said))
        if ttl_s := turn.get("lease_ttl_s"):
            until_s = end_s + ttl_s
            if following is not None and following["leased"]:
                until_s = following["arrived_s"] + following["seconds"]["queued"]
            trace.add_lease(pid, program_id, end_s, until_s, {"ttl_s": ttl_s})
    trace.add_program(pid, program_id, slices)
