"""Event-driven simulation of a cluster of prefill and decode nodes (DualPath §4, §6, §7).

A turn is submitted. The router's own ``PairScheduler`` gives it a pair of devices and a read side. Once its
nodes have memory, its reads queue at the storage NICs. After the reads, the prefill device computes the rest
of the prompt in one or more steps. The KV moves to the decode device, which decodes the output. Then the
agent's next turn follows.

The model:

- Storage NICs are FIFOs of whole requests. The DRAM buffer of a prefill node limits how much KV its storage
  NIC reads ahead. The router admits requests to a decode device up to the device's memory plus its share of
  the node's DRAM buffer.
- With layerwise prefill, a request takes no memory of the prefill device before it is computed, and copies
  overlap with compute. Without layerwise prefill, a request takes memory for all its KV before its read, and
  keeps the memory until its KV has left. Copies come before and after the compute.
- A decode device reserves memory for a request's prompt and the longest output that the client declared. The
  router uses the same number.
- Copies over compute NICs take time, but do not queue. Only copies of whole requests (without layerwise
  prefill) queue at their device.
- Decode devices do not wait for one another. The scheduler takes no time, nor does the storage behind the
  NICs.
- Writes use the other direction of the storage NICs and are not simulated.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from sojourn_server.policies.prefill_decode.engine_pair_scheduler import PairScheduler
from sojourn_server.policies.prefill_decode.prefill_compute_quota import AttentionCosts, PrefillComputeQuota
from sojourn_server.policies.prefill_decode.prefill_decode_views import FULL_BLOCK_TOKENS, PdRequest
from sojourn_server.policies.prefill_decode.prefill_engine_selection import PrefillSelectionLimits

from ..event_queue import Event, EventQueue
from .cluster_devices import (
    WINDOW_S,
    AgentState,
    DecodeDevice,
    FcfsMemoryPool,
    PrefillDevice,
    PrefillGroup,
    PrefillStepCost,
    StorageNic,
)
from .prefill_decode_cluster import PdCluster
from .prefill_decode_systems import PdSystem, RoundRobinPairs
from .trajectories import Trajectory, workload_means

HIGH_PRIORITY_SHARE = 0.99
"""Share of a compute NIC that traffic classes give to the model's messages while KV is copied too (§5.1)."""

PROGRESS_EVENTS = 1 << 16
"""Events between two calls of ``on_progress``."""


class PdSimulation:
    """Simulation of one system on one cluster. Agents are present from the start, or arrive one by one."""

    def __init__(
        self,
        cluster: PdCluster,
        system: PdSystem,
        agents: Sequence[Trajectory],
        arrivals_s: Sequence[float] | None = None,
        *,
        latencies_from_s: float | None = None,
    ) -> None:
        """``arrivals_s`` has the arrival time of each agent; with ``None``, all agents arrive at once. The
        latencies of turns submitted at ``latencies_from_s`` or later are recorded; with ``None``, none are.

        Raises ``ValueError`` without agents. If an agent fits no decode device, ``run`` raises ``ValueError``
        at its arrival."""
        if not agents:
            raise ValueError("no agents to simulate")
        if arrivals_s is not None and len(arrivals_s) != len(agents):
            raise ValueError(f"{len(arrivals_s)} arrivals for {len(agents)} agents; expected as many")
        self.cluster = cluster
        self.system = system
        self.agents = agents
        self._states = [AgentState(agent, trajectory) for agent, trajectory in enumerate(agents)]
        self._queue = EventQueue()
        self.events = 0
        self.turns = 0
        self.finished_agents = 0
        self.finished_s: list[float] = []
        """End times of agents, earliest first."""
        self.prompt_tokens = self.output_tokens = 0
        """Prompt tokens and output tokens of all finished turns."""
        self.attention_in: list[list[float]] = []
        """For each window of ``WINDOW_S``: [sum of maxima, sum of means], over the prefill steps that began
        in the window. Maximum and mean are those of the devices' attention seconds in a step."""
        self.latencies = None if latencies_from_s is None else TokenLatencies(latencies_from_s)
        self._build(cluster, system, agents)
        arrivals: deque[Event] = deque()
        times_s = arrivals_s or [0.0] * len(agents)
        for agent in sorted(range(len(agents)), key=times_s.__getitem__):
            self._queue.schedule_in_fifo(arrivals, times_s[agent], self._arrive, self._states[agent])

    # -- setup -------------------------------------------------------------------------

    def _build(self, cluster: PdCluster, system: PdSystem, agents: Sequence[Trajectory]) -> None:
        machine, model = cluster.machine, cluster.model
        block_bytes = FULL_BLOCK_TOKENS * model.kv_bytes_per_token
        blocks_per_s = machine.storage_nic_bytes_per_s / block_bytes
        flops_per_s = machine.flops_per_s
        # Bandwidth that is left for KV, because the model's messages have priority.
        share = machine.collective_share
        lane = machine.compute_nic_bytes_per_s * (
            1.0 - HIGH_PRIORITY_SHARE * share if cluster.isolated else 1
        )
        self._block_copy_s = block_bytes / lane
        self._token_copy_s = model.kv_bytes_per_token / lane
        self._stall = 0.0 if cluster.isolated else share
        if system.free_io:
            self._block_copy_s = self._token_copy_s = self._stall = 0.0
        costs = AttentionCosts(
            pair_s=model.pair_flops / flops_per_s, token_s=model.local_token_flops / flops_per_s
        )
        self.attention_costs = costs
        cost = PrefillStepCost(
            model.prefill_step_s,
            model.spread_token_flops / flops_per_s,
            self._block_copy_s,
            self._token_copy_s,
            model.layers,
            self._stall,
        )
        quota = PrefillComputeQuota(
            costs=costs,
            quota_s=cluster.quota_s if cluster.step_tokens is None else 1e12,
            block_tokens=FULL_BLOCK_TOKENS,
        )
        shapes = [turn for agent in {id(agent): agent for agent in agents}.values() for turn in agent]
        self._declared_tokens = max(turn.output_tokens for turn in shapes)
        """``max_tokens`` of every request: the workload's longest output, so that no output is cut."""
        self._max_context_tokens = max(turn.prompt_tokens + turn.output_tokens for turn in shapes)
        load = workload_means(agents)
        turn_s = model.turn_flops(load.hit_tokens, load.new_tokens) / flops_per_s
        limits = PrefillSelectionLimits(
            short_queue_s=cluster.short_queue_s,
            most_tokens=cluster.most_tokens_s * load.prompt_tokens / turn_s,
        )
        self.limits = limits
        self.pairs: PairScheduler | RoundRobinPairs = (
            PairScheduler(limits, system.side()) if system.scheduled else RoundRobinPairs(system.side())
        )
        nodes = cluster.prefill_nodes + cluster.decode_nodes
        self.nics = [StorageNic(blocks_per_s) for _ in range(nodes)]
        self.prefill_devices: list[PrefillDevice] = []
        self.decode_devices: list[DecodeDevice] = []
        for node in range(nodes):
            self.pairs.add_node(node, 1.0 / blocks_per_s)
        for node in range(cluster.prefill_nodes):
            for _ in range(machine.devices):
                number = len(self.prefill_devices)
                self.prefill_devices.append(PrefillDevice(node))
                self.pairs.add_prefill(number, node)
        memory = machine.decode_kv_tokens(model)
        in_transit = machine.buffer_tokens(model) // machine.devices
        for node in range(cluster.prefill_nodes, nodes):
            for _ in range(machine.devices):
                number = len(self.decode_devices)
                self.decode_devices.append(
                    DecodeDevice(
                        node,
                        memory,
                        model.decode_step_s,
                        model.decode_request_s,
                        model.decode_bytes_per_token / (machine.device_bytes_per_s * machine.read_efficiency),
                    )
                )
                self.pairs.add_decode(number, node, node, memory + in_transit)
        together = max(1, min(cluster.prefill_nodes, model.group_nodes) * machine.devices)
        devices = self.prefill_devices
        self.groups = [
            PrefillGroup(
                devices[first : first + together],
                quota,
                math.inf if cluster.step_tokens is None else cluster.step_tokens,
                cost,
                system.layerwise and not system.free_io,
            )
            for first in range(0, len(devices), together)
        ]
        self._group_of = [self.groups[number // together] for number in range(len(devices))]
        self._buffers: list[FcfsMemoryPool[AgentState]] = [
            FcfsMemoryPool(machine.buffer_bytes / block_bytes) for _ in range(cluster.prefill_nodes)
        ]
        self._copies_first = not system.layerwise and not system.free_io
        """Whether all KV of a request is copied to the device before the compute, and from the device after
        the compute. The KV then occupies device memory all that time. If false, copies overlap with the
        compute."""
        self._on_device: list[FcfsMemoryPool[AgentState]] = (
            [FcfsMemoryPool(machine.prefill_kv_tokens(model)) for _ in devices] if self._copies_first else []
        )
        self._free_io = system.free_io
        self._fetches = cluster.fetch_between_steps
        self._copying_in_s = [0.0] * len(devices)
        self._copying_out_s = [0.0] * len(devices)
        self._coming_in: list[deque[Event]] = [deque() for _ in devices]
        self._going_out: list[deque[Event]] = [deque() for _ in devices]

    # -- time --------------------------------------------------------------------------

    def run(self, until_s: float = math.inf, on_progress: Callable[[float, int], None] | None = None) -> None:
        """Run until all agents have ended, or until ``until_s``. Calls ``on_progress(now, number of ended
        agents)`` every ``PROGRESS_EVENTS`` events and at the end."""
        ran = PROGRESS_EVENTS
        while ran == PROGRESS_EVENTS:
            ran = self._queue.run_until(until_s, PROGRESS_EVENTS)
            self.events += ran
            if on_progress is not None:
                on_progress(self.now, self.finished_agents)

    @property
    def now(self) -> float:
        """Virtual time of the latest event."""
        return self._queue.now_s

    # -- steps of a turn -----------------------------------------------------------------

    def _arrive(self, state: AgentState) -> None:
        self._submit(state)
        self._dispatch()

    def _submit(self, state: AgentState) -> None:
        hit_blocks, prompt_tokens, output_tokens, _ = state.trajectory[state.turn]
        most_tokens = min(prompt_tokens + self._declared_tokens, self._max_context_tokens)
        if self.system.knows_lengths:
            most_tokens = prompt_tokens + output_tokens
        request = state.request = PdRequest(
            state.agent, prompt_tokens, 0 if self._free_io else hit_blocks, most_tokens
        )
        state.output_tokens = output_tokens
        state.cached = cached = hit_blocks * FULL_BLOCK_TOKENS
        state.todo = prompt_tokens - cached
        state.submitted_s = self._queue.now_s
        self.pairs.submit(request)

    def _dispatch(self, *, between_steps: bool = False) -> None:
        """Start the turns for which the pair scheduler finds devices now. ``between_steps``: whether a
        prefill group has ended a step and not begun the next."""
        if self._fetches and not between_steps and all(group.busy for group in self.groups):
            return
        states = self._states
        for request, worker, decode, (own, other) in self.pairs.dispatch(self._queue.now_s):
            state = states[request.request_id]  # type: ignore[index]
            state.worker = worker
            state.decode = decode
            state.prefill_blocks = own
            state.decode_blocks = other
            # Without layerwise prefill, a request's whole KV occupies the device from before its read.
            if not self._copies_first or self._on_device[worker].take(request.tokens, state):
                self._start_reads(state)

    def _start_reads(self, state: AgentState) -> None:
        own, other = state.prefill_blocks, state.decode_blocks
        state.parts = (own > 0) + (other > 0)
        if not state.parts:
            self._hit_in_dram(state)
            return
        if other:
            self._read(self.decode_devices[state.decode].node, other, self._read_done, state)
        if own:
            node = self.prefill_devices[state.worker].node
            if self._buffers[node].take(own, state):
                self._read(node, own, self._prefill_read_done, state)

    def _read(self, node: int, blocks: int, done: Callable[[AgentState], None], state: AgentState) -> None:
        """Queue a read at the storage NIC of ``node``. Calls ``done(state)`` at its end."""
        nic = self.nics[node]
        self._queue.schedule_in_fifo(nic.queue, nic.read(blocks, self._queue.now_s), done, state)

    def _read_done(self, state: AgentState) -> None:
        """Handle the end of a read by one of the request's two nodes."""
        state.parts -= 1
        if not state.parts:
            self._hit_in_dram(state)

    def _prefill_read_done(self, state: AgentState) -> None:
        """Handle the end of a read by the prefill node's storage NIC. If reads still wait for buffer memory,
        report the length of the NIC's queue, including these reads, to the pair scheduler."""
        self._read_done(state)
        node = self.prefill_devices[state.worker].node
        waiting = self._buffers[node].waiting
        if waiting:
            # The scheduler does not know of reads that wait for memory.
            nic = self.nics[node]
            queue_s = max(0.0, nic.busy_until_s - self._queue.now_s) + waiting / nic.rate_blocks_per_s
            self.pairs.report(node, queue_s, self._queue.now_s)

    def _hit_in_dram(self, state: AgentState) -> None:
        """Handle a request whose cached KV is all in DRAM. Copy the KV to the prefill device. With layerwise
        prefill the request is ready at once, because copies overlap with compute."""
        if self._copies_first and state.cached:
            worker = state.worker
            begin = max(self._queue.now_s, self._copying_in_s[worker])
            self._copying_in_s[worker] = end = begin + state.cached * self._token_copy_s
            self._queue.schedule_in_fifo(self._coming_in[worker], end, self._loaded, state)
        else:
            self._loaded(state)

    def _loaded(self, state: AgentState) -> None:
        """Add a request to the ready queue of its prefill device. Begin a step if the group is idle."""
        worker = state.worker
        self.prefill_devices[worker].add_ready(state)
        group = self._group_of[worker]
        if not group.busy:
            self._begin(group)

    def _begin(self, group: PrefillGroup) -> None:
        """Begin a step of ``group`` if it has work."""
        step_s = group.begin()
        if step_s:
            self._queue.schedule_at(self._queue.now_s + step_s, self._prefill_step_done, group)
            window = int(self._queue.now_s / WINDOW_S)
            counted = self.attention_in
            if len(counted) <= window:
                counted.extend([[0.0, 0.0] for _ in range(window + 1 - len(counted))])
            longest_s, mean_s = group.last_attention_s
            counted[window][0] += longest_s
            counted[window][1] += mean_s

    def _prefill_step_done(self, group: PrefillGroup) -> None:
        done = group.end()
        now = self._queue.now_s
        prefilled = self.pairs.prefilled
        for state in done:
            state.first_token_s = now
            prefilled(state.agent)
            if state.prefill_blocks:
                self._leave_buffer(self.prefill_devices[state.worker].node, state.prefill_blocks)
            if self._copies_first:
                worker = state.worker
                begin = max(now, self._copying_out_s[worker])
                self._copying_out_s[worker] = end = begin + state.request.tokens * self._token_copy_s
                self._queue.schedule_in_fifo(self._going_out[worker], end, self._kv_left_prefill, state)
            else:
                self._kv_in_decode_dram(state)
        if self._fetches:
            self._dispatch(between_steps=True)
        self._begin(group)
        if done:
            self._dispatch()

    def _leave_buffer(self, node: int, blocks: int) -> None:
        """Free buffer memory of a prefill node, and start the reads that waited for it."""
        for other in self._buffers[node].release_memory(blocks):
            self._read(node, other.prefill_blocks, self._prefill_read_done, other)

    def _kv_left_prefill(self, state: AgentState) -> None:
        """Free the device memory of a request whose KV has left the prefill device. Start the reads of
        requests that waited for this memory, and pass the request on to decoding."""
        for other in self._on_device[state.worker].release_memory(state.request.tokens):
            self._start_reads(other)
        self._kv_in_decode_dram(state)

    def _kv_in_decode_dram(self, state: AgentState) -> None:
        """Begin to decode a request whose KV is in the decode node's DRAM. A request whose KV does not fit on
        the device waits. A request with only one output token ends at once."""
        device = self.decode_devices[state.decode]
        if state.output_tokens < 2:
            self._end([state])
            return
        if device.queue or not device.fits(state):
            device.queue.append(state)
            return
        self._enter(device, state)
        due_s = device.next_s(self._queue.now_s)
        if due_s < device.due_s:
            device.due_s = due_s
            self._queue.schedule_at(due_s, self._decode_step_done, device)

    def _enter(self, device: DecodeDevice, state: AgentState) -> None:
        load_s = state.request.tokens * self._token_copy_s
        device.enter(state, load_s, self._stall * load_s, self._queue.now_s)

    def _decode_step_done(self, device: DecodeDevice) -> None:
        now = self._queue.now_s
        if now != device.due_s:
            return  # stale: an earlier event was scheduled instead of this one
        done = device.pop_finished(now)
        while device.queue and device.fits(device.queue[0]):
            self._enter(device, device.queue.popleft())
        device.due_s = due_s = device.next_s(now)
        if due_s < math.inf:
            self._queue.schedule_at(due_s, self._decode_step_done, device)
        if done:
            self._end(done)

    def _end(self, done: list[AgentState]) -> None:
        now = self._queue.now_s
        end = self.pairs.end
        for state in done:
            end(state.agent)
            self.turns += 1
            self.prompt_tokens += state.request.tokens
            self.output_tokens += state.output_tokens
            if self.latencies is not None:
                self.latencies.record_turn(state, now)
            gap_s = state.trajectory[state.turn].gap_s
            state.turn += 1
            if state.turn == len(state.trajectory):
                self.finished_agents += 1
                self.finished_s.append(now)
            elif gap_s:
                self._queue.schedule_at(now + gap_s, self._arrive, state)
            else:
                self._submit(state)
        self._dispatch()


class TokenLatencies:
    """Latencies, in seconds, of turns with more than one output token, submitted at ``from_s`` or later."""

    __slots__ = ("first_token_s", "from_s", "per_token_s", "second_token_s")

    def __init__(self, from_s: float) -> None:
        self.from_s = from_s
        self.first_token_s = array("d")
        """Seconds from the request to its first token."""
        self.second_token_s = array("d")
        """Seconds from the first token to the second."""
        self.per_token_s = array("d")
        """Seconds from the start of decoding to the last token, per token after the first."""

    def record_turn(self, state: AgentState, now: float) -> None:
        """Record a turn whose last token was decoded now."""
        if state.output_tokens > 1 and state.submitted_s >= self.from_s:
            self.first_token_s.append(state.first_token_s - state.submitted_s)
            self.second_token_s.append(state.second_token_s - state.first_token_s)
            self.per_token_s.append((now - state.decoded_from_s) / (state.output_tokens - 1))
