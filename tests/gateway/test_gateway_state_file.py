"""The gateway's state file: what it has after the last write, whichever thread writes when."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_harness import until
from sojourn_server.gateway.http import routing_state_file
from sojourn_server.gateway.http.routing_state_file import RoutingStateFile
from sojourn_server.policies.cluster_preset import parse_cluster_preset
from sojourn_server.routing import routing_snapshot
from sojourn_server.routing.affinity_core import AffinityCore
from sojourn_server.routing.routed_programs import RoutedProgram
from sojourn_server.routing.routing_events import (
    ProgramEnded,
    ReplicaRegistered,
    RequestFinished,
    RequestReceived,
)
from sojourn_server.routing.routing_from_preset import build_routing_core
from sojourn_server.routing.routing_snapshot import SavedProgram


def new_core() -> AffinityCore:
    return build_routing_core(parse_cluster_preset('routing = "session-affinity"', source="test"))


def add_programs(core: AffinityCore, count: int, first: int = 0) -> None:
    core.take(ReplicaRegistered("a", "1", 10**9), 0.0)
    for number in range(first, first + count):
        core.take(RequestReceived(f"r{number}", "t", 10, f"p{number}", agent_type='a "b"'), 0.0)
        core.take(RequestFinished(f"r{number}", 1, "a", True), 1.0)


def saved_programs(path: Path) -> int:
    return len(msgspec.json.decode(path.read_bytes())["core"]["programs"])


async def test_a_write_that_a_thread_begins_after_the_last_one_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], Any]] = []

    async def begin_later(write: Callable[..., Any], *args: Any) -> None:
        late.append(lambda: write(*args))
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "to_thread", begin_later)
    monkeypatch.setattr(routing_state_file, "SAVE_INTERVAL_S", 0.0)
    core, path = new_core(), tmp_path / "state"
    add_programs(core, 1)
    saving = asyncio.ensure_future(RoutingStateFile(path, core).run())
    await until(lambda: late)
    add_programs(core, 1, first=1)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert saved_programs(path) == 2
    [write] = late
    write()
    assert saved_programs(path) == 2


async def test_a_failed_write_is_tried_again_without_a_further_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routing_state_file, "SAVE_INTERVAL_S", 0.001)
    fails = [True]

    def fsync(file: int) -> None:
        if fails:
            fails.pop()
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    core, path = new_core(), tmp_path / "state"
    add_programs(core, 1)
    saving = asyncio.ensure_future(RoutingStateFile(path, core).run())
    await until(path.exists)
    assert "cannot be written" in caplog.text
    assert saved_programs(path) == 1
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving


async def test_pauses_grow_while_writes_fail_and_few_failures_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    sleep, now, is_full = asyncio.sleep, 0.0, True

    async def paused(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds
        await sleep(0)

    def fsync(file: int) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "no space left on device")

    core, path = new_core(), tmp_path / "state"
    add_programs(core, 1)
    state_file = RoutingStateFile(path, core, clock=lambda: now)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(asyncio, "sleep", paused)
    saving = asyncio.ensure_future(state_file.run())
    while len(pauses) < 8:
        await sleep(0)
    is_full = False
    while not path.exists():
        await sleep(0)
    count = len(pauses)
    while len(pauses) < count + 2:
        await sleep(0)
    is_full = True
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert pauses[:8] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert pauses[-1] == 2.0
    lines = [line for line in caplog.messages if "cannot be written" in line]
    assert len(lines) < 8
    assert "1 more since the last one" in lines[1]
    assert "state lacks the newest programs" in caplog.messages[-1]


async def test_other_tasks_run_between_the_slices_of_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_state_file, "SAVE_INTERVAL_S", 0.001)
    monkeypatch.setattr(routing_snapshot, "SNAPSHOT_SLICE", 4)
    copied = longest = 0
    copy = routing_snapshot._saved_program

    def counted(program: RoutedProgram) -> SavedProgram:
        nonlocal copied, longest
        copied += 1
        longest = max(longest, copied)
        return copy(program)

    monkeypatch.setattr(routing_snapshot, "_saved_program", counted)
    core, path = new_core(), tmp_path / "state"
    add_programs(core, 30)
    saving = asyncio.ensure_future(RoutingStateFile(path, core).run())
    while not path.exists():
        copied = 0
        await asyncio.sleep(0)
    assert longest == 4
    assert saved_programs(path) == 30
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert saved_programs(path) == 30


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [("programs", "turns", -1), ("replicas", "capacity_tokens", 0), ("replicas", "health", "gone")],
)
def test_a_refused_file_leaves_the_core_as_it_was(
    part: str, field: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, path = new_core(), new_core(), tmp_path / "state"
    before.take(ReplicaRegistered("b", "1", 10**9), 0.0)
    add_programs(before, 2)
    before.take(ProgramEnded("p1", "t"), 2.0)
    add_programs(before, 1, first=2)
    core = msgspec.to_builtins(before.snapshot(5.0))
    core[part][-1][field] = value
    path.write_bytes(msgspec.json.encode({"unix_s": 9.0, "core": core}))
    assert RoutingStateFile(path, after, clock=lambda: 5.0, wall=lambda: 9.0).restore() == 0
    assert "programs start without homes" in caplog.text
    assert after.snapshot(5.0) == new_core().snapshot(5.0)


@pytest.mark.parametrize("programs", [0, 1, 3, 4, 5, 40])
async def test_a_state_that_is_encoded_in_slices_is_the_whole_state(
    programs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_state_file, "ENCODED_PROGRAMS", 4)
    before, after, path = new_core(), new_core(), tmp_path / "state"
    add_programs(before, programs)
    saving = asyncio.ensure_future(RoutingStateFile(path, before, clock=lambda: 5.0, wall=lambda: 9.0).run())
    await asyncio.sleep(0)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert RoutingStateFile(path, after, clock=lambda: 5.0, wall=lambda: 9.0).restore() == programs
    assert after.snapshot(5.0) == before.snapshot(5.0)
    assert [one.name for one in tmp_path.iterdir()] == ["state"]
