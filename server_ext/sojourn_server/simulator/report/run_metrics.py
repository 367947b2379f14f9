"""Definitions of a run's metrics, computed from its log.

Sub-agents count as programs of their own (MORI §4.2), as in ``sojourn replay``. The argument ``since_s`` is
the end of the warm-up, in virtual seconds; in a closed loop all programs start on an empty cache, which would
distort the metrics. Programs that arrived before ``since_s`` and turns that were sent before it do not count.
Rates count all events from ``since_s`` on. ``run_end_s`` is the virtual time of the end of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import PurePath
from typing import Any

import msgspec
from sojourn.errors import InputError

from sojourn_server.metrics.summary_statistics import PERCENTILES, summarise

from ..run_log import SLO_FACTOR, ProgramLog, RunFacts, RunLog, TurnLog
from .run_row import NO_STATISTICS, OVERALL, ReplicaRow, RunRow, SummaryStatistics

SURVIVORS_NOTE = (
    "closed loop: completion covers finished programs only, so policies that finish mostly short programs "
    "look better than they are (survivor bias). Compare 'est. of all' instead: unfinished programs count "
    "with their elapsed time (Kaplan-Meier). ≥: the run was too short"
)
NONE_FINISHED_NOTE = (
    "no program finished: completion values are lower bounds at most, and other values cover the turns so "
    "far. Simulate longer, or fewer programs"
)
NONE_ARRIVED_NOTE = "no program arrived in this time, so nothing can be said. Simulate longer"
CASCADE_STEPS = 10
"""Maximum number of engine steps between two preemptions of a cascade. Tetris §1 gives no number; ten steps
are well under a second of decoding."""
_ROUNDING = 1e-12
"""Tolerance for rounding errors in shares, which are products of fractions."""
_TRACE_ENDINGS = (".jsonl.gz", ".json.gz", ".jsonl", ".json")

CUT_OFF_NOTE = (
    "open loop, ended before all programs had: an unfinished one counts with its time so far, "
    "so figures with ≥ are lower bounds; 'est. of all' is the Kaplan-Meier estimate"
)


class WarmUpError(InputError):
    """The warm-up leaves nothing of a run."""

    next_step = "use a shorter warm-up, or simulate longer"


def summarize_run(run: RunLog, *, since_s: float = 0.0) -> RunRow:
    """Metrics of ``run``.

    - ``completion_s``: from arrival to the last token. In a closed loop only finished programs count. In an
      open loop all programs count, unfinished ones with their elapsed time. ``at_least`` names the statistics
      that are only lower bounds for this reason.
    - ``completion_estimate_s``: Kaplan-Meier estimate of completion for all programs, in both loops.
    - ``slowdown``: the times of ``completion_s``, each ÷ the program's time alone on an empty engine.
    - ``ttft_s``: from sending to the first token, including time at a router.
    - ``ttft_s`` of a turn that still waits at the end of the run: the elapsed time. Then ``at_least`` names
      the lower bounds. Otherwise a policy that starves requests would look best.
    - ``tpot_s``: (last token or end of the run − first token) ÷ (output tokens − 1), for turns with more than
      one token. Preempted turns that still wait count too.
    - ``output_tok_per_s``: tokens of finished and unfinished turns ÷ seconds since ``since_s``. A turn that
      began before ``since_s`` counts in proportion.
    - ``prompt_tokens``, ``computed_tokens``, ``regenerated_tokens``, hits: sums over turns that got blocks.
    - ``programs_per_hour``: programs that finished from ``since_s`` on ÷ hours since ``since_s``.
    - ``ended_work_s``: ``service_s`` of the same programs.
    - ``cascades``: preemptions at most ``CASCADE_STEPS`` steps after another preemption.
    - ``utilisation``, ``per_replica``, ``routes``, ``preemptions``, ``cascades``, copies,
      ``device_busy_fraction``, ``scheduler_ms_per_step``, ``virtual_s``, ``wall_s``: over the whole run.

    Raises ``WarmUpError`` if ``since_s`` is negative or not before the end of the run.
    """
    if since_s < 0 or (since_s > 0 and since_s >= run.virtual_s):
        raise WarmUpError(
            f"since_s is {since_s:g}; expected 0 or more, and less than virtual_s, {run.virtual_s:g}"
        )
    programs = [program for program in run.programs if program.arrived_s >= since_s]
    sent = [turn for program in run.programs for turn in program.turns if turn.submitted_s >= since_s]
    admitted = [turn for turn in sent if turn.admitted_s is not None]
    finished = [seconds for program in programs if (seconds := program.completion_s) is not None]
    elapsed = [run.virtual_s - program.arrived_s for program in programs if program.finished_s is None]
    is_closed = run.loop == "closed"
    alone = [(program, program.expected_s) for program in programs if program.expected_s]
    slow = [program.completion_s / s for program, s in alone if program.completion_s is not None]
    slow_so_far = [(run.virtual_s - one.arrived_s) / s for one, s in alone if one.finished_s is None]
    causes: Counter[str] = Counter()
    for turn in admitted:
        causes.update(turn.regenerated)
    window_s = run.virtual_s - since_s
    ended = [one for one in run.programs if one.finished_s is not None and one.finished_s >= since_s]
    facts: dict[str, Any] = {name: getattr(run, name) for name in RunFacts.__struct_fields__}
    return RunRow(
        **facts | {"trace": trace_name(run.trace), "routes": dict(run.routes)},
        programs=run.programs_wanted,
        programs_finished=len(finished),
        programs_unfinished=len(elapsed),
        completion_s=censored_statistics(finished, [] if is_closed else elapsed),
        slowdown=censored_statistics(slow, [] if is_closed else slow_so_far),
        ttft_s=censored_statistics(
            [turn.first_token_s - turn.submitted_s for turn in sent if turn.first_token_s is not None],
            [run.virtual_s - turn.submitted_s for turn in sent if turn.first_token_s is None],
        ),
        tpot_s=summary_statistics(seconds for turn in sent for seconds in _tpot_s(turn, run.virtual_s)),
        output_tok_per_s=_rate(_output_tokens_since(run, since_s), window_s),
        prompt_tokens=sum(turn.prompt_tokens for turn in admitted),
        computed_tokens=sum(turn.computed_tokens for turn in admitted),
        regenerated_tokens=sum(causes.values()),
        preemptions=len(run.preemption_steps),
        cascades=cascades(run.preemption_steps),
        scheduler_ms_per_step=1e3 * run.scheduler_s / run.steps if run.steps else None,
        since_s=since_s,
        programs_cut=sum(program.cut and program.finished_s is not None for program in programs),
        programs_per_hour=_rate(3600.0 * len(ended), window_s),
        ended_work_s=math.fsum(map(service_s, ended)),
        completion_estimate_s=estimated_statistics(finished, elapsed),
        turns_finished=sum(turn.finished_s is not None for turn in sent),
        device_hit_tokens=sum(turn.device_tokens for turn in admitted),
        host_hit_tokens=sum(turn.host_tokens for turn in admitted),
        regenerated_by=dict(sorted(causes.items())),
        device_busy_fraction=_rate(run.busy_s, run.virtual_s),
        replicas=len(run.replicas) or None,
        replica_changes=replica_changes(programs) if run.replicas else None,
        utilisation=utilisation(run),
        slo_attainment=slo_attainment(programs, run.virtual_s) if run.replicas else None,
        per_replica=per_replica(run),
        notes=tuple(dict.fromkeys([*run.notes, *_notes(run, since_s, bool(ended), bool(elapsed))])),
    )


def summary_statistics(values: Iterable[float]) -> SummaryStatistics:
    """Mean and percentiles of ``values``."""
    summary: dict[str, Any] = summarise(values)
    return SummaryStatistics(**summary)


def service_s(program: ProgramLog) -> float:
    """Seconds that the requests of a finished program take alone on an empty engine, without tools; 0 if the
    log does not say."""
    if program.expected_s is None:
        return 0.0
    return program.expected_s - math.fsum(turn.gap_s for turn in program.turns)


def censored_statistics(exact: Sequence[float], lower_bounds: Sequence[float]) -> SummaryStatistics:
    """Mean and percentiles of values, some of which are known only as lower bounds.

    Each lower bound counts as if it were the value. ``at_least`` names the statistics that may be too low for
    this reason: the mean, and each percentile computed from a lower bound or from a value above a lower
    bound.
    """
    ordered = sorted([*((value, False) for value in exact), *((value, True) for value in lower_bounds)])
    first_bound = next((place for place, (_, bound) in enumerate(ordered) if bound), None)
    made = summary_statistics(value for value, _ in ordered)
    if first_bound is None:
        return made
    # The upper of the two neighbours between which a percentile is interpolated.
    upper = {f"p{percent}": math.ceil((len(ordered) - 1) * percent / 100.0) for percent in PERCENTILES}
    too_low = [name for name, place in upper.items() if first_bound <= place]
    return msgspec.structs.replace(made, at_least=("mean", *too_low))


def estimated_statistics(exact: Sequence[float], cut_off: Sequence[float]) -> SummaryStatistics:
    """Kaplan-Meier estimate of the mean and percentiles of all programs' completion times, in seconds.

    ``exact``: completion times of finished programs. ``cut_off``: elapsed times of unfinished ones. The mean
    over finished programs is biased towards short ones, the more so the slower a policy, so the slowest may
    look best. Kaplan and Meier (1958) count an unfinished program as at risk for as long as it was observed;
    its cut-off is independent of its remaining time, since that is the end of the run. Where the run was too
    short to observe a percentile, or all ends, the longest observed time takes its place: ``at_least`` names
    these lower bounds.
    """
    if not exact and not cut_off:
        return NO_STATISTICS
    ordered = sorted([*((seconds, 0) for seconds in exact), *((seconds, 1) for seconds in cut_off)])
    points: list[tuple[float, float]] = []
    """(seconds, share that has finished by then), in order."""
    at_risk, unfinished, left = len(ordered), 1.0, 1.0
    mean = before_s = 0.0
    for seconds, same in groupby(ordered, key=lambda entry: entry[0]):
        cut = [bound for _, bound in same]
        # A program that is cut off at this moment is still at risk.
        if ended := cut.count(0):
            mean += left * (seconds - before_s)
            unfinished *= 1.0 - ended / at_risk
            points.append((seconds, 1.0 - unfinished))
            before_s, left = seconds, 1.0 - points[-1][1]
        at_risk -= len(cut)
    longest_s = ordered[-1][0]
    mean += left * (longest_s - before_s)
    at_least = ["mean"] if left > _ROUNDING else []
    found: dict[str, float] = {}
    for percent in PERCENTILES:
        reached_s = next((s for s, share in points if share >= percent / 100.0 - _ROUNDING), None)
        if reached_s is None:
            at_least.append(f"p{percent}")
        found[f"p{percent}"] = longest_s if reached_s is None else reached_s
    return SummaryStatistics(mean=mean, **found, count=len(ordered), at_least=tuple(at_least))


def trace_name(workload: str) -> str:
    """Name of a trace file without folder and suffix. Other workload names are unchanged."""
    name = PurePath(workload).name if workload.endswith(_TRACE_ENDINGS) else workload
    for ending in _TRACE_ENDINGS:
        name = name.removesuffix(ending)
    return name


def cascades(preemption_steps: Iterable[int], within: int = CASCADE_STEPS) -> int:
    """Number of preemptions that follow another preemption within at most ``within`` steps (Tetris §1;
    mechanism T6). The first preemption of a cascade does not count."""
    ordered = sorted(preemption_steps)
    return sum(after - before <= within for before, after in pairwise(ordered))


def _tpot_s(turn: TurnLog, run_end_s: float) -> list[float]:
    if turn.first_token_s is None or turn.tokens_so_far < 2:
        return []
    end_s = run_end_s if turn.finished_s is None else turn.finished_s
    return [(end_s - turn.first_token_s) / (turn.tokens_so_far - 1)]


def _output_tokens_since(run: RunLog, since_s: float) -> float:
    """Number of output tokens from ``since_s`` on. Each turn is assumed to generate its tokens at an even
    pace."""
    total = 0.0
    for program in run.programs:
        for turn in program.turns:
            if turn.first_token_s is None:
                continue
            tokens = turn.tokens_so_far
            end_s = run.virtual_s if turn.finished_s is None else turn.finished_s
            if turn.first_token_s >= since_s:
                total += tokens
            elif end_s > since_s:
                total += tokens * (end_s - since_s) / (end_s - turn.first_token_s)
    return total


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _notes(run: RunLog, since_s: float, any_ended: bool, any_unfinished: bool) -> Iterator[str]:
    if not run.programs:
        yield NONE_ARRIVED_NOTE
    elif not any_ended:
        yield NONE_FINISHED_NOTE
    if any_unfinished and run.loop != "closed":
        yield CUT_OFF_NOTE
    elif any_unfinished and any_ended:
        yield SURVIVORS_NOTE
    if since_s > 0:
        yield (
            f"without programs that arrived, and turns that were sent, in the first {since_s:g} s; "
            "preemptions, cascades, copies, device time and scheduler time are of the whole run"
        )
    if run.refused_hints:
        yield f"{run.policy}: the server refused {run.refused_hints} events: a defect"
    if run.hook_failures:
        yield (
            f"{run.policy}: {run.hook_failures} calls of the policy or the adapter failed, see above; where "
            "they did, the engine did as stock does, so these figures are not the policy's"
        )
    turns = [turn for program in run.programs for turn in program.turns]
    if run.policy == "stock" and turns and not run.preemption_steps and not any(t.regenerated for t in turns):
        yield (
            f"under stock the KV pool of {run.pool_blocks * run.block_size:,} tokens never ran short: "
            "policies can hardly differ; ask for more --programs, or less memory by --pool-tokens"
        )


def replica_changes(programs: Iterable[ProgramLog]) -> dict[str, float] | None:
    """How often programs changed replicas between computed turns; ``None`` if nothing was computed."""
    places = ([turn.replica for turn in one.turns if turn.admitted_s is not None] for one in programs)
    changes = [sum(before != after for before, after in pairwise(at)) for at in places if at]
    if not changes:
        return None
    return {
        "programs_share": sum(map(bool, changes)) / len(changes),
        "per_program": sum(changes) / len(changes),
    }


def utilisation(run: RunLog) -> dict[str, float] | None:
    """Busy share of the replicas over the whole run; ``None`` for a single engine and for an empty run."""
    if not run.replicas or not run.virtual_s:
        return None
    shares = [replica.busy_s / run.virtual_s for replica in run.replicas]
    return {"min": min(shares), "mean": sum(shares) / len(shares), "max": max(shares)}


def slo_attainment(programs: Sequence[ProgramLog], run_end_s: float) -> dict[str, float] | None:
    """Return tenant → share of its programs that met their SLO, 0 to 1. The key ``OVERALL`` stands for all
    programs, with and without a tenant. ``None`` if no program counts.

    SLO: a program finishes by its deadline. The deadline is the program's arrival + ``SLO_FACTOR`` × its
    expected time. The expected time (``ProgramLog.expected_s``) is what the program takes alone on an
    empty engine; a program without one does not count. An unfinished program has missed its SLO if the run
    ended after its deadline; otherwise it does not count.
    """
    met: dict[str, list[bool]] = {}
    for program in programs:
        if program.expected_s is None:
            continue
        took_s, allowed_s = program.completion_s, SLO_FACTOR * program.expected_s
        if took_s is not None or run_end_s - program.arrived_s > allowed_s:
            for tenant in {OVERALL, program.tenant or OVERALL}:
                met.setdefault(tenant, []).append(took_s is not None and took_s <= allowed_s)
    return {tenant: sum(met[tenant]) / len(met[tenant]) for tenant in sorted(met)} or None


def per_replica(run: RunLog) -> tuple[ReplicaRow, ...]:
    """One row per engine of a cluster, in order; empty for a single engine."""
    turns: dict[str | None, list[TurnLog]] = {}
    for turn in (turn for program in run.programs for turn in program.turns if turn.admitted_s is not None):
        turns.setdefault(turn.replica, []).append(turn)
    return tuple(
        ReplicaRow(
            replica=replica.replica,
            steps=replica.steps,
            busy_s=replica.busy_s,
            turns=len(here := turns.get(replica.replica, [])),
            output_tokens=sum(turn.tokens_so_far for turn in here),
            computed_tokens=sum(turn.computed_tokens for turn in here),
            regenerated_tokens=sum(turn.regenerated_tokens for turn in here),
        )
        for replica in run.replicas
    )
