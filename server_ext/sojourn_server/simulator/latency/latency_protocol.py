"""Interface of latency models: the work of one engine step, and the shape of a device."""

from __future__ import annotations

from typing import NamedTuple, Protocol


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


class LatencyModel(Protocol):
    """Predicts seconds of device time. The same work always takes the same time."""

    @property
    def call_s(self) -> float:
        """Seconds that a request takes from the client to the scheduler (HTTP, tokenising). They are part of
        no step."""
        ...

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step, its fixed overhead included."""
        ...

    def copy_s(self, kv_bytes: int, *, to_host: bool) -> float:
        """Seconds to copy KV between device and host memory, with no other copy on the link."""
        ...

    def disk_s(self, kv_bytes: int, *, to_disk: bool) -> float:
        """Seconds to copy KV between host memory and disk."""
        ...


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
