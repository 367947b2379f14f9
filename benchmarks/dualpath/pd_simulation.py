"""Event-driven simulation of a cluster of prefill and decode nodes (DualPath §4, §6, §7).

A turn is submitted. The router's own ``PairScheduler`` gives it a pair of devices and a read side. Once its
nodes have memory, its reads queue at the storage NICs. After the reads, the prefill device computes the rest
of the prompt in one or more steps. The KV moves to the decode device, which decodes the output. Then the
agent's next turn follows. ``PdSimulation._live`` is this life of an agent.

- Storage NICs are FIFOs of whole requests. The DRAM buffer of a prefill node limits how much KV its NIC reads
  ahead. The router admits requests to a decode device up to its memory plus its share of the node's DRAM
  buffer.
- With layerwise prefill, a request takes no memory of the prefill device before it is computed, and copies
  overlap with compute. Without, it takes memory for all its KV from before its read until its KV has left.
- A decode device reserves memory for a prompt and the longest output that the client declared, as the router
  does.
- Copies over compute NICs get what the model's messages leave of them (traffic classes, §5.1). They take
  time, but only copies of whole requests (without layerwise prefill) queue.
- Decode devices do not wait for one another. Neither the scheduler nor the storage behind the NICs takes
  time. Writes use the other direction of the NICs and are not simulated.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import fmean
from typing import Any

import msgspec
from pd_cluster import PdCluster, PdModel, Trajectory, load_trajectories, sample_agents
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import (
    FULL_BLOCK_TOKENS,
    EnginePair,
    PairScheduler,
    PdRequest,
    PrefillDecodeRules,
)
from sojourn_server.policies.prefill_decode.prefill_compute_quota import (
    PrefillComputeQuota,
    StepQuotaUsage,
)
from sojourn_server.simulator.event_queue import EventQueue

HIGH_PRIORITY_SHARE = 0.99
"""Share of a compute NIC that traffic classes give to the model's messages while KV is copied too (§5.1)."""
WINDOW_S = 10.0
"""Length of the windows of time in which metrics of NICs and attention are summed."""

# -- the compared systems ------------------------------------------------------------------------


class RoundRobinPairs:
    """Chooses pairs of engines by round robin, regardless of load. Has the methods of ``PairScheduler`` that
    the simulation calls.

    A request goes to the next prefill engine, and to the next decode engine with enough free KV memory. If
    none has enough, the request waits, and so do all later ones. The prefill side reads; with ``alternates``,
    each side in turn, the "round robin" of §7.5.
    """

    def __init__(self, alternates: bool) -> None:
        self._alternates = alternates
        self._prefill: list[int] = []
        self._free: dict[int, int] = {}
        self._queue: deque[PdRequest] = deque()
        self._at: dict[int | str, tuple[int, int]] = {}
        self._next_prefill = self._next_decode = self._reads = 0
        self._stuck = False

    def add_prefill(self, number: int, node: int) -> None:
        self._prefill.append(number)

    def add_decode(self, number: int, node: int, group: int, kv_tokens: int) -> None:
        self._free[number] = kv_tokens

    def submit(self, request: PdRequest) -> None:
        self._queue.append(request)

    def end(self, request_id: int | str) -> None:
        number, kv_tokens = self._at.pop(request_id)
        self._free[number] += kv_tokens
        self._stuck = False

    def ignore(self, *facts: float) -> None:
        """Loads are not tracked."""

    add_node = prefilled = report = ignore

    def dispatch(self, now: float) -> list[EnginePair]:
        pairs: list[EnginePair] = []
        queue, engines = self._queue, len(self._free)
        while queue and not self._stuck:
            request = queue[0]
            turns = ((self._next_decode + step) % engines for step in range(engines))
            decode = next((number for number in turns if self._free[number] >= request.kv_tokens), None)
            if decode is None:
                self._stuck = True
                break
            self._next_decode = decode + 1
            queue.popleft()
            self._free[decode] -= request.kv_tokens
            self._at[request.request_id] = (decode, request.kv_tokens)
            prefill = self._prefill[self._next_prefill % len(self._prefill)]
            self._next_prefill += 1
            decode_reads = self._alternates and self._reads % 2 == 1
            self._reads += request.hit_blocks > 0
            pairs.append(EnginePair(request, prefill, decode, decode_reads))
        return pairs


@dataclass(frozen=True, kw_only=True)
class PdSystem:
    """One compared system. All have the same costs of a step, which are those of the cluster."""

    title: str
    layerwise: bool = True
    """Whether the prefill device holds the KV of one layer at a time, and copies overlap with compute."""
    scheduled: bool = True
    """Whether DualPath's scheduler (§6.1; D4 and D5) chooses the engines and the side that reads. If false,
    round robin does."""
    alternates: bool = False  # with round robin: whether the decode side reads every second request
    free_io: bool = False  # whether reads and copies take no time, as in the paper's Oracle


PD_SYSTEMS = {
    "basic": PdSystem(title="Basic", layerwise=False, scheduled=False),
    "layerwise": PdSystem(title="+ layerwise", scheduled=False),
    "dual-path": PdSystem(title="+ dual path", scheduled=False, alternates=True),
    "scheduling": PdSystem(title="+ scheduling"),
    "oracle": PdSystem(title="Oracle", free_io=True),
}
"""Systems by name, in the order of the ablation (§7.5). ``scheduling`` is the whole published DualPath. No
scheduler knows the length of an output, only the ``max_tokens`` that clients declare: the workload's longest
output, so that no output is cut."""

# -- devices -------------------------------------------------------------------------------------


class Agent:
    """One agent, and its current turn. Until the current turn sets a field, the field is missing or has the
    previous turn's value. Times are virtual seconds."""

    life: Iterator[float | None]
    """What the agent does, as a coroutine of the simulation."""
    request: PdRequest
    pair: EnginePair
    output_tokens: int
    cached: int  # prompt tokens that have KV now
    todo: int  # prompt tokens that are not computed yet
    second_token_s: float
    decoded_from_s: float

    def __init__(self, number: int) -> None:
        self.number = number


class StorageNic:
    """A node's storage NIC: a FIFO of reads. ``blocks_in`` counts blocks by window of ``WINDOW_S``."""

    def __init__(self, rate_blocks_per_s: float) -> None:
        self.rate_blocks_per_s = rate_blocks_per_s
        self.busy_until_s = 0.0
        self.blocks_in: list[float] = [0.0]

    def read(self, blocks: int, now: float) -> float:
        """Queue a read of ``blocks`` Full Blocks. Returns the virtual time at which it ends."""
        begin = max(self.busy_until_s, now)
        end = self.busy_until_s = begin + blocks / self.rate_blocks_per_s
        first, last = int(begin / WINDOW_S), int(end / WINDOW_S)
        counted = self.blocks_in
        counted.extend([0.0] * (last + 1 - len(counted)))
        if first == last:
            counted[first] += blocks
        else:
            for window in range(first, last + 1):
                inside = min(end, (window + 1) * WINDOW_S) - max(begin, window * WINDOW_S)
                counted[window] += inside * self.rate_blocks_per_s
        return end


class FcfsMemoryPool:
    """Memory that requests get in order of arrival. A request that does not fit waits, and so do all later
    ones. A request larger than the pool waits until the whole pool is free, and then gets it."""

    def __init__(self, size: float) -> None:
        self.size = self.free = size
        self.queue: deque[tuple[float, Agent]] = deque()
        self.waiting = 0.0

    def take(self, amount: float, item: Agent) -> bool:
        """Whether ``amount`` was allocated. If not, a later ``release_memory`` allocates it and yields
        ``item``."""
        if not self.queue and (amount <= self.free or self.free == self.size):
            self.free -= amount
            return True
        self.queue.append((amount, item))
        self.waiting += amount
        return False

    def release_memory(self, amount: float) -> Iterator[Agent]:
        """Free ``amount``. Yields the waiting items that fit now, in order."""
        self.free += amount
        queue = self.queue
        while queue and (queue[0][0] <= self.free or self.free == self.size):
            needs, item = queue.popleft()
            self.waiting -= needs
            self.free -= needs
            yield item


class PrefillDevice:
    """A prefill device, with the requests that are ready to be computed."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.states: deque[Agent] = deque()


class PrefillGroup:
    """Prefill devices that share expert layers and run steps together. All wait for the slowest (§6.2).

    A step takes a fixed time, plus the longest attention time of any device, plus the time of the experts,
    whose work is spread over all devices. With layerwise prefill, KV is copied while all layers but one
    compute; the step waits for copies that take longer than these layers.
    """

    def __init__(
        self, devices: list[PrefillDevice], quota: PrefillComputeQuota, model: PdModel, flops_per_s: float,
        token_copy_s: float,
    ) -> None:  # fmt: skip
        """``token_copy_s``: seconds that a token's KV occupies a device's compute NIC; 0 without layerwise
        copies."""
        self.devices = devices
        self.quota = quota
        self.model = model
        self.expert_token_s = model.spread_token_flops / flops_per_s
        self.token_copy_s = token_copy_s
        self.busy = False
        self.planned: list[tuple[PrefillDevice, list[int]]] = []
        self.busy_s = 0.0

    def begin(self) -> float:
        """Plan and begin a step. Returns the step's duration in seconds; 0.0 if no request is ready."""
        longest = copy = 0.0
        tokens = 0
        planned = self.planned = []
        for device in self.devices:
            if not device.states:
                continue
            step, chunks = StepQuotaUsage(self.quota, decodes_s=0.0), []
            for number, state in enumerate(device.states):
                chunk = step.offer(str(number), state.cached, state.todo)
                if chunk:
                    step.take(str(number), state.cached, chunk)
                    chunks.append(chunk)
                if step.closed:
                    break
            device_tokens = sum(chunks)
            tokens += device_tokens
            longest = max(longest, step.prompts_s)
            planned.append((device, chunks))
            if self.token_copy_s:
                # Cached KV enters the device once, whichever node read it. A block that the device's own node
                # read passes the device's NIC twice: to the device, and on to the decode side. The NIC also
                # carries the new KV (§4.2).
                ended = [
                    state for state, chunk in zip(device.states, chunks, strict=False) if chunk == state.todo
                ]
                own = sum(state.request.hit_blocks for state in ended if not state.pair.decode_reads)
                blocks = max(2 * own, sum(state.request.hit_blocks for state in ended))
                copy = max(
                    copy, blocks * FULL_BLOCK_TOKENS * self.token_copy_s + device_tokens * self.token_copy_s
                )
        self.busy = bool(planned)
        if not planned:
            return 0.0
        step_s = self.model.prefill_step_s + longest + tokens * self.expert_token_s / len(self.devices)
        step_s += max(0.0, copy - (self.model.layers - 1) / self.model.layers * step_s)
        self.busy_s += step_s
        return step_s

    def end(self) -> list[Agent]:
        """End the step. Returns the requests whose prompts are complete."""
        done: list[Agent] = []
        for device, chunks in self.planned:
            for chunk in chunks:
                state = device.states[0]
                if chunk < state.todo:
                    state.todo -= chunk
                    state.cached += chunk
                    break  # a cut chunk is the last of a step
                device.states.popleft()
                done.append(state)
        return done


class DecodeDevice:
    """Decode device with continuous batching. A step's duration, ``step_s``, changes only when a request
    enters or ends: each request counts with its mean context length, the prompt plus half of the output.
    Memory is reserved for a request's longest possible context. Requests that do not fit wait in the node's
    DRAM."""

    def __init__(self, node: int, kv_tokens: int, model: PdModel, token_s: float) -> None:
        """``token_s``: seconds that a step takes for each context token."""
        self.node = node
        self.model = model
        self.token_s = token_s
        self.free_kv_tokens = kv_tokens
        self.tokens = 0.0
        self.requests = 0
        self.progress = 0.0  # number of steps so far, up to ``since_s``; a fraction while a step runs
        self.since_s = 0.0
        self.step_s = model.decode_step_s
        self.ends: list[tuple[float, int, Agent]] = []
        """Heap of current requests: (``progress`` at which the request ends, agent, its state)."""
        self.queue: deque[Agent] = deque()
        self.due_s = math.inf  # time of the next event of the device

    def fits(self, state: Agent) -> bool:
        """Whether a request fits; an empty device accepts any request."""
        return state.request.kv_tokens <= self.free_kv_tokens or not self.requests

    def enter(self, state: Agent, token_copy_s: float, now: float) -> None:
        """Add a request whose prompt is computed. Its decoding starts when its KV is copied."""
        load_s = state.request.tokens * token_copy_s
        self._move_to(now)
        self._count(state, 1)
        state.decoded_from_s = now + load_s
        state.second_token_s = now + load_s + self.step_s
        steps = load_s / self.step_s + state.output_tokens - 1
        heappush(self.ends, (self.progress + steps, state.number, state))

    def pop_finished(self, now: float) -> list[Agent]:
        """Remove and return the requests whose last token is decoded by ``now``, and free their memory."""
        self._move_to(now)
        done: list[Agent] = []
        limit = self.progress + 1e-6  # tolerance for rounding errors, in steps
        while self.ends and self.ends[0][0] <= limit:
            done.append(heappop(self.ends)[2])
            self._count(done[-1], -1)
        return done

    def next_s(self, now: float) -> float:
        """Time at which the next request ends, if steps keep their duration; ``inf`` without requests."""
        return now + max(0.0, self.ends[0][0] - self.progress) * self.step_s if self.ends else math.inf

    def _move_to(self, now: float) -> None:
        self.progress += (now - self.since_s) / self.step_s
        self.since_s = now

    def _count(self, state: Agent, sign: int) -> None:
        model = self.model
        self.free_kv_tokens -= sign * state.request.kv_tokens
        self.tokens += sign * (state.request.tokens + state.output_tokens / 2)
        self.requests += sign
        self.step_s = (
            model.decode_step_s + model.decode_request_s * self.requests + self.token_s * self.tokens
        )


# -- the simulation ------------------------------------------------------------------------------


class PdSimulation:
    """Simulation of one system on one cluster. Agents are present from the start, or arrive one by one."""

    def __init__(
        self, cluster: PdCluster, system: PdSystem, agents: Sequence[Trajectory],
        arrivals_s: Sequence[float] | None = None, *, latencies_from_s: float = math.inf,
    ) -> None:  # fmt: skip
        """``arrivals_s`` has the arrival time of each agent; with ``None``, all arrive at once. The latencies
        of turns submitted at ``latencies_from_s`` or later are recorded. ``run`` raises ``ValueError`` for an
        agent that fits no decode device."""
        self.cluster = cluster
        self.system = system
        self._agents = [Agent(number) for number in range(len(agents))]
        self._queue = EventQueue()
        self._changed = False
        """Whether the pair scheduler may find devices for waiting turns, since it was asked."""
        self.turns = 0
        self.latencies: list[tuple[float, float, float]] = []
        """(TTFT, TTST, TPOT) in seconds of each recorded turn with more than one output token."""
        self._latencies_from_s = latencies_from_s
        times_s = arrivals_s or [0.0] * len(agents)
        for agent in sorted(range(len(agents)), key=times_s.__getitem__):
            self._agents[agent].life = self._live(self._agents[agent], agents[agent])
            self._at(times_s[agent], self._go_on, self._agents[agent])
        machine, model = cluster.machine, cluster.model
        block_bytes = FULL_BLOCK_TOKENS * model.kv_bytes_per_token
        blocks_per_s = machine.storage_nic_bytes_per_s / block_bytes
        flops_per_s = machine.flops_per_s
        # Copies get the bandwidth that the model's messages leave.
        lane = machine.compute_nic_bytes_per_s * (1.0 - HIGH_PRIORITY_SHARE * machine.collective_share)
        self._token_copy_s = 0.0 if system.free_io else model.kv_bytes_per_token / lane
        quota = PrefillComputeQuota(
            costs=StepCosts(
                0.0, model.local_token_flops / flops_per_s, model.pair_flops / flops_per_s, 0.0, 0.0
            ),
            quota_s=cluster.quota_s,
            block_tokens=FULL_BLOCK_TOKENS,
        )
        every = [turn for agent in agents for turn in agent]
        self._declared_tokens = max(turn.output_tokens for turn in every)
        self._max_context_tokens = max(turn.prompt_tokens + turn.output_tokens for turn in every)
        prompt_tokens = sum(turn.prompt_tokens for turn in every) / len(every)
        hit_tokens = sum(turn.hit_blocks for turn in every) * FULL_BLOCK_TOKENS / len(every)
        turn_s = model.turn_flops(hit_tokens, prompt_tokens - hit_tokens) / flops_per_s
        self.pairs: PairScheduler | RoundRobinPairs
        if system.scheduled:
            rules = PrefillDecodeRules(short_queue_s=cluster.short_queue_s, most_tokens_s=math.inf)
            self.pairs = PairScheduler(rules)
            self.pairs.most_prefill_tokens = cluster.most_tokens_s * prompt_tokens / turn_s
        else:
            self.pairs = RoundRobinPairs(system.alternates)
        nodes = cluster.prefill_nodes + cluster.decode_nodes
        self.nics = [StorageNic(blocks_per_s) for _ in range(nodes)]
        for node in range(nodes):
            self.pairs.add_node(node, 1.0 / blocks_per_s)
        self.prefill_devices = [
            PrefillDevice(node) for node in range(cluster.prefill_nodes) for _ in range(machine.devices)
        ]
        for number, prefill in enumerate(self.prefill_devices):
            self.pairs.add_prefill(number, prefill.node)
        memory = machine.kv_tokens(model, model.decode_weight_bytes)
        in_transit = int(machine.buffer_bytes / model.kv_bytes_per_token) // machine.devices
        self._largest_tokens = memory + in_transit
        token_s = model.decode_bytes_per_token / (machine.device_bytes_per_s * machine.read_efficiency)
        self.decode_devices = [
            DecodeDevice(node, memory, model, token_s)
            for node in range(cluster.prefill_nodes, nodes)
            for _ in range(machine.devices)
        ]
        for number, decode in enumerate(self.decode_devices):
            self.pairs.add_decode(number, decode.node, decode.node, self._largest_tokens)
        together = max(1, min(cluster.prefill_nodes, model.group_nodes) * machine.devices)
        devices = self.prefill_devices
        layerwise_copy_s = self._token_copy_s if system.layerwise else 0.0
        self.groups = [
            PrefillGroup(devices[first : first + together], quota, model, flops_per_s, layerwise_copy_s)
            for first in range(0, len(devices), together)
        ]
        self._group_of = [self.groups[number // together] for number in range(len(devices))]
        self._buffers = [
            FcfsMemoryPool(machine.buffer_bytes / block_bytes) for _ in range(cluster.prefill_nodes)
        ]
        self._copies_first = not system.layerwise and not system.free_io
        """Whether all KV of a request is copied to the device before the compute, and from it after the
        compute. If false, copies overlap with the compute."""
        on_device = machine.kv_tokens(model, model.prefill_weight_bytes)
        self._on_device = [FcfsMemoryPool(on_device) for _ in devices]
        self._copied_in_s = [0.0] * len(devices)
        self._copied_out_s = [0.0] * len(devices)
        """Prefill device → end of its last copy."""

    def run(self, until_s: float = math.inf) -> None:
        """Run until all agents have ended, or until ``until_s``. Pauses garbage collection, which would take
        a third of the time and finds nothing, because turns create no cycles."""
        gc.disable()
        try:
            self._queue.run_until(until_s)
        finally:
            gc.enable()

    @property
    def now(self) -> float:
        """Virtual time of the latest event."""
        return self._queue.now_s

    def _at(self, at_s: float, call: Callable[[Any], None], item: Any) -> None:
        """Schedule ``call(item)``, and after it the start of the turns that it lets the pair scheduler
        place."""
        self._queue.schedule_at(at_s, self._run_event, call, item)

    def _run_event(self, call: Callable[[Any], None], item: Any) -> None:
        call(item)
        if self._changed:
            self._changed = False
            for pair in self.pairs.dispatch(self.now):
                agent = self._agents[pair.request.request_id]  # type: ignore[index]
                agent.pair = pair
                self._go_on(agent)

    def _go_on(self, agent: Agent) -> None:
        """Let an agent go on until it waits."""
        at_s = next(agent.life, None)
        if at_s is not None:
            self._at(at_s, self._go_on, agent)

    def _live(self, agent: Agent, trajectory: Trajectory) -> Iterator[float | None]:
        """The turns of an agent, one after another. Yields when the agent waits: the time at which it goes
        on, or ``None`` if what it waits for calls ``_go_on``."""
        gap_s = 0.0
        for hit_blocks, prompt_tokens, output_tokens, next_gap_s in trajectory:
            if gap_s:
                yield self.now + gap_s
            gap_s = next_gap_s
            submitted_s = self.now
            self._submit(agent, hit_blocks, prompt_tokens, output_tokens)
            yield None  # until the pair scheduler finds devices
            request, worker, decode, decode_reads = agent.pair
            device, blocks = self.prefill_devices[worker], request.hit_blocks
            # Without layerwise prefill, a request's whole KV occupies the device from before its read.
            if self._copies_first and not self._on_device[worker].take(request.tokens, agent):
                yield None
            if blocks and decode_reads:
                yield self.nics[self.decode_devices[decode].node].read(blocks, self.now)
            elif blocks:
                nic, buffer = self.nics[device.node], self._buffers[device.node]
                if not buffer.take(blocks, agent):
                    yield None
                yield nic.read(blocks, self.now)
                if buffer.waiting:  # the scheduler does not know of reads that wait for memory
                    queue_s = max(0.0, nic.busy_until_s - self.now) + buffer.waiting / nic.rate_blocks_per_s
                    self.pairs.report(device.node, queue_s, self.now)
            # All cached KV is in DRAM. With layerwise prefill, copies overlap with the compute.
            if self._copies_first and agent.cached:
                yield self._copy(self._copied_in_s, worker, agent.cached)
            device.states.append(agent)
            if not self._group_of[worker].busy:
                self._begin(self._group_of[worker])
            yield None  # until a step has computed the end of the prompt
            first_token_s = self.now
            self.pairs.prefilled(agent.number)
            self._changed = True
            if blocks and not decode_reads:
                for other in buffer.release_memory(blocks):
                    self._go_on(other)
            if self._copies_first:
                yield self._copy(self._copied_out_s, worker, request.tokens)
                for other in self._on_device[worker].release_memory(request.tokens):
                    self._go_on(other)
            if output_tokens > 1:
                self.decode_devices[decode].queue.append(agent)
                self._fill(self.decode_devices[decode])
                yield None  # until the last token is decoded
            self.pairs.end(agent.number)
            self._changed = True
            self.turns += 1
            if output_tokens > 1 and submitted_s >= self._latencies_from_s:
                per_token_s = (self.now - agent.decoded_from_s) / (output_tokens - 1)
                second_s = agent.second_token_s - first_token_s
                self.latencies.append((first_token_s - submitted_s, second_s, per_token_s))

    def _submit(self, agent: Agent, hit_blocks: int, prompt_tokens: int, output_tokens: int) -> None:
        most_tokens = min(prompt_tokens + self._declared_tokens, self._max_context_tokens)
        if most_tokens > self._largest_tokens:
            raise ValueError(
                f"a turn needs KV for {most_tokens:,} tokens; expected at most {self._largest_tokens:,}"
            )
        read_blocks = 0 if self.system.free_io else hit_blocks
        agent.request = PdRequest(agent.number, prompt_tokens, read_blocks, most_tokens)
        agent.output_tokens = output_tokens
        agent.cached = hit_blocks * FULL_BLOCK_TOKENS
        agent.todo = prompt_tokens - agent.cached
        self.pairs.submit(agent.request)
        self._changed = True

    def _copy(self, until_s: list[float], worker: int, tokens: int) -> float:
        """Queue a copy to or from a prefill device behind those that end at ``until_s``. Returns its end."""
        until_s[worker] = end_s = max(self.now, until_s[worker]) + tokens * self._token_copy_s
        return end_s

    def _begin(self, group: PrefillGroup) -> None:
        """Begin a step of ``group`` if it has work."""
        step_s = group.begin()
        if step_s:
            self._at(self.now + step_s, self._prefill_step_done, group)

    def _prefill_step_done(self, group: PrefillGroup) -> None:
        for agent in group.end():
            self._go_on(agent)
        self._begin(group)

    def _fill(self, device: DecodeDevice) -> None:
        """Begin to decode the waiting requests that fit on the device, whose KV is in its node's DRAM."""
        while device.queue and device.fits(device.queue[0]):
            device.enter(device.queue.popleft(), self._token_copy_s, self.now)
        due_s = device.next_s(self.now)
        if due_s < device.due_s:
            device.due_s = due_s
            self._at(due_s, self._decode_step_done, device)

    def _decode_step_done(self, device: DecodeDevice) -> None:
        if self.now != device.due_s:
            return  # stale: an earlier event was scheduled instead of this one
        done = device.pop_finished(self.now)
        device.due_s = math.inf
        self._fill(device)
        for agent in done:
            self._go_on(agent)


# -- one run and its metrics ---------------------------------------------------------------------

LOADED = (0.05, 0.5)
"""Start and end of the *loaded part* of a run without arrivals, as shares of its duration: storage is empty
at the start, and little work is left at the end (§7.5). With arrivals, it is the second half."""


class PdSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    system: str = "scheduling"
    cluster: PdCluster = PdCluster()
    workload: str = "dualpath-64k"
    agents: int = 2000  # concurrent agents or, with rate_per_s, the maximum number of arrivals
    rate_per_s: float | None = None
    """Mean arrivals of agents per second, a Poisson process until ``until_s``; ``None``: all are present at
    once."""
    until_s: float = math.inf  # virtual end of the run; with inf it ends when all agents have ended
    warm_up_s: float = 0.0  # virtual time from which submitted turns count in the latencies
    seed: int = 0


class PdOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one run. Latencies are in seconds, over turns that were submitted after the warm-up and have
    finished with more than one token; ``None`` if there are none."""

    system: str
    model: str
    workload: str
    cluster: str
    agents: int
    rate_per_s: float | None
    seed: int
    virtual_s: float  # virtual time of the last event. If all agents end, this is the job's completion time
    turns: int
    nic_max_over_mean: float | None
    """Bytes of the busiest storage NIC ÷ mean bytes of all, in a window of 10 s: the mean over all windows of
    the loaded part with reads."""
    nic_busy: tuple[float, float]
    """Bytes read ÷ bytes that the storage NICs can read in the loaded part: (prefill nodes, decode nodes)."""
    prefill_busy: float  # busy share of the prefill groups over the whole run
    cpu_s: float
    ttft_mean: float | None = None
    ttft_p95: float | None = None
    ttst_mean: float | None = None  # from the first token to the second
    tpot_mean: float | None = None


def run_prefill_decode(spec: PdSpec) -> PdOutcome:
    """Run one specification."""
    arrivals_s: list[float] = []
    if spec.rate_per_s is not None:
        rng = random.Random(f"pd arrivals/{spec.seed}")
        now = rng.expovariate(spec.rate_per_s)
        while now <= spec.until_s and len(arrivals_s) < spec.agents:
            arrivals_s.append(now)
            now += rng.expovariate(spec.rate_per_s)
        arrivals_s = arrivals_s or [0.0]
    trajectories = load_trajectories(spec.workload, spec.seed)
    agents = sample_agents(trajectories, len(arrivals_s) or spec.agents, spec.seed)
    began_s = time.process_time()
    from_s = math.inf if spec.rate_per_s is None else spec.warm_up_s
    simulation = PdSimulation(
        spec.cluster, PD_SYSTEMS[spec.system], agents, arrivals_s, latencies_from_s=from_s
    )
    simulation.run(spec.until_s)
    balance, busy = _nic_balance(simulation, *(LOADED if spec.rate_per_s is None else (0.5, 1.0)))
    latencies: dict[str, float] = {}
    if simulation.latencies:
        ttft_s, ttst_s, tpot_s = zip(*simulation.latencies, strict=True)
        latencies = {"ttft_mean": fmean(ttft_s), "ttst_mean": fmean(ttst_s), "tpot_mean": fmean(tpot_s)}
        latencies["ttft_p95"] = sorted(ttft_s)[min(len(ttft_s) - 1, int(0.95 * len(ttft_s)))]
    return PdOutcome(
        system=spec.system,
        model=spec.cluster.model.name,
        workload=spec.workload,
        cluster=spec.cluster.name,
        agents=len(agents),
        rate_per_s=spec.rate_per_s,
        seed=spec.seed,
        virtual_s=simulation.now,
        turns=simulation.turns,
        nic_max_over_mean=balance,
        nic_busy=busy,
        prefill_busy=fmean(group.busy_s for group in simulation.groups) / max(simulation.now, 1e-9),
        cpu_s=time.process_time() - began_s,
        **latencies,
    )


def _nic_balance(
    simulation: PdSimulation, low: float, high: float
) -> tuple[float | None, tuple[float, float]]:
    """``PdOutcome.nic_max_over_mean`` and ``nic_busy``, from ``low`` to ``high`` of the run."""
    nics, prefill = simulation.nics, simulation.cluster.prefill_nodes
    first, last = int(low * simulation.now / WINDOW_S) + 1, int(high * simulation.now / WINDOW_S)
    shares, read = [], [0.0, 0.0]
    for window in range(first, last):
        counts = [nic.blocks_in[window] if window < len(nic.blocks_in) else 0.0 for nic in nics]
        if mean := fmean(counts):
            shares.append(max(counts) / mean)
        read[0] += sum(counts[:prefill]) / prefill
        read[1] += sum(counts[prefill:]) / (len(counts) - prefill)
    could = max(1, last - first) * WINDOW_S * nics[0].rate_blocks_per_s
    return fmean(shares) if shares else None, (read[0] / could, read[1] / could)
