"""The first difference between what was recorded and what came out, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..recording import RECORD_SHAPES, RecordedCall
from ..recording.record_format import DECISION_FIELDS


@dataclass(frozen=True, kw_only=True)
class ParityDifference:
    """Where a replay first answered otherwise."""

    line: int
    """Of the tape, counted from 1, which is the header."""
    at_s: float | None
    """On the engine's clock; None where the record has no time of its own."""
    op: str
    meaning: str
    where: str
    """Which part of the record, e.g. ``answer.ttl_s`` or ``decisions.0.reason``."""
    recorded: Any
    replayed: Any
    record: str
    """The recorded line."""
    before: tuple[str, ...]
    """The last lines that tell of the same program."""
    raised: str | None = None
    """What the replay raised, where it did."""

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


def first_difference(
    wanted: RecordedCall, made: bytes, before: Sequence[RecordedCall], raised: Exception | None
) -> ParityDifference:
    """``made`` came out where ``wanted`` was recorded; ``before`` tell of the same program."""
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
    """A list whose places have names as an object."""
    if isinstance(values, list) and len(names) > 1 and len(values) <= len(names):
        return dict(zip(names, values, strict=False))
    return values


def _decisions(decisions: Sequence[Any]) -> list[Any]:
    return [_with_field_names(decision, DECISION_FIELDS) for decision in decisions]


def _first_differing_leaf(where: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """The first place at which two JSON values differ, numbers by kind and sign of zero too."""
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
