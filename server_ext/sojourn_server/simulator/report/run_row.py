"""Result rows: the metrics of one policy on one workload, as in JSON and tables."""

from __future__ import annotations

import msgspec

from ..run_log import ReplicaLog, RunFacts

WALL_CLOCK_FIELDS = ("scheduler_ms_per_step", "wall_s")
"""Fields of ``RunRow`` that depend on the machine. Other fields are equal in every repetition of a run."""


class SummaryStatistics(msgspec.Struct, kw_only=True, frozen=True):
    """Mean and percentiles; each is ``None`` if nothing was measured. Percentiles are linearly interpolated,
    except those of ``RunRow.completion_estimate_s``."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    count: int = 0
    """Number of measurements."""
    at_least: tuple[str, ...] = ()
    """Names of the statistics, such as ``p95``, that are only lower bounds, because the end of the run cut
    off measurements."""


NO_STATISTICS = SummaryStatistics(mean=None, p50=None, p90=None, p95=None, p99=None)


class ReplicaRow(ReplicaLog, kw_only=True):
    """Metrics of one engine over the whole run. Tokens are sums over the turns that the engine computed."""

    turns: int
    output_tokens: int
    computed_tokens: int
    regenerated_tokens: int
    """Recomputed prompt tokens."""


OVERALL = "overall"
"""Key of ``RunRow.slo_attainment`` for all programs, whatever their tenant."""


class RunRow(RunFacts, kw_only=True):
    """One policy on one workload. Times are virtual seconds except ``WALL_CLOCK_FIELDS``. ``summarize_run``
    defines the metrics; ``None`` in a metric means "not measured", never zero."""

    programs: int
    """Concurrent programs (closed loop), or number of arrivals (open loop)."""
    programs_finished: int
    programs_unfinished: int
    completion_s: SummaryStatistics
    ttft_s: SummaryStatistics
    tpot_s: SummaryStatistics
    output_tok_per_s: float | None
    prompt_tokens: int
    computed_tokens: int
    regenerated_tokens: int
    preemptions: int
    cascades: int
    scheduler_ms_per_step: float | None
    """Wall-clock milliseconds inside calls of the scheduler, per step."""

    since_s: float = 0.0
    programs_cut: int = 0
    """Number of finished programs that ended early because their next turn would not have fitted."""
    programs_per_hour: float | None = None
    ended_work_s: float | None = None
    """Seconds that the requests of the finished programs take, each program alone on an empty engine."""
    completion_estimate_s: SummaryStatistics = NO_STATISTICS
    """Kaplan-Meier estimate of the completion times of all programs, unfinished ones included. Compare
    policies by this field."""
    slowdown: SummaryStatistics = NO_STATISTICS
    """Completion time ÷ completion time alone on an empty engine, of the programs in ``completion_s``."""
    turns_finished: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    regenerated_by: dict[str, int] = msgspec.field(default_factory=dict)
    device_busy_fraction: float | None = None
    replicas: int | None = None
    """Number of engines behind a gateway; ``None`` for a single engine without a gateway. With several
    engines, ``device_busy_fraction`` is the mean."""
    replica_changes: dict[str, float] | None = None
    """Of the programs with a turn that an engine computed: ``programs_share``, the share that was computed on
    more than one engine, and ``per_program``, the mean number of engine changes."""
    utilisation: dict[str, float] | None = None
    """``min``, ``mean`` and ``max`` of the engines' busy virtual seconds ÷ virtual seconds of the run."""
    slo_attainment: dict[str, float] | None = None
    """Tenant → share of its programs that meet their SLO, 0 to 1. The key ``OVERALL`` stands for all
    programs. See ``run_metrics.slo_attainment``."""
    per_replica: tuple[ReplicaRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def workload(self) -> tuple[str, str, str, str, int, int, int, float, float]:
        """Key of the workload: rows with equal keys may be compared. Sorting by key puts rows of the same
        trace, hardware, model, loop and seed in order of load. The pool size is not part of the key, because
        bounds may have other pool sizes."""
        return (
            self.trace, self.hardware, self.model, self.loop, self.seed,
            self.replicas or 0, self.programs, self.rate_per_s or 0.0, self.since_s,
        )  # fmt: skip
