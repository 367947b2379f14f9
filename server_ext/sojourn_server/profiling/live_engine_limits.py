"""Reads the limits of a live engine from the sojourn plugin's capabilities and vLLM's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from sojourn.wire_codec import CAPABILITIES_PATH

from sojourn_server.metrics.vllm_metrics_page import CachePool, cache_pool, whole
from sojourn_server.policies.costs.engine_profile import EngineLimits
from sojourn_server.replay.completions_client import ServedModel

METRICS_PATH = "/metrics"
TIMEOUT_S = 10.0


async def read_limits(url: str, served: ServedModel, *, api_key: str | None = None) -> EngineLimits:
    """Return the server's limits; ``None`` for limits that it does not report. Never raises.

    A server with sojourn reports all limits. Stock vLLM reports the size of its KV pool and its maximum
    context, other servers at most the maximum context.
    """
    async with _client(api_key) as client:
        told = _limits_from_capabilities(await _get(client, url + CAPABILITIES_PATH))
        pool = _limits_from_metrics(await _get(client, url + METRICS_PATH))
    block_size = whole(told.get("block_size")) or pool.block_size
    blocks = whole(told.get("num_blocks")) or pool.num_blocks
    return EngineLimits(
        kv_pool_tokens=blocks * block_size if blocks and block_size else None,
        max_context_tokens=served.max_context_tokens,
        max_num_seqs=whole(told.get("max_num_seqs")),
        max_num_batched_tokens=whole(told.get("max_num_batched_tokens")),
        kv_bytes_per_token=whole(told.get("kv_bytes_per_token")),
    )


async def read_block_size(url: str, *, api_key: str | None = None) -> int | None:
    """Return the tokens per KV block from vLLM's metrics; ``None``: not found. Used for servers without
    sojourn. Never raises."""
    async with _client(api_key) as client:
        return _limits_from_metrics(await _get(client, url + METRICS_PATH)).block_size


def _client(api_key: str | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=TIMEOUT_S,
        trust_env=False,  # no proxy, as in CompletionsClient
        verify=httpx.create_ssl_context(),
    )


async def _get(client: httpx.AsyncClient, address: str) -> httpx.Response | None:
    try:
        answer = await client.get(address)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return answer if answer.status_code == 200 else None


def _limits_from_capabilities(answer: httpx.Response | None) -> Mapping[str, Any]:
    try:
        engine = answer.json()["engine"] if answer is not None else {}
    except (ValueError, KeyError, TypeError):
        return {}
    return engine if isinstance(engine, dict) else {}


def _limits_from_metrics(answer: httpx.Response | None) -> CachePool:
    return cache_pool(answer.text) if answer is not None else CachePool()
