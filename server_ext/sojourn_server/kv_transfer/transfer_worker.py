"""Carries out each step's transfer jobs, on the worker's side of the vLLM connector.

    begin_step       starts the step's jobs, such as reads and pushes
    wait_for_layer   waits until fetched KV has filled a layer
    save_layer       starts to send a computed layer to peers, while the model computes the next layer
    end_step         copies the step's new Full Blocks, hands them to the store, and starts fill jobs
    take_*           return results

The thread that runs the model calls every method. Other threads gather layers for pushes, and fill blocks of
requests that are not running yet. Errors of transfers are logged and not raised, unless ``strict`` is set.
The engine then computes the affected KV.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..kv_offload.transfer_thread import TransferThread
from .transfer import BlockLoad, BlockPush, IncomingPrompt, ReadingPeer
from .transfer_jobs import FetchJob, FillJob, PushJob, SaveJob, TransferJobs, TransferResults

if TYPE_CHECKING:
    from ..kv_offload.kv_block_arrays import KvBlockArrays
    from .transfer_manager import TransferManager

MANAGER_TIMEOUT_S = 30.0
"""Maximum seconds to wait for the transfer manager, after which it counts as dead. A live manager reports
failures much sooner."""


class TransferWorker:
    """Carries out the KV transfers of one vLLM worker."""

    def __init__(
        self,
        manager: TransferManager,
        kv: KvBlockArrays,
        *,
        log: Callable[[str, BaseException], None] = lambda what, error: None,
        strict: bool = False,
        layerwise: bool = True,
    ) -> None:
        """``log`` receives sojourn's own errors. With ``strict`` they are raised instead, for tests.
        ``layerwise``: whether a request may run once the first layer of its blocks has arrived."""
        self.counts: Counter[str] = Counter()
        self._layerwise = layerwise
        self._node = manager.node
        self._storage = manager.storage
        self._kv = kv
        self._log = log
        self._strict = strict
        self._lock = threading.Lock()
        """Guards ``_filled`` and ``_not_filled``, which the thread of ``_fill_lane`` changes."""
        self._sources: dict[int, BlockLoad | IncomingPrompt] = {}
        """Number of an ask → the transfer that brings its blocks, until a job takes it over or the ask
        ends."""
        self._unanswered: set[int] = set()
        """Asks whose result has not been reported to the planner yet."""
        self._filled: set[str] = set()
        """Requests whose fill job has ended since the last ``take_received``."""
        self._not_filled: set[int] = set()
        """Ids of blocks that fill jobs could not fill since the last ``take_not_filled``."""
        self._streams: list[tuple[FillJob, BlockLoad]] = []
        self._step_pushes: list[tuple[PushJob, BlockPush]] = []
        self._pushes: list[BlockPush] = []
        """Pushes that may be open."""
        self._held: set[str] = set()
        """Finished requests whose blocks vLLM keeps until ``take_sent`` returns them."""
        self._jobs = TransferJobs()
        """Jobs of this step."""
        self._bad: set[int] = set()
        """Ids of blocks of this step that were not filled."""
        self._reports = TransferResults()
        self._push_lane = TransferThread("paths-give")
        self._fill_lane = TransferThread("paths-take")

    # -- a step -----------------------------------------------------------------------

    def begin_step(self, step: TransferJobs) -> None:
        """Begin a step's jobs. Call it before the forward pass, and also in steps without a forward pass."""
        self._bad = set(step.not_filled)
        self._streams, self._step_pushes = [], []
        self._jobs = step
        for abort in step.aborts:
            self._do("end a push", self._node.give_up, *abort)
        for job in step.fetches:
            self._unanswered.add(job.ask)
            self._do("begin a transfer", self._begin, job)
        for source in filter(None, map(self._take_source, step.ends)):
            self._do("end a transfer", source.end)
        for stream in step.streams:
            load = self._take_source(stream.ask)
            if isinstance(load, BlockLoad):
                self._streams.append((stream, load))
            else:
                self._bad.update(stream.block_ids)
        for order in step.pushes:
            self._do("offer a prompt", self._offer, order)
        self._held.update(step.holds)

    def wait_for_layer(self, name: str) -> None:
        """Wait until this step's streams have filled layer ``name``, which the forward pass needs next."""
        if not self._streams and not self._bad:
            return
        layer = self._kv.index.get(name)
        if layer is None:  # it has no KV of its own
            return
        for stream, load in self._streams:
            filled = self._do("fill a layer", self._fill_layer, stream, load, layer) or ()
            self._bad.update(stream.block_ids[len(filled) :])
        if self._bad:
            for order, push in self._step_pushes:
                if not self._bad.isdisjoint(order.block_ids):  # so the peer never has the whole prompt
                    self._do("end a push", push.end)

    def save_layer(self, name: str) -> None:
        """Start to send layer ``name``, which the forward pass has just computed, for this step's pushes."""
        layer = self._kv.index.get(name)
        if layer is None:
            return
        for order, push in self._step_pushes:
            if push.announced == layer:
                push.announced += 1
                self._push_lane.submit(partial(self._push_layer, order, push, layer, self._kv.fence()))

    def end_step(self) -> None:
        """End the step: wait until its pushes have copied their KV, copy the blocks to save, and start its
        fill jobs. After that, the step's blocks may be reused. Also call it in steps without a forward
        pass."""
        is_copied = not self._step_pushes or self._push_lane.end_of_work().wait(MANAGER_TIMEOUT_S)
        for _, push in self._step_pushes:
            if not is_copied or push.announced < len(self._kv):  # or the forward pass has skipped layers
                self._do("end a push", push.end)
        for _, load in self._streams:
            self._do("release blocks", load.end)
        self._save_blocks()
        for fill in self._jobs.fills:
            source = self._take_source(fill.ask)
            self._fill_lane.submit(partial(self._fill_blocks, fill, source, self._kv.fence()))
        self._streams, self._step_pushes, self._jobs = [], [], TransferJobs()

    # -- results ------------------------------------------------------------------------

    def take_sent(self) -> set[str]:
        """Return the finished requests whose blocks the step has copied, so that vLLM may free them. Call it
        after ``end_step``. Each request is returned once."""
        sent, self._held = self._held, set()
        return sent

    def take_received(self) -> set[str]:
        """Return the requests whose fill jobs have ended since the last call. ``take_not_filled`` returns the
        blocks that could not be filled."""
        with self._lock:
            filled, self._filled = self._filled, set()
        return filled

    def take_not_filled(self) -> set[int]:
        """Return the ids of blocks that could not be filled since the last call. They belong to this step's
        requests, or to requests that ``take_received`` returns."""
        with self._lock:
            found, self._not_filled = self._not_filled, set()
        found |= self._bad
        self._bad = set()
        self.counts["blocks_not_filled"] += len(found)
        return found

    def take_results(self) -> TransferResults:
        """Return the results of jobs since the last call, for the planner."""
        for ask in list(self._unanswered):
            source, blocks = self._sources.get(ask), 0
            if source is not None:
                blocks = self._do("check a transfer", source.ready, self._layerwise, otherwise=0)
            if blocks is not None:
                self._unanswered.discard(ask)
                self._reports.ready[ask] = blocks
        reports, self._reports = self._reports, TransferResults()
        return reports

    @property
    def open_operations(self) -> int:
        """Number of open asks, pushes, and finished requests whose blocks are kept."""
        return len(self._sources) + len(self._filled) + len(self._held) + len(self._open_pushes())

    def close(self) -> None:
        """Stop all threads, and unpin host memory unless one of them hangs in a copy."""
        lanes = (self._push_lane, self._fill_lane)
        for lane in lanes:
            lane.close()
        if not any(lane.is_alive for lane in lanes):
            self._kv.close()

    # -- asks -------------------------------------------------------------------------

    def _begin(self, job: FetchJob) -> None:
        """Start the transfer that brings an ask's blocks."""
        if not job.keys:
            with contextlib.suppress(ValueError):  # another request waits for it
                self._sources[job.ask] = self._node.expect(job.context)
            return
        peer, name = (ReadingPeer(job.peer, job.total), job.context) if job.peer else (None, f"{job.ask}")
        self._sources[job.ask] = self._node.load(name, job.keys, peer)

    def _take_source(self, ask: int) -> BlockLoad | IncomingPrompt | None:
        self._unanswered.discard(ask)
        return self._sources.pop(ask, None)

    def _fill_layer(self, stream: FillJob, load: BlockLoad, layer: int) -> list[int]:
        """Wait for a layer of a load, and copy it. Returns the ids of the filled blocks."""
        blocks = load.wait_layer(layer, MANAGER_TIMEOUT_S)
        after = self._kv.fence()
        return self._kv.scatter(layer, blocks, stream.skip, stream.block_ids, after=after, hold=True)

    def _fill_blocks(self, fill: FillJob, source: IncomingPrompt | BlockLoad | None, after: Any) -> None:
        """Fill a request's blocks with a complete context or with fetched blocks. Runs in ``_fill_lane``."""
        filled: list[int] = []
        try:
            if source is not None:
                blocks = source.blocks()
                for layer in range(len(self._kv)):
                    filled = self._kv.scatter(
                        layer, blocks, fill.skip, fill.block_ids, part=layer, after=after
                    )
        except Exception as error:
            filled = []
            self._failed("fill a request's blocks", error)
        finally:
            with self._lock:
                self._not_filled.update(fill.block_ids[len(filled) :])
                self._filled.add(fill.request)
            if source is not None:
                source.end()

    # -- saves --------------------------------------------------------------------------

    def _save_blocks(self) -> None:
        """Hand the store copies of the step's new Full Blocks that it lacks. From the first of a request on
        that it does not take, its blocks are left to a later step; a finished request's are given up."""
        refused = self._reports.stored
        for save in self._jobs.saves:
            is_computed = not self._bad or save.request in self._held
            if save.request not in refused and not (
                is_computed and self._do("store a block", self._save, save)
            ):
                refused[save.request] = save.place

    def _save(self, save: SaveJob) -> bool:
        """Save a block. Returns whether the store has the block or will get it."""
        if self._storage.knows(save.key):
            return True
        if not self._storage.has_room:
            self.counts["writes_refused"] += 1
            return False
        self._storage.write(save.key, save.parent, self._kv.gather_full(save.block_ids, self._kv.fence()))
        return True

    # -- pushes -------------------------------------------------------------------------

    def _open_pushes(self) -> list[BlockPush]:
        self._pushes = [push for push in self._pushes if push.outcome is None]
        return self._pushes

    def _offer(self, order: PushJob) -> None:
        held = sum(len(push.keys) for push in self._open_pushes())
        try:
            if held and held + len(order.keys) > self._node.limits.slots:
                raise ValueError("a peer without room keeps pushes open, and so the copies of their blocks")
            push = self._node.offer(order.context, order.address, order.keys)
        except ValueError:
            self.counts["pushes_refused"] += 1
        else:
            self._pushes.append(push)
            self._step_pushes.append((order, push))

    def _push_layer(self, order: PushJob, push: BlockPush, layer: int, after: Any) -> None:
        """Copy a layer of a push's blocks, and send the copy. Runs in ``_push_lane``."""
        if push.outcome is not None:
            return
        try:
            push.give(layer, self._kv.gather(layer, order.block_ids, after))
        except Exception as error:
            self._failed("send a layer", error)
            self._do("end a push", push.end)

    # -- errors -------------------------------------------------------------------------

    def _do(
        self, what: str, call: Callable[..., object], *arguments: object, otherwise: object = None
    ) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            self._failed(what, error)
            return otherwise

    def _failed(self, what: str, error: Exception) -> None:
        self.counts["errors"] += 1
        if self._strict:
            raise error
        self._log(what, error)
