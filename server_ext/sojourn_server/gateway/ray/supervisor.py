"""Looks after one engine's process, and tells the coordinator of it. Without Ray: a deployment wraps it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from ..http.watch import Description
from ..pd.description import PairDescription
from ..pd.told import LinkTold
from .calls import CoordinatorAway, CoordinatorCalls, answered
from .messages import CannotBeWritten, Drain, EngineGone, Registration
from .process import END_S, EngineFailed, EngineProcess

logger = logging.getLogger(__name__)

BEAT_S = 0.5
POLL_S = 0.1
DESCRIBE_EVERY = 60
"""Beats between two looks at what the engine can hold."""
LINKS_EVERY = 4
"""The same of an engine of pairs, with what waits for its links."""
CALL_TIMEOUT_S = 5.0
LOOK_AGAIN_S = 0.2
MOST_DEAD = 3
"""Looks in a row at an engine whose process lives and which says that it is dead."""


class Supervisor:
    """One engine's, from ``start`` to ``stop``."""

    def __init__(self, process: EngineProcess, calls: CoordinatorCalls, *, drain_s: float) -> None:
        """``drain_s``: how long turns that are on their way may take when it is to stop."""
        self.process = process
        self.wanted_engines = 0
        self._calls = calls
        self._drain_s = drain_s
        self._description: Description | None = None
        self._links: dict[str, LinkTold] = {}
        """As they were at the last look, if that has not been told."""
        self._epoch = 0
        self._failure: str | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine, and look after it from then on. Raises ``EngineFailed``."""
        self._description = await self.process.start()
        self._looking = asyncio.ensure_future(self._look_after())

    def check(self) -> None:
        """Raises ``EngineFailed`` where the engine is gone."""
        if self.process.code is not None:
            raise EngineFailed(f"the engine's process ended with code {self.process.code}")
        if self._failure is not None:
            raise EngineFailed(self._failure)

    async def _look_after(self) -> None:
        """Until cancelled, or the engine is gone."""
        watching = asyncio.ensure_future(self._watch_process())
        beating = asyncio.ensure_future(self._beat())
        try:
            await asyncio.wait({watching, beating}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watching, beating):
                task.cancel()
            await asyncio.gather(watching, beating, return_exceptions=True)
        with contextlib.suppress(EngineFailed):
            self.check()
            return
        await self._say_gone()

    async def stop(self) -> None:
        """Let it be left by all, then end it."""
        try:
            if self.process.code is None and self._failure is None:
                await self._drained()
            if self._looking is not None:
                # It must not register once more after it is gone.
                self._looking.cancel()
                await asyncio.gather(self._looking, return_exceptions=True)
            await self._say_gone("stopped")
        finally:
            await self.process.end(END_S)

    async def _watch_process(self) -> None:
        while self.process.code is None:
            await asyncio.sleep(POLL_S)

    async def _beat(self) -> None:
        beats = dead = 0
        every = DESCRIBE_EVERY if self.process.role is None else LINKS_EVERY
        while True:
            lives = await self.process.lives()
            dead = dead + 1 if lives is False else 0
            if dead >= MOST_DEAD:
                self._failure = "the engine says that it is dead, or takes no connections"
                logger.warning("engine %s: %s", self.process.engine_id, self._failure)
                return
            # Of one that is slow to answer nothing is said: its lease runs, and gateways look.
            if lives:
                if beats % every == every - 1:
                    await self._look_again()
                beats += 1
                await self._register()
            await asyncio.sleep(BEAT_S)

    async def _look_again(self) -> None:
        found = await self.process.describe()
        if isinstance(found, PairDescription):
            self._links = await self.process.links()
            if found.unfit:
                return  # half an answer: it was fit when it started
        self._description = found or self._description

    async def _register(self) -> None:
        of, links = self._description, self._links
        assert of is not None
        paths = of.paths if isinstance(of, PairDescription) else None
        told = Registration(self.process.engine_id, self.process.url, of, self._epoch, paths, links)
        self._links = {}  # told once: between two looks whoever decides counts by itself
        try:
            answer = await answered(self._calls.register(told), CALL_TIMEOUT_S)
        except (CoordinatorAway, CannotBeWritten) as error:
            if isinstance(error, CannotBeWritten):
                logger.warning("engine %s describes itself oddly: %s", self.process.engine_id, error)
            return
        if answer.epoch >= self._epoch:
            self._epoch = answer.epoch
            self.wanted_engines = answer.wanted_engines

    async def _say_gone(self, reason: str = "its process ended") -> None:
        instance = self._description.instance if self._description is not None else self.process.instance
        gone = EngineGone(self.process.engine_id, instance, reason)
        with contextlib.suppress(CoordinatorAway):
            await answered(self._calls.gone(gone), CALL_TIMEOUT_S)

    async def _drained(self) -> None:
        end_s = time.monotonic() + self._drain_s
        drain = Drain(self.process.engine_id)
        quiet = 0
        # Twice: a turn that a gateway sent without asking is told of a moment later.
        while quiet < 2 and time.monotonic() < end_s and self.process.code is None:
            with contextlib.suppress(CoordinatorAway):
                drained = await answered(self._calls.drain(drain), CALL_TIMEOUT_S)
                quiet = quiet + 1 if not drained.in_flight else 0
            await asyncio.sleep(LOOK_AGAIN_S)
        if quiet < 2:
            logger.warning("engine %s stops with requests on their way", self.process.engine_id)
