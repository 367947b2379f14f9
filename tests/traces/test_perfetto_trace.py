"""The Perfetto file: slices of a thread nest, ids are integers, the newest events stay."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.traces.perfetto_trace import PerfettoTrace, Slice, add_ledger_program, write_perfetto


def turn(number: int, arrived_s: float, *, gap_s: float | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "turn": number, "arrived_s": arrived_s, "gap_s": gap_s, "tool_before": "pytest" if gap_s else None,
        "seconds": {"wall": 3.0, "queued": 1.0, "prefilling": 0.5, "decoding": 1.5}, "leased": bool(gap_s),
        "lease_ttl_s": 8.0, "tokens": {"prompt": 10, "lost": {"evicted": 4}}, "evictor": None, **fields,
    }  # fmt: skip


def check(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Check what every trace must be; return its events without metadata."""
    events = [event for event in document["traceEvents"] if event["ph"] != "M"]
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["name"] == "thread_name"}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
    for event in events:
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            assert (event["pid"], event["tid"]) in named
    for slices in threads.values():
        opened: list[float] = []
        for start, end in sorted(slices, key=lambda pair: (pair[0], -pair[1])):
            while opened and opened[-1] <= start + 0.2:  # a microsecond is the unit; 0.1 is the rounding
                opened.pop()
            assert not opened or end <= opened[-1] + 0.2, "slices of a thread must nest"
            opened.append(end)
    return events


def test_a_ledger_becomes_turns_phases_gaps_and_leases(tmp_path: Path) -> None:
    trace = PerfettoTrace()
    pid = trace.process("programs")
    program = {
        "program_id": "p",
        "ledger": [turn(1, 100.0), turn(2, 107.0, gap_s=4.0), turn(3, 150.0, gap_s=40.0, leased=False)],
    }
    add_ledger_program(trace, pid, program)
    trace.add_instant(pid, "p", "keep", 103.0, {"ttl_s": 8.0})
    path = tmp_path / "t.json.gz"
    write_perfetto(path, trace.document(notes={"source": "test"}))
    document = json.loads(gzip.decompress(path.read_bytes()))
    events = check(document)
    (gap,) = [event for event in events if event["name"] == "pytest" and event["ts"] < 5e6]
    assert (gap["ts"], gap["dur"], gap["args"]["inferred"]) == (3e6, 4e6, True)
    turns = [event for event in events if event.get("cat") == "turn"]
    assert [event["ts"] for event in turns] == [0.0, 7e6, 50e6]
    assert turns[1]["args"]["tokens"]["lost"] == {"evicted": 4}
    leases = [event for event in events if event.get("cat") == "lease"]
    assert [(event["ph"], event["ts"]) for event in leases[:4]] == [
        ("b", 3e6),
        ("e", 8e6),
        ("b", 10e6),
        ("e", 18e6),
    ]
    assert document["otherData"] == {"source": "test", "cut_events": 0, "zero_s": 100.0}


def test_the_newest_events_stay_and_the_others_are_counted() -> None:
    trace = PerfettoTrace()
    pid = trace.process("programs")
    slices = [
        Slice(f"turn {n}", n * 10.0, n * 10.0 + 5, {}, [("queued", n * 10.0, n * 10.0 + 5)])
        for n in range(50)
    ]
    trace.add_program(pid, "p", slices)
    document = trace.document(max_events=21)
    events = check(document)
    assert [event["name"] for event in events if event["cat"] == "turn"] == [
        f"turn {n}" for n in range(40, 50)
    ]
    assert document["otherData"]["cut_events"] == 80


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20), st.floats(0, 1)), max_size=12))
def test_parallel_turns_go_to_lanes(drawn: list[tuple[float, float, float]]) -> None:
    trace = PerfettoTrace()
    pid = trace.process("programs")
    slices = [
        Slice(
            str(n),
            start,
            start + wall,
            {},
            [("queued", start, start + wall * at), ("run", start + wall * at, start + wall)],
        )
        for n, (start, wall, at) in enumerate(drawn)
    ]
    trace.add_program(pid, "p", slices)
    events = check(trace.document())
    assert sum(event["cat"] == "turn" for event in events) == len(drawn)
