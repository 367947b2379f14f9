"""One engine as a child process: starts, watches, drains and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from ..http.engine_client import ask_engine, bearer

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks at an engine."""
ANSWER_TIMEOUT_S = 5.0
"""Maximum seconds to wait for an engine's answer."""
STOP_GRACE_S = 10.0
"""Seconds for an engine to end after SIGTERM before it is killed."""
MAX_FAILED_HEALTH_CHECKS = 3
"""Number of consecutive failed health checks after which a running process counts as failed."""

_EXCLUDED_PREFIXES = ("RAY_", "SERVE_")
"""Prefixes of the names of Ray's environment variables. Engines do not get these variables."""
# Ray sets this variable to the actor's reserved CPUs; the engine may use more.
_EXCLUDED_VARIABLES = frozenset({"OMP_NUM_THREADS"})
_PLACEHOLDER = re.compile(r"\{\w+\}")
_KV_USE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{.*\})? (\S+)$", re.MULTILINE)
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)


class EngineFailed(RuntimeError):
    """An engine failed to start, or has ended. The text says why. After a failed start, the text may end with
    the last lines of the engine's log."""


class EngineProcess:
    """An engine in a child process. In ``command``, ``{host}``, ``{port}`` and ``{engine}`` stand for the
    engine's address and id.

    Call ``start`` in a thread that lives as long as the engine, because the engine ends with the thread that
    started it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        engine_id: str,
        host: str,
        log_dir: Path,
        environment: Mapping[str, str] | None = None,
        key: str | None = None,
        start_timeout_s: float = 1800.0,
        words: Mapping[str, str] | None = None,
    ) -> None:
        """``environment``: variables that are added to this process's own. Of the latter, Ray's are left out.
        ``key``: key for queries to the engine. ``words``: further placeholders of ``command``, with their
        values."""
        self.engine_id = engine_id
        self.log_path = log_dir / f"engine-{engine_id}.log"
        """File of the engine's output."""
        self._port = 0
        self._host = host
        self._command = tuple(command)
        self._words = dict(words or {})
        self._added = dict(environment or {})
        self._authorization = bearer(key)
        self._start_timeout_s = start_timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        """The engine's process; ``None``: not started."""
        self._failure: str | None = None
        """Why the engine counts as failed, although its process still ran; ``None``: it has not failed."""
        self._is_ended = False
        """Whether ``end`` has killed the process group. Afterwards the group's number may belong to other
        processes."""

    @property
    def url(self) -> str:
        """URL of the engine's API."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def code(self) -> int | None:
        """The exit code; ``None``: the engine runs, or was not started."""
        return self.process.poll() if self.process is not None else None

    def check(self) -> None:
        """Raise ``EngineFailed`` if the engine is gone."""
        # A failed engine's process is killed, so the reason is in ``_failure`` and not in the exit code.
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self.code is not None:
            raise EngineFailed(f"the engine's process ended with code {self.code}")

    async def start(self) -> None:
        """Start the engine, and wait until it is healthy. Raises ``EngineFailed``, after the process has been
        ended."""
        self._port = _free_port(self._host)
        self.log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        guarded = [sys.executable, "-m", "sojourn_server.gateway.ray.parent_death_signal", str(os.getpid())]
        values = {**self._words, "{host}": self._host, "{port}": str(self._port), "{engine}": self.engine_id}
        command = [_PLACEHOLDER.sub(lambda one: values.get(one[0], one[0]), part) for part in self._command]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*guarded, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(os.environ, self._added),
                # Its own process group, so that it is ended together with its children.
                start_new_session=True,
            )
        logger.info("engine %s: process %d, log %s", self.engine_id, self.process.pid, self.log_path)
        try:
            await self._ready()
        except BaseException:
            await self.end()
            raise

    async def watch(self) -> None:
        """Return when the engine has ended or counts as failed, after its process group was ended. A child
        that is left, or a process that hangs, would hold the memory that the next engine needs."""
        failed = 0
        while self.code is None and failed < MAX_FAILED_HEALTH_CHECKS:
            await asyncio.sleep(POLL_S)
            failed = failed + 1 if await self._is_healthy() is False else 0
        if self.code is None:
            self._failure = "the engine reports that it is unhealthy, or refuses connections"
            logger.warning("engine %s: %s", self.engine_id, self._failure)
        await self.end()

    async def load(self) -> tuple[float, int] | None:
        """Ask the engine for its load. Return (used fraction of its KV memory, the mean of its data-parallel
        ranks; number of running and waiting requests). ``None``: no answer."""
        async with aiohttp.ClientSession(trust_env=False) as session:
            answer = await ask_engine(
                session, f"{self.url}/metrics", authorization=self._authorization, timeout_s=ANSWER_TIMEOUT_S
            )
        if answer is None:
            return None
        text = answer.body.decode(errors="replace")
        uses = [float(use) for use in _KV_USE.findall(text)]
        requests = sum(float(number) for number in _REQUESTS.findall(text))
        return (sum(uses) / len(uses) if uses else 0.0, round(requests))

    async def drain(self, unseen_s: float, drain_s: float) -> None:
        """Wait until the engine has had no request for ``unseen_s`` seconds, at most ``drain_s`` seconds.
        ``unseen_s``: seconds until all gateways know that the engine takes no new programs."""
        end_s = time.monotonic() + drain_s
        busy_s = time.monotonic()
        while self.code is None and time.monotonic() - busy_s < min(unseen_s, drain_s):
            if time.monotonic() >= end_s:
                logger.warning("engine %s stops with requests in flight", self.engine_id)
                return
            load = await self.load()
            if load is None or load[1]:
                busy_s = time.monotonic()
            await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """Send SIGTERM to the engine, and wait at most ``STOP_GRACE_S`` for its end. Then kill its process
        group, so that no child is left. Further calls have no effect."""
        process = self.process
        if process is None or self._is_ended:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            end_s = time.monotonic() + STOP_GRACE_S
            while process.poll() is None and time.monotonic() < end_s:
                await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._is_ended = True

    def _log_tail(self) -> str:
        """Return the last 20 lines of the engine's log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
            return "\n".join(log.read().decode("utf-8", "replace").splitlines()[-20:])

    async def _ready(self) -> None:
        """Wait until the started engine is healthy. Raises ``EngineFailed``."""
        began_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - began_s
            if self.code is not None:
                raise EngineFailed(
                    f"the engine ended with code {self.code} while starting:\n{self._log_tail()}"
                )
            if await self._is_healthy():
                logger.info("engine %s answers at %s after %.1f s", self.engine_id, self.url, waited_s)
                return
            if waited_s > self._start_timeout_s:
                raise EngineFailed(f"the engine was not ready after {waited_s:.0f} s:\n{self._log_tail()}")
            await asyncio.sleep(POLL_S)

    async def _is_healthy(self) -> bool | None:
        """Check the engine's health. False: it says that it is unhealthy, or refuses connections. ``None``:
        unknown, for example because it does not answer in time."""
        headers = {"Authorization": self._authorization} if self._authorization else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(trust_env=False, timeout=timeout) as session,
                session.get(f"{self.url}/health", headers=headers) as answer,
            ):
                return answer.status < 300 or (False if answer.status in (500, 503) else None)
        except aiohttp.ClientConnectorError as error:
            return False if isinstance(error.os_error, ConnectionRefusedError) else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def environment(here: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for an engine: ``here`` without Ray's variables, plus ``added``."""
    kept = {
        name: value
        for name, value in here.items()
        if not name.startswith(_EXCLUDED_PREFIXES) and name not in _EXCLUDED_VARIABLES
    }
    return {**kept, **added}


def _free_port(host: str) -> int:
    """Return a TCP port that is free at ``host`` now. Another process may take it before the engine does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])
