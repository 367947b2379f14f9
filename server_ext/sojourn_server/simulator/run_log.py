"""Log of a simulation: every turn, every program, and the engines. Times are virtual seconds."""

from __future__ import annotations

import msgspec

SLO_FACTOR = 1.5
"""A program meets its SLO if it takes at most this factor times ``ProgramLog.expected_s`` (SAGA §9.1)."""


class TurnLog(msgspec.Struct, kw_only=True):
    """One LLM request. A time is ``None`` if its event has not occurred."""

    program_id: str
    turn: int
    """Number of the turn, from 0."""
    submitted_s: float
    """Time at which the client sent the request."""
    entered_s: float | None = None
    """Time at which the request arrived at the engine. The time since ``submitted_s`` includes the way to the
    engine, and the time for which a router held the request back."""
    admitted_s: float | None = None
    """Time at which the request first got blocks."""
    first_token_s: float | None = None
    finished_s: float | None = None
    prompt_tokens: int
    output_tokens: int
    generated_tokens: int = 0
    """Output tokens so far of an unfinished turn."""
    known_tokens: int = 0
    """Tokens of the prompt's leading full blocks that any engine of the run had computed before."""
    device_tokens: int = 0
    """Prompt tokens found in device memory at the first admission."""
    host_tokens: int = 0
    """Prompt tokens loaded from host memory."""
    computed_tokens: int = 0
    """Tokens computed as prefill, including the prefill after a preemption."""
    regenerated: dict[str, int] = msgspec.field(default_factory=dict)
    """Recomputed tokens by cause: ``evicted``, ``preempted``, ``moved``, or the finer causes that sojourn's
    scheduler knows (see ``CAUSES`` in ``report.program_explanation``)."""
    preemptions: int = 0
    preempted_before_first_token_s: float = 0.0
    """Virtual seconds that the request waited between preemption and resumption, before its first token."""
    preempted_after_s: float = 0.0
    """Virtual seconds that the request waited between preemption and resumption, after its first token."""
    evictor: str | None = None
    """Program whose request took the memory of this prompt's first missing block; ``None`` if unknown."""
    evicted_score: tuple[float, ...] | None = None
    """Eviction score of this turn's program at the time when the prompt's first missing block was evicted.
    Blocks with the lowest score are evicted first. ``None``: the policy has no scores, or the score is
    unknown."""
    goes_on: float | None = None
    """Probability of another turn, predicted by the policy at the end of this turn; ``None`` without a
    prediction."""
    tool: str | None = None
    """Tool that runs after this turn."""
    gap_s: float = 0.0
    """Client-side seconds until the next turn; 0 for the last turn."""
    replica: str | None = None
    """Name of the engine that got the turn; ``None`` with a single engine, or before a router chose one."""
    recalls: int = 0
    """Number of times that a gateway withdrew the request from an engine before its first token."""

    @property
    def request_id(self) -> str:
        """Request id in the engine: program id, slash, number of the turn."""
        return f"{self.program_id}/{self.turn}"

    @property
    def regenerated_tokens(self) -> int:
        return sum(self.regenerated.values())


class ProgramLog(msgspec.Struct, kw_only=True):
    """One program: its turns, and the times of its arrival and end. ``finished_s`` is ``None`` if the program
    is unfinished."""

    program_id: str
    trace_id: str
    """``program_id`` of the trace line; several programs may replay one line."""
    parent: str | None = None
    arrived_s: float
    finished_s: float | None = None
    turns_total: int
    turns: list[TurnLog] = msgspec.field(default_factory=list)
    cut: bool = False
    """Whether the program ended early because its next turn would not have fitted the context or the pool."""
    tenant: str | None = None
    """Tenant of the program, if the workload has tenants."""
    expected_s: float | None = None
    """Expected time: the seconds that the program would take alone on an empty engine, tools included.
    ``None`` in logs of earlier releases."""

    @property
    def completion_s(self) -> float | None:
        """Seconds from arrival to the last token; ``None`` if unfinished."""
        return None if self.finished_s is None else self.finished_s - self.arrived_s


class ReplicaLog(msgspec.Struct, kw_only=True):
    """One of several engines of a run."""

    replica: str
    steps: int
    busy_s: float
    """Virtual seconds of computation."""


REPLICA_STEP_OFFSET = 1 << 40
"""Offset between the step numbers of two engines of a run; larger than any step number."""


class RunLog(msgspec.Struct, kw_only=True):
    """Log of one policy on one workload. With several engines, pool, host and disk sizes are those of one
    engine. ``steps``, copied bytes and ``scheduler_s`` are sums over the engines; ``busy_s`` is their
    mean."""

    policy: str
    programs_wanted: int
    """Concurrent programs (closed loop), or number of arrivals (open loop)."""
    hardware: str
    model: str
    trace: str
    seed: int
    loop: str
    """``closed`` or ``open``; in a closed loop, ``rate_per_s`` is ``None``."""
    rate_per_s: float | None = None
    pool_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    block_size: int = 16
    programs: list[ProgramLog] = msgspec.field(default_factory=list)
    preemption_steps: list[int] = msgspec.field(default_factory=list)
    """Step number of every preemption. On engine n, counted from 0, n × ``REPLICA_STEP_OFFSET`` is added."""
    steps: int = 0
    virtual_s: float = 0.0
    busy_s: float = 0.0
    """Virtual seconds of computation."""
    copied_to_host_bytes: int = 0
    copied_to_device_bytes: int = 0
    copied_to_disk_bytes: int = 0
    copied_from_disk_bytes: int = 0
    """Bytes read from disk to host memory."""
    hook_failures: int = 0
    """Number of errors of sojourn's code that its scheduler adapter caught; anything but 0 is a defect."""
    refused_hints: int = 0
    """Number of client events whose outcome is not in ``ACCEPTED_OUTCOMES`` (``simulated_clients``); anything
    but 0 is a defect."""
    scheduler_s: float = 0.0
    """Wall-clock seconds inside calls of the scheduler."""
    wall_s: float = 0.0
    notes: list[str] = msgspec.field(default_factory=list)
    replicas: list[ReplicaLog] = msgspec.field(default_factory=list)
    """Engines behind a gateway; empty for a single engine."""
    routes: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests sent by the gateway, by routing reason."""
