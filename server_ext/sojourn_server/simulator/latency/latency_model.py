"""What one engine step computes, summed over its requests: all that a latency model sees."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class StepWork(NamedTuple):
    """One step. A request adds n new tokens to a context of c tokens whose KV is there already."""

    requests: int
    """Requests in the step."""
    tokens: int
    """Σ n: tokens that go through the weights."""
    prefill_tokens: int
    """Of ``tokens`` those of requests that add more than one."""
    attention_pairs: int
    """Σ n·c + n·(n+1)/2: query-key pairs."""
    prefill_attention_pairs: int
    """Of ``attention_pairs`` those of requests that add more than one token."""
    kv_tokens_read: int
    """Σ c + n: tokens whose KV is read."""
    sampled: int
    """Requests that yield a token."""


class LatencyModel(Protocol):
    """Seconds of device time. Plain objects: the same work takes the same time, always."""

    @property
    def call_s(self) -> float:
        """What lies between client and scheduler and is in no step: HTTP, tokenising. Once a request."""
        ...

    def step_s(self, work: StepWork) -> float:
        """One engine step, its fixed overhead included."""
        ...

    def copy_s(self, kv_bytes: int, *, to_host: bool) -> float:
        """A copy of KV between device and host memory, alone on its lane."""
        ...

    def disk_s(self, kv_bytes: int, *, to_disk: bool) -> float:
        """The same between host memory and disk."""
        ...


class DeviceShape(NamedTuple):
    """What an engine on this hardware with this model looks like to the scheduler."""

    hardware: str
    model: str
    kv_bytes_per_token: int
    """Of all devices together."""
    kv_pool_tokens: int
    """Tokens of KV that fit beside the weights."""
    max_context_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    host_kv_tokens: int = 0
    """Tokens of KV that fit in the host memory set aside; 0: no offload."""
