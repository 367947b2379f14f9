"""The part ``attention`` of ``engine.py``: vLLM's attention over two layouts of the KV cache.

``BLHNC``, which ``sojourn serve`` asks for, has the layers of a block side by side. ``LBNHC`` is vLLM's own
choice. The question is whether attention pays for copies that are cheaper.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

LAYOUTS = {"LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4)}
"""Order in memory of the dimensions layer, block, head, token, content (keys, then values)."""
LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, HEAD_SIZE, QUERY_HEADS = 8, 8192, 8, 16, 128, 32
"""Layers as in Llama 3.1 8B, bfloat16. That model has 32; with 8, the two caches take 8 GiB."""
CASES = {
    "decode, 24 requests of 5,000 tokens": (24, 1, 5_000),
    "decode, 4 requests of 30,000 tokens": (4, 1, 30_000),
    "prefill, 2,048 tokens after 10,000": (1, 2_048, 12_048),
}
"""Number of requests, tokens computed for each, and tokens of its whole context."""
ROUNDS, REPEATS = 5, 10


def attention_rows() -> list[dict[str, Any]]:
    """Return one row for each case, with microseconds a layer for each layout (medians of rounds in turn)."""
    device = torch.device("cuda:0")
    caches = {layout: _cache(order, device) for layout, order in LAYOUTS.items()}
    rows = []
    for case, (requests, new_tokens, context) in CASES.items():
        steps, outputs, graphs = {}, {}, {}  # a graph reads what its step holds
        for layout, cache in caches.items():
            steps[layout], outputs[layout] = _attention(cache, requests, new_tokens, context)
            graphs[layout] = _graph(steps[layout])
        rows.append(_row(case, graphs))
        if not torch.equal(outputs["LBNHC"], outputs["BLHNC"]):
            rows[-1]["failed"] = "the layouts gave different outputs"
    steps = {layout: _write(cache) for layout, cache in caches.items()}
    graphs = {layout: _graph(step) for layout, step in steps.items()}
    rows.append(_row("writing the KV of 2,048 tokens", graphs))
    if not torch.equal(caches["LBNHC"][0], caches["BLHNC"][0]):
        rows[-1]["failed"] = "the layouts have different contents"
    return rows


def _row(case: str, graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, Any]:
    rounds = [{layout: _microseconds(graph) for layout, graph in graphs.items()} for _ in range(ROUNDS)]
    us = {layout: statistics.median(found[layout] for found in rounds) / LAYERS for layout in graphs}
    ratio = statistics.median(found["BLHNC"] / found["LBNHC"] for found in rounds)
    return (
        {"case": case}
        | {f"{layout} us": round(value, 2) for layout, value in us.items()}
        | {"BLHNC over LBNHC": round(ratio, 3)}
    )


def _cache(order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a cache that vLLM indexes by layer, block, head, token, content, with memory in this order.

    All layouts have the same numbers in the same places.
    """
    shape = (LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
    memory = torch.empty([shape[axis] for axis in order], dtype=torch.bfloat16, device=device)
    cache = memory.permute([order.index(axis) for axis in range(len(order))])
    generator = torch.Generator(device).manual_seed(0)
    for layer in range(LAYERS):
        cache[layer].copy_(torch.randn(shape[1:], dtype=torch.bfloat16, device=device, generator=generator))
    return cache


def _attention(
    cache: torch.Tensor, requests: int, new_tokens: int, context: int
) -> tuple[Callable[[], None], torch.Tensor]:
    """Return a function that runs attention in all layers, and the tensor that it writes."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    device = cache.device
    generator = torch.Generator(device).manual_seed(1)
    shape = (requests * new_tokens, QUERY_HEADS, HEAD_SIZE)
    query = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
    blocks = -(-context // BLOCK_TOKENS)
    table = torch.randperm(BLOCKS, device=device, generator=generator)[: requests * blocks]
    table = table.to(torch.int32).reshape(requests, blocks)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * new_tokens
    used = torch.full((requests,), context, dtype=torch.int32, device=device)
    outputs = torch.empty((LAYERS, *shape), dtype=torch.bfloat16, device=device)

    def step() -> None:
        for layer in range(LAYERS):
            keys, values = cache[layer].transpose(1, 2).split(HEAD_SIZE, dim=-1)
            flash_attn_varlen_func(
                q=query,
                k=keys,
                v=values,
                out=outputs[layer],
                cu_seqlens_q=starts,
                max_seqlen_q=new_tokens,
                seqused_k=used,
                max_seqlen_k=context,
                softmax_scale=HEAD_SIZE**-0.5,
                causal=True,
                block_table=table,
                fa_version=3,
            )

    return step, outputs


def _write(cache: torch.Tensor) -> Callable[[], None]:
    """Return a function that writes the KV of 2,048 tokens to all layers."""
    from vllm import _custom_ops

    device = cache.device
    generator = torch.Generator(device).manual_seed(2)
    new = torch.randn((2, 2_048, HEADS, HEAD_SIZE), dtype=torch.bfloat16, device=device, generator=generator)
    slots = torch.randperm(BLOCKS, device=device, generator=generator)[: 2_048 // BLOCK_TOKENS]
    slots = (slots[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)).flatten()
    scale = torch.ones((), device=device)

    def step() -> None:
        for layer in range(LAYERS):
            keys, values = cache[layer].transpose(1, 2).split(HEAD_SIZE, dim=-1)
            _custom_ops.reshape_and_cache_flash(new[0], new[1], keys, values, slots, "auto", scale, scale)

    return step


def _graph(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return ``step`` as a CUDA graph, so that the host's time does not count."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the microseconds of one replay."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    for _ in range(REPEATS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) * 1e3 / REPEATS
