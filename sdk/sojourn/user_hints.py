"""Checks and holds the hints that the user's code gives for LLM requests."""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

from . import runtime


class UserHints(NamedTuple):
    """Hints for LLM requests; ``None`` means no hint. ``deadline_at_s`` is a time on the monotonic clock."""

    priority: int | None = None
    deadline_at_s: float | None = None
    expected_output_length: int | None = None
    kv_retention_ttl_s: float | None = None
    expected_resume: bool | None = None
    blocks_parent: bool | None = None
    final: bool | None = None
    expected_steps_left: float | None = None

    def with_defaults(self, outer: UserHints) -> UserHints:
        """Return these hints, with missing ones taken from ``outer``."""
        if self is NO_HINTS or outer is NO_HINTS:
            return outer if self is NO_HINTS else self
        return outer._replace(**{name: value for name, value in self._asdict().items() if value is not None})

    def __reduce__(self) -> Any:
        # Each machine has a monotonic clock of its own. The wall clock tells how long the pickle lay in a
        # queue.
        if self.deadline_at_s is None:
            return _unpickled, (None, *self)
        left_s = self.deadline_at_s - runtime.clock()
        return _unpickled, (time.time() + left_s, *self._replace(deadline_at_s=left_s))


NO_HINTS = UserHints()


def _unpickled(until_s: float | None, priority: int | None, left_s: float | None, *others: Any) -> UserHints:
    """Return the unpickled hints. ``until_s``: the deadline on the wall clock. ``left_s``: seconds to the
    deadline when the hints were pickled."""
    if until_s is not None and left_s is not None:
        # At most what was left, should this machine's clock be slow.
        left_s = min(left_s, until_s - time.time())
    found = UserHints(priority, None if left_s is None else runtime.clock() + left_s, *others)
    return NO_HINTS if found == NO_HINTS else found  # one object, which other modules compare by identity


class StepContext(NamedTuple):
    """Node, step id and hints of the current ``step()``. Missing values come from the steps around it."""

    node: str | None = None
    step_id: str | None = None
    hints: UserHints = NO_HINTS

    def within(self, outer: StepContext | None) -> StepContext:
        """Return this step, with missing values taken from ``outer``."""
        if outer is None:
            return self
        hints = self.hints.with_defaults(outer.hints)
        return StepContext(self.node or outer.node, self.step_id or outer.step_id, hints)


def checked_hints(
    *,
    priority: int | None = None,
    deadline_s: float | None = None,
    expected_output_length: int | None = None,
    kv_retention_ttl_s: float | None = None,
    expected_resume: bool | None = None,
    blocks_parent: bool | None = None,
    final: bool | None = None,
    expected_steps_left: float | None = None,
) -> UserHints:
    """Check the hints and return them as ``UserHints``. ``deadline_s``: seconds from now. Raises
    ``ValueError``, which names the first invalid hint."""
    for name, whole in (("priority", priority), ("expected_output_length", expected_output_length)):
        if whole is not None and not (type(whole) is int and abs(whole) < 2**63):
            raise ValueError(f"{name} is {whole!r}; expected a whole number of 64 bits")
    if expected_output_length is not None and expected_output_length < 0:
        raise ValueError(f"expected_output_length is {expected_output_length}; expected tokens ≥ 0")
    for name, seconds in (("deadline_s", deadline_s), ("kv_retention_ttl_s", kv_retention_ttl_s)):
        check_number(name, seconds, "seconds")
    check_number("expected_steps_left", expected_steps_left, "steps")
    flags = {"expected_resume": expected_resume, "blocks_parent": blocks_parent, "final": final}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{name} is {flag!r}; expected True, False or None")
    return UserHints(
        priority=priority,
        deadline_at_s=None if deadline_s is None else runtime.clock() + deadline_s,
        expected_output_length=expected_output_length,
        kv_retention_ttl_s=None if kv_retention_ttl_s is None else float(kv_retention_ttl_s),
        expected_steps_left=None if expected_steps_left is None else float(expected_steps_left),
        **flags,
    )


def check_number(name: str, value: object, unit: str) -> None:
    """Raise ``ValueError`` unless ``value`` is ``None`` or a finite number ≥ 0."""
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} is {value!r}; expected {unit} ≥ 0")


def step_limit(most: object) -> int | None:
    """Return a limit of turns in a framework's settings, for ``program(max_steps=)``. Frameworks use 0 and
    ``None`` for no limit."""
    return most if type(most) is int and 0 < most < 2**31 else None
