"""vLLM's scheduler and KV manager without a model: schedules steps, makes up tokens, and applies results.

The simulator, tests and benchmarks use this module. It imports vLLM.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..vllm import compat
from . import vllm_offload_transfers

DUMMY_TOKEN = 7
STOP_TOKEN = 2
"""Stop token of every request: it ends an output that is shorter than ``max_tokens``."""


MODEL_FOLDER = Path(__file__).parent / "engine_model"
"""Configuration in the shape of Llama-3.1-8B, with a smaller vocabulary: vLLM's configuration needs a model.
The context limit is raised if an engine needs more."""


@dataclass(slots=True, kw_only=True)
class SimulatedEngineOptions:
    """Options of a simulated engine."""

    blocks: int = 64
    """KV blocks, vLLM's null block included."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    asynchronous: bool = False
    scheduling_policy: str = "fcfs"
    host_blocks: int = 0
    """Blocks of host memory for a KV connector; 0 for no connector."""
    own_tiers: bool = False
    """Whether host memory uses sojourn's KV connector instead of vLLM's."""
    other_groups: Sequence[compat.KVCacheSpec] = ()
    """Further KV cache groups beside the group with full attention, such as sliding windows or Mamba
    states."""
    disk_blocks: int = 0
    """Blocks of disk below host memory, for sojourn's connector; 0 for no disk."""
    sojourn: dict[str, Any] | None = None
    """Sojourn's settings; ``None`` for vLLM's own scheduler class, without any code of sojourn."""


@dataclass(slots=True)
class EngineStepResult:
    """Result of one step."""

    planned: compat.SchedulerOutput
    finished: list[str] = field(default_factory=list)
    """Ids of the requests that finished."""


class SimulatedEngine:
    """One vLLM scheduler without a model. ``clock`` returns the time for sojourn's adapter."""

    def __init__(self, options: SimulatedEngineOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.tokens: Callable[[compat.Request], int] = lambda request: DUMMY_TOKEN
        """Function that returns the next output token of a request."""
        spec = compat.FullAttentionSpec(
            block_size=options.block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        config = _engine_vllm_config(options, spec.page_size_bytes)
        kv = compat.KVCacheConfig(
            num_blocks=options.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                compat.KVCacheGroupSpec([f"layer{number}"], each)
                for number, each in enumerate((spec, *options.other_groups))
            ],
        )
        self.scheduler: Any = _scheduler_class(options, clock)(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=compat.StructuredOutputManager(config),
            block_size=options.block_size,
            log_stats=False,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.adapter: Any = getattr(self.scheduler, "sojourn", None)
        """Sojourn's adapter, which connects its policies to the scheduler; ``None`` in vLLM's own class."""

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        program_id: str | None = None,
        context: dict[str, Any] | None = None,
        priority: int = 0,
        arrival_s: float = 0.0,
    ) -> compat.Request:
        """Add a request. ``context``: additional fields of its ``agentic_context``."""
        extra = None
        if program_id is not None:
            extra = {"agentic_context": json.dumps({"program_id": program_id, **(context or {})})}
        request = compat.Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=compat.SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[STOP_TOKEN], extra_args=extra
            ),
            pooling_params=None,
            block_hasher=self.hash_blocks,
            arrival_time=arrival_s,
            priority=priority,
        )
        self.scheduler.add_request(request)
        return request

    def plan(self) -> compat.SchedulerOutput:
        """Schedule the next step."""
        return self.scheduler.schedule()

    def update_from_output(
        self,
        planned: compat.SchedulerOutput,
        copies: compat.KVConnectorOutput | None = None,
        sampled: Container[str] | None = None,
    ) -> list[str]:
        """Apply the results of a step: new tokens, and finished ``copies``. Returns the ids of finished
        requests.

        ``sampled`` has the ids of the requests that get a token. ``None``: every request of the step whose
        tokens are all computed gets a token. Pass ``sampled`` if the next step has been planned already,
        because the requests then count the tokens of that step as computed too.
        """
        ids = list(planned.num_scheduled_tokens)
        tokens = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            gets_token = request is not None and (
                request.num_computed_tokens >= request.num_tokens
                if sampled is None
                else request_id in sampled
            )
            tokens.append([self.tokens(request)] if gets_token else [])
        outputs = self.scheduler.update_from_output(
            planned,
            compat.ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=tokens,
                kv_connector_output=copies,
            ),
        )
        return [o.request_id for b in outputs.values() for o in b.outputs if o.finish_reason is not None]

    def step(self) -> EngineStepResult:
        """Schedule a step and apply its results. Loads of KV by sojourn's connector end with the step."""
        planned = self.plan()
        has_tiers = self.options.own_tiers and self.options.host_blocks
        loaded = set(planned.kv_connector_metadata.jobs.loads) if has_tiers else set()
        if not planned.total_num_scheduled_tokens and not loaded:
            return EngineStepResult(planned)
        return EngineStepResult(
            planned, self.update_from_output(planned, compat.KVConnectorOutput(finished_recving=loaded))
        )

    def run(self, *, max_steps: int = 10_000) -> int:
        """Step until all requests have finished, at most ``max_steps`` times; returns the number of steps."""
        for steps in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return steps
            self.step()
        return max_steps

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.scheduler.finish_requests(request_id, compat.RequestStatus.FINISHED_ABORTED)

    def tell(self, *events: dict[str, Any], emitter: str = "test") -> list[dict[str, Any]]:
        """Send client events to sojourn's adapter. Returns the outcome of each, in order. ``emitter`` is the
        name of their sender."""
        batches = json.dumps([{"v": 1, "emitter": emitter, "events": list(events)}])
        [answer] = json.loads(self.scheduler.sojourn_call("event_batches", batches))["batches"]
        return list(answer["outcomes"])

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Call an operation of sojourn's adapter, such as ``yield``. Returns the decoded JSON answer."""
        return json.loads(self.scheduler.sojourn_call(operation, json.dumps(arguments)))

    def hash_blocks(self, request: compat.Request) -> list[compat.BlockHash]:
        """Chained hashes of the request's new full blocks. They are Python's hashes of tuples of integers.
        These are the same in every run, and ten times faster than vLLM's hashes."""
        size = self.options.block_size
        done = len(request.block_hashes)
        if request.num_tokens < (done + 1) * size:
            return []
        added: list[compat.BlockHash] = []
        chain = int.from_bytes(request.block_hashes[-1] if done else b"", "little", signed=True)
        tokens = request.all_token_ids
        for start in range(done * size, request.num_tokens - size + 1, size):
            chain = hash((chain, *tokens[start : start + size]))
            added.append(compat.BlockHash(chain.to_bytes(8, "little", signed=True)))
        return added


def _scheduler_class(options: SimulatedEngineOptions, clock: Callable[[], float]) -> Any:
    if options.sojourn is None:
        return compat.AsyncScheduler if options.asynchronous else compat.Scheduler
    from ..vllm.scheduler import SojournAsyncScheduler, SojournScheduler

    base = SojournAsyncScheduler if options.asynchronous else SojournScheduler
    return type(base.__name__, (base,), {"sojourn_clock": staticmethod(clock)})


def _engine_vllm_config(options: SimulatedEngineOptions, page_bytes: int) -> compat.VllmConfig:
    cache = compat.CacheConfig(block_size=options.block_size, enable_prefix_caching=True)
    if any(getattr(spec, "mamba_cache_mode", None) == "align" for spec in options.other_groups):
        cache.mamba_cache_mode = "align"
    config = compat.VllmConfig(
        # This is a copy, so changes to it affect no other engine of the process.
        model_config=copy.copy(_model_config(options.max_model_len)),
        scheduler_config=compat.SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=options.asynchronous,
            policy=options.scheduling_policy,
        ),
        cache_config=cache,
        device_config=compat.DeviceConfig("cpu"),
        kv_transfer_config=_transfer_config(options, page_bytes),
        # A simulation also runs if the host memory that its policy needs is missing; validate_specs notes it.
        additional_config={"sojourn": {"allow_missing_tiers": True, **options.sojourn}}
        if options.sojourn is not None
        else {},
    )
    cache.num_gpu_blocks = options.blocks
    return config


def _transfer_config(options: SimulatedEngineOptions, page_bytes: int) -> compat.KVTransferConfig | None:
    if not options.host_blocks:
        return None
    if not options.own_tiers:
        return vllm_offload_transfers.vllm_offload_transfer_config(options.host_blocks, page_bytes)
    from . import tier_transfers

    return tier_transfers.tier_transfer_config(options.host_blocks, page_bytes, options.disk_blocks)


@cache
def _model_config(max_model_len: int) -> compat.ModelConfig:
    return compat.ModelConfig(
        model=str(MODEL_FOLDER),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        dtype="bfloat16",
        hf_overrides={"max_position_embeddings": max(131072, max_model_len)},
    )
