"""The compared systems: DualPath with its parts added one by one (§7.5), split reads, and two oracles.
Sections are DualPath's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from sojourn_server.policies.prefill_decode.prefill_decode_views import (
    EnginePair,
    PdRequest,
    ReadSplit,
    StorageReadView,
)
from sojourn_server.policies.prefill_decode.read_side_policies import (
    PrefillSideRead,
    ReadSidePolicy,
    ShorterQueueRead,
    WaterFillingRead,
)


class AlternatingReadSide:
    """Read-side policy that alternates between the prefill and the decode side: the "round robin" of §7.5."""

    def __init__(self) -> None:
        self._turn = count()

    def split(self, view: StorageReadView) -> ReadSplit:
        if next(self._turn) % 2 and not view.one_node:
            return ReadSplit(0, view.blocks)
        return ReadSplit(view.blocks, 0)


class RoundRobinPairs:
    """Chooses pairs of engines by round robin, regardless of load. Has the methods of ``PairScheduler`` that
    the simulation calls.

    A request goes to the next prefill engine, and to the next decode engine with enough free KV memory. If no
    decode engine has enough, the request waits, and so do all later requests. Read queues are not tracked.
    """

    def __init__(self, side: ReadSidePolicy) -> None:
        self._side = side
        self._prefill: list[tuple[int, int]] = []
        self._decode: list[tuple[int, int]] = []
        self._free: dict[int, int] = {}
        self._largest = 0
        """KV capacity in tokens of the largest decode engine."""
        self._queue: deque[PdRequest] = deque()
        self._at: dict[int | str, tuple[int, int]] = {}
        self._next_prefill = self._next_decode = 0
        self._stuck = False

    def add_node(self, node: int, block_s: float) -> None:
        """Do nothing; part of ``PairScheduler``'s interface."""

    def add_prefill(self, number: int, node: int) -> None:
        self._prefill.append((number, node))

    def add_decode(self, number: int, node: int, group: int, kv_tokens: int) -> None:
        self._decode.append((number, node))
        self._free[number] = kv_tokens
        self._largest = max(self._largest, kv_tokens)

    def submit(self, request: PdRequest) -> None:
        """Add a request. Raises ``ValueError`` if all decode engines are too small."""
        if request.kv_tokens > self._largest:
            raise ValueError(
                f"request {request.request_id!r} needs {request.kv_tokens:,} tokens of KV; expected at most "
                f"{self._largest:,}, the capacity of the largest decode engine"
            )
        self._queue.append(request)

    def prefilled(self, request_id: int | str) -> None:
        """Do nothing; part of ``PairScheduler``'s interface."""

    def end(self, request_id: int | str) -> None:
        number, kv_tokens = self._at.pop(request_id)
        self._free[number] += kv_tokens
        self._stuck = False

    def report(self, node: int, queue_s: float, now: float) -> None:
        """Do nothing; part of ``PairScheduler``'s interface."""

    def dispatch(self, now: float) -> list[EnginePair]:
        pairs: list[EnginePair] = []
        queue = self._queue
        while queue and not self._stuck:
            request = queue[0]
            engines = len(self._decode)
            for step in range(engines):
                decode, decode_node = self._decode[(self._next_decode + step) % engines]
                if self._free[decode] >= request.kv_tokens:
                    break
            else:
                self._stuck = True
                break
            self._next_decode += step + 1
            queue.popleft()
            self._free[decode] -= request.kv_tokens
            self._at[request.request_id] = (decode, request.kv_tokens)
            prefill, node = self._prefill[self._next_prefill % len(self._prefill)]
            self._next_prefill += 1
            blocks = request.hit_blocks
            split = ReadSplit(0, 0)
            if blocks:
                split = self._side.split(StorageReadView(blocks, 0.0, 0.0, 1.0, 1.0, node == decode_node))
            pairs.append(EnginePair(request, prefill, decode, split))
        return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSystem:
    """One compared system: the settings in which the systems of the ablation differ. All systems have the
    same costs of a step, which are those of the cluster."""

    name: str
    title: str
    layerwise: bool = True
    """Whether the prefill device holds the KV of one layer at a time, and copies overlap with compute."""
    side: Callable[[], ReadSidePolicy]
    """Factory of the read-side policy; each run calls it once."""
    scheduled: bool = True
    """Whether DualPath's scheduler (§6.1; mechanisms D4 and D5) chooses the engines. If false, round robin
    does. In both cases, ``side`` chooses the read side."""
    free_io: bool = False
    """Whether reads and copies take no time, as in the paper's Oracle."""
    knows_lengths: bool = False
    """Whether the scheduler knows the length of each output. If false, it knows only the ``max_tokens`` that
    clients declare: the workload's longest output, so that no output is cut."""


PD_SYSTEMS = {
    system.name: system
    for system in (
        PdSystem(name="basic", title="Basic", layerwise=False, side=PrefillSideRead, scheduled=False),
        PdSystem(name="layerwise", title="+ layerwise", side=PrefillSideRead, scheduled=False),
        PdSystem(name="dual-path", title="+ dual path", side=AlternatingReadSide, scheduled=False),
        PdSystem(name="scheduling", title="+ scheduling", side=ShorterQueueRead),
        PdSystem(name="split", title="+ split reads", side=WaterFillingRead),
        PdSystem(name="oracle-lengths", title="+ known lengths", side=ShorterQueueRead, knows_lengths=True),
        PdSystem(name="oracle", title="Oracle", side=PrefillSideRead, free_io=True),
    )
}
"""Systems by name, in the order of the ablation. ``scheduling`` is the whole published DualPath. ``split``
adds split reads, which are sojourn's own. ``oracle-lengths`` is ``scheduling`` with known output lengths."""
PUBLISHED_SYSTEMS = ("basic", "layerwise", "dual-path", "scheduling", "oracle")
