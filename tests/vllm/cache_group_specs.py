"""KV cache groups that a model may have beside the one with full attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sojourn_server.simulator import simulated_engine
from sojourn_server.vllm import compat
from vllm.v1 import kv_cache_interface

BLOCK = 16
WINDOW = 64


def attention_spec(kind: str, block_size: int = BLOCK, **fields: Any) -> Any:
    """A KV cache group of one of vLLM's kinds."""
    shape: dict[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    return getattr(kv_cache_interface, kind)(block_size=block_size, **{**shape, **fields})


def window_spec(block_size: int = BLOCK, window: int = WINDOW) -> Any:
    """Layers whose tokens attend to the last ``window`` tokens."""
    return attention_spec("SlidingWindowSpec", block_size, sliding_window=window)


def state_spec() -> Any:
    """Layers with a state, of as many bytes as a block of the group with full attention."""
    shape = (BLOCK, 2 * 8 * 128)
    return kv_cache_interface.MambaSpec(
        block_size=BLOCK, shapes=(shape,), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
    )


def chunk_spec() -> Any:
    """Layers whose tokens attend to their chunk of ``WINDOW`` tokens."""
    return attention_spec("ChunkedLocalAttentionSpec", attention_chunk_size=WINDOW)


def serve_alone(monkeypatch: Any, spec: Callable[[], Any]) -> None:
    """Give simulated engines a group of this kind in place of the one with full attention."""

    class Alone:
        FullAttentionSpec = staticmethod(lambda **fields: spec())

        def __getattr__(self, name: str) -> Any:
            return getattr(compat, name)

    monkeypatch.setattr(simulated_engine, "compat", Alone())


MORE_GROUPS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a window": lambda: (window_spec(),),
    "a state": lambda: (state_spec(),),
    "three states": lambda: (state_spec(), state_spec(), state_spec()),
    "a window and a state": lambda: (window_spec(), state_spec()),
}
