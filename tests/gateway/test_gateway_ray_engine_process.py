"""One engine as a process: started, watched, drained, ended, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_harness import until
from sojourn_server.gateway.ray import engine_process
from sojourn_server.gateway.ray.engine_process import EngineFailed, EngineProcess, engine_environment
from sojourn_server.launch.engine_server import ServerStartError

FAKE = [sys.executable, str(Path(__file__).with_name("fake_engine_process.py")), "{host}", "{port}"]
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


def engine(path: Path, command: list[str] | None = None, **more: Any) -> EngineProcess:
    return EngineProcess(command=command or FAKE, engine_id="e", log_path=path / "log", **more)


def gone(of: EngineProcess | int) -> bool:
    pid = of if isinstance(of, int) else of.process.pid if of.process is not None else 0
    return not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


async def test_it_tells_its_load_and_drains_before_its_end(tmp_path: Path) -> None:
    it = engine(tmp_path)
    await it.start()
    it.check()
    body = {"model": "tiny", "messages": [], "stream": True, "events": 20, "gap_s": 0.05, "kv_use": 0.25}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{it.url}/v1/chat/completions", json=body) as answer,
    ):
        assert await it.load() == (0.25, 1)
        await it.drain(0.1, 60.0)
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert await it.load() == (0.25, 0)
    await it.stop()
    assert gone(it)
    assert await it.load() is None


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_engine_that_ends_or_hangs_fails_its_check_and_leaves_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    monkeypatch.setattr(engine_process, "POLL_S", 0.05)
    monkeypatch.setattr(engine_process, "STOP_GRACE_S", 0.2)
    it = engine(tmp_path, WITH_CHILD)
    await it.start()
    child = int(it.log_tail().split("child ")[1].split()[0])
    assert not gone(child)
    assert it.process is not None
    os.kill(it.process.pid, sent)
    if sent is signal.SIGSTOP:  # as an engine whose core has died answers
        monkeypatch.setattr(it, "is_healthy", lambda: False)
    await it.watch()
    assert gone(it)
    await until(lambda: gone(child))
    why = "ended with code -9" if sent is signal.SIGKILL else "reports that it is unhealthy"
    with pytest.raises(EngineFailed, match=why):
        it.check()
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    await it.stop()
    assert killed == [], "another process may have got the number"


async def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    code = "import sys; print('no such model'); sys.exit(3)"
    it = engine(tmp_path, [sys.executable, "-c", code])
    with pytest.raises(ServerStartError, match=r"(?s)code 3 while starting.*no such model"):
        await it.start()
    code = "import time; print('still loading', flush=True); time.sleep(600)"
    it = engine(tmp_path, [sys.executable, "-c", code], start_timeout_s=1.0)
    with pytest.raises(ServerStartError, match="not ready after"):
        await it.start()
    assert gone(it)


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
    here = {"RAY_ADDRESS": "x", "SERVE_X": "x", "OMP_NUM_THREADS": "1", "PATH": "/bin"}
    assert engine_environment(here, {"OMP_NUM_THREADS": "8"}) == {"PATH": "/bin", "OMP_NUM_THREADS": "8"}
