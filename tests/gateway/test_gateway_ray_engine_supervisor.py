"""One engine as a process: started, looked after, drained, ended, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import until
from sojourn_server.gateway.ray import coordinator_messages as m
from sojourn_server.gateway.ray import engine_supervisor
from sojourn_server.gateway.ray.coordinator_messages import CoordinatorUnavailable
from sojourn_server.gateway.ray.engine_process import EngineFailed, EngineProcess, environment
from sojourn_server.gateway.ray.engine_supervisor import EngineSupervisor

FAKE = [sys.executable, str(Path(__file__).with_name("fake_engine_process.py")), "{host}", "{port}"]


class Ear:
    """Hears what a supervisor says."""

    def __init__(self) -> None:
        self.registered: list[m.EngineRegistration] = []
        self.said: list[str] = []
        self.in_flight = [0]
        self.away = False
        self.wanted = 3
        self.error: Exception | None = None

    def _there(self) -> None:
        if self.away:
            raise CoordinatorUnavailable("away")

    async def register(self, told: m.EngineRegistration) -> m.RegistrationResponse:
        self._there()
        if self.error is not None:
            raise self.error
        self.registered.append(told)
        return m.RegistrationResponse(7, wanted_engines=self.wanted)

    async def engine_stopped(self, stopped: m.EngineStopped) -> m.RegistrationResponse:
        self._there()
        self.said.append(f"gone: {stopped.reason}")
        return m.RegistrationResponse(7)

    async def drain(self, drain: m.DrainRequest) -> m.DrainResponse:
        self._there()
        left = self.in_flight.pop(0) if len(self.in_flight) > 1 else self.in_flight[0]
        self.said.append(f"drain: {left}")
        return m.DrainResponse(7, left)


def supervisor(path: Path, ear: Any, command: list[str] | None = None, **more: Any) -> EngineSupervisor:
    process = EngineProcess(command or FAKE, engine_id="e", host="127.0.0.1", log_dir=path, **more)
    return EngineSupervisor(process, ear, drain_s=60.0)


def gone(pid: int | None) -> bool:
    assert pid is not None
    return not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


async def test_it_registers_drains_and_ends(tmp_path: Path) -> None:
    ear = Ear()
    it = supervisor(tmp_path, ear)
    await it.start()
    await until(lambda: len(ear.registered) > 1 and it.wanted_engines == 3)
    told = ear.registered[0]
    assert told.url == it.process.url
    assert told.description.capacity_tokens == 16_000
    assert told.description.instance == it.process.instance
    assert ear.registered[-1].seen_epoch == 7
    it.check()
    ear.in_flight = [2, 0, 1, 0]
    await it.stop()
    assert ear.said == ["drain: 2", "drain: 0", "drain: 1", "drain: 0", "drain: 0", "gone: stopped"]
    assert gone(it.process.pid)
    await it.stop()


async def test_a_process_that_ends_is_reported_at_once_and_fails_the_check(tmp_path: Path) -> None:
    ear = Ear()
    it = supervisor(tmp_path, ear)
    await it.start()
    await until(lambda: ear.registered)
    assert it.process.pid is not None
    os.kill(it.process.pid, signal.SIGKILL)
    await until(lambda: ear.said)
    assert ear.said == ["gone: its process ended"]
    with pytest.raises(EngineFailed, match="ended with code -9"):
        it.check()
    await it.stop()


async def test_while_the_coordinator_is_away_the_engine_goes_on(tmp_path: Path) -> None:
    ear = Ear()
    ear.away = True
    it = supervisor(tmp_path, ear)
    await it.start()
    assert await it.process.check_health()
    ear.away = False
    await until(lambda: ear.registered)
    await it.stop()


async def test_the_wanted_number_stays_while_a_coordinator_does_not_know_it(tmp_path: Path) -> None:
    ear = Ear()
    it = supervisor(tmp_path, ear)
    await it.start()
    await until(lambda: it.wanted_engines == 3)
    ear.wanted = 0
    seen = len(ear.registered)
    await until(lambda: len(ear.registered) > seen + 1)
    assert it.wanted_engines == 3
    assert ear.registered[0].wanted_engines == 0
    assert ear.registered[-1].wanted_engines == 3, "a new coordinator continues from it"
    await it.stop()


WITH_CHILD = [
    sys.executable,
    "-c",
    "import runpy, subprocess, sys\n"
    "print('child', subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    "sys.argv = sys.argv[1:]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n",
    *FAKE[1:],
]
"""A fake engine with a child, as vLLM's API server has the process of its core."""


def child_of(it: EngineSupervisor) -> int:
    return int(it.process.log_path.read_text().split("child ")[1].split()[0])


async def test_the_children_of_a_process_that_ends_alone_end_too(tmp_path: Path) -> None:
    ear = Ear()
    it = supervisor(tmp_path, ear, WITH_CHILD)
    await it.start()
    child = child_of(it)
    assert not gone(child)
    assert it.process.pid is not None
    os.kill(it.process.pid, signal.SIGKILL)
    await until(lambda: gone(child))
    await until(lambda: ear.said == ["gone: its process ended"])
    await it.stop()


async def test_an_engine_that_counts_as_failed_and_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "STOP_GRACE_S", 0.2)
    ear = Ear()
    it = supervisor(tmp_path, ear, WITH_CHILD)
    await it.start()
    child = child_of(it)
    assert it.process.pid is not None
    os.kill(it.process.pid, signal.SIGSTOP)  # so that it does not react to SIGTERM

    async def dead() -> bool:
        return False

    monkeypatch.setattr(it.process, "check_health", dead)
    await until(lambda: gone(it.process.pid) and gone(child))
    with pytest.raises(EngineFailed, match="reports that it is unhealthy"):
        it.check()
    await until(lambda: ear.said)
    await it.stop()


async def test_a_group_that_has_ended_is_not_killed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = supervisor(tmp_path, Ear())
    await it.start()
    await it.process.end(60.0)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    await it.stop()
    assert killed == [], "another process may have got the number"


async def test_an_unexpected_error_of_a_call_does_not_end_the_supervision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "HEARTBEAT_INTERVAL_S", 0.01)
    ear = Ear()
    ear.error = OSError("the socket is gone")
    asked = []
    real = ear.register

    async def register(told: m.EngineRegistration) -> m.RegistrationResponse:
        asked.append(told)
        return await real(told)

    ear.register = register  # type: ignore[method-assign]
    it = supervisor(tmp_path, ear)
    await it.start()
    await until(lambda: len(asked) > 3)
    it.check()
    ear.error = None
    await until(lambda: ear.registered)
    assert caplog.text.count("the socket is gone") == 1
    await it.stop()


async def test_an_unexpected_error_of_a_description_does_not_end_the_supervision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr(engine_supervisor, "HEARTBEATS_PER_DESCRIPTION", 2)
    ear = Ear()
    it = supervisor(tmp_path, ear)
    await it.start()

    async def describe() -> None:
        raise ValueError("no such unit")

    monkeypatch.setattr(it.process, "describe", describe)
    await until(lambda: "no such unit" in caplog.text)
    seen = len(ear.registered)
    await until(lambda: len(ear.registered) > seen + 2)
    it.check()
    await it.stop()


async def test_a_supervision_that_ends_with_an_error_is_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear()
    it = supervisor(tmp_path, ear)
    await it.start()

    async def check_health() -> bool:
        raise RuntimeError("the session is closed")

    monkeypatch.setattr(it.process, "check_health", check_health)
    await until(lambda: gone(it.process.pid))
    with pytest.raises(EngineFailed, match="supervision failed: RuntimeError: the session is closed"):
        it.check()
    await until(lambda: ear.said)
    assert "please report this" in caplog.text
    await it.stop()


async def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    code = "import sys; print('no such model'); sys.exit(3)"
    it = supervisor(tmp_path, Ear(), [sys.executable, "-c", code])
    with pytest.raises(EngineFailed, match=r"(?s)code 3 while starting.*no such model"):
        await it.start()
    code = "import time; print('still loading', flush=True); time.sleep(600)"
    it = supervisor(tmp_path, Ear(), [sys.executable, "-c", code], start_timeout_s=1.0)
    with pytest.raises(EngineFailed, match="not ready after"):
        await it.start()
    assert gone(it.process.pid)


async def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, os, time\n"
        "guard = 'sojourn_server.gateway.ray.parent_death_signal'\n"
        "guarded = [sys.executable, '-m', guard, str(os.getpid())]\n"
        "child = subprocess.Popen([*guarded, 'sleep', '600'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(await asyncio.to_thread(parent.stdout.readline))
    await until(lambda: "sleep" in Path(f"/proc/{child}/comm").read_text())
    parent.kill()
    await until(lambda: gone(child))
    parent.wait()
    parent.stdout.close()


def test_rays_environment_is_not_the_engines() -> None:
    here = {
        "RAY_ADDRESS": "x",
        "SERVE_X": "x",
        "OMP_NUM_THREADS": "1",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "2",
    }
    assert environment(here, {"OMP_NUM_THREADS": "8"}) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "2",
        "OMP_NUM_THREADS": "8",
    }
