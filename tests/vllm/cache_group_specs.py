"""KV cache groups that a model may have beside the one with full attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BLOCK = 16
WINDOW = 64


def window_spec() -> Any:
    """Layers whose tokens attend to the last ``WINDOW`` tokens."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=WINDOW
    )


def state_spec() -> Any:
    """Layers with a state, of as many bytes as a block of the group with full attention."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    shape = (BLOCK, 2 * 8 * 128)
    return MambaSpec(block_size=BLOCK, shapes=(shape,), dtypes=(torch.bfloat16,), mamba_cache_mode="align")


def chunk_spec() -> Any:
    """Layers whose tokens attend to their chunk of ``WINDOW`` tokens."""
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, attention_chunk_size=WINDOW
    )


def serve_alone(monkeypatch: Any, spec: Callable[[], Any]) -> None:
    """Give simulated engines a group of this kind in place of the one with full attention."""
    from sojourn_server.simulator import simulated_engine
    from sojourn_server.vllm import compat

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
