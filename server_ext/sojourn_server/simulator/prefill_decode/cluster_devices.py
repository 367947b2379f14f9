"""Devices of a simulated cluster: storage NICs, memory, prefill and decode devices; state of an agent.
Sections are DualPath's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from sojourn_server.policies.prefill_decode.prefill_compute_quota import PrefillCandidate, PrefillComputeQuota
from sojourn_server.policies.prefill_decode.prefill_decode_views import PdRequest

from .trajectories import Trajectory

if TYPE_CHECKING:
    from ..event_queue import Event


class AgentState:
    """State of one agent and its current turn. Until the current turn sets a field, the field is missing or
    has the previous turn's value. Times are virtual seconds."""

    __slots__ = (
        "agent", "cached", "decode", "decode_blocks", "decoded_from_s", "first_token_s", "output_tokens",
        "parts", "prefill_blocks", "request", "second_token_s", "submitted_s", "todo", "trajectory", "turn",
        "worker",
    )  # fmt: skip

    request: PdRequest
    output_tokens: int
    cached: int
    """Prompt tokens that have KV now."""
    todo: int
    """Prompt tokens that are not computed yet."""
    submitted_s: float
    first_token_s: float
    second_token_s: float
    decoded_from_s: float
    """Time at which decoding starts."""
    worker: int
    """Index of the prefill device that computes the turn."""
    decode: int
    """Index of the decode device that decodes the turn."""
    prefill_blocks: int
    """Number of Full Blocks (64 tokens each) that the prefill device's node reads from storage."""
    decode_blocks: int
    """Number of Full Blocks that the decode device's node reads from storage."""
    parts: int
    """Number of unfinished reads from storage."""

    def __init__(self, agent: int, trajectory: Trajectory) -> None:
        self.agent = agent
        self.trajectory = trajectory
        self.turn = 0
        """Index of the current turn in the trajectory."""


WINDOW_S = 10.0
"""Length of the windows of time in which metrics of NICs and attention are summed."""


class StorageNic:
    """A node's storage NIC: a FIFO of reads. Writes use the other direction and are not simulated."""

    __slots__ = (
        "_window", "_window_from_s", "_window_to_s", "blocks", "blocks_in", "busy_until_s", "queue",
        "rate_blocks_per_s",
    )  # fmt: skip

    def __init__(self, rate_blocks_per_s: float) -> None:
        self.rate_blocks_per_s = rate_blocks_per_s
        self.busy_until_s = 0.0
        self.blocks = 0
        """Number of Full Blocks of all reads so far, queued ones included."""
        self.blocks_in: list[float] = [0.0]
        """Number of blocks read in each window of ``WINDOW_S``. A read that spans windows is split between
        them."""

        self.queue: deque[Event] = deque()
        """Completion events of queued reads."""
        self._window, self._window_from_s, self._window_to_s = 0, 0.0, WINDOW_S

    def read(self, blocks: int, now: float) -> float:
        """Queue a read of ``blocks`` Full Blocks. Returns the virtual time at which it ends."""
        begin = max(self.busy_until_s, now)
        end = begin + blocks / self.rate_blocks_per_s
        self.busy_until_s = end
        self.blocks += blocks
        if end < self._window_to_s and begin >= self._window_from_s:
            self.blocks_in[self._window] += blocks
        else:
            self._add_to_window(blocks, begin, end)
        return end

    def _add_to_window(self, blocks: int, begin: float, end: float) -> None:
        first, last = int(begin / WINDOW_S), int(end / WINDOW_S)
        counted = self.blocks_in
        if len(counted) <= last:
            counted.extend([0.0] * (last + 1 - len(counted)))
        if first == last:
            counted[first] += blocks
        else:
            for window in range(first, last + 1):
                inside = min(end, (window + 1) * WINDOW_S) - max(begin, window * WINDOW_S)
                counted[window] += inside * self.rate_blocks_per_s
        self._window, self._window_from_s, self._window_to_s = last, last * WINDOW_S, (last + 1) * WINDOW_S


Item = TypeVar("Item")


class FcfsMemoryPool(Generic[Item]):
    """Memory that requests get in order of arrival. A request that does not fit waits, and so do all later
    requests. A request larger than the pool waits until the whole pool is free, and then gets it."""

    __slots__ = ("free", "queue", "size", "waiting")

    def __init__(self, size: float) -> None:
        self.size = size
        self.free = size
        self.queue: deque[tuple[float, Item]] = deque()
        self.waiting = 0.0
        """Total demand of waiting requests."""

    def take(self, amount: float, item: Item) -> bool:
        """Allocate ``amount`` for the request ``item``. Returns whether it was allocated. If not, ``item``
        waits; a later ``release_memory`` allocates the memory and yields ``item``."""
        if not self.queue and (amount <= self.free or self.free == self.size):
            self.free -= amount
            return True
        self.queue.append((amount, item))
        self.waiting += amount
        return False

    def release_memory(self, amount: float) -> Iterator[Item]:
        """Free ``amount``. Yields the waiting items that fit now, in order."""
        self.free += amount
        queue = self.queue
        while queue and (queue[0][0] <= self.free or self.free == self.size):
            needs, item = queue.popleft()
            self.waiting -= needs
            self.free -= needs
            yield item


class PrefillStepCost(NamedTuple):
    """Costs of a prefill step and its copies."""

    fixed_s: float
    """Seconds of a step without work."""
    spread_token_s: float
    """Seconds of one new token in all experts on one device. A group of n devices takes 1/n of this time."""
    block_copy_s: float
    """Seconds that a Full Block occupies a device's compute NIC, one way."""
    token_copy_s: float
    """Seconds that a new token's KV occupies a device's compute NIC."""
    layers: int
    collective_s_per_copy_s: float
    """Seconds that each second of copying adds to a concurrent step; 0 if KV and the model's collectives do
    not compete for the network."""


class PrefillDevice:
    """A prefill device, with its queue of requests that are ready to be computed."""

    __slots__ = ("node", "states", "todo")

    def __init__(self, node: int) -> None:
        self.node = node
        self.states: deque[AgentState] = deque()
        self.todo: deque[PrefillCandidate] = deque()
        """Remaining work of each of ``states``."""

    def add_ready(self, state: AgentState) -> None:
        """Add a request whose cached KV is available."""
        self.states.append(state)
        self.todo.append(PrefillCandidate(state.cached, state.todo))


class PrefillGroup:
    """Prefill devices that share expert layers and run steps together. All wait for the slowest (§6.2).

    A step takes a fixed time, plus the longest attention time of any device, plus the time of the experts.
    The experts' work is spread over all devices. With layerwise prefill, KV is copied while all layers but
    one compute. Copies can lengthen the step in two ways. They may slow the model's collectives
    (``collective_s_per_copy_s``). And the step waits for copies that take longer than these layers compute.
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
        """Attention seconds of the current or last step: maximum and mean over the devices."""

    def begin(self) -> float:
        """Plan and begin a step. Returns the step's duration in seconds; 0.0 if no request is ready."""
        cost = self.cost
        longest = total = copy = 0.0
        tokens = 0
        planned = self.planned = []
        for device in self.devices:
            if not device.todo:
                continue
            plan = self.quota.plan(device.todo, tokens_at_most=self.tokens_at_most)
            device_tokens = sum(plan.chunks)
            tokens += device_tokens
            total += plan.attention_s
            if plan.attention_s > longest:
                longest = plan.attention_s
            planned.append((device, plan.chunks))
            if self.layerwise:
                # Cached KV enters the device once, whichever node read it. A block that the device's own node
                # read passes the device's NIC twice: to the device, and on to the decode side. The NIC also
                # carries the new KV (§4.2).
                own = other = 0
                for state, chunk in zip(device.states, plan.chunks, strict=False):
                    if chunk == state.todo:
                        own += state.prefill_blocks
                        other += state.decode_blocks
                reads, writes = 2 * own, own + other
                seconds = max(reads, writes) * cost.block_copy_s + device_tokens * cost.token_copy_s
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
        """End the step. Returns the requests whose prompts are complete."""
        done: list[AgentState] = []
        for device, chunks in self.planned:
            states, todo = device.states, device.todo
            for chunk in chunks:
                state = states[0]
                if chunk < state.todo:
                    state.todo -= chunk
                    state.cached += chunk
                    todo[0] = PrefillCandidate(state.cached, state.todo)
                    break  # a cut chunk is the last of a plan
                states.popleft()
                todo.popleft()
                done.append(state)
        self.planned = []
        return done


_EARLY = 1e-6
"""Tolerance, in steps, for rounding errors of ``DecodeDevice.progress``."""


class DecodeDevice:
    """Decode device with continuous batching. A step's duration, ``step_s``, changes only when a request
    enters or ends.

    To keep ``step_s`` constant in between, each request counts with its mean context length: the prompt plus
    half of the output. Memory is reserved for a request's longest possible context (``PdRequest.kv_tokens``).
    Requests that do not fit wait in the node's DRAM.
    """

    __slots__ = (
        "base_s", "due_s", "ends", "free_kv_tokens", "kv_tokens", "node", "progress", "queue", "request_s",
        "requests", "since_s", "step_s", "token_s", "tokens",
    )  # fmt: skip

    def __init__(self, node: int, kv_tokens: int, base_s: float, request_s: float, token_s: float) -> None:
        """The duration of a step is ``base_s`` + ``request_s`` × requests + ``token_s`` × context tokens."""
        self.node = node
        self.kv_tokens = self.free_kv_tokens = kv_tokens
        self.base_s = base_s
        self.request_s = request_s
        self.token_s = token_s
        self.tokens = 0.0
        """Context tokens of all current requests, each counted with its mean length."""
        self.requests = 0
        self.progress = 0.0
        """Number of steps so far, up to ``since_s``; a fraction while a step runs."""
        self.since_s = 0.0
        self.step_s = base_s
        self.ends: list[tuple[float, int, AgentState]] = []
        """Heap of current requests: (``progress`` at which the request ends, agent, state of the agent)."""
        self.queue: deque[AgentState] = deque()
        self.due_s = math.inf
        """Time of the next event of the device."""

    def fits(self, state: AgentState) -> bool:
        """Whether a request fits; an empty device accepts any request."""
        return state.request.kv_tokens <= self.free_kv_tokens or not self.requests

    def enter(self, state: AgentState, load_s: float, stall_s: float, now: float) -> None:
        """Add a request whose prompt is computed. ``load_s``: seconds to copy its KV to the device; then its
        decoding starts. ``stall_s``: seconds for which this copy stops all other requests."""
        _, prompt_tokens, _, kv_tokens = state.request
        self.progress += (now - stall_s - self.since_s) / self.step_s
        self.since_s = now
        self.free_kv_tokens -= kv_tokens
        self.tokens += prompt_tokens + state.output_tokens / 2
        self.requests += 1
        self.step_s = step_s = self.base_s + self.request_s * self.requests + self.token_s * self.tokens
        state.decoded_from_s = now + load_s
        state.second_token_s = now + load_s + step_s
        steps = load_s / step_s + state.output_tokens - 1
        heappush(self.ends, (self.progress + steps, state.agent, state))

    def next_s(self, now: float) -> float:
        """Time at which the next request ends, if steps keep their current duration; ``inf`` without
        requests."""
        if not self.ends:
            return math.inf
        steps = self.ends[0][0] - self.progress
        return now + steps * self.step_s if steps > 0 else now

    def pop_finished(self, now: float) -> list[AgentState]:
        """Remove and return the requests whose last token is decoded by ``now``, and free their memory."""
        self.progress += (now - self.since_s) / self.step_s
        self.since_s = now
        done: list[AgentState] = []
        ends = self.ends
        limit = self.progress + _EARLY
        if not ends or ends[0][0] > limit:
            return done
        while ends and ends[0][0] <= limit:
            state = heappop(ends)[2]
            _, prompt_tokens, _, kv_tokens = state.request
            self.free_kv_tokens += kv_tokens
            self.tokens -= prompt_tokens + state.output_tokens / 2
            self.requests -= 1
            done.append(state)
        self.step_s = self.base_s + self.request_s * self.requests + self.token_s * self.tokens
        return done
