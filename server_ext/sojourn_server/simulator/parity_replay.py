"""Replays a recording on a rebuilt scheduler, and compares its decisions and answers with the recorded ones.

A recording has all calls that a live engine made to sojourn's scheduler. Parity means that the replay gives
the same decisions and answers. With parity, policies decide in the simulator as they do in the engine, so
simulated results are valid for the engine. The replay does not import the engine.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sojourn_server.recording import (
    RECORD_SHAPES,
    RecordedCall,
    RecordingError,
    RecordingReader,
    canonical_line,
    encode_record,
)
from sojourn_server.recording.record_format import DECISION_FIELDS

from .recording_player import RecordingPlayer

__all__ = ["ParityDifference", "ParityReport", "RecordingError", "replay_recording"]

RECENT_RECORDS = 4000
"""``ParityDifference.before`` is chosen from this many records before the difference."""


@dataclass(frozen=True, kw_only=True)
class ParityDifference:
    """First difference between a recording and its replay."""

    line: int
    """Line number in the recording; the header is line 1."""
    at_s: float | None
    """Time on the engine's clock; None for a record without a time."""
    op: str
    """Kind of the record."""
    meaning: str
    """Description of the kind."""
    where: str
    """Part of the record, e.g. ``answer.ttl_s`` or ``decisions.0.reason``."""
    recorded: Any
    replayed: Any
    record: str
    """The recorded line."""
    before: tuple[str, ...]
    """The last recorded lines of the same program before this record, the newest last; at most six."""
    raised: str | None = None
    """Exception of the replay, if any."""

    def __str__(self) -> str:
        at = f" at {self.at_s!r} s" if self.at_s is not None else ""
        text = (
            f"line {self.line}{at}, {self.op} ({self.meaning}): {self.where} was {self.recorded!r} "
            f"and is now {self.replayed!r}"
        )
        if self.raised is not None:
            text += f"\n  raised: {self.raised}"
        text += f"\n  recorded: {self.record}"
        return text + "".join(f"\n  before:   {line}" for line in self.before)


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Result of replaying a recording."""

    path: str
    preset: str
    versions: dict[str, str]
    """Versions of sojourn, the engine and Python at recording time."""
    records: int
    """Number of compared records, including the one that differs, if any."""
    span_s: float
    """Seconds of the engine's clock from the first to the last compared record."""
    decisions: dict[str, int]
    """Number of reproduced entries of the decision log, by kind."""
    answers: dict[str, int]
    """Number of reproduced answers, by kind of record."""
    evictions: int
    """Number of evicted blocks in the reproduced records."""
    ended: str | None
    """Recorded reason for the end; None if the recording stops without an end record."""
    difference: ParityDifference | None
    """The first difference, at which the replay stops; ``None``: there is none."""
    wall_s: float

    @property
    def identical(self) -> bool:
        """Whether every decision and every answer was reproduced exactly."""
        return self.difference is None

    @property
    def total_decisions(self) -> int:
        """Number of reproduced entries of the decision log."""
        return sum(self.decisions.values())

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, with ``identical`` and the text of the difference."""
        return {
            "recording": self.path,
            "identical": self.identical,
            "policy": self.preset,
            "versions": self.versions,
            "records": self.records,
            "decisions": self.total_decisions,
            "decisions_by_kind": self.decisions,
            "answers_by_kind": self.answers,
            "evictions": self.evictions,
            "span_s": self.span_s,
            "ended": self.ended,
            "difference": None if self.difference is None else str(self.difference),
            "wall_s": self.wall_s,
        }

    def __rich__(self) -> RenderableType:
        table = Table(title=f"{self.path}: {self.preset}", title_justify="left", show_header=True)
        table.add_column("reproduced exactly" if self.identical else "reproduced up to the difference")
        table.add_column("count", justify="right")
        for kind, count in sorted(self.decisions.items()):
            table.add_row(f"decision: {kind}", f"{count:,}")
        for op, count in sorted(self.answers.items()):
            table.add_row(f"answer: {RECORD_SHAPES[op].meaning}", f"{count:,}")
        table.add_row("blocks reported as reused", f"{self.evictions:,}")
        table.add_row("records", f"{self.records:,}", end_section=True)
        made_by = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        lines = [
            f"{self.span_s:,.1f} s of the engine's clock in {self.wall_s:.1f} s; recorded by {made_by}",
            f"the recording ends: {self.ended}"
            if self.ended
            else "the recording stops without an end record",
        ]
        if self.difference is None:
            verdict = Text(f"identical: {self.total_decisions:,} decisions", style="bold green")
        else:
            verdict = Text(str(self.difference), style="bold red")
        return Group(table, *map(Text, lines), verdict)


def replay_recording(path: str | Path, *, allow_unfinished: bool = False) -> ParityReport:
    """Replay a recording and compare decisions and answers, up to the first difference.

    Raises ``RecordingError`` if the file is missing, damaged, unfinished (unless ``allow_unfinished``) or of
    another version, because such a file says nothing about the policy.
    """
    reader = RecordingReader(path, allow_unfinished=allow_unfinished)
    started = time.perf_counter()
    replay = _ParityReplay(reader)
    found = replay.run()
    return ParityReport(
        path=str(path),
        preset=replay.player.program_scheduler.preset.name,
        versions=reader.header.versions,
        records=replay.records,
        span_s=replay.span_s,
        decisions=dict(replay.decisions),
        answers=dict(replay.answers),
        evictions=replay.evictions,
        ended=replay.ended,
        difference=found,
        wall_s=time.perf_counter() - started,
    )


@dataclass(slots=True)
class _ComparingSink:
    """A ``RecordSink`` that compares each record with the recorded one."""

    full: bool = False
    expected: deque[RecordedCall] = field(default_factory=deque)
    found: tuple[RecordedCall, bytes] | None = None
    """The first record that differs: (recorded, replayed)."""
    failure: Exception | None = None

    def write(self, record: tuple[Any, ...]) -> None:
        if self.found is not None or self.failure is not None:
            return
        made = encode_record(record)
        if not self.expected:
            self.failure = RuntimeError(f"a record of {record[0]!r} that is not in the recording")
            return
        wanted = self.expected.popleft()
        if made != wanted.raw and made != canonical_line(wanted.raw):
            self.found = (wanted, made)

    def close(self) -> None:
        pass

    def give_up(self, error: Exception) -> None:
        self.failure = error


class _ParityReplay:
    def __init__(self, reader: RecordingReader) -> None:
        self._reader = reader
        self._sink = _ComparingSink()
        try:
            self.player = RecordingPlayer(reader.header.program_scheduler(self._sink))
        except (ValueError, TypeError, KeyError) as error:
            raise RecordingError(
                f"{reader.path}, line 1: no scheduler can be built from this: {error}"
            ) from error
        self.records = self.evictions = 0
        self.decisions: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.ended: str | None = None
        self._first_s: float | None = None
        self._last_s = 0.0
        self._recent: deque[RecordedCall] = deque(maxlen=RECENT_RECORDS)

    @property
    def span_s(self) -> float:
        """Seconds between the first and the last of the compared records that have a time."""
        return self._last_s - self._first_s if self._first_s is not None else 0.0

    def run(self) -> ParityDifference | None:
        """Replay all records in order, up to the first difference. Returns the difference, if any."""
        differences = (self._one(record) for record in self._reader.records())
        return next((found for found in differences if found is not None), None)

    def _one(self, record: RecordedCall) -> ParityDifference | None:
        """Replay one record. Returns the difference, or ``None`` if there is none."""
        where = f"{self._reader.path}, line {record.line}"
        self._sink.expected.append(record)
        self.records += 1
        try:
            call = self.player.call(record)
        except (ValueError, TypeError, LookupError) as error:
            raise RecordingError(
                f"{where}: the facts of {record.op!r} are invalid: {error!r:.200}"
            ) from error
        raised: Exception | None = None
        try:
            call()
        except Exception as error:
            raised = error  # the recorded call may have raised too; if so, the recorded answer says so
        if self._sink.failure is not None:
            raise RecordingError(f"{where}: {self._sink.failure!r:.200}") from self._sink.failure
        if self._sink.found is not None:
            wanted, made = self._sink.found
            return _first_difference(wanted, made, self._before(wanted), raised)
        self._recent.append(record)
        self._count(record)
        return None

    def _before(self, wanted: RecordedCall) -> list[RecordedCall]:
        """The last records, at most six, that precede ``wanted`` and are about the same program; empty if
        ``wanted`` is about no program."""
        program_id = self.player.program_of(wanted)
        if program_id is None:
            return []
        return [r for r in self._recent if r is not wanted and self.player.program_of(r) == program_id][-6:]

    def _count(self, record: RecordedCall) -> None:
        if record.now is not None:
            self._first_s = record.now if self._first_s is None else self._first_s
            self._last_s = record.now
        self.decisions.update(decision[1] for decision in record.decisions)
        if record.op == "evict":
            self.evictions += len(record.facts[3])
        elif record.op == "close":
            self.ended = record.facts[0]
        elif RECORD_SHAPES[record.op].answer:
            self.answers[record.op] += 1


def _first_difference(
    wanted: RecordedCall, made: bytes, before: Sequence[RecordedCall], raised: Exception | None
) -> ParityDifference:
    """Describe the first difference between a recorded call and the replayed one.

    ``wanted`` is the recorded call. ``made`` is the replayed call, written as a line of a recording.
    ``before`` are earlier records of the same program. ``raised`` is the exception of the replay, if any."""
    parts = msgspec.json.decode(made)
    parts += [None] * (6 - len(parts))
    op, now, facts, answer, decisions, orders = parts
    shape = RECORD_SHAPES[wanted.op]
    where, recorded, replayed = "record", wanted.raw.decode(), made.decode()
    for name, old, new in (
        ("op", wanted.op, op),
        ("now", wanted.now, now),
        ("facts", _with_field_names(wanted.facts, shape.facts), _with_field_names(facts or [], shape.facts)),
        ("decisions", _decisions(wanted.decisions), _decisions(decisions or [])),
        ("orders", wanted.orders, orders or []),
        ("answer", _with_field_names(wanted.answer, shape.answer), _with_field_names(answer, shape.answer)),
    ):
        found = _first_differing_leaf(name, old, new)
        if found is not None:
            where, recorded, replayed = found
            break
    return ParityDifference(
        line=wanted.line,
        at_s=wanted.now,
        op=wanted.op,
        meaning=shape.meaning,
        where=where,
        recorded=recorded,
        replayed=replayed,
        record=_record_text(wanted),
        before=tuple(_record_text(record) for record in before),
        raised=None if raised is None else f"{type(raised).__name__}: {raised}",
    )


def _record_text(record: RecordedCall) -> str:
    text = record.raw.decode()
    return f"{record.line}: {text if len(text) <= 400 else text[:400] + '…'}"


def _with_field_names(values: Any, names: Sequence[str]) -> Any:
    """Turn the list ``values`` into a dict with ``names`` as keys. Returns ``values`` unchanged if it is no
    list or is longer than ``names``, or if there are fewer than two names."""
    if isinstance(values, list) and len(names) > 1 and len(values) <= len(names):
        return dict(zip(names, values, strict=False))
    return values


def _decisions(decisions: Sequence[Any]) -> list[Any]:
    return [_with_field_names(decision, DECISION_FIELDS) for decision in decisions]


def _first_differing_leaf(where: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """First place where two JSON values differ: (place, old value, new value); ``None`` if they are equal.
    1 and 1.0 differ, and so do 0.0 and -0.0. ``where`` is the place of ``old`` and ``new`` in the record."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            found = _first_differing_leaf(f"{where}.{key}", old.get(key), new.get(key))
            if found is not None:
                return found
        return None
    if isinstance(old, list) and isinstance(new, list):
        for index, (one, other) in enumerate(zip(old, new, strict=False)):
            found = _first_differing_leaf(f"{where}.{index}", one, other)
            if found is not None:
                return found
        return None if len(old) == len(new) else (f"{where}.length", len(old), len(new))
    return None if repr(old) == repr(new) else (where, old, new)
