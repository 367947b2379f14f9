"""Reads the limits of a live engine from the sojourn plugin's capabilities and vLLM's own metrics."""

from __future__ import annotations

from sojourn_server.metrics.vllm_metrics_page import CachePool, cache_pool, whole
from sojourn_server.policies.costs.engine_profile import EngineLimits
from sojourn_server.replay.completions_client import CompletionsClient, ServedModel, ServerError

METRICS_PATH = "/metrics"


async def read_limits(client: CompletionsClient, served: ServedModel) -> tuple[EngineLimits, int | None]:
    """Return the limits of the server's engine, and the tokens per KV block by vLLM's metrics; ``None`` for
    each that the server does not report. Never raises.

    A server with sojourn reports all limits. Stock vLLM reports the size of its KV pool and its maximum
    context. Other servers report at most the maximum context.
    """
    engine = served.capabilities
    try:
        pool = cache_pool((await client.get(METRICS_PATH)).text)
    except ServerError:
        pool = CachePool()
    block_size = whole(engine.get("block_size")) or pool.block_size
    blocks = whole(engine.get("num_blocks")) or pool.num_blocks
    limits = EngineLimits(
        kv_pool_tokens=blocks * block_size if blocks and block_size else None,
        max_context_tokens=served.max_context_tokens,
        max_num_seqs=whole(engine.get("max_num_seqs")),
        max_num_batched_tokens=whole(engine.get("max_num_batched_tokens")),
        kv_bytes_per_token=whole(engine.get("kv_bytes_per_token")),
    )
    return limits, pool.block_size
