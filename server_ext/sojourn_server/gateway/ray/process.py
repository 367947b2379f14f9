"""One engine as a process of ours: started, waited for, described, ended."""

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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import gt
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from sojourn.wire import CAPABILITIES_PATH

from ..http.watch import Description, describe
from ..pd.description import PairDescription, describe_pair
from ..pd.facts import Role
from ..pd.told import STATS_PATH, LinkTold, read_links

logger = logging.getLogger(__name__)

POLL_S = 0.25
ANSWER_TIMEOUT_S = 5.0
PROGRESS_S = 15.0
END_S = 10.0
"""What an engine gets to end by itself."""

_LEFT_OUT = ("RAY_", "SERVE_")
# Ray sets it to the CPUs that the actor reserved, which is not what the engine may use.
_NOT_OURS = frozenset({"OMP_NUM_THREADS"})


class EngineFailed(RuntimeError):
    """An engine did not start, or has ended; the text ends with the tail of its log."""


class EngineProcess:
    """``command`` has ``{host}``, ``{port}`` and ``{engine}`` where its address and its name go.

    ``start`` and ``end`` are to be called in one thread that lives as long as the engine is to.
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
        role: Role | None = None,
        words: Mapping[str, str] | None = None,
    ) -> None:
        """``environment`` is added to this process's, of which what is Ray's is left out. ``role``: of an
        engine that is to be one of a pair; one that is not does not start. ``words``: what stands in
        ``command`` beside address and name, and what for."""
        self.engine_id = engine_id
        self.role = role
        self.instance = ""
        self.port = 0
        self.log_path = log_dir / f"engine-{engine_id}.log"
        self._host = host
        self._command = tuple(command)
        self._words = dict(words or {})
        self._added = dict(environment or {})
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._described: Description | None = None
        """As it last told all that it tells."""
        self._told = [False, False, False]
        """Which parts of it."""

    @property
    def url(self) -> str:
        """Where it is reached."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """``None``: it was not started."""
        return self._process.pid if self._process is not None else None

    @property
    def code(self) -> int | None:
        """With which it ended; ``None``: it runs."""
        return self._process.poll() if self._process is not None else None

    async def start(self) -> Description:
        """Start it and wait until it answers. Raises ``EngineFailed``."""
        self.port = _free_port(self._host)
        self.instance = secrets.token_hex(6)
        self._described = None
        self.log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        guarded = [sys.executable, "-m", "sojourn_server.gateway.ray.guarded", str(os.getpid())]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*guarded, *self._filled_in()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(os.environ, self._added),
                # A group of its own: it is ended with all that it started.
                start_new_session=True,
            )
        logger.info("engine %s: process %d, log %s", self.engine_id, self._process.pid, self.log_path)
        try:
            return await self._ready()
        except BaseException:
            await self.end(0.0)
            raise

    async def lives(self) -> bool | None:
        """Whether it answers; ``None``: not in time."""
        try:
            timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
            async with self._http().get(
                f"{self.url}/health", headers=self._headers, timeout=timeout
            ) as answer:
                return answer.status not in (500, 503)
        except aiohttp.ClientConnectorError:
            return False
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None

    async def describe(self) -> Description | None:
        """What it tells of itself; ``None``: nothing. While it leaves out what it told before, it is as it
        was: what is missing would look like another engine."""
        parts = await asyncio.gather(
            self._json(CAPABILITIES_PATH), self._text("/metrics"), self._json("/v1/models")
        )
        told = [part is not None for part in parts]
        if self._described is not None and any(map(gt, self._told, told)):
            return self._described
        described = self._read(*parts)
        if described is not None:
            self._told, self._described = told, described
        return described

    def _read(
        self, capabilities: dict[str, Any] | None, metrics: str | None, models: dict[str, Any] | None
    ) -> Description | None:
        if capabilities is None and (self.role is not None or (metrics is None and models is None)):
            return None
        told = (capabilities or {}, metrics or "", models or {}, 0)
        if self.role is None:
            return replace(describe(*told), instance=self.instance)
        pair = describe_pair(*told)
        life = f"{self.instance} {pair.paths.epoch}" if pair.paths is not None else self.instance
        return replace(pair, instance=life)

    async def links(self) -> dict[str, LinkTold]:
        """What waits for the links of one of a pair; empty: it does not say."""
        return read_links(await self._json(STATS_PATH) or {}) or {}

    async def end(self, grace_s: float = END_S) -> None:
        """End it and all that it started. May be called again."""
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                end_s = time.monotonic() + grace_s
                while process.poll() is None and time.monotonic() < end_s:
                    await asyncio.sleep(0.05)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
                return "\n".join(log.read().decode("utf-8", "replace").splitlines()[-lines:])
        except OSError:
            return ""

    async def _ready(self) -> Description:
        began_s = said_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - began_s
            if self.code is not None:
                raise EngineFailed(
                    f"the engine ended with code {self.code} while starting:\n{self.log_tail()}"
                )
            if await self.lives():
                described = await self.describe()
                if described is not None:
                    self._check_role(described)
                    logger.info("engine %s answers at %s after %.1f s", self.engine_id, self.url, waited_s)
                    return described
            if waited_s > self._start_timeout_s:
                raise EngineFailed(f"the engine was not ready after {waited_s:.0f} s:\n{self.log_tail()}")
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                last = self.log_tail(1)[:160]
                logger.info("engine %s starts, %.0f s so far: %s", self.engine_id, waited_s, last)
            await asyncio.sleep(POLL_S)

    def _check_role(self, told: Description) -> None:
        if self.role is None:
            return
        assert isinstance(told, PairDescription)
        why = told.unfit
        if told.paths is not None and told.paths.role is not self.role:
            why = f"it is a {told.paths.role.value} engine; expected a {self.role.value} engine"
        if why:
            raise EngineFailed(f"the engine cannot be in a pair: {why}")

    def _filled_in(self) -> list[str]:
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

    async def _json(self, path: str) -> dict[str, Any] | None:
        text = await self._text(path)
        try:
            found = msgspec.json.decode(text) if text is not None else None
        except msgspec.DecodeError:
            return None
        return found if isinstance(found, dict) else None

    async def _text(self, path: str) -> str | None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        try:
            async with self._http().get(self.url + path, headers=self._headers, timeout=timeout) as answer:
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, UnicodeDecodeError):
            return None


def environment(here: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """An engine's: this process's without what Ray put there, and what was added for it."""
    kept = {
        name: value
        for name, value in here.items()
        if not name.startswith(_LEFT_OUT) and name not in _NOT_OURS
    }
    return {**kept, **added}


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
