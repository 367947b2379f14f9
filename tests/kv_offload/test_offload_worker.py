"""The mover on real memory, files and threads, under the real planner.

What is slow here waits for an event, not for time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_cuda import FakeCuda  # noqa: E402
from faulty_file_system import FaultyFiles  # noqa: E402
from kv_blocks import key  # noqa: E402
from offload_harness import PATIENCE_S, Engine, nothing_is_pinned  # noqa: E402
from sojourn_server.kv_offload.offload_jobs import OffloadJobs  # noqa: E402
from sojourn_server.kv_offload.offload_worker import SEARCH_S, OffloadWorker  # noqa: E402
from sojourn_server.kv_offload.transfer_thread import TransferThread  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("default"),  # torch warns about itself
    pytest.mark.filterwarnings("error:::sojourn"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]

KEYS = [key(number) for number in range(80)]
A, B, C, D = KEYS[:4]


class Broken(Exception):
    """What a copy of these tests fails with."""


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What failed in a lane and was reported as Python reports it of any thread."""
    errors: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    return errors


@pytest.fixture(params=["cpu", "cuda"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """``make(folder | None, **options)``; closed at the end."""
    engines: list[Engine] = []

    def start(folder: Path | None = None, **options: Any) -> Engine:
        cuda = FakeCuda(len(engines)) if request.param == "cuda" else None
        engines.append(Engine(folder, cuda=cuda, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def waits(event: threading.Event, *names: str) -> Callable[..., None]:
    """For a device or a file system: such an operation does not go on before the event."""

    def before(name: str, about: Any = None) -> None:
        if name in names:
            assert event.wait(PATIENCE_S)

    return before


# -- order, and what waits for what


def test_no_step_waits_for_a_load(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.save([A, B])
    engine.step()
    arrives = threading.Event()
    engine.device.before = waits(arrives, "to_device")
    assert engine.ask([A, B]) == 2
    engine.planner.load("r", [A, B], [4, 5])
    engine.begin()
    for _ in range(3):  # other requests compute
        assert engine.mover.take_loaded() == (set(), set())
        engine.planner.take_results(engine.mover.take_results())
        engine.begin()
    assert engine.planner.under_way == 1
    arrives.set()
    assert engine.end() == set()
    assert engine.planner.under_way == 0
    assert engine.results[-1].waited_s == 0
    assert engine.holds(4, A)
    assert engine.holds(5, B)


def test_no_lane_waits_for_another(make: Callable[..., Engine], tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = make(tmp_path, files=files, slots=8, spill_below=1.0)
    engine.save([A, B])
    engine.steps_until(lambda: len(engine.planner.disk.blocks) == 2)
    engine.planner.host.remove(engine.planner.host.get(B))
    goes_on = threading.Event()
    files.before = waits(goes_on, "read", "write")
    ours = threading.current_thread()
    slow = waits(goes_on, "to_host")
    engine.device.before = lambda name: slow(name) if threading.current_thread() is not ours else None
    engine.write(6, D)
    assert engine.planner.store([(D, 6)]) == 1  # device to host: stands still
    assert engine.planner.disk.fetch([B], 2) == 1  # disk to host: stands still
    for _ in range(3):
        engine.step()
    engine.save({C: 7})
    engine.step()  # host to disk: stands still
    engine.load([A])
    assert engine.mover._stores
    assert engine.planner.under_way == 3
    goes_on.set()
    engine.rest()
    assert not engine.mover._stores
    engine.load([D, B, C], "r2")


def test_a_step_after_a_cancelled_load_waits_for_its_copies() -> None:
    engine, arrives = Engine(), threading.Event()
    engine.save([A])
    engine.step()
    engine.device.before = waits(arrives, "to_device")
    assert engine.ask([A]) == 1
    engine.planner.load("r", [A], [4])
    engine.begin()
    engine.planner.cancel_load("r")
    threading.Timer(0.05, arrives.set).start()
    engine.begin()
    engine.write(4, B)
    engine.end()
    assert engine.holds(4, B), "the cancelled load has ended before"
    engine.close()


# -- stores that are awaited


def test_a_store_that_is_needed_now_does_not_wait_for_those_in_front_of_it() -> None:
    """What is copied to spare must not hold up a step."""
    engine, begun, release, ours = Engine(), threading.Event(), threading.Event(), threading.current_thread()

    def before(name: str) -> None:
        if name == "to_host" and threading.current_thread() is not ours:
            begun.set()
            assert release.wait(PATIENCE_S)

    engine.device.before = before
    for block_id, key_ in enumerate([A, B, C]):
        engine.write(block_id, key_)
        engine.planner.store([(key_, block_id)])
    engine.begin()
    assert begun.wait(PATIENCE_S)
    assert engine.planner.plan_save(C, 2)
    engine.begin()
    engine.write(2, D)
    release.set()
    engine.rest()
    assert engine.device.calls.count("to_host") == 3, "and it is not done twice"
    engine.load([A, B, C])
    engine.close()


# -- a device that fails


def test_every_job_of_a_step_that_failed_is_answered(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tmp_path, spill_below=1.0)
    engine.save([A, B])
    engine.steps_until(lambda: len(engine.planner.disk.blocks) == 2)
    for each in (A, B):
        engine.planner.host.remove(engine.planner.host.get(each))
    engine.save([C])
    engine.step()
    assert engine.ask([A, B]) is None, "a read is planned"
    engine.write(4, D)
    engine.planner.store([(D, 4)])
    assert engine.ask(KEYS[10:40], "searches") is None
    with monkeypatch.context() as failing:
        failing.setattr(engine.device, "fence", None)
        with pytest.raises(TypeError):
            engine.begin()
    engine.end()
    engine.steps_until(lambda: not engine.planner.under_way)  # an earlier step's write may still run
    assert engine.ask([D]) == 0
    for request in ("r", "searches"):
        engine.planner.abandon(request)
    assert engine.wait_for([C]) == 1
    engine.planner.load("r", [C], [0])
    assert engine.step() == {0}, "what host memory has is not known any more"
    engine.rest()
    assert nothing_is_pinned(engine.planner)


# -- a disk that fails


def test_a_search_of_a_slow_disk_ends_in_time_with_what_it_has_found(tmp_path: Path) -> None:
    """A request waits a second for it. What takes longer to look for used to be computed, all of it."""
    now, files = 0.0, FaultyFiles()
    engine = Engine(tmp_path, files=files, disk_blocks=100)
    assert engine.disk is not None
    for each in KEYS:
        engine.disk.put(each, [bytes(engine.device.block_bytes)])

    def slow(name: str, path: Path) -> None:
        nonlocal now
        now += 0.01

    files.before = slow
    searching = OffloadWorker(engine.device, engine.disk, clock=lambda: now)
    searching.begin_step(OffloadJobs(probes={1: KEYS}))
    assert searching._probe.end_of_work().wait(PATIENCE_S)
    assert searching.take_results().probed == {1: (50, False)}, "of the rest nothing is known"
    assert SEARCH_S < now < engine.planner.limits.max_stage_wait_s
    searching.close()
    engine.close()


def test_after_a_store_that_fails_once_a_step_has_waited_for_it_nothing_is_loaded_or_written(
    reported: list[BaseException], tmp_path: Path
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class FailsLate:
        def wait(self) -> float:
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            raise Broken

    engine = Engine(tmp_path)
    engine.device.to_host = lambda copies, after: FailsLate()  # type: ignore[method-assign, assignment]
    engine.device.hold_compute = lambda copy: None  # type: ignore[method-assign]
    assert engine.planner.store([(A, 0)]) == 1
    engine.step()
    assert begun.wait(PATIENCE_S)
    assert engine.planner.plan_save(A, 0), "the step overwrites it"
    engine.step()
    goes_on.set()
    engine.lane_is_through("_to_host")
    engine.step()
    assert engine.ask([A]) == 1
    assert engine.planner.persist([A], {}, engine.now) == (0, 1, "")
    engine.planner.load("r", [A], [1])
    assert engine.step() == {1}
    engine.steps_until(lambda: engine.planner.counts["spill_failed"] == 1)
    assert isinstance(reported[0], Broken)
    engine.close()


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    make: Callable[..., Engine], tmp_path: Path, reported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransferThread.close, "__defaults__", (0.02,))
    files = FaultyFiles()
    engine = make(tmp_path, files=files, spill_below=1.0)
    engine.step()
    goes_on = threading.Event()
    files.before = waits(goes_on, "write")
    engine.save(KEYS[:6])
    engine.step()
    engine.close()
    goes_on.set()
    engine.mover._to_disk._thread.join(PATIENCE_S)
    make(tmp_path).load(KEYS[:6])


def test_each_lane_says_what_it_has_moved(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(tmp_path, spill_below=1.0)
    size = engine.device.block_bytes
    for index, key_ in enumerate([A, B, C]):
        engine.write(index, key_)
    engine.planner.store([(A, 0), (B, 1), (C, 2)])
    engine.steps_until(lambda: len(engine.planner.disk.blocks) == 3)
    engine.planner.host.remove(engine.planner.host.get(A))
    engine.load([A, B])
    for lane in ("_to_host", "_to_device", "_to_disk", "_from_disk"):
        engine.lane_is_through(lane)
    engine.step()
    spilled = [each for report in engine.results for each in report.spilled]
    assert spilled == [C, B, A], "the end was written first"
    moved = {"to_host": 3 * size, "to_device": 2 * size, "to_disk": 3 * size, "from_disk": size}
    sums, seconds = Counter[str](), Counter[str]()
    for report in engine.results:
        sums.update(report.moved_bytes)
        seconds.update(report.seconds)
    assert sums == moved
    assert seconds.keys() == moved.keys()
    assert all(0 < spent < PATIENCE_S for spent in seconds.values())
    again = engine.mover.take_results()
    assert not again.moved_bytes
    assert not again
