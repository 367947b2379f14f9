"""Replays a recording on a rebuilt scheduler, and compares actions and decisions with the recorded ones.

A recording has all events that a live engine reported to sojourn's scheduler. Parity means that the replay
gives the same actions and decisions. With parity, policies decide in the simulator as they do in the engine,
so simulated results are valid for the engine. The replay does not import the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sojourn_server.core.events_and_actions import BlocksEvicted
from sojourn_server.recording.recording_file import (
    RecordingError,
    RecordingReader,
    RecordingScheduler,
    encode_record,
)

__all__ = ["ParityReport", "RecordingError", "replay_recording"]


@dataclass(kw_only=True)
class ParityReport:
    """Result of replaying a recording, up to the first difference."""

    recording: str
    policy: str
    versions: dict[str, str]
    """Versions of sojourn, the engine and Python at recording time."""
    records: int = 0
    """Number of replayed records, including the one that differs, if any."""
    span_s: float = 0.0
    """Seconds of the engine's clock from the first to the last replayed event."""
    events_by_kind: Counter[str] = field(default_factory=Counter)
    actions_by_kind: Counter[str] = field(default_factory=Counter)
    """Number of reproduced actions, by kind."""
    decisions_by_kind: Counter[str] = field(default_factory=Counter)
    """Number of reproduced entries of the decision log, by kind."""
    evictions: int = 0
    """Number of evicted blocks in the replayed events."""
    ended: str | None = None
    """Recorded reason for the end; None if the recording stops without an end record."""
    difference: str | None = None
    """The first difference, with its line; ``None``: there is none."""
    wall_s: float = 0.0

    @property
    def identical(self) -> bool:
        """Whether every action and decision was reproduced exactly."""
        return self.difference is None

    @property
    def decisions(self) -> int:
        """Number of reproduced entries of the decision log."""
        return self.decisions_by_kind.total()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**vars(self), "identical": self.identical, "decisions": self.decisions}

    def __rich__(self) -> RenderableType:
        table = Table(title=f"{self.recording}: {self.policy}", title_justify="left")
        table.add_column("reproduced exactly" if self.identical else "reproduced up to the difference")
        table.add_column("count", justify="right")
        for what, by_kind in (("decision", self.decisions_by_kind), ("action", self.actions_by_kind)):
            for kind, count in sorted(by_kind.items()):
                table.add_row(f"{what}: {kind}", f"{count:,}")
        table.add_row("blocks reported as evicted", f"{self.evictions:,}")
        table.add_row("records", f"{self.records:,}", end_section=True)
        made_by = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        span = f"{self.span_s:,.1f} s of the engine's clock in {self.wall_s:.1f} s; recorded by {made_by}"
        end = f"ends: {self.ended}" if self.ended else "stops without an end record"
        verdict = Text(f"identical: {self.decisions:,} decisions", style="bold green")
        if self.difference is not None:
            verdict = Text(self.difference, style="bold red")
        return Group(table, Text(span), Text(f"the recording {end}"), verdict)


def replay_recording(path: str | Path, *, allow_unfinished: bool = False) -> ParityReport:
    """Replay a recording and compare actions and decisions, up to the first difference.

    Raises ``RecordingError`` if the file is missing, damaged, unfinished (unless ``allow_unfinished``) or of
    another version, because such a file says nothing about the policy.
    """
    started, first_s = time.perf_counter(), None
    reader = RecordingReader(path, allow_unfinished=allow_unfinished)
    try:
        scheduler = RecordingScheduler.from_header(reader.header)
    except (ValueError, TypeError, KeyError) as error:
        raise RecordingError(f"{path}, line 1: no scheduler can be built from this: {error}") from error
    report = ParityReport(recording=str(path), policy=scheduler.preset.name, versions=reader.header.versions)
    for number, line, record in reader.records():
        report.records += 1
        recorded = record.outcome
        if isinstance(record.event, str):
            kind, raised = "end", ""
            report.ended, outcome = record.event, encode_record(scheduler.totals())
        else:
            kind = type(record.event).__name__
            result, raised = scheduler.replay(record.event, record.now)
            outcome = encode_record(result)
            first_s = record.now if first_s is None else first_s
            report.span_s = record.now - first_s
            report.events_by_kind[kind] += 1
            report.evictions += len(record.event.blocks) if isinstance(record.event, BlocksEvicted) else 0
        old = msgspec.json.decode(recorded)
        if outcome not in (bytes(recorded), encode_record(old)):  # the file may have been edited
            where, was, now = _first_difference("outcome", old, msgspec.json.decode(outcome))
            text = line.decode()
            report.difference = (
                f"line {number}, {kind}: {where} was {was!r} and is now {now!r}{raised}\n"
                f"  recorded: {text if len(text) <= 400 else text[:400] + '…'}"
            )
            break
        if kind != "end" and isinstance(old, list):
            report.actions_by_kind.update(action[0] for action in old[0])
            report.decisions_by_kind.update(decision["kind"] for decision in old[1])
    report.wall_s = time.perf_counter() - started
    return report


def _first_difference(where: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return the first place where two different JSON values differ: (place, old value, new value). 1 and 1.0
    differ. ``where`` is the place of ``old`` and ``new`` in the record."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(key, old.get(key), new.get(key)) for key in {**old, **new}]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(index, one, other) for index, (one, other) in enumerate(zip(old, new, strict=True))]
    else:
        return where, old, new
    key, one, other = next(pair for pair in pairs if encode_record(pair[1]) != encode_record(pair[2]))
    return _first_difference(f"{where}.{key}", one, other)
