"""A turn on its way through the cluster."""

from __future__ import annotations

from sojourn_server.policy.pd_views import Pair, PdRequest


class Flight:
    """Written by whoever has it at the moment; times in virtual seconds."""

    __slots__ = (
        "agent", "cached", "cached_before", "decode", "decode_blocks", "decoded_from_s", "first_token_s",
        "output_tokens", "parts", "prefill_blocks", "request", "second_token_s", "submitted_s", "todo",
        "worker",
    )  # fmt: skip

    def __init__(self, agent: int, request: PdRequest, output_tokens: int, cached: int, now: float) -> None:
        self.agent = agent
        self.request = request
        self.output_tokens = output_tokens
        self.submitted_s = now
        self.first_token_s = now
        self.second_token_s = now
        self.decoded_from_s = now
        self.cached = self.cached_before = cached
        """Prompt tokens whose KV there is: now, and from storage."""
        self.todo = request.tokens - cached
        self.parts = 0
        """Reads that are still under way."""
        self.worker = 0
        """Its prefill device."""
        self.decode = 0
        self.prefill_blocks = self.decode_blocks = 0

    def paired(self, pair: Pair) -> None:
        self.worker = pair.prefill
        self.decode = pair.decode
        self.prefill_blocks, self.decode_blocks = pair.split
