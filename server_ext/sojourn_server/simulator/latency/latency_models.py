"""Latency models: a roofline of data sheets, and a linear fit of a live engine.

The roofline has a step's FLOPs and bytes over the achieved rates of the device.

A step is a sequence of kernels, so their times add. All terms are seconds; an achieved rate is a published
peak times an efficiency of ``HardwareProfile``:

    step    = step_overhead + requests · request_overhead
            + layers · (layer_overhead + linear + 2 · all_reduce) + attention + head
    linear  = √( compute² + read² )     compute = 2 · active parameters of a layer · tokens / achieved FLOP/s
                                        read    = touched weights of a layer / achieved bytes/s
    attention = 4 · heads · head_size · layers · pairs / achieved FLOP/s
              + KV bytes read / achieved bytes/s
    head    = √( compute² + read² ) of the output matrix, for the tokens that are sampled
    all_reduce = overhead + 2 · (tp-1)/tp · tokens · hidden · 2 bytes / bus bandwidth   (tp > 1)

The root of squares is a smooth maximum. A plain maximum is off by 27 % at 128 tokens, where reading and
computing take the same time (Llama-3-8B's projections on A100: measured 0.377 ms, plain maximum 0.276 ms,
root of squares 0.37 ms).

In a mixture of E experts, a token computes with k of them. A step reads every expert that at least one of its
tokens uses. If tokens choose uniformly, these are E·(1 - (1 - k/E)^tokens) experts on average. Tensor
parallelism divides compute, weights and KV by ``tp``.

Accuracy. The projections are within 15 % of the operators measured in microsoft/vidur's tables from 1 to
16,384 tokens (tests/simulator/test_simulator_latency_published.py). Attention, the overheads and all of B200
are estimates. Left out: power throttling, other work on PCIe, and the API server's time per request. Prefill
throughput is an upper bound: expect engines to be 0 to 30 % slower. Expect an error of ±30 % in absolute
seconds, and a far smaller one in ratios between policies on one device. A real load from host memory is
slower while a store runs. The model ignores this (see the sources of the copy rates in the profiles).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from ...policies.costs.step_costs import StepCosts
from .latency_profiles import (
    DISK_READ_BYTES_PER_S,
    DISK_WRITE_BYTES_PER_S,
    HardwareProfile,
    LatencyProfileError,
    ModelShape,
)

if TYPE_CHECKING:
    from ..workloads.program_plans import ProgramPlan


class StepWork(NamedTuple):
    """Work of one step. Each request of the step computes n new tokens after c tokens that already have KV.
    Σ is the sum over these requests."""

    requests: int
    """Requests in the step."""
    tokens: int
    """Σ n: tokens that the step computes."""
    attention_pairs: int
    """Σ (n·c + n·(n+1)/2): query-key pairs."""
    kv_tokens_read: int
    """Σ (c + n): tokens whose KV is read."""
    sampled: int
    """Requests that sample a token."""


class DeviceShape(NamedTuple):
    """What a scheduler knows of its engine: hardware, model and limits."""

    hardware: str
    model: str
    kv_bytes_per_token: int
    """Bytes of a token's KV on all devices together."""
    kv_pool_tokens: int
    """Tokens of KV that fit beside the weights."""
    max_context_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    host_kv_tokens: int = 0
    """Tokens of KV that fit into host memory; 0 without offload."""


class LatencyModel(ABC):
    """Predicts seconds of device time. The same work always takes the same time."""

    call_s = 0.0
    """Seconds that a request takes from the client to the scheduler (HTTP, tokenising). They are part of no
    step. The roofline leaves them out."""

    def __init__(
        self,
        to_host_bytes_per_s: float | None,
        to_device_bytes_per_s: float | None,
        *,
        copy_overhead_s: float = 0.0,
        disk_read_bytes_per_s: float = DISK_READ_BYTES_PER_S,
        disk_write_bytes_per_s: float = DISK_WRITE_BYTES_PER_S,
    ) -> None:
        self._copy_rates = (to_device_bytes_per_s, to_host_bytes_per_s)
        self._copy_overhead_s = copy_overhead_s
        self._disk_rates = (disk_read_bytes_per_s, disk_write_bytes_per_s)

    @abstractmethod
    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step, its fixed overhead included."""

    def copy_s(self, kv_bytes: int, *, to_host: bool) -> float:
        """Seconds to copy KV between device and host memory, with no other copy on the link. Raises
        ``LatencyProfileError`` if the engine profile lacks the bandwidth of this direction."""
        if kv_bytes <= 0:
            return 0.0
        rate = self._copy_rates[to_host]
        if rate is None:
            raise LatencyProfileError(
                "the engine profile holds no copy bandwidth; measure it on the server's machine, "
                "or simulate without host memory"
            )
        return self._copy_overhead_s + kv_bytes / rate

    def disk_s(self, kv_bytes: int, *, to_disk: bool) -> float:
        """Seconds to write or read ``kv_bytes`` in files on the machine's disk, which all devices share."""
        return max(0, kv_bytes) / self._disk_rates[to_disk]


class FittedLatency(LatencyModel):
    """Step latency of a live engine, linear in the work of a step: the costs that ``sojourn profile`` fitted.

    Seconds of a step = step_s + token_s·tokens + pair_s·attention_pairs + kv_token_s·kv_tokens_read +
    request_s·requests. The coefficients are fields of ``costs``, the other factors fields of ``StepWork``.
    The model is accurate between the measured points (the profile's samples show the error). Beyond them, for
    example for a much larger batch, it is optimistic. The disk is a typical drive (not measured).
    """

    def __init__(
        self, costs: StepCosts, to_host_bytes_per_s: float | None, to_device_bytes_per_s: float | None
    ) -> None:
        super().__init__(to_host_bytes_per_s, to_device_bytes_per_s)
        self.costs, self.call_s = costs, costs.call_s

    def step_s(self, work: StepWork) -> float:
        step_s, token_s, pair_s, kv_token_s, request_s, _ = self.costs
        return (
            step_s
            + token_s * work.tokens
            + pair_s * work.attention_pairs
            + kv_token_s * work.kv_tokens_read
            + request_s * work.requests
        )


class RooflineLatency(LatencyModel):
    """Latency of ``tp`` devices, from data-sheet constants. More work never takes less time. Raises
    ``LatencyProfileError`` if vLLM cannot split the model over ``tp`` devices."""

    def __init__(self, hardware: HardwareProfile, model: ModelShape, tp: int = 1) -> None:
        model.check_tp(tp)
        super().__init__(  # each device copies its share over its own link
            hardware.device_to_host_bytes_per_s * tp,
            hardware.host_to_device_bytes_per_s * tp,
            copy_overhead_s=hardware.copy_overhead_s,
            disk_read_bytes_per_s=hardware.disk_read_bytes_per_s,
            disk_write_bytes_per_s=hardware.disk_write_bytes_per_s,
        )
        self.hardware, self.model, self.tp = hardware, model, tp
        flops = hardware.bf16_flops_per_s * tp
        weights_per_s = hardware.memory_bandwidth_bytes_per_s * hardware.weight_read_efficiency * tp
        dense = model.attention_parameters + (0 if model.experts else model.mlp_parameters)
        routed = model.active_layer_parameters - dense
        reduce_bytes = 2 * (tp - 1) / tp * model.hidden_size * 2
        reduces = 2 * model.layers if tp > 1 else 0
        self._fixed_s = (
            hardware.step_overhead_s
            + model.layers * hardware.layer_overhead_s
            + reduces * hardware.all_reduce_overhead_s
        )
        layer_token_flops = dense / hardware.linear_efficiency + routed / hardware.expert_efficiency
        self._token_s = 2 * model.layers * layer_token_flops / flops
        self._read_s = model.layers * dense * model.weight_bytes / weights_per_s
        experts = model.experts * (model.mlp_parameters if model.experts else 0)
        self._expert_read_s = model.layers * experts * model.weight_bytes / weights_per_s
        self._miss = 1 - model.experts_per_token / model.experts if model.experts else 0.0
        self._reduce_token_s = reduces * reduce_bytes / hardware.all_reduce_bytes_per_s
        pair_flops = 4 * model.layers * model.heads * model.head_size
        self._pair_s = pair_flops / (flops * hardware.attention_efficiency)
        kv_bytes_per_s = hardware.memory_bandwidth_bytes_per_s * hardware.kv_read_efficiency * tp
        self._kv_token_s = model.kv_bytes_per_token(tp) / kv_bytes_per_s
        self._head_token_s = 2 * model.head_parameters / (flops * hardware.linear_efficiency)
        self._head_read_s = model.head_parameters * model.weight_bytes / weights_per_s

    def step_s(self, work: StepWork) -> float:
        requests, tokens, pairs, kv_tokens_read, sampled = work
        if tokens <= 0:
            return self.hardware.step_overhead_s
        read_s = self._read_s
        if self._expert_read_s:
            read_s += self._expert_read_s * (1.0 - self._miss**tokens)
        compute_s = self._token_s * tokens
        seconds = (
            self._fixed_s
            + self.hardware.request_overhead_s * requests
            + sqrt(compute_s * compute_s + read_s * read_s)
            + self._reduce_token_s * tokens
            + self._pair_s * pairs
            + self._kv_token_s * kv_tokens_read
        )
        if sampled > 0:
            compute_s, read_s = self._head_token_s * sampled, self._head_read_s
            seconds += sqrt(compute_s * compute_s + read_s * read_s)
        return seconds


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
    starts = range(min(found_tokens, prompt_tokens - 1), prompt_tokens, chunk)
    ends = [*starts[1:], prompt_tokens]
    return sum(
        _step_s(latency, end - start, start, samples=end == prompt_tokens)
        for start, end in zip(starts, ends, strict=True)
    )


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
