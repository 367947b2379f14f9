"""A step of the agent: the node of its graph, and hints for the requests made inside the step."""

from __future__ import annotations

from types import TracebackType

from . import runtime
from .program import AsyncBlock, enter_block, leave_block, live_context
from .stats import Counters
from .user_hints import NO_HINTS, StepContext, UserHints, checked_hints


class Step(AsyncBlock["Step"]):
    """A ``with`` block that gives the requests inside it a graph node and hints. Values that this step lacks
    come from the steps around it. Threads and tasks may be in the same step at the same time."""

    __slots__ = ("__weakref__", "hints", "node", "step_id")

    def __init__(self, node: str | None, step_id: str | None, hints: UserHints) -> None:
        self.node = node
        self.step_id = step_id
        self.hints = hints

    def __enter__(self) -> Step:
        here = live_context()
        inner = StepContext(self.node, self.step_id, self.hints).within(here.step)
        enter_block(self, here._replace(step=inner))
        if self.node is not None and here.program is not None:
            runtime.notify_listeners("node_entered", here.program, self.node)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave_block(self)


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
    expected_steps_left: float | None = None,
) -> Step:
    """Return a ``with`` block that gives hints for the requests made inside it:
    ``with sojourn.step("plan", expected_output_length=200): ...``.

    ``node`` is a node of the agent's graph; ``step_id`` is passed on to vLLM Router. A higher ``priority`` is
    more important. ``deadline_s`` counts from now, in seconds. ``expected_output_length`` is in tokens.
    ``kv_retention_ttl_s`` is how long to keep a turn's KV, in seconds. ``expected_resume`` says whether a
    further turn follows; ``final`` means that none follows. ``expected_steps_left`` is how many turns you
    expect after each request of the block; a guess will do, since the server learns how far it is true. An
    invalid value is dropped and counted (``hint_invalid``). It does not raise, since agents often compute
    values while they run.
    """
    hints = _valid_hints(
        runtime.session().counters,
        priority=priority,
        deadline_s=deadline_s,
        expected_output_length=expected_output_length,
        kv_retention_ttl_s=kv_retention_ttl_s,
        expected_resume=expected_resume,
        final=final,
        expected_steps_left=expected_steps_left,
    )
    return Step(None if node is None else str(node), None if step_id is None else str(step_id), hints)


def _valid_hints(counters: Counters, **hints: object) -> UserHints:
    result = NO_HINTS
    for name, value in hints.items():
        try:
            if value is not None:
                result = checked_hints(**{name: value}).with_defaults(result)  # type: ignore[arg-type]
        except Exception:
            counters.add("hint_invalid")
    return result
