"""An engine small enough to see through: KV is made of tokens by a checksum, scheduling is vLLM's in short.

It computes a layer from the KV that its blocks really have: where that is not what the tokens make of it, the
request's answer is wrong, and a test sees it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from fake_transfer_requests import BLOCK_TOKENS, PER_FULL, Request
from sojourn_server.kv_offload.block_file import KvIdentity
from sojourn_server.kv_offload.cpu_device_backend import KvBlockArrays
from sojourn_server.kv_offload.disk_store import BlockNotFound, PutOutcome
from sojourn_server.kv_transfer.transfer_limits import LinkRates, TransferLimits
from sojourn_server.kv_transfer.transfer_manager import TransferManager
from sojourn_server.kv_transfer.transfer_planner import ScheduledRequest, TransferPlanner
from sojourn_server.kv_transfer.transfer_worker import TransferWorker

LAYERS = 3
TOKEN_BYTES = 4
BLOCK_BYTES = LAYERS * PER_FULL * BLOCK_TOKENS * TOKEN_BYTES
DEADLINE_S = 60.0


def identity(**changed: Any) -> KvIdentity:
    fields: dict[str, Any] = {
        "model": "checksum",
        "kv_dtype": "uint32",
        "block_tokens": BLOCK_TOKENS * PER_FULL,
        "block_bytes": BLOCK_BYTES,
        "layers": LAYERS,
        "hash_scheme": "sha256",
        "vllm_version": "0",
    }
    return KvIdentity(**{**fields, **changed})


class MemoryStore:
    """Full Blocks in a dictionary; ``broken`` are there and cannot be read."""

    def __init__(self) -> None:
        self.identity = identity()
        self.blocks: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes] = {}
        self.broken: set[bytes] = set()
        self.reads: list[bytes] = []

    def leading(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.blocks), len(keys))

    def get_into(self, key: bytes, buffers: Sequence[Any]) -> None:
        self.reads.append(key)
        if key not in self.blocks or key in self.broken:
            raise BlockNotFound(key)
        content, at = self.blocks[key], 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            view[:] = content[at : at + view.nbytes]
            at += view.nbytes

    def put(self, key: bytes, buffers: Sequence[Any], *, parent: bytes = b"") -> PutOutcome:
        if key in self.blocks:
            return PutOutcome.ALREADY
        self.blocks[key] = b"".join(bytes(buffer) for buffer in buffers)
        self.parents[key] = parent
        return PutOutcome.STORED

    def close(self) -> None: ...


def kv_of(tokens: Sequence[int], layer: int) -> np.ndarray[Any, Any]:
    """What one layer makes of tokens: a row of bytes for each."""
    chain, found = 0, []
    for token in tokens:
        chain = zlib.crc32(token.to_bytes(8, "little"), chain)
        found.append(zlib.crc32(bytes([layer]), chain))
    return np.array(found, "<u4").view(np.uint8).reshape(len(found), TOKEN_BYTES)


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
    on_device: int
    """Tokens that the device's own cache has of it."""
    status: Status = Status.WAITING
    computed: int = 0
    ids: list[int] = field(default_factory=list)
    wrong: bool = False
    answer: dict[str, Any] | None = None
    held: bool = False
    prefilled: int = 0
    """Tokens of its prompt that were computed here."""

    @property
    def name(self) -> str:
        return self.request.request_id


class ToyEngine:
    """``step`` is one of vLLM's. Close it."""

    def __init__(
        self,
        name: str,
        store: Any,
        listen: str,
        *,
        blocks: int = 400,
        chunk: int = 10_000,
        max_running: int = 1000,
        limits: dict[str, Any] | None = None,
        rates: dict[str, Any] | None = None,
        **planner: Any,
    ) -> None:
        rows = PER_FULL * BLOCK_TOKENS * TOKEN_BYTES // PER_FULL
        self.layers = [np.zeros((blocks, rows), np.uint8) for _ in range(LAYERS)]
        self.kv = KvBlockArrays({f"layer{at}": layer for at, layer in enumerate(self.layers)}, PER_FULL)
        bounds = TransferLimits(**{"slots": 64, "chunk_bytes": 512, **(limits or {})})
        self.manager = TransferManager(store, bounds, LinkRates(**(rates or {})), name=name, listen=[listen])
        self.address = self.manager.addresses[0]
        self.errors: list[BaseException] = []
        self.worker = TransferWorker(
            self.manager, store.leading, self.kv, slots=bounds.slots,
            log=lambda what, error: self.errors.append(error),
        )  # fmt: skip
        self.planner = TransferPlanner(block_tokens=BLOCK_TOKENS, blocks_per_full=PER_FULL, **planner)
        self.blocks = blocks
        self.free = list(range(1, blocks))  # 0 is vLLM's null block
        self.chunk = chunk
        self.max_running = max_running
        self.jobs: dict[str, Job] = {}
        self.done: dict[str, Job] = {}
        self.received: set[str] = set()
        self.after_layer: Callable[[int], None] = lambda layer: None
        self.is_idle = False

    def close(self) -> None:
        self.worker.close()
        assert self.manager.close()

    def add(self, request: Request, max_tokens: int = 1, on_device: int = 0) -> Job:
        job = self.jobs[request.request_id] = Job(request, max_tokens, on_device)
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
        job.computed, job.on_device, job.status = 0, 0, Status.WAITING

    def step(self) -> None:
        step = self._schedule()
        planned = [ScheduledRequest(job.name, job.computed + count) for job, count in step]
        self.planner.scheduled(planned, lambda name: self.jobs[name].ids)
        self.worker.begin_step(self.planner.take_jobs())
        for job, _ in step:
            job.wrong = False
        for layer in range(LAYERS) if step else ():
            self.worker.wait_for_layer(f"layer{layer}")
            for job, count in step:
                self._compute(job, count, layer)
            self.worker.save_layer(f"layer{layer}")
            self.after_layer(layer)
        self.worker.end_step()
        sent, received = self.worker.take_sent(), self.worker.take_received()
        not_filled, reports = self.worker.take_not_filled(), self.worker.take_results()
        self._take_back(not_filled, step)
        self.planner.take_results(reports)
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
        self.is_idle = not step

    def assert_clean(self) -> None:
        """Nothing has leaked."""
        assert not self.jobs
        assert sorted(self.free) == list(range(1, self.blocks))
        assert (len(self.planner), self.planner.open_fetches) == (0, 0)
        assert self.worker.open_operations == 0
        assert not self.errors, self.errors

    def rows(self, job: Job, layer: int, tokens: int) -> np.ndarray[Any, Any]:
        """What a request's blocks have of one layer of its first tokens."""
        return self.layers[layer][job.ids].reshape(-1, TOKEN_BYTES)[:tokens]

    # -- inside -----------------------------------------------------------------------

    def _schedule(self) -> list[tuple[Job, int]]:
        step = []
        for job in list(self.jobs.values()):
            if job.status is Status.REMOTE and job.name in self.received:
                self.received.discard(job.name)
                job.status = Status.WAITING
                if not job.computed:
                    self._release(job)
                job.computed = min(job.computed, job.request.num_tokens - 1)
            if job.status is Status.WAITING and (self._is_full or not self._admit(job)):
                continue
            if job.status is not Status.RUNNING:
                continue
            count = min(self.chunk, job.request.num_tokens - job.computed)
            if len(job.ids) * BLOCK_TOKENS < job.computed + count:
                if not self.free:
                    self.preempt(job.name)
                    continue
                job.ids.append(self.free.pop())
            step.append((job, count))
        return step

    @property
    def _is_full(self) -> bool:
        """So many have blocks that nobody further is asked about."""
        return sum(job.status in (Status.RUNNING, Status.REMOTE) for job in self.jobs.values()) >= (
            self.max_running
        )

    def _admit(self, job: Job) -> bool:
        """Whether it is to be looked at further."""
        if job.computed:
            self.planner.allocated(job.name, job.ids, 0)
            job.status = Status.RUNNING
            return True
        local = job.on_device // BLOCK_TOKENS * BLOCK_TOKENS
        found = self.planner.ask(job.name, local)
        if found.tokens is None:
            return False
        need = -(-job.request.num_tokens // BLOCK_TOKENS)
        if need > len(self.free):
            return False
        job.ids = [self.free.pop() for _ in range(need)]
        for layer in range(LAYERS):
            self._write(job, layer, 0, kv_of(job.request.tokens[:local], layer))
            # What was there before is somebody else's.
            self._write(
                job, layer, local, np.full((need * BLOCK_TOKENS - local, TOKEN_BYTES), 0xEE, np.uint8)
            )
        self.planner.allocated(job.name, job.ids, found.tokens)
        job.computed = local + found.tokens
        assert job.computed <= job.request.num_tokens
        job.status = Status.REMOTE if found.is_async else Status.RUNNING
        return True

    def _compute(self, job: Job, count: int, layer: int) -> None:
        tokens = job.request.tokens[: job.computed + count]
        made = kv_of(tokens, layer)
        if not np.array_equal(self.rows(job, layer, job.computed), made[: job.computed]):
            job.wrong = True
        if job.wrong:
            made = made ^ 0x55
        self._write(job, layer, job.computed, made[job.computed :])

    def _write(self, job: Job, layer: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        for at, row in enumerate(rows, start):
            place = at % BLOCK_TOKENS * TOKEN_BYTES
            self.layers[layer][job.ids[at // BLOCK_TOKENS], place : place + TOKEN_BYTES] = row

    def _take_back(self, not_filled: set[int], step: list[tuple[Job, int]]) -> None:
        counts = {job.name: count for job, count in step}
        for job in list(self.jobs.values()):
            if job.status is Status.REMOTE or job.name in counts:
                known = job.ids[: -(-job.computed // BLOCK_TOKENS)]
                bad = next((at for at, block in enumerate(known) if block in not_filled), None)
                if bad is not None:
                    job.computed = bad * BLOCK_TOKENS
                    counts.pop(job.name, None)
        for job, count in step:
            if job.name not in counts:
                continue
            prompt = job.request.num_prompt_tokens
            job.prefilled += max(0, min(prompt, job.computed + count) - job.computed)
            job.computed += count
            if job.computed == job.request.num_tokens:
                job.request.output.append(-1 if job.wrong else next_token(job.request.tokens))
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
        self.free += job.ids
        job.ids = []


def run(until: Callable[[], bool], *engines: ToyEngine) -> None:
    """Let engines step until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        for engine in engines:
            engine.step()
        if all(engine.is_idle for engine in engines):
            time.sleep(0.001)
        assert time.monotonic() < deadline, [engine.jobs for engine in engines]


def settle(*engines: ToyEngine) -> None:
    """Let engines step until nothing is open, in their traffic managers neither."""

    def quiet(engine: ToyEngine) -> bool:
        manager = engine.manager
        return not (engine.jobs or engine.worker.open_operations or engine.planner.has_jobs) and manager.do(
            lambda now: manager.core.is_clean
        )

    run(lambda: all(quiet(engine) for engine in engines), *engines)
    for engine in engines:
        engine.assert_clean()


def expected(tokens: Sequence[int], count: int) -> list[int]:
    """What any engine answers."""
    made = list(tokens)
    for _ in range(count):
        made.append(next_token(made))
    return made[len(tokens) :]
