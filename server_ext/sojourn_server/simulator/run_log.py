"""What a simulation records: the life of every turn, of every program and of the engine; virtual seconds."""

from __future__ import annotations

import msgspec


class TurnLog(msgspec.Struct, kw_only=True):
    """One LLM request."""

    program_id: str
    turn: int
    """From 0."""
    submitted_s: float
    """The client sent it."""
    entered_s: float | None = None
    """It reached the engine: later than sent where a router held it back."""
    admitted_s: float | None = None
    """It first got blocks."""
    first_token_s: float | None = None
    finished_s: float | None = None
    prompt_tokens: int
    output_tokens: int
    generated_tokens: int = 0
    """Output tokens so far, where it has not finished; a finished one has made ``output_tokens``."""
    known_tokens: int = 0
    """Leading prompt tokens that this program or its group had computed before, in whole blocks."""
    device_tokens: int = 0
    """Prompt tokens found in device memory when first admitted."""
    host_tokens: int = 0
    """Prompt tokens brought back from host memory."""
    computed_tokens: int = 0
    """Tokens computed as prefill, those after a preemption included."""
    regenerated: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens computed again, by cause: ``evicted``, ``preempted``; finer where the adapter knows."""
    preemptions: int = 0
    preempted_before_first_token_s: float = 0.0
    """Virtual seconds that it waited to be taken up again, before it had made a token."""
    preempted_after_s: float = 0.0
    """The same, in mid-answer."""
    evictor: str | None = None
    """Program that took its first missing block, where the adapter knows."""
    evicted_score: tuple[float, ...] | None = None
    """Its program's place in the eviction order then, lowest first, where the policy has such an order."""
    optimum_tokens: int | None = None
    """Tokens that Bélády's order of eviction would have computed again for it, on this run's own accesses:
    the least for all programs together, not for each. ``None``: these were not recorded, or host memory was
    used."""
    goes_on: float | None = None
    """Probability that another turn would follow, as the policy saw it when this one ended."""
    tool: str | None = None
    """What runs after it."""
    gap_s: float = 0.0
    """Client-side seconds until the next turn; of the last turn 0."""
    replica: str | None = None
    """The engine that computed it, of several; ``None``: there is one, or none has begun yet."""
    recalls: int = 0
    """How often a gateway took it back from an engine before its first token."""

    @property
    def request_id(self) -> str:
        """Its name in the engine: the program's, a slash, and the turn's number."""
        return f"{self.program_id}/{self.turn}"

    @property
    def regenerated_tokens(self) -> int:
        return sum(self.regenerated.values())


class ProgramLog(msgspec.Struct, kw_only=True):
    """One program."""

    program_id: str
    trace_id: str
    """``program_id`` of the trace line it plays; several programs may play one."""
    parent: str | None = None
    arrived_s: float
    finished_s: float | None = None
    turns_total: int
    turns: list[TurnLog] = msgspec.field(default_factory=list)
    cut: bool = False
    """Ended before a turn that would not have fitted the context or the pool."""
    tenant: str | None = None
    """On whose behalf it ran, where the workload says so."""
    expected_s: float | None = None
    """What it would take alone on an empty engine, its tools included; ``None``: not worked out."""

    @property
    def completion_s(self) -> float | None:
        """From arrival to the last token; ``None`` where it has not finished."""
        return None if self.finished_s is None else self.finished_s - self.arrived_s


class OccupancySample(msgspec.Struct, kw_only=True):
    """Who holds the KV memory at one moment, in blocks."""

    at_s: float
    running: int
    """Held by running requests."""
    idle: int
    """Cached or leased contexts of programs that are in a tool."""
    other: int
    """Cached contexts of programs that are over or wait."""
    free: int
    host: int = 0
    programs_waiting: int = 0
    """Programs whose request waits in the engine or at the router."""
    programs_acting: int = 0
    programs_running: int = 0


class ReplicaLog(msgspec.Struct, kw_only=True):
    """One engine of several."""

    replica: str
    steps: int
    busy_s: float
    """Virtual seconds in which its device computed."""


REPLICA_STEP_OFFSET = 1 << 40
"""Between the step numbers of two engines of a run: no preemption of one seems to follow another's."""


class RunLog(msgspec.Struct, kw_only=True):
    """One policy on one workload.

    Of several engines, sizes are those of each; steps, copies and seconds in schedulers are summed up, and
    ``busy_s`` is the mean.
    """

    policy: str
    programs_wanted: int
    """Programs at once (closed loop), or arrivals in all (open loop)."""
    hardware: str
    model: str
    trace: str
    seed: int
    loop: str
    """``closed`` or ``open``."""
    rate_per_s: float | None = None
    pool_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    block_size: int = 16
    programs: list[ProgramLog] = msgspec.field(default_factory=list)
    occupancy: list[OccupancySample] = msgspec.field(default_factory=list)
    preemption_steps: list[int] = msgspec.field(default_factory=list)
    """Step number of every preemption, plus n × ``REPLICA_STEP_OFFSET`` for the n-th engine, from 0."""
    steps: int = 0
    virtual_s: float = 0.0
    busy_s: float = 0.0
    """Virtual seconds in which the device computed."""
    copied_to_host_bytes: int = 0
    copied_to_device_bytes: int = 0
    copied_to_disk_bytes: int = 0
    copied_from_disk_bytes: int = 0
    """To host memory."""
    hook_failures: int = 0
    """Errors of ours that the adapter swallowed; anything but 0 is a defect."""
    refused_hints: int = 0
    """Events that the server did not take; anything but 0 is a defect."""
    scheduler_s: float = 0.0
    """Wall seconds inside the scheduler's own calls."""
    wall_s: float = 0.0
    notes: list[str] = msgspec.field(default_factory=list)
    replicas: list[ReplicaLog] = msgspec.field(default_factory=list)
    """Engines behind a gateway; empty: one engine by itself."""
    routes: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests that the gateway sent, by the reason for where."""
