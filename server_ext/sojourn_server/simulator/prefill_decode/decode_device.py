"""A decode device: all its requests advance together, a token each step, and a fuller step takes longer."""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agent_state import AgentState

_EARLY = 1e-6
"""Steps by which floating point may have an end come too early."""


class DecodeDevice:
    """Continuous batching as processor sharing: ``step_s`` holds until somebody comes or goes.

    A context's growth while it is written is counted from the beginning, half of it. Requests whose KV does
    not fit wait in line, in the node's DRAM.
    """

    __slots__ = (
        "base_s", "due_s", "ends", "free_kv_tokens", "kv_tokens", "line", "node", "number", "progress",
        "request_s", "requests", "since_s", "step_s", "token_s", "tokens",
    )  # fmt: skip

    def __init__(
        self, number: int, node: int, kv_tokens: int, base_s: float, request_s: float, token_s: float
    ) -> None:
        self.number = number
        self.node = node
        self.kv_tokens = self.free_kv_tokens = kv_tokens
        self.base_s = base_s
        self.request_s = request_s
        self.token_s = token_s
        self.tokens = 0.0
        self.requests = 0
        self.progress = 0.0
        """Steps so far."""
        self.since_s = 0.0
        self.step_s = base_s
        self.ends: list[tuple[float, int, AgentState]] = []
        """(progress at which it has all its tokens, agent, request)"""
        self.line: deque[AgentState] = deque()
        self.due_s = math.inf
        """When the device wants to be asked next."""

    def fits(self, flight: AgentState) -> bool:
        """Whether there is room for it; an empty device takes anybody."""
        return flight.request.kv_tokens <= self.free_kv_tokens or not self.requests

    def enter(self, flight: AgentState, load_s: float, stall_s: float, now: float) -> None:
        """Its prompt is computed, and there is room. ``load_s``: copying its KV in, which takes it and nobody
        else that long; ``stall_s``: time that this costs everybody."""
        _, prompt_tokens, _, kv_tokens = flight.request
        self.progress += (now - stall_s - self.since_s) / self.step_s
        self.since_s = now
        self.free_kv_tokens -= kv_tokens
        self.tokens += (prompt_tokens + kv_tokens) / 2
        self.requests += 1
        self.step_s = step_s = self.base_s + self.request_s * self.requests + self.token_s * self.tokens
        flight.decoded_from_s = now + load_s
        flight.second_token_s = now + load_s + step_s
        steps = load_s / step_s + flight.output_tokens - 1
        heappush(self.ends, (self.progress + steps, flight.agent, flight))

    def next_s(self, now: float) -> float:
        """When its next request has all its tokens, as things stand."""
        if not self.ends:
            return math.inf
        steps = self.ends[0][0] - self.progress
        return now + steps * self.step_s if steps > 0 else now

    def finished(self, now: float) -> list[AgentState]:
        """Who has all tokens by now; their memory is free."""
        self.progress += (now - self.since_s) / self.step_s
        self.since_s = now
        done: list[AgentState] = []
        ends = self.ends
        limit = self.progress + _EARLY
        if not ends or ends[0][0] > limit:
            return done
        while ends and ends[0][0] <= limit:
            flight = heappop(ends)[2]
            _, prompt_tokens, _, kv_tokens = flight.request
            self.free_kv_tokens += kv_tokens
            self.tokens -= (prompt_tokens + kv_tokens) / 2
            self.requests -= 1
            done.append(flight)
        self.step_s = self.base_s + self.request_s * self.requests + self.token_s * self.tokens
        return done
