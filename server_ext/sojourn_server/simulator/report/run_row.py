"""One line of the lab's results: what a policy did on a workload, as it stands in JSON and tables."""

from __future__ import annotations

import msgspec

WALL_CLOCK_FIELDS = ("scheduler_ms_per_step", "wall_s")
"""Fields of ``RunRow`` that tell of the machine the lab ran on. All others repeat byte for byte."""


class SummaryStatistics(msgspec.Struct, kw_only=True, frozen=True):
    """Mean and percentiles, interpolated linearly as in ``metrics.summary``; ``None`` where nothing was
    measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    count: int = 0
    """Measurements behind them."""
    at_least: tuple[str, ...] = ()
    """Names of figures that are lower bounds, since some measurements were cut off by the run's end."""


NO_STATISTICS = SummaryStatistics(mean=None, p50=None, p90=None, p95=None, p99=None)


class ReplicaChanges(msgspec.Struct, kw_only=True, frozen=True):
    """How programs went from one engine to another, of all of which a turn was computed."""

    programs_share: float
    """Share of them that were computed on more than one, 0 to 1."""
    per_program: float
    """Changes from one turn to the next, on average."""


class Utilisation(msgspec.Struct, kw_only=True, frozen=True):
    """Virtual seconds in which an engine computed ÷ those of the run, over the engines."""

    min: float
    mean: float
    max: float


class ReplicaRow(msgspec.Struct, kw_only=True, frozen=True):
    """What one engine of several did, in the whole run; tokens are of turns that it computed."""

    replica: str
    steps: int
    busy_s: float
    turns: int
    output_tokens: int
    computed_tokens: int
    regenerated_tokens: int
    """Prompt tokens computed again."""


OVERALL = "overall"
"""In ``RunRow.slo_attainment``: of all programs, whosever they are."""


class RunRow(msgspec.Struct, kw_only=True, frozen=True):
    """One policy on one workload. Times are virtual seconds unless named in ``WALL_CLOCK_FIELDS``.

    What each field counts is defined in ``summarize_run``. ``None`` is "not measured", never zero.
    """

    policy: str
    programs: int
    """At once (closed loop), or arrivals in all (open loop)."""
    hardware: str
    model: str
    trace: str
    seed: int
    programs_finished: int
    programs_unfinished: int
    completion_s: SummaryStatistics
    ttft_s: SummaryStatistics
    tpot_s: SummaryStatistics
    output_tok_per_s: float | None
    prompt_tokens: int
    computed_tokens: int
    regenerated_tokens: int
    regenerated_over_belady: float | None
    preemptions: int
    cascades: int
    scheduler_ms_per_step: float | None
    """Wall milliseconds inside the scheduler's own calls."""
    virtual_s: float
    wall_s: float

    limit: bool = False
    """No policy but a bound on policies: never marked best."""
    loop: str = "closed"
    rate_per_s: float | None = None
    since_s: float = 0.0
    pool_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    block_size: int = 16
    programs_cut: int = 0
    """Of the finished ones, those that ended early: their next turn would not have fitted."""
    programs_per_hour: float | None = None
    unfinished_elapsed_s: SummaryStatistics = NO_STATISTICS
    """Time so far of the programs that had not finished."""
    completion_estimate_s: SummaryStatistics = NO_STATISTICS
    """Completion of all programs, the unfinished included, as ``survival`` estimates it: to compare by."""
    queue_s: SummaryStatistics = NO_STATISTICS
    turns_finished: int = 0
    turns_unfinished: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    regenerated_by: dict[str, int] = msgspec.field(default_factory=dict)
    device_busy_fraction: float | None = None
    copied_to_host_bytes: int = 0
    copied_to_device_bytes: int = 0
    copied_to_disk_bytes: int = 0
    copied_from_disk_bytes: int = 0
    """To host memory."""
    steps: int = 0
    replicas: int | None = None
    """Engines behind a gateway; ``None``: one by itself. Sizes of pools are then those of each, and
    ``device_busy_fraction`` is the mean."""
    replica_changes: ReplicaChanges | None = None
    utilisation: Utilisation | None = None
    slo_attainment: dict[str, float] | None = None
    """Share of programs that were done within 1.5 times what they take alone on an empty engine, by tenant
    and ``overall``."""
    per_replica: tuple[ReplicaRow, ...] = ()
    routes: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests sent by our gateway, by its reason for where; the whole run's."""
    notes: tuple[str, ...] = ()

    @property
    def workload(self) -> tuple[str, str, str, str, int, int, int, float, float]:
        """Rows that share this may be compared. Sorts by load. The pool's size is not in it: a limit may have
        an endless one."""
        return (
            self.trace, self.hardware, self.model, self.loop, self.seed,
            self.replicas or 0, self.programs, self.rate_per_s or 0.0, self.since_s,
        )  # fmt: skip
