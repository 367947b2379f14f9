"""vLLM's own scheduler and KV manager without a model: plan a step, make up its tokens, take them in.

What a test, a benchmark and later the simulator share. Imports vllm; nothing
outside the lab, the tests and the benchmarks imports this.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from ..vllm.scheduler import SojournAsyncScheduler, SojournScheduler

MADE_UP_TOKEN = 7

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}
"""Shape of Llama-3.1-8B; only the scheduler sees it, and only its lengths."""


@dataclass(slots=True, kw_only=True)
class BareEngineOptions:
    """Shape of a bare engine."""

    blocks: int = 64
    """KV blocks, the null block included, as vLLM counts them."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    asynchronous: bool = False
    scheduling_policy: str = "fcfs"
    sojourn: dict[str, Any] | None = None
    """Sojourn's settings; None is the engine's untouched scheduler class."""


@dataclass(slots=True)
class StepResult:
    """What one step did."""

    planned: SchedulerOutput
    finished: list[str] = field(default_factory=list)


class BareEngine:
    """One scheduler with a made-up model. ``clock`` is what sojourn's adapter reads."""

    def __init__(self, options: BareEngineOptions, clock: Callable[[], float]) -> None:
        self.options = options
        init_none_hash(_hash())
        self._hasher = get_request_block_hasher(options.block_size, _hash())
        config = _config(options)
        spec = FullAttentionSpec(
            block_size=options.block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        kv = KVCacheConfig(
            num_blocks=options.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.scheduler: Any = _scheduler_class(options, clock)(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=options.block_size,
            log_stats=False,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool

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
    ) -> Request:
        """Hand in a request; ``context`` are further fields of its ``agentic_context``."""
        extra = None
        if program_id is not None:
            extra = {"agentic_context": json.dumps({"program_id": program_id, **(context or {})})}
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
            pooling_params=None,
            block_hasher=self._hasher,
            arrival_time=arrival_s,
            priority=priority,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> StepResult:
        """Plan a step, make up a token for every request whose prompt is through, take the results in."""
        planned = self.scheduler.schedule()
        result = StepResult(planned)
        if not planned.total_num_scheduled_tokens:
            return result
        ids = list(planned.num_scheduled_tokens)
        tokens = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            through = request.num_computed_tokens >= request.num_tokens
            tokens.append([MADE_UP_TOKEN] if through else [])
        outputs = self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=tokens,
            ),
        )
        for batch in outputs.values():
            result.finished.extend(o.request_id for o in batch.outputs if o.finish_reason is not None)
        return result

    def run(self, *, max_steps: int = 10_000) -> int:
        """Step until nothing is left or nothing moves any more; returns the steps taken."""
        for steps in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return steps
            self.step()
        return max_steps

    def abort(self, request_id: str) -> None:
        """The client of a request has gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def tell(self, *events: dict[str, Any], emitter: str = "test") -> list[dict[str, Any]]:
        """Send client events to sojourn; returns their outcomes."""
        batch = json.dumps({"v": 1, "emitter": emitter, "events": list(events)})
        return list(json.loads(self.scheduler.sojourn_call("events", batch))["outcomes"])

    def ask(self, operation: str, **arguments: Any) -> Any:
        """One of sojourn's operations."""
        return json.loads(self.scheduler.sojourn_call(operation, json.dumps(arguments)))


def _scheduler_class(options: BareEngineOptions, clock: Callable[[], float]) -> type:
    if options.sojourn is None:
        return AsyncScheduler if options.asynchronous else Scheduler
    base = SojournAsyncScheduler if options.asynchronous else SojournScheduler
    return type(base.__name__, (base,), {"sojourn_clock": staticmethod(clock)})


def _config(options: BareEngineOptions) -> VllmConfig:
    cache = CacheConfig(block_size=options.block_size, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=_model_config(options.max_model_len),
        scheduler_config=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=options.asynchronous,
            policy=options.scheduling_policy,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        additional_config={"sojourn": options.sojourn} if options.sojourn is not None else {},
    )
    cache.num_gpu_blocks = options.blocks
    return config


@cache
def _model_config(max_model_len: int) -> ModelConfig:
    with tempfile.TemporaryDirectory(prefix="sojourn-bare-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_LLAMA_8B))
        return ModelConfig(
            model=folder, skip_tokenizer_init=True, max_model_len=max_model_len, dtype="bfloat16"
        )


@cache
def _hash() -> Callable[[Any], bytes]:
    return get_hash_fn_by_name("sha256")
