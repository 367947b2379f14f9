"""The gateway's routing core in a simulation, and how long a program would take alone."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn_server.policies.cluster_preset import ClusterPreset
from sojourn_server.routing.routing_events import AnyRoutingAction, AnyRoutingEvent
from sojourn_server.routing.routing_from_preset import build_routing_core
from sojourn_server.routing.routing_limits import RoutingLimits

from .latency.latency_models import LatencyModel, StepWork
from .request_router import UNLIMITED_S, RequestRouter
from .workloads.program_plans import ProgramPlan


def isolated_completion_s(plan: ProgramPlan, latency: LatencyModel, max_batched_tokens: int) -> float:
    """Expected time of a program: seconds from its arrival to its last token, alone on an empty engine, tools
    included. Sub-agents count as programs of their own.

    Prefill computes the tokens that no earlier turn of the program computed, in chunks of
    ``max_batched_tokens``. Decoding adds one token per step. Simpson's rule gives the time of all decode
    steps from the first, middle and last step.
    """
    total_s = latency.call_s * len(plan.plans) + sum(isolated_turns_s(plan, latency, max_batched_tokens))
    return total_s + sum(plan.gap_s(turn) for turn in range(len(plan.plans) - 1))


def isolated_turns_s(plan: ProgramPlan, latency: LatencyModel, max_batched_tokens: int) -> list[float]:
    """Seconds of each turn, from admission to the last token, of a program that is alone on an engine."""
    return [
        _prefill_s(latency, lengths.reused_tokens, lengths.prompt_tokens, max_batched_tokens)
        + _decode_s(latency, lengths.prompt_tokens, lengths.output_tokens - 1)
        for lengths in plan.plans
    ]


def _prefill_s(latency: LatencyModel, found_tokens: int, prompt_tokens: int, chunk: int) -> float:
    # At least the last token of a prompt is computed.
    context, total_s = min(found_tokens, prompt_tokens - 1), 0.0
    while context < prompt_tokens:
        new = min(chunk, prompt_tokens - context)
        total_s += _step_s(latency, new, context, samples=context + new == prompt_tokens)
        context += new
    return total_s


def _decode_s(latency: LatencyModel, prompt_tokens: int, steps: int) -> float:
    if steps < 1:
        return 0.0
    first, last = prompt_tokens, prompt_tokens + steps - 1
    at = [_step_s(latency, 1, context) for context in (first, (first + last + 2) // 2 - 1, last)]
    return steps * (at[0] + 4 * at[1] + at[2]) / 6


def _step_s(latency: LatencyModel, new: int, context: int, *, samples: bool = True) -> float:
    """Seconds of a step of one request that adds ``new`` tokens to a context of ``context`` tokens.
    ``samples`` says whether the step also samples an output token."""
    pairs = new * context + new * (new + 1) // 2
    return latency.step_s(StepWork(1, new, pairs, kv_tokens_read=context + new, sampled=int(samples)))


TICK_INTERVAL_S = 0.1
"""Virtual seconds between two ticks of the routing core. Ticks occur only with presets whose decisions depend
on time: those that move waiting requests to other engines (work stealing, SAGA §5.2), divide capacity between
tenants, or make requests yield (SAGA §6.2)."""
MAX_WAITING_REQUESTS = 1_000_000


class SimulatedGateway(RequestRouter):
    """The gateway's routing core (``sojourn_server.routing``: its decisions, without HTTP).

    Its limits are so high that it rejects no request for lack of capacity or after a long wait, since
    baselines reject no requests either.
    """

    reads_residency = True

    def __init__(self, preset: ClusterPreset) -> None:
        self.core = build_routing_core(
            preset,
            RoutingLimits(
                most_waiting=MAX_WAITING_REQUESTS,
                wait_s=UNLIMITED_S,
                lease_s=UNLIMITED_S,
                silent_program_s=UNLIMITED_S,
            ),
        )
        needs_time = (
            preset.stealing.is_used or preset.sharing.divides_capacity or preset.tenant_preemption.is_used
        )
        self.tick_s = TICK_INTERVAL_S if needs_time else float("inf")
        self.reads_prefixes = preset.routing.reads_prefixes

    def take(self, event: AnyRoutingEvent, now: float) -> Sequence[AnyRoutingAction]:
        return self.core.take(event, now)
