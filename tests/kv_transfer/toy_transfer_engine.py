"""A simple engine for tests. KV is a checksum of tokens, and scheduling is a short form of vLLM's.

It computes a layer from the KV that its blocks really contain. If this KV does not fit the tokens, the
request's answer is wrong, and a test sees it.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import transfer_manager_harness
from fake_cuda import FakeCuda
from fake_transfer_requests import BLOCK_TOKENS, PER_FULL, Request, to_prefill
from kv_blocks import identity
from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend
from sojourn_server.kv_offload.cuda_device_backend import CudaDeviceBackend
from sojourn_server.kv_offload.kv_block_arrays import KvBlockArrays
from sojourn_server.kv_offload.kv_pages import KvPages
from sojourn_server.kv_transfer.peer_transport import SocketStream
from sojourn_server.kv_transfer.rank_transfers import jobs_of_rank, rank_address
from sojourn_server.kv_transfer.staging_buffers import TransferLimits
from sojourn_server.kv_transfer.transfer_jobs import TransferJobs
from sojourn_server.kv_transfer.transfer_manager import TransferManager
from sojourn_server.kv_transfer.transfer_planner import TransferPlanner
from sojourn_server.kv_transfer.transfer_worker import TransferWorker

LAYERS = 3
TOKEN_BYTES = 4
RUN_TOKENS = 32
BLOCK_BYTES = LAYERS * PER_FULL * BLOCK_TOKENS * TOKEN_BYTES
DEADLINE_S = 60.0
WRONG = 1 << 60
"""Token in an answer that was computed from wrong KV."""


class MemoryStore(transfer_manager_harness.MemoryStore):
    """Full Blocks of this engine's KV."""

    def __init__(self, **changed: Any) -> None:
        shape = {"block_tokens": BLOCK_TOKENS * PER_FULL, "block_bytes": BLOCK_BYTES, "layers": LAYERS}
        super().__init__(identity(**shape, **changed))


def kv_of(tokens: Sequence[int], layer: int) -> np.ndarray[Any, Any]:
    """KV of tokens in one layer, with one row of bytes per token."""
    chain, runs = 0, [np.empty(0, np.uint8)]
    for first in range(0, len(tokens), RUN_TOKENS):
        chain, found = _kv_of_run(chain, tuple(tokens[first : first + RUN_TOKENS]), layer)
        runs.append(found)
    return np.concatenate(runs).reshape(len(tokens), TOKEN_BYTES)


@lru_cache(4096)
def _kv_of_run(chain: int, tokens: tuple[int, ...], layer: int) -> tuple[int, np.ndarray[Any, Any]]:
    """The checksum of all tokens to the end of a run, given that of those before it, and the run's KV. A
    context is asked for at each step of each layer, and only its last run is new."""
    found = []
    for token in tokens:
        chain = zlib.crc32(token.to_bytes(8, "little"), chain)
        found.append(zlib.crc32(bytes([layer]), chain))
    return chain, np.array(found, "<u4").view(np.uint8)


def next_token(tokens: Sequence[int]) -> int:
    return int(kv_of(tokens, LAYERS)[-1, 0])


class Status(Enum):
    WAITING = "waiting"
    REMOTE = "remote"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Job:
    """A request in an engine."""

    request: Request
    max_tokens: int
    status: Status = Status.WAITING
    computed: int = 0
    """Tokens whose KV the request's blocks contain when all planned steps have ended."""
    ids: list[int] = field(default_factory=list)
    unknown: int = 0
    """Tokens that planned steps will sample."""
    ends_by_chance: bool = False
    """Whether a stop token ends the request, so that steps are planned beyond its last token."""
    last_step: int = 0
    """Number of the last step that was planned for the request."""
    answer: dict[str, Any] | None = None
    held: bool = False
    prefilled: int = 0
    """Prompt tokens that this engine computed."""

    @property
    def name(self) -> str:
        return self.request.request_id


@dataclass(eq=False)
class Work:
    """What a planned step does for one request."""

    job: Job
    ids: list[int]
    first: int
    count: int
    samples: bool
    stale: bool = False
    """Whether the request was preempted after the step was planned."""
    wrong: bool = False


@dataclass(eq=False)
class Step:
    """A planned step."""

    number: int
    works: list[Work]
    orders: TransferJobs


def slow_sends(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """Make each connection send ``rate`` bytes a second."""
    write = SocketStream.write

    async def slow(stream: SocketStream, parts: Sequence[bytes | memoryview]) -> None:
        await asyncio.sleep(sum(map(len, parts)) / rate)
        await write(stream, parts)

    monkeypatch.setattr(SocketStream, "write", slow)


class Rank:
    """A worker of an engine, with its part of the KV, its transfer manager and its transfer worker."""

    def __init__(
        self, name: str, store: Any, listen: str, blocks: int, bounds: TransferLimits,
        log: Callable[[str, BaseException], None], layerwise: bool, cuda: FakeCuda | None,
    ) -> None:  # fmt: skip
        rows = BLOCK_TOKENS * TOKEN_BYTES
        self.layers = [np.zeros((blocks, rows), np.uint8) for _ in range(LAYERS)]
        named = {f"layer{at}": layer for at, layer in enumerate(self.layers)}
        backend: Any = CpuDeviceBackend(self.layers, 200, by_layer=True)
        if cuda is not None:
            pages = [[KvPages(each.ctypes.data, rows, rows)] for each in self.layers]
            backend = CudaDeviceBackend(pages, 10, cuda)
        self.kv: Any = KvBlockArrays(named, PER_FULL, backend, 100 if cuda is None else 5)
        self.manager = TransferManager(store, bounds, name=name, listen=[listen])
        self.worker = TransferWorker(self.manager, self.kv, log=log, layerwise=layerwise)


class ToyEngine:
    """An engine with one worker, or one per entry of ``stores``. ``step`` is like a step of vLLM. Close the
    engine at the end."""

    def __init__(
        self,
        name: str,
        store: Any,
        listen: str,
        *,
        blocks: int = 400,
        chunk: int = 10_000,
        limits: dict[str, Any] | None = None,
        stores: Sequence[Any] = (),
        late: Callable[[], bool] = lambda: False,
        concurrent_steps: int = 1,
        cuda: FakeCuda | None = None,
        **planner: Any,
    ) -> None:
        """``cuda`` is a device that does its queued work in any allowed order; with ``None``, work is done at
        once. With ``concurrent_steps`` 2, each step is planned before the previous step's results are
        known."""
        bounds = TransferLimits(**{"slots": 64, "chunk_bytes": 512, **(limits or {})})
        self.errors: list[BaseException] = []
        stores = stores or [store]
        self.ranks = [
            Rank(
                name, each, rank_address(listen, rank, len(stores)), blocks, bounds,
                lambda what, error: self.errors.append(error),
                len(stores) == concurrent_steps == 1, cuda,
            )
            for rank, each in enumerate(stores)
        ]  # fmt: skip
        first = self.ranks[0]
        self.layers, self.kv, self.manager, self.worker = first.layers, first.kv, first.manager, first.worker
        self.address = ",".join(rank.manager.addresses[0] for rank in self.ranks)
        self.late = late
        """Whether a worker's copies of this step end in a later one."""
        self._reported: Counter[tuple[str, str]] = Counter()
        self.planner = TransferPlanner(
            block_tokens=BLOCK_TOKENS, blocks_per_full=PER_FULL, ranks=len(stores),
            concurrent_steps=concurrent_steps, **planner,
        )  # fmt: skip
        self.under_way: deque[Step] = deque()
        """Steps that are planned but not carried out yet."""
        self.concurrent_steps = concurrent_steps
        self.cuda = cuda
        self._planned = self._processed = 0
        """Numbers of the last planned step, and of the last step with known results."""
        self.deferred: list[tuple[int, list[int]]] = []
        """Pairs of a step number and the blocks that are free when this step has ended, in order."""
        self.blocks = blocks
        self.free = list(range(1, blocks))  # 0 is vLLM's null block
        self.chunk = chunk
        self.jobs: dict[str, Job] = {}
        self.done: dict[str, Job] = {}
        self.received: set[str] = set()
        self.after_layer: Callable[[int], None] = lambda layer: None
        self.is_idle = False

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
            assert rank.manager.close()
        assert self.cuda is None or not self.cuda.pinned

    def add(self, request: Request, max_tokens: int = 1) -> Job:
        job = self.jobs[request.request_id] = Job(request, max_tokens)
        job.ends_by_chance = len(self.done) % 2 == 0
        self.planner.arrived(request)
        return job

    def abort(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is None or job.status is Status.FINISHED:
            return
        waits = job.status is Status.REMOTE and name not in self.received
        self._finish(job, well=False, busy=waits)

    def preempt(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is None or job.status is not Status.RUNNING:
            return
        self._release(job)
        job.computed, job.unknown, job.status = 0, 0, Status.WAITING
        for step in self.under_way:
            for work in step.works:
                work.stale |= work.job is job

    def step(self) -> None:
        """Plan a step, and carry out the oldest planned steps until fewer than ``concurrent_steps`` are
        left."""
        self.under_way.append(self._plan())
        self.is_idle = not any(step.works for step in self.under_way)
        while len(self.under_way) >= self.concurrent_steps:
            self._carry_out(self.under_way.popleft())

    def _plan(self) -> Step:
        self._planned += 1
        works = self._schedule()
        planned = {work.job.name: work.first + work.count for work in works}
        self.planner.scheduled(planned, lambda name: self.jobs[name].ids)
        for work in works:
            work.job.computed += work.count
            work.job.unknown += work.samples
            work.job.last_step = self._planned
        return Step(self._planned, works, self.planner.take_jobs())

    def _carry_out(self, step: Step) -> None:
        for number, rank in enumerate(self.ranks):
            rank.worker.begin_step(jobs_of_rank(step.orders, number, len(self.ranks)))
        for layer in range(LAYERS) if step.works else ():
            for rank in self.ranks:
                rank.worker.wait_for_layer(f"layer{layer}")
            for work in step.works:
                self._compute(work, layer)
            for rank in self.ranks:
                rank.worker.save_layer(f"layer{layer}")
            self.after_layer(layer)
            if self.cuda is not None:
                self.cuda.run_some(4)
        sent, received, not_filled = set[str](), set[str](), set[int]()
        reports = []
        for rank in self.ranks:
            rank.worker.end_step()
            if not self.late():
                sent |= self._by_all("sent", rank.worker.take_sent())
                received |= self._by_all("received", rank.worker.take_received())
                not_filled |= rank.worker.take_not_filled()
            reports.append(rank.worker.take_results())
        if self.cuda is not None:  # sampled tokens are copied after the last kernel
            sampled = self.cuda.new_event()
            sampled.record(self.cuda.compute)
            sampled.synchronize()
        self._processed = step.number
        while self.deferred and self.deferred[0][0] <= self._processed:
            self.free += self.deferred.pop(0)[1]
        self._take_back(not_filled, step.works)
        for name in received:
            self.planner.filled(name)
        for each in reports:
            self.planner.take_results(each)
        for name in received:
            job = self.jobs[name]
            if job.status is Status.REMOTE:
                self.received.add(name)
            else:
                assert job.status is Status.FINISHED
                self._release(job)
                del self.jobs[name]
        for name in sent:
            job = self.jobs.pop(name)
            assert job.held
            self._release(job)

    def assert_clean(self) -> None:
        """Check that no request, block, transfer or report has leaked."""
        assert not self.jobs
        assert sorted(self.free) == list(range(1, self.blocks))
        assert len(self.planner) == 0
        assert [rank.worker.open_operations for rank in self.ranks] == [0] * len(self.ranks)
        assert not self._reported, "a worker has not reported what the others have"
        assert not self.errors, self.errors

    def _by_all(self, kind: str, names: set[str]) -> set[str]:
        """Count a worker's report of ``names``, as vLLM does. Return the names that all workers have
        reported."""
        found = set()
        for name in names:
            self._reported[kind, name] += 1
            if self._reported[kind, name] == len(self.ranks):
                del self._reported[kind, name]
                found.add(name)
        return found

    # -- inside -----------------------------------------------------------------------

    def _schedule(self) -> list[Work]:
        works: dict[Job, Work] = {}
        for job in list(self.jobs.values()):
            if job.status is Status.REMOTE and job.name in self.received:
                self.received.discard(job.name)
                job.status = Status.WAITING
                if not job.computed:
                    self._release(job)
                job.computed = min(job.computed, job.request.num_tokens - 1)
            if job.status is Status.WAITING and not self._admit(job):
                continue
            if job.status is not Status.RUNNING:
                continue
            sampled = len(job.request.output) + job.unknown
            if job.unknown and sampled >= job.max_tokens and not job.ends_by_chance:
                continue
            known = job.request.num_tokens + job.unknown
            count = min(self.chunk, known - job.computed)
            if not count:
                continue
            if len(job.ids) * BLOCK_TOKENS < job.computed + count:
                if not self.free:
                    self.preempt(job.name)
                    continue
                job.ids.append(self.free.pop())
            works[job] = Work(job, list(job.ids), job.computed, count, job.computed + count == known)
        return list(works.values())

    def _admit(self, job: Job) -> bool:
        """Try to admit a waiting request. Returns False if it must wait."""
        if job.computed:
            self.planner.allocated(job.name, job.ids, 0)
            job.status = Status.RUNNING
            return True
        found = self.planner.ask(job.name, 0)
        if found.tokens is None:
            return False
        need = -(-job.request.num_tokens // BLOCK_TOKENS)
        if need > len(self.free):
            return False
        job.ids = [self.free.pop() for _ in range(need)]
        # The blocks' earlier content belongs to other requests.
        rows = np.full((need * BLOCK_TOKENS, TOKEN_BYTES), 0xEE, np.uint8)
        for layer in range(LAYERS):
            self._run(lambda layer=layer, ids=job.ids: self._write(ids, layer, 0, rows))  # type: ignore[misc]
        self.planner.allocated(job.name, job.ids, found.tokens)
        job.computed = found.tokens
        assert job.computed <= job.request.num_tokens
        job.status = Status.REMOTE if found.is_async else Status.RUNNING
        return True

    def _compute(self, work: Work, layer: int) -> None:
        tokens = work.job.request.tokens[: work.first + work.count]
        self._run(lambda: self._compute_from(work, layer, tokens))

    def _run(self, kernel: Callable[[], None]) -> None:
        if self.cuda is not None:
            self.cuda.kernel(kernel)
        else:
            kernel()

    def _compute_from(self, work: Work, layer: int, tokens: list[int]) -> None:
        made = kv_of(tokens, layer)
        for number, rank in enumerate(self.ranks):  # wrong KV of one worker affects the output of all
            there = rank.layers[layer][work.ids].reshape(-1, TOKEN_BYTES)[: work.first]
            if not np.array_equal(there, made[: work.first] ^ number):
                work.wrong = True
        if work.wrong:
            made = made ^ 0x55
        self._write(work.ids, layer, work.first, made[work.first :])

    def _write(self, ids: list[int], layer: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        for number, rank in enumerate(self.ranks):
            for at, row in enumerate(rows ^ number, start):
                place = at % BLOCK_TOKENS * TOKEN_BYTES
                rank.layers[layer][ids[at // BLOCK_TOKENS], place : place + TOKEN_BYTES] = row

    def _take_back(self, not_filled: set[int], works: list[Work]) -> None:
        counts = {work.job.name: work.count for work in works}
        failed = set[Job]()
        for job in list(self.jobs.values()):
            if job.status is Status.REMOTE or job.name in counts:
                computed = job.computed - (0 if job.status is Status.REMOTE else counts.get(job.name, 0))
                known = job.ids[: -(-computed // BLOCK_TOKENS)]
                bad = next((at for at, block in enumerate(known) if block in not_filled), None)
                if bad is not None:
                    assert job.status is Status.REMOTE or self.concurrent_steps == 1, "vLLM would fail here"
                    job.computed, job.unknown = bad * BLOCK_TOKENS, 0
                    failed.add(job)
        for work in works:
            job = work.job
            if job.status is Status.FINISHED or (job in failed and not work.stale):
                continue
            prompt = job.request.num_prompt_tokens
            job.prefilled += max(0, min(prompt, work.first + work.count) - work.first)
            if work.samples:
                job.unknown -= not work.stale
                job.request.output.append(WRONG if work.wrong else next_token(job.request.tokens))
                if len(job.request.output) >= job.max_tokens:
                    self._finish(job, well=True)

    def _finish(self, job: Job, well: bool, busy: bool = False) -> None:
        job.status = Status.FINISHED
        job.held, job.answer = self.planner.finished(job.name, well, job.ids)
        self.done[job.name] = job
        self.received.discard(job.name)
        if not job.held and not busy:
            self._release(job)
            del self.jobs[job.name]

    def _release(self, job: Job) -> None:
        """Free the request's blocks as soon as no planned step writes them."""
        if job.last_step <= self._processed:
            self.free += job.ids
        else:
            self.deferred.append((self._planned, job.ids))
        job.ids = []


def run(until: Callable[[], bool], *engines: ToyEngine) -> None:
    """Step the engines until ``until`` is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        for engine in engines:
            engine.step()
        if all(engine.is_idle for engine in engines):
            time.sleep(0.001)
        assert time.monotonic() < deadline, [engine.jobs for engine in engines]


def settle(*engines: ToyEngine) -> None:
    """Step the engines until neither they nor their transfer managers have open operations."""

    def quiet(engine: ToyEngine) -> bool:
        waits = engine.jobs or engine.planner.has_jobs or engine.deferred
        waits = waits or any(step.orders for step in engine.under_way)
        return not waits and all(
            not rank.worker.open_operations and rank.manager.is_clean for rank in engine.ranks
        )

    run(lambda: all(quiet(engine) for engine in engines), *engines)
    for engine in engines:
        engine.assert_clean()


def expected(tokens: Sequence[int], count: int) -> list[int]:
    """The correct answer to a prompt."""
    made = list(tokens)
    for _ in range(count):
        made.append(next_token(made))
    return made[len(tokens) :]


def through(p: ToyEngine, d: ToyEngine, tokens: list[int], name: str = "r", **said: Any) -> tuple[Job, Job]:
    """A request's two jobs, on P and then on D with three tokens. Both answers are right, and the engines are
    settled."""
    said = {"peer": d.address, **said}
    first = p.add(Request(name, tokens, to_prefill(f"t-{name}", **said)))
    run(lambda: name in p.done, p, d)
    second = d.add(Request(name, tokens, first.answer), max_tokens=3)
    run(lambda: name in d.done, p, d)
    settle(p, d)
    assert first.request.output == expected(tokens, 1)
    assert second.request.output == expected(tokens, 3)
    return first, second
