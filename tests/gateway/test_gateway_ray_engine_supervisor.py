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

    def _there(self) -> None:
        if self.away:
            raise CoordinatorUnavailable("away")

    async def register(self, told: m.EngineRegistration) -> m.RegistrationResponse:
        self._there()
        self.registered.append(told)
        return m.RegistrationResponse(7, wanted_engines=3)

    async def gone(self, gone: m.EngineStopped) -> m.RegistrationResponse:
        self._there()
        self.said.append(f"gone: {gone.reason}")
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
    assert await it.process.lives()
    ear.away = False
    await until(lambda: ear.registered)
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
