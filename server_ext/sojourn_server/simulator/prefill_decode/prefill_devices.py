"""Prefill devices that compute in step: each packs what is ready, and all wait for the slowest (§6.2)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from sojourn_server.policies.prefill_decode.prefill_compute_quota import PrefillCandidate, PrefillComputeQuota

if TYPE_CHECKING:
    from .agent_state import AgentState


class PrefillStepCost(NamedTuple):
    """What a step takes, and what its copies do to it."""

    fixed_s: float
    spread_token_s: float
    """A new token's share of the experts, on one device alone."""
    block_copy_s: float
    """Seconds a Full Block occupies a device's compute NIC, one way."""
    token_copy_s: float
    layers: int
    collective_s_per_copy_s: float
    """What a second of copying beside a step adds to it where KV and model share a lane; 0: they do not."""


class PrefillDevice:
    """What is ready to be computed on one device."""

    __slots__ = ("flights", "node", "number", "todo")

    def __init__(self, number: int, node: int) -> None:
        self.number = number
        self.node = node
        self.flights: deque[AgentState] = deque()
        self.todo: deque[PrefillCandidate] = deque()
        """Of each of ``flights``, what is left."""

    def ready(self, flight: AgentState) -> None:
        """Its hit is at hand."""
        self.flights.append(flight)
        self.todo.append(PrefillCandidate(flight.cached, flight.todo))


class PrefillGroup:
    """Devices that share expert layers; a group of one waits for nobody.

    A step takes its fixed part, the longest attention of any device, and the experts' work, which is spread
    over all. Layer by layer, copies lie behind all but one layer of the step; what is longer is waited for.
    """

    __slots__ = (
        "busy", "busy_s", "cost", "devices", "last_attention_s", "layerwise", "planned",
        "quota", "steps", "tokens", "tokens_at_most",
    )  # fmt: skip

    def __init__(
        self,
        devices: list[PrefillDevice],
        quota: PrefillComputeQuota,
        tokens_at_most: float,
        cost: PrefillStepCost,
        layerwise: bool,
    ) -> None:
        self.devices = devices
        self.quota = quota
        self.tokens_at_most = tokens_at_most
        self.cost = cost
        self.layerwise = layerwise
        self.busy = False
        self.planned: list[tuple[PrefillDevice, tuple[int, ...]]] = []
        self.steps = 0
        self.tokens = 0
        self.busy_s = 0.0
        self.last_attention_s = 0.0, 0.0
        """Of the step under way, or the last: the longest, and the mean."""

    def begin(self) -> float:
        """Plan a step of what is ready; its seconds, 0.0 where nothing is."""
        cost = self.cost
        longest = total = copy = 0.0
        tokens = 0
        planned = self.planned = []
        for device in self.devices:
            if not device.todo:
                continue
            plan = self.quota.plan(device.todo, tokens_at_most=self.tokens_at_most)
            mine = sum(plan.chunks)
            tokens += mine
            total += plan.attention_s
            if plan.attention_s > longest:
                longest = plan.attention_s
            planned.append((device, plan.chunks))
            if self.layerwise:
                # A hit comes in once, whoever read it. Out of the device's NIC go its own node's hits twice,
                # into the device and on to the decode side, and the new KV (§4.2).
                own = other = 0
                for flight, chunk in zip(device.flights, plan.chunks, strict=False):
                    if chunk == flight.todo:
                        own += flight.prefill_blocks
                        other += flight.decode_blocks
                reads, writes = 2 * own, own + other
                seconds = max(reads, writes) * cost.block_copy_s + mine * cost.token_copy_s
                if seconds > copy:
                    copy = seconds
        if not planned:
            self.busy = False
            return 0.0
        step_s = cost.fixed_s + longest + tokens * cost.spread_token_s / len(self.devices)
        if copy:
            step_s += cost.collective_s_per_copy_s * min(copy, step_s)
            step_s += max(0.0, copy - (cost.layers - 1) / cost.layers * step_s)
        self.busy = True
        self.steps += 1
        self.tokens += tokens
        self.busy_s += step_s
        self.last_attention_s = longest, total / len(self.devices)
        return step_s

    def end(self) -> list[AgentState]:
        """The step is over; whose prompts are computed now."""
        done: list[AgentState] = []
        for device, chunks in self.planned:
            flights, todo = device.flights, device.todo
            for chunk in chunks:
                flight = flights[0]
                if chunk < flight.todo:
                    flight.todo -= chunk
                    flight.cached += chunk
                    todo[0] = PrefillCandidate(flight.cached, flight.todo)
                    break  # a cut chunk is a plan's last
                flights.popleft()
                todo.popleft()
                done.append(flight)
        self.planned = []
        return done
