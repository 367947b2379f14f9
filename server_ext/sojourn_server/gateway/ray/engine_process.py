"""One engine as a child process: starts, watches, drains and ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from ...launch.engine_server import ServerProcess, free_port

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks at an engine."""
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
    """An engine has ended. The text says why."""


@dataclass(eq=False, repr=False, kw_only=True)
class EngineProcess(ServerProcess):
    """An engine in a child process.

    Call ``start`` in a thread that lives as long as the engine, because the engine ends with the thread that
    started it.
    """

    command: Sequence[str]
    """In it, ``{host}``, ``{port}`` and ``{engine}`` stand for the engine's address and id."""
    engine_id: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to this process's own. Of the latter, Ray's are left out."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Further placeholders of ``command``, with their values."""
    start_timeout_s: float = 1800.0
    failure: str | None = field(default=None, init=False)
    """Why the engine counts as failed, although its process still ran; ``None``: it has not failed."""

    def check(self) -> None:
        """Raise ``EngineFailed`` if the engine is gone."""
        # A failed engine's process is killed, so the reason is in ``failure`` and not in the exit code.
        if self.failure is not None:
            raise EngineFailed(self.failure)
        if self.code is not None:
            raise EngineFailed(f"the engine's process ended with code {self.code}")

    async def start(self) -> None:
        """Start the engine, and wait until it is healthy. Raises ``ServerStartError``, after the process has
        been ended."""
        self.port = free_port(self.host)
        guarded = [sys.executable, "-m", "sojourn_server.gateway.ray.parent_death_signal", str(os.getpid())]
        values = {**self.words, "{host}": self.host, "{port}": str(self.port), "{engine}": self.engine_id}
        command = [_PLACEHOLDER.sub(lambda one: values.get(one[0], one[0]), part) for part in self.command]
        self.launch([*guarded, *command], engine_environment(os.environ, self.environment))
        logger.info("engine %s: log %s", self.engine_id, self.log_path)
        try:
            await asyncio.to_thread(self.wait_until_ready, self.start_timeout_s)
        except BaseException:
            await self.stop()
            raise
        logger.info("engine %s answers at %s", self.engine_id, self.url)

    async def watch(self) -> None:
        """Return when the engine has ended or counts as failed, after its process group was ended. A child
        that is left, or a process that hangs, would hold the memory that the next engine needs."""
        failed = 0
        while self.code is None and failed < MAX_FAILED_HEALTH_CHECKS:
            await asyncio.sleep(POLL_S)
            failed = failed + 1 if await asyncio.to_thread(self.is_healthy) is False else 0
        if self.code is None:
            self.failure = "the engine reports that it is unhealthy, or refuses connections"
            logger.warning("engine %s: %s", self.engine_id, self.failure)
        await self.stop()

    async def load(self) -> tuple[float, int] | None:
        """Ask the engine for its load. Return (used fraction of its KV memory, the mean of its data-parallel
        ranks; number of running and waiting requests). ``None``: no answer."""
        try:
            text = (await asyncio.to_thread(self.get, "/metrics")).text
        except httpx.HTTPError:
            return None
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

    async def stop(self) -> None:
        """Send SIGTERM to the engine, and wait at most ``STOP_GRACE_S`` for its end. Then kill its process
        group. Further calls have no effect."""
        await asyncio.to_thread(self.end, STOP_GRACE_S)


def engine_environment(here: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for an engine: ``here`` without Ray's variables, plus ``added``."""
    kept = {
        name: value
        for name, value in here.items()
        if not name.startswith(_EXCLUDED_PREFIXES) and name not in _EXCLUDED_VARIABLES
    }
    return {**kept, **added}
