"""A step of the agent: which node of its graph runs, and advice for the requests made meanwhile."""

from __future__ import annotations

import math
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from . import runtime
from .context import Place, leave, place
from .observe import tell

if TYPE_CHECKING:
    from .stats import Counters


class Advice(NamedTuple):
    """Hints for a turn; ``None`` says nothing. Deadlines are points on the monotonic clock."""

    priority: int | None = None
    deadline_at_s: float | None = None
    expected_output_length: int | None = None
    kv_retention_ttl_s: float | None = None
    expected_resume: bool | None = None
    blocks_parent: bool | None = None
    final: bool | None = None

    def over(self, outer: Advice) -> Advice:
        """These hints where given, else those of ``outer``."""
        return outer._replace(**{name: value for name, value in self._asdict().items() if value is not None})


NO_ADVICE = Advice()


def advice(
    *,
    priority: int | None = None,
    deadline_s: float | None = None,
    expected_output_length: int | None = None,
    kv_retention_ttl_s: float | None = None,
    expected_resume: bool | None = None,
    blocks_parent: bool | None = None,
    final: bool | None = None,
) -> Advice:
    """Check and gather. Raises ``ValueError`` naming the first hint that makes no sense."""
    for name, whole in (("priority", priority), ("expected_output_length", expected_output_length)):
        if whole is not None and not (type(whole) is int and abs(whole) < 2**63):
            raise ValueError(f"{name} is {whole!r}; expected a whole number of 64 bits")
    if expected_output_length is not None and expected_output_length < 0:
        raise ValueError(f"expected_output_length is {expected_output_length}; expected tokens ≥ 0")
    for name, seconds in (("deadline_s", deadline_s), ("kv_retention_ttl_s", kv_retention_ttl_s)):
        if seconds is not None and not (
            isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds >= 0
        ):
            raise ValueError(f"{name} is {seconds!r}; expected seconds ≥ 0")
    flags = {"expected_resume": expected_resume, "blocks_parent": blocks_parent, "final": final}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise ValueError(f"{name} is {flag!r}; expected True, False or None")
    return Advice(
        priority=priority,
        deadline_at_s=None if deadline_s is None else runtime.clock() + deadline_s,
        expected_output_length=expected_output_length,
        kv_retention_ttl_s=None if kv_retention_ttl_s is None else float(kv_retention_ttl_s),
        expected_resume=expected_resume,
        blocks_parent=blocks_parent,
        final=final,
    )


class Step:
    """A node and advice, in force inside its ``with`` block. Inner steps add to outer ones."""

    __slots__ = ("_token", "advice", "node", "step_id")

    def __init__(self, node: str | None, step_id: str | None, advice: Advice) -> None:
        self.node = node
        self.step_id = step_id
        self.advice = advice
        self._token: Token[Place] | None = None

    def __enter__(self) -> Step:
        here = place.get()
        self._token = place.set(here._replace(step=self._within(here.step)))
        if self.node is not None and here.program is not None:
            tell("node_entered", here.program, self.node)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            leave(token, runtime.session().counters)

    def _within(self, outer: Step | None) -> Step:
        if outer is None:
            return self
        advice = self.advice.over(outer.advice)
        return Step(self.node or outer.node, self.step_id or outer.step_id, advice)

    async def __aenter__(self) -> Step:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def step(
    node: str | None = None,
    *,
    step_id: str | None = None,
    priority: int | None = None,
    deadline_s: float | None = None,
    expected_output_length: int | None = None,
    kv_retention_ttl_s: float | None = None,
    expected_resume: bool | None = None,
    final: bool | None = None,
) -> Step:
    """Say what the next requests are for: ``with sojourn.step("plan", expected_output_length=200): ...``.

    ``node`` names the node of the agent's graph. ``deadline_s`` counts from now, in seconds;
    ``expected_output_length`` is in tokens; ``final`` says that no further turn follows. Since these are
    often computed while an agent runs, a value that makes no sense is dropped and counted (``hint_invalid``).
    """
    hints = _lenient(
        runtime.session().counters,
        priority=priority,
        deadline_s=deadline_s,
        expected_output_length=expected_output_length,
        kv_retention_ttl_s=kv_retention_ttl_s,
        expected_resume=expected_resume,
        final=final,
    )
    return Step(
        node if node is None else str(node),
        step_id if step_id is None else str(step_id),
        hints,
    )


def _lenient(counters: Counters, **hints: object) -> Advice:
    given = {name: value for name, value in hints.items() if value is not None}
    if not given:
        return NO_ADVICE
    try:
        return advice(**given)  # type: ignore[arg-type]
    except Exception:
        result = NO_ADVICE
        for name, value in given.items():
            try:
                result = advice(**{name: value}).over(result)  # type: ignore[arg-type]
            except Exception:
                counters.add("hint_invalid")
        return result
