"""The mover on real memory, files and threads, under the real planner.

What is slow here waits for an event, not for time.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_cuda import FakeCuda  # noqa: E402
from faulty_file_system import WRITES, FaultyFiles, broken, key  # noqa: E402
from offload_harness import PATIENCE_S, Engine, merged, nothing_is_pinned, slots_add_up  # noqa: E402
from sojourn_server.kv_offload.cpu_device_backend import CHUNK_BLOCKS, CpuCopy, CpuDeviceBackend, block_rows  # noqa: E402
from sojourn_server.kv_offload.offload_jobs import BlockCopy, CopyResult, FileCopy, OffloadJobs  # noqa: E402
from sojourn_server.kv_offload.offload_worker import OffloadWorker  # noqa: E402
from sojourn_server.kv_offload.transfer_thread import TransferThread  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("default"),  # torch warns about itself
    pytest.mark.filterwarnings("error:::sojourn"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]

KEYS = [key(number) for number in range(80)]
A, B, C, D = KEYS[:4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]


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


def fails(*names: str) -> Callable[[str], None]:
    def before(name: str) -> None:
        if name in names:
            raise Broken(name)

    return before


def waits(event: threading.Event, *names: str) -> Callable[..., None]:
    """For a device or a file system: such an operation does not go on before the event."""

    def before(name: str, about: Any = None) -> None:
        if name in names:
            assert event.wait(PATIENCE_S)

    return before


# -- there and back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_and_loaded(make: Callable[..., Engine], dtype: Any) -> None:
    engine = make(dtype=dtype)
    engine.save([A, B, C])
    engine.step()
    engine.load([A, B, C])
    engine.load([C, A], "r2")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spilled_and_staged_by_the_next_engine(
    make: Callable[..., Engine], tmp_path: Path, dtype: Any
) -> None:
    engine = make(tmp_path, dtype=dtype, spill_below=1.0)
    engine.save(KEYS[:5])
    engine.steps_until(lambda: len(engine.planner.disk) == 5)
    engine.close()

    engine = make(tmp_path, dtype=dtype)
    engine.step()
    assert len(engine.planner.disk) == 5
    engine.load(KEYS[:5])
    assert engine.planner.counts["staged"] == 5


def test_stored_ahead_and_loaded_when_the_block_has_been_overwritten(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.write(0, A)
    assert engine.planner.store([(A, 0)]) == 1
    engine.steps_until(lambda: not engine.planner.under_way)
    assert engine.planner.plan_save(A, 0)
    assert not engine.planner.has_jobs  # it is there already
    engine.step()
    engine.write(0, B)
    engine.load([A])


def test_what_is_found_while_it_is_being_stored_is_there_when_it_is_loaded(
    make: Callable[..., Engine],
) -> None:
    engine = make()
    engine.write(5, A)
    stored = threading.Event()
    engine.device.before = waits(stored, "to_host")
    engine.planner.store([(A, 5)])
    engine.step()
    threading.Timer(0.05, stored.set).start()
    assert engine.ask([A]) == 1
    engine.planner.load("r", [A], [0])
    assert engine.step() == set()
    assert engine.holds(0, A)


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
    assert engine.results.waited_s == 0
    assert engine.holds(4, A)
    assert engine.holds(5, B)


def test_a_load_is_answered_when_its_blocks_have_arrived(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.save([A])
    engine.step()
    begun, arrives = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name == "to_device":
            begun.set()
            assert arrives.wait(PATIENCE_S)

    engine.device.before = before
    assert engine.ask([A]) == 1
    engine.planner.load("r", [A], [4])
    engine.begin()
    assert begun.wait(PATIENCE_S)
    assert engine.mover.take_loaded() == (set(), set())
    arrives.set()
    engine.mover.wait_for_loads()
    assert engine.mover.take_loaded() == ({"r"}, set())
    assert engine.mover.take_loaded() == (set(), set()), "and once"
    assert engine.holds(4, A)


def test_a_slot_keeps_its_block_until_the_load_has_ended(make: Callable[..., Engine]) -> None:
    engine = make(slots=2)
    engine.save([A, B])
    engine.step()
    arrives = threading.Event()
    engine.device.before = waits(arrives, "to_device")
    assert engine.ask([A]) == 1
    engine.planner.load("r", [A], [4])
    engine.begin()
    for number, each in enumerate((C, D)):  # what the device loses meanwhile finds one slot only
        engine.write(number, each)
        engine.planner.plan_save(each, number)
        engine.begin()
    arrives.set()
    assert engine.end() == set()
    assert engine.holds(4, A)
    assert nothing_is_pinned(engine.planner)


def test_a_request_is_answered_before_those_behind_it(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.save([A, B])
    engine.step()
    begun: list[str] = []
    second = threading.Event()

    def before(name: str) -> None:
        if name == "to_device":
            begun.append(name)
            assert len(begun) <= 1 or second.wait(PATIENCE_S)

    engine.device.before = before
    for request_id, each, block_id in (("first", A, 4), ("second", B, 5)):
        assert engine.ask([each], request_id) == 1
        engine.planner.load(request_id, [each], [block_id])
    engine.begin()
    deadline = time.monotonic() + PATIENCE_S
    while (answered := engine.mover.take_loaded()) == (set(), set()):
        assert time.monotonic() < deadline
    assert answered == ({"first"}, set())
    second.set()
    engine.mover.wait_for_loads()
    assert engine.mover.take_loaded() == ({"second"}, set())


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_the_end_of_all_copies_is_awaited_for_a_limited_time(
    make: Callable[..., Engine], direction: str
) -> None:
    engine = make()
    engine.save([A])
    engine.step()
    goes_on = threading.Event()
    engine.device.before = waits(goes_on, direction)
    if direction == "to_host":
        engine.write(1, B)
        assert engine.planner.store([(B, 1)]) == 1
    else:
        assert engine.ask([A]) == 1
        engine.planner.load("r", [A], [4])
    engine.begin()
    assert not engine.mover.wait_for_copies(0.0)
    goes_on.set()
    assert engine.mover.wait_for_copies(PATIENCE_S)
    if direction == "to_host":
        assert list(engine.mover.take_results().stored.values()) == [CopyResult.MOVED]
    else:
        assert engine.mover.take_loaded() == ({"r"}, set())


def test_no_lane_waits_for_another(make: Callable[..., Engine], tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = make(tmp_path, files=files, slots=8, spill_below=1.0)
    engine.save([A, B])
    engine.steps_until(lambda: len(engine.planner.disk) == 2)
    engine.planner.host.remove(_entry(engine, B))
    goes_on = threading.Event()
    files.before = waits(goes_on, "readv", "writev")
    ours = threading.current_thread()
    slow = waits(goes_on, "to_host")
    engine.device.before = lambda name: slow(name) if threading.current_thread() is not ours else None
    engine.write(6, D)
    assert engine.planner.store([(D, 6)]) == 1  # device to host: stands still
    assert engine.planner.fetch([B]) == 1  # disk to host: stands still
    for _ in range(3):
        engine.step()
    engine.save({C: 7})
    engine.step()  # host to disk: stands still
    engine.load([A])
    assert engine.mover.busy
    assert engine.planner.under_way == 3
    goes_on.set()
    engine.rest()
    assert not engine.mover.busy
    engine.load([D, B, C], "r2")


def test_of_several_saves_into_one_slot_the_last_stays(make: Callable[..., Engine]) -> None:
    engine = make(blocks=80, slots=2)
    engine.save(KEYS[:80])  # within a chunk, and from one chunk to the next
    jobs = engine.begin()
    assert len(jobs.saves) == 80 > 2 * CHUNK_BLOCKS
    engine.end()
    engine.load(KEYS[78:80])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", range(0, 2 * CHUNK_BLOCKS, 7))
def test_the_last_copy_into_a_slot_stays_wherever_it_is_in_the_list(dtype: Any, last: int) -> None:
    cache = torch.arange(2 * CHUNK_BLOCKS).view(-1, 1).to(dtype)
    memory = CpuDeviceBackend([block_rows("layer", cache, 2 * CHUNK_BLOCKS)], 1)
    memory.to_host([BlockCopy(block, 0) for block in range(last + 1)])
    assert bytes(memory.slot(0)) == cache[last].view(torch.uint8).numpy().tobytes()


# -- stores that are awaited


def test_a_store_under_way_is_waited_for_before_its_block_is_overwritten(make: Callable[..., Engine]) -> None:
    engine = make()
    stored = threading.Event()
    engine.device.before = waits(stored, "to_host")
    engine.write(0, A)
    engine.planner.store([(A, 0)])
    engine.step()
    engine.planner.plan_save(A, 0)
    threading.Timer(0.05, stored.set).start()
    assert engine.begin().awaited
    assert stored.is_set()
    engine.write(0, B)
    engine.end()
    assert engine.results.waited_s > 0
    assert engine.device.calls.count("to_host") == 1
    engine.load([A])


def test_a_store_that_is_needed_now_does_not_wait_for_those_in_front_of_it() -> None:
    """What is copied to spare must not hold up a step."""
    begun, release = threading.Event(), threading.Event()
    copied: list[list[BlockCopy]] = []

    class Device:
        block_bytes = 1

        def fence(self) -> None: ...

        def to_host(self, copies: Any, after: None) -> CpuCopy:
            copied.append(list(copies))
            if copies[0].slot == 0:
                begun.set()
                assert release.wait(60)
            return CpuCopy(0.0)

        def to_device(self, copies: Any, after: None) -> CpuCopy:
            return CpuCopy(0.0)

        def hold_compute(self, copy: CpuCopy) -> None: ...

        def slot(self, slot: int) -> memoryview:
            return memoryview(bytearray(1))

        def close(self) -> None: ...

    mover = OffloadWorker(Device())
    mover.begin_step(OffloadJobs(stores={job: [BlockCopy(job, job)] for job in range(3)}))
    assert begun.wait(60)
    mover.begin_step(OffloadJobs(awaited={2: [BlockCopy(2, 2)]}))
    assert copied == [[BlockCopy(0, 0)], [BlockCopy(2, 2)]]
    release.set()
    mover.close()
    assert copied == [[BlockCopy(0, 0)], [BlockCopy(2, 2)], [BlockCopy(1, 1)]], "and it is not done twice"


def test_a_store_that_is_over_is_not_done_again(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.write(0, A)
    engine.planner.store([(A, 0)])
    engine.begin()
    engine.lane_is_through("_to_host")
    engine.planner.plan_save(A, 0)  # its end has not been reported
    assert engine.begin().awaited
    engine.write(0, B)
    engine.end()
    assert engine.device.calls == ["to_host"]
    engine.load([A])


def test_a_store_that_has_failed_is_done_again(make: Callable[..., Engine], reported: list[Any]) -> None:
    engine = make()
    engine.write(0, A)
    engine.device.before = fails("to_host")
    engine.planner.store([(A, 0)])
    engine.begin()
    engine.lane_is_through("_to_host")
    engine.device.before = lambda name: None
    engine.planner.plan_save(A, 0)
    engine.begin()
    engine.write(0, B)
    engine.end()
    assert [type(error) for error in reported] == [Broken]
    assert set(engine.results.stored.values()) == {
        CopyResult.FAILED
    }  # of the first try, which counts no more
    engine.load([A])


def test_a_store_whose_report_is_on_its_way_is_done_again_where_it_failed(
    make: Callable[..., Engine], reported: list[Any]
) -> None:
    engine = make()
    engine.write(0, A)
    engine.device.before = fails("to_host")
    engine.planner.store([(A, 0)])
    engine.begin()
    engine.lane_is_through("_to_host")
    late = engine.mover.take_results()
    engine.device.before = lambda name: None
    engine.planner.plan_save(A, 0)
    engine.begin()
    engine.write(0, B)
    engine.planner.take_results(late)
    engine.end()
    engine.load([A])


def test_a_store_that_fails_twice_is_forgotten(make: Callable[..., Engine], reported: list[Any]) -> None:
    engine = make()
    engine.write(0, A)
    engine.device.before = fails("to_host")
    engine.planner.store([(A, 0)])
    engine.begin()
    engine.lane_is_through("_to_host")
    engine.planner.plan_save(A, 0)
    engine.step()
    assert len(engine.results.lost_slots) == 1
    assert engine.ask([A]) == 0
    assert slots_add_up(engine.planner)


# -- a device that fails


def test_a_store_that_fails_is_found_by_nobody(make: Callable[..., Engine], reported: list[Any]) -> None:
    engine = make()
    engine.write(0, A)
    engine.device.before = fails("to_host")
    engine.planner.store([(A, 0)])
    engine.steps_until(lambda: not engine.planner.under_way)
    assert engine.ask([A]) == 0
    assert engine.planner.counts["failed"] == 1
    assert engine.planner.host.free == 6


def test_a_save_that_fails_is_found_by_nobody(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.device.before = fails("to_host")
    engine.save([A])
    engine.step()
    assert len(engine.results.lost_slots) == 1
    assert engine.ask([A]) == 0
    assert engine.planner.host.free == 6


def broken_step(*_: Any) -> Any:
    raise Broken("on purpose")


def test_what_a_step_that_failed_before_its_saves_was_to_save_is_found_by_nobody(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    go_on = threading.Event()
    engine.mover._to_host.submit(lambda: go_on.wait(PATIENCE_S) and 0)
    engine.write(0, A)
    engine.planner.store([(A, 0)])
    engine.step()  # the store waits for its turn
    engine.planner.await_store(A)
    engine.save({B: 1})
    with monkeypatch.context() as failing:
        failing.setattr(engine.mover, "_unfinished", broken_step)
        with pytest.raises(Broken):
            engine.begin()
    go_on.set()
    engine.end()
    assert len(engine.results.lost_slots) == 2
    assert engine.ask([A]) == engine.ask([B]) == 0
    # The store that had not begun must not write to its slot, which another block may have now.
    engine.save({C: 2, D: 3})
    engine.rest()
    engine.load([C, D])
    assert slots_add_up(engine.planner)
    assert nothing_is_pinned(engine.planner)


def test_every_job_of_a_step_that_failed_is_answered(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tmp_path, spill_below=1.0, name="one")
    engine.save([A, B])
    engine.steps_until(lambda: len(engine.planner.disk) == 2)
    for each in (A, B):
        engine.planner.host.remove(engine.planner.host.get(each))
    engine.save([C])
    engine.step()
    assert engine.ask([A, B]) is None, "a read is planned"
    engine.write(4, D)
    engine.planner.store([(D, 4)])
    assert engine.ask(KEYS[10:40], "searches") is None
    with monkeypatch.context() as failing:
        failing.setattr(engine.device, "fence", broken_step)
        with pytest.raises(Broken):
            engine.begin()
    engine.end()
    engine.steps_until(lambda: not engine.planner.under_way)  # an earlier step's write may still run
    assert engine.ask([D]) == 0
    assert engine.ask([A, B]) == 0
    assert engine.ask(KEYS[10:40], "searches") == 0
    for request in ("r", "searches"):
        engine.planner.abandon(request)
    assert nothing_is_pinned(engine.planner)
    engine.rest()
    engine.load([C])


def test_what_is_loaded_from_a_slot_that_the_same_step_failed_to_fill_is_invalid(
    make: Callable[..., Engine],
) -> None:
    engine = make()
    engine.save([A])
    engine.step()
    engine.device.before = fails("to_host")
    engine.save({B: 1})
    assert engine.ask([A, B]) == 2
    engine.planner.load("r", [A, B], [4, 5])
    assert engine.step() == {5}
    assert engine.holds(4, A)
    assert engine.ask([A, B]) == 1


def test_what_is_loaded_by_a_step_planned_before_it_was_known_that_a_save_failed_is_invalid(
    make: Callable[..., Engine],
) -> None:
    engine = make()
    engine.save([A])
    failing = engine.planner.take_jobs()
    assert engine.ask([A]) == 1
    engine.planner.load("r", [A], [4])
    loading = engine.planner.take_jobs()

    engine.device.before = fails("to_host")
    engine.mover.begin_step(failing)
    engine.device.before = lambda name: None
    engine.mover.begin_step(loading)
    assert engine.end() == {4}
    assert engine.ask([A]) == 0
    engine.save([A])  # and the slot is as good as any other
    engine.step()
    engine.load([A])


def test_what_could_not_be_saved_is_never_on_disk(make: Callable[..., Engine], tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = make(tmp_path, files=files, spill_below=1.0)
    engine.step()
    engine.save([A])
    engine.device.before = fails("to_host")
    files.before = broken("unlink")  # what was written by mistake could not be taken back
    assert engine.begin().spills
    engine.end()
    engine.rest()
    assert not list(tmp_path.glob("*/*/*"))
    files.before = lambda name, path: None
    engine.close()
    engine = make(tmp_path)
    engine.step()
    assert engine.ask([A]) == 0


def test_blocks_that_cannot_be_loaded_are_invalid(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.save([A, B])
    engine.step()
    engine.device.before = fails("to_device")
    assert engine.ask([A, B]) == 2
    engine.planner.load("r", [A, B], [4, 5])
    assert engine.step() == {4, 5}
    engine.device.before = lambda name: None
    assert engine.ask([A, B], "r2") == 0, "else it would be tried again for ever"
    assert nothing_is_pinned(engine.planner)


# -- a disk that fails


def test_a_full_disk_keeps_what_it_has(make: Callable[..., Engine], tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = make(tmp_path, files=files, slots=4, spill_below=1.0)
    engine.save([A, B])
    engine.steps_until(lambda: len(engine.planner.disk) == 2)
    files.before = broken(*WRITES, code=errno.ENOSPC)
    engine.save([C, D])
    engine.steps_until(lambda: engine.planner.counts["spill_full"] == 2)
    engine.load([A, B, C, D])
    for _ in range(10):
        engine.step()
    assert engine.disk is not None
    assert set(engine.disk.keys()) == {A, B}
    assert engine.planner.counts["spilled"] == 2  # not one in place of the other, and back
    files.before = lambda name, path: None
    engine.steps_until(lambda: len(engine.planner.disk) == 4)  # it has room again, and is tried again
    assert set(engine.disk.keys()) == set(engine.planner.disk)


def test_a_disk_smaller_than_what_is_on_its_way_gets_no_more_than_it_holds(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    files = FaultyFiles()
    engine = make(tmp_path, files=files, disk_blocks=3, spill_below=1.0)
    engine.step()
    goes_on = threading.Event()
    files.before = waits(goes_on, "writev")
    for start in range(0, 12, 2):
        engine.save({KEYS[start]: 0, KEYS[start + 1]: 1})
        engine.step()
        assert len(engine.planner.disk) + len(engine.planner.disk.being_spilled) <= 3
    assert engine.planner.disk.spill(engine.planner.host.next_unspilled(6, above=-1)) == 0
    goes_on.set()
    engine.rest()
    assert engine.planner.counts["spill_full"] == 0
    assert len(engine.planner.disk) == 3


def test_at_its_budget_what_is_new_takes_the_place_of_what_is_old(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make(tmp_path, slots=4, disk_blocks=4, spill_below=1.0)
    engine.step()
    for start in range(0, 40, 4):
        engine.save({KEYS[start + index]: index for index in range(4)})
        engine.rest()
        assert engine.planner.counts["spill_full"] == 0
    assert engine.disk is not None
    assert set(engine.disk.keys()) == set(engine.planner.disk) == set(KEYS[36:40])


def test_a_disk_that_cannot_be_written_is_left_alone_and_tried_again(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    files = FaultyFiles()
    engine = make(tmp_path, files=files, blocks=16, slots=12, disk_blocks=20, spill_below=1.0)
    engine.step()
    files.before = broken("writev")
    engine.save(KEYS[:12])
    engine.steps_until(lambda: engine.planner.counts["spill_failed"] == 12)
    files.before = lambda name, path: None
    for _ in range(16):  # it was one failure, however many blocks it was of
        engine.step()
    engine.rest()
    assert engine.planner.counts["spilled"] == 12
    engine.load(KEYS[:12])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "corrupt": _flip,
    "corrupt_short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "missing": Path.unlink,
    "failed": lambda file: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_block_that_cannot_be_read_is_computed_again(
    make: Callable[..., Engine], tmp_path: Path, damage: str
) -> None:
    engine = make(tmp_path, spill_below=1.0)
    engine.save([A, B, C])
    engine.steps_until(lambda: len(engine.planner.disk) == 3)
    engine.close()

    files = FaultyFiles()
    engine = make(tmp_path, files=files, spill_below=1.0)
    engine.step()
    (file,) = tmp_path.glob(f"*/*/{B.hex()}.kv")
    DAMAGES[damage](file)
    if damage == "failed":
        fault = broken("readv")
        files.before = lambda name, path: fault(name, path) if path == file else None
    assert engine.wait_for([A, B, C]) == 1
    assert engine.planner.counts[f"stage_{damage.split('_')[0]}"] == 1
    engine.planner.load("r", [A], [0])
    engine.rest()
    assert not file.exists()
    files.before = lambda name, path: None
    engine.save({B: 1})
    engine.rest()
    assert B in engine.planner.disk
    engine.load([A, B, C], "r2")
    engine.close()

    engine = make(tmp_path)
    engine.step()
    engine.load([A, B, C])


def test_a_slow_disk_is_not_given_more_than_it_takes(make: Callable[..., Engine], tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = make(tmp_path, files=files, spill_below=1.0, max_spilling=2)
    engine.step()
    goes_on = threading.Event()
    files.before = waits(goes_on, "writev")
    engine.save(KEYS[:6])
    for _ in range(50):
        engine.step()
        assert len(engine.planner.disk.being_spilled) == 2
    goes_on.set()
    engine.steps_until(lambda: len(engine.planner.disk) == 6)
    engine.load(KEYS[:6])


def test_who_has_waited_for_the_disk_long_enough_computes(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make(tmp_path, spill_below=1.0)
    engine.save([A, B])
    engine.steps_until(lambda: len(engine.planner.disk) == 2)
    engine.close()

    files = FaultyFiles()
    engine = make(tmp_path, files=files, max_stage_wait_s=10.0)
    engine.step()
    arrives = threading.Event()
    files.before = waits(arrives, "readv")
    assert engine.ask([A, B]) is None
    engine.step()
    engine.now += 9.9
    assert engine.ask([A, B]) is None
    engine.now += 0.2
    assert engine.ask([A, B]) == 0
    assert engine.planner.counts["gave_up"] == 2
    engine.step()
    assert engine.ask([A, B]) == 0  # it does not begin to wait once more
    arrives.set()
    engine.rest()
    engine.load([A, B], "r2")  # what comes all the same is the next one's
    engine.planner.abandon("r")
    engine.step()
    assert nothing_is_pinned(engine.planner)


@pytest.mark.parametrize("where", ["spills", "stages"])
def test_an_error_that_nobody_expected_is_answered_too(
    make: Callable[..., Engine], tmp_path: Path, reported: list[Any], where: str
) -> None:
    engine = make(tmp_path, spill_below=1.0)
    engine.step()
    engine.save([A, B])
    if where == "stages":
        engine.rest()
        for key_ in (A, B):
            engine.planner.host.remove(_entry(engine, key_))
        assert engine.ask([A, B]) is None
    engine.device.before = fails("slot")
    engine.step()
    engine.steps_until(lambda: not engine.planner.under_way)
    assert [type(error) for error in reported] == [Broken]
    assert engine.planner.counts["spill_failed" if where == "spills" else "stage_failed"] == 2
    assert engine.ask([A, B]) == (2 if where == "spills" else 0)
    engine.planner.abandon("r")
    assert nothing_is_pinned(engine.planner)
    assert slots_add_up(engine.planner)


def test_a_step_that_fails_still_deletes_its_files(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tmp_path, spill_below=1.0)
    engine.save([A, B])
    engine.steps_until(lambda: len(engine.planner.disk) == 2)
    monkeypatch.setattr(engine.device, "fence", lambda: fails("fence")("fence"))
    with pytest.raises(Broken):
        engine.mover.begin_step(OffloadJobs(loads={"r": [BlockCopy(5, 0)]}, drops=[A]))
    engine.lane_is_through("_to_disk")
    assert engine.mover.on_disk == 1


def test_what_is_dropped_and_written_by_the_same_step_is_there(
    tmp_path: Path, make: Callable[..., Engine]
) -> None:
    engine = make(tmp_path)
    engine.write(0, A)
    engine.mover.begin_step(OffloadJobs(saves=[BlockCopy(0, 0)], spills={1: [FileCopy(0, A)]}))
    engine.write(1, A, weights=1)
    engine.mover.begin_step(OffloadJobs(saves=[BlockCopy(1, 1)], spills={2: [FileCopy(1, A)]}, drops=[A]))
    engine.lane_is_through("_to_disk")
    engine.mover.begin_step(OffloadJobs(stages={3: [FileCopy(2, A)]}))
    engine.lane_is_through("_from_disk")
    engine.mover.begin_step(OffloadJobs(loads={"r": [BlockCopy(5, 2)]}))
    engine.mover.wait_for_loads()
    assert engine.mover.take_loaded() == ({"r"}, set())
    assert engine.holds(5, A, weights=1)


# -- the end


def test_what_was_begun_is_done_when_it_is_closed(make: Callable[..., Engine], tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = make(tmp_path, files=files, spill_below=1.0)
    engine.step()
    files.before = lambda name, path: time.sleep(0.003)
    engine.save(KEYS[:6])
    engine.step()
    engine.close()

    engine = make(tmp_path)
    engine.step()
    assert len(engine.planner.disk) == 6
    engine.load(KEYS[:6])


def test_a_disk_that_hangs_does_not_hold_up_the_end(
    make: Callable[..., Engine], tmp_path: Path, reported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransferThread.close, "__defaults__", (0.02,))
    files = FaultyFiles()
    engine = make(tmp_path, files=files, spill_below=1.0)
    engine.step()
    goes_on = threading.Event()
    files.before = waits(goes_on, "writev")
    engine.save(KEYS[:6])
    engine.step()
    threading.Timer(0.2, goes_on.set).start()
    engine.close()

    engine = make(tmp_path)
    engine.step()
    found = list(engine.planner.disk)
    assert found  # the one that was under way
    engine.load(found)


# -- what it says of itself


def test_each_lane_says_what_it_has_moved(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(tmp_path, spill_below=1.0)
    size = engine.device.block_bytes
    results = []

    def rest() -> None:
        engine.step()
        results.append(engine.results)
        while engine.planner.under_way:
            time.sleep(0.001)
            engine.step()
            results.append(engine.results)

    for index, key_ in enumerate([A, B, C]):
        engine.write(index, key_)
    engine.planner.store([(A, 0), (B, 1), (C, 2)])
    rest()
    rest()
    engine.planner.host.remove(_entry(engine, A))
    engine.planner.fetch([A])
    rest()
    assert engine.ask([A, B]) == 2
    engine.planner.load("r", [A, B], [4, 5])
    rest()
    for lane in ("_to_host", "_to_device", "_to_disk", "_from_disk"):
        engine.lane_is_through(lane)
    results.append(engine.mover.take_results())
    moved = {"to_host": 3 * size, "to_device": 2 * size, "to_disk": 3 * size, "from_disk": size}
    assert merged(results, "moved_bytes") == moved
    seconds = merged(results, "seconds")
    assert seconds.keys() == moved.keys()
    assert all(0 < spent < PATIENCE_S for spent in seconds.values())
    again = engine.mover.take_results()
    assert not again.moved_bytes
    assert not again


def _entry(engine: Engine, key_: bytes) -> Any:
    entry = engine.planner.host.get(key_)
    assert entry is not None
    return entry


def test_a_load_that_was_cancelled_has_ended_before_its_blocks_are_used_again(
    make: Callable[..., Engine],
) -> None:
    engine = make()
    engine.save([A])
    engine.step()
    arrives = threading.Event()
    engine.device.before = waits(arrives, "to_device")
    assert engine.ask([A]) == 1
    engine.planner.load("r", [A], [4])
    engine.begin()
    assert engine.planner.cancel_load("r")
    threading.Timer(0.05, arrives.set).start()
    engine.begin()
    engine.write(4, B)
    engine.end()
    assert engine.holds(4, B), "it was written over what arrived, and not the other way round"
    assert nothing_is_pinned(engine.planner)
    assert not engine.planner.cancel_load("r")
