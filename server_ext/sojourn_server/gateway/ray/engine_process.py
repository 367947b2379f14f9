"""One engine as a child process: starts, polls, describes and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from sojourn.wire_codec import CAPABILITIES_PATH

from ...routing.routing_events import PairRole
from ...routing.routing_status import LinkStats
from ..http.engine_descriptions import (
    EngineDescription,
    PairEngineDescription,
    describe_engine,
    describe_pair,
)
from ..http.engine_probe import EngineProbe

logger = logging.getLogger(__name__)

READY_POLL_S = 0.25
"""Seconds between two polls of an engine that starts."""
PROGRESS_LOG_INTERVAL_S = 15.0
"""Seconds between two log lines about an engine that starts."""
STOP_GRACE_S = 10.0
"""Seconds for an engine to end after SIGTERM before it is killed."""

_EXCLUDED_PREFIXES = ("RAY_", "SERVE_")
"""Prefixes of the names of Ray's environment variables. Engines do not get these variables."""
# Ray sets this variable to the actor's reserved CPUs; the engine may use more.
_EXCLUDED_VARIABLES = frozenset({"OMP_NUM_THREADS"})


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
        role: PairRole | None = None,
        words: Mapping[str, str] | None = None,
    ) -> None:
        """``environment``: variables that are added to this process's own. Of the latter, Ray's are left out.
        ``key``: key for queries to the engine. ``role``: role of a prefill or decode engine; ``None``: the
        engine computes both stages. With a role, the start fails if the engine cannot be part of a pair.
        ``words``: further placeholders of ``command``, with their values."""
        self.engine_id = engine_id
        self.role = role
        self.instance = ""
        """Random id of the started process; empty before the start."""
        self.port = 0
        """Port of the engine's API; 0 before the start."""
        self.log_path = log_dir / f"engine-{engine_id}.log"
        """File of the engine's output."""
        self._host = host
        self._command = tuple(command)
        self._words = dict(words or {})
        self._added = dict(environment or {})
        self._key = key
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        """Whether ``end`` has killed the process group. Afterwards the group's number may belong to other
        processes."""
        self._session: aiohttp.ClientSession | None = None
        self._probe: EngineProbe | None = None

    @property
    def url(self) -> str:
        """URL of the engine's API."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id; ``None``: not started."""
        return self._process.pid if self._process is not None else None

    @property
    def code(self) -> int | None:
        """The exit code; ``None``: the engine runs, or was not started."""
        return self._process.poll() if self._process is not None else None

    async def start(self) -> EngineDescription:
        """Start the engine, wait until it answers, and return its description. Raises ``EngineFailed``, after
        the process has been ended."""
        self.port = _free_port(self._host)
        self.instance = secrets.token_hex(6)
        self._probe = EngineProbe(
            self.url,
            self._http,
            key=self._key,
            read=self._read,
            accepts=self._is_enough,
            max_error_polls=1,
        )
        self.log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        guarded = [sys.executable, "-m", "sojourn_server.gateway.ray.parent_death_signal", str(os.getpid())]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*guarded, *self._format_command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(os.environ, self._added),
                # Its own process group, so that it is ended together with its children.
                start_new_session=True,
            )
        logger.info("engine %s: process %d, log %s", self.engine_id, self._process.pid, self.log_path)
        try:
            return await self._ready()
        except BaseException:
            await self.end(0.0)
            raise

    async def check_health(self) -> bool | None:
        """Check the engine's health. True: the engine is alive. False: it refuses connections or reports that
        it is unhealthy. ``None``: unknown, for example because it does not answer in time."""
        assert self._probe is not None, "the engine was not started"
        return await self._probe.check_health()

    async def describe(self) -> EngineDescription | None:
        """Request the engine's description; ``None``: there is no description yet. If the new description is
        incomplete, return the last complete one. With values missing, the engine would look like another
        engine."""
        assert self._probe is not None, "the engine was not started"
        described = await self._probe.describe()
        if described is not None:
            self._probe.described = described
        return self._probe.described

    def _is_enough(self, answered: Collection[str]) -> bool:
        """Whether the answered paths suffice for a first description. With a role, the answer to
        ``/capabilities`` is needed; without a role, any answer suffices."""
        return CAPABILITIES_PATH in answered if self.role is not None else bool(answered)

    def _read(self, *answers: Any) -> EngineDescription:
        """Build the engine's description from its answers, with this process's ``instance``."""
        if self.role is None:
            return replace(describe_engine(*answers), instance=self.instance)
        pair = describe_pair(*answers)
        life = f"{self.instance} {pair.paths.epoch}" if pair.paths is not None else self.instance
        return replace(pair, instance=life)

    async def links(self) -> dict[str, LinkStats]:
        """Query the state of a prefill or decode engine's links, by link name; empty: not reported."""
        return (await self._probe.links() if self._probe is not None else None) or {}

    async def end(self, grace_s: float = STOP_GRACE_S) -> None:
        """Send SIGTERM to the engine, and wait at most ``grace_s`` seconds for its end. Then kill its process
        group, so that no child is left. Further calls have no effect."""
        process = self._process
        if process is not None and not self._is_ended:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                end_s = time.monotonic() + grace_s
                while process.poll() is None and time.monotonic() < end_s:
                    await asyncio.sleep(0.05)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._is_ended = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def log_tail(self, lines: int = 20) -> str:
        """Return the last ``lines`` lines of the engine's log; empty if the log cannot be read."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
                return "\n".join(log.read().decode("utf-8", "replace").splitlines()[-lines:])
        except OSError:
            return ""

    async def _ready(self) -> EngineDescription:
        """Wait until the started engine answers, and return its description. Raises ``EngineFailed``."""
        began_s = last_log_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - began_s
            if self.code is not None:
                raise EngineFailed(
                    f"the engine ended with code {self.code} while starting:\n{self.log_tail()}"
                )
            if await self.check_health():
                described = await self.describe()
                if described is not None:
                    self._check_role(described)
                    logger.info("engine %s answers at %s after %.1f s", self.engine_id, self.url, waited_s)
                    return described
            if waited_s > self._start_timeout_s:
                raise EngineFailed(f"the engine was not ready after {waited_s:.0f} s:\n{self.log_tail()}")
            if time.monotonic() - last_log_s >= PROGRESS_LOG_INTERVAL_S:
                last_log_s = time.monotonic()
                last = self.log_tail(1)[:160]
                logger.info("engine %s starts, %.0f s so far: %s", self.engine_id, waited_s, last)
            await asyncio.sleep(READY_POLL_S)

    def _check_role(self, described: EngineDescription) -> None:
        """Raise ``EngineFailed`` if the engine cannot be part of a pair in its role."""
        if self.role is None:
            return
        assert isinstance(described, PairEngineDescription)
        why = described.unfit
        if described.paths is not None and described.paths.role is not self.role:
            why = f"it is a {described.paths.role.value} engine; expected a {self.role.value} engine"
        if why:
            raise EngineFailed(f"the engine cannot be in a pair: {why}")

    def _format_command(self) -> list[str]:
        """Return the command with the values of all placeholders."""
        here = {"{host}": self._host, "{port}": str(self.port), "{engine}": self.engine_id}
        words = {**self._words, **here}
        filled = []
        for part in self._command:
            for word, value in words.items():
                part = part.replace(word, value)
            filled.append(part)
        return filled

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        return self._session


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
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
