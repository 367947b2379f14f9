"""Supervises one engine's process, and registers the engine with the coordinator, which decides for all
gateways. ``deployments`` runs a supervisor in each engine replica on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from ...metrics.rate_limited_log import RateLimitedLog
from ...routing.routing_status import LinkStats
from ..http.engine_descriptions import EngineDescription, PairEngineDescription
from .coordinator_messages import (
    CoordinatorClient,
    CoordinatorUnavailable,
    DrainRequest,
    EngineRegistration,
    EngineStopped,
    MessageEncodingError,
    call_with_timeout,
)
from .engine_process import STOP_GRACE_S, EngineFailed, EngineProcess

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.5
"""Seconds between two registrations of the engine with the coordinator (heartbeats)."""
PROCESS_POLL_S = 0.1
"""Seconds between two looks at the engine's process."""
HEARTBEATS_PER_DESCRIPTION = 60
"""Number of heartbeats between two queries for the description of an engine without a role (prefill or
decode)."""
HEARTBEATS_PER_LINK_STATUS = 4
"""Number of heartbeats between two queries for the description of a prefill or decode engine. The engine's
links are queried at the same time."""
SUPERVISOR_CALL_TIMEOUT_S = 5.0
"""Seconds that a supervisor waits for the coordinator's answer."""
DRAIN_POLL_S = 0.2
"""Seconds between two queries for the progress of a drain."""
MAX_FAILED_HEALTH_CHECKS = 3
"""Number of consecutive failed health checks after which a running process counts as failed."""


class EngineSupervisor:
    """Supervises one engine, from ``start`` to ``stop``."""

    def __init__(self, process: EngineProcess, calls: CoordinatorClient, *, drain_s: float) -> None:
        """``drain_s``: maximum seconds for running turns to end when the engine stops."""
        self.process = process
        self.wanted_engines = 0
        """Number of engines that the coordinator wants, as of its last answer; 0: unknown."""
        self._calls = calls
        self._drain_s = drain_s
        self._description: EngineDescription | None = None
        self._links: dict[str, LinkStats] = {}
        """The engine's last report of its links, until it is sent; empty: there is none."""
        self._epoch = 0
        """Highest epoch of a coordinator that has answered. A later coordinator has a higher epoch."""
        self._failure: str | None = None
        """Why the engine counts as failed, although its process still ran; ``None``: it has not failed."""
        self._rate_limited_log = RateLimitedLog(logger)
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine, and supervise it from then on. Raises ``EngineFailed``."""
        self._description = await self.process.start()
        self._supervising = asyncio.ensure_future(self._supervise())

    def check(self) -> None:
        """Raise ``EngineFailed`` if the engine is gone."""
        # A failed engine's process is killed, so the reason is in ``_failure`` and not in the exit code.
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self.process.code is not None:
            raise EngineFailed(f"the engine's process ended with code {self.process.code}")

    async def _supervise(self) -> None:
        """Check and register the engine regularly, until cancelled or until the engine is gone.

        If the engine is gone, report this to the coordinator, and end the engine's process group. A child
        that is left, or a process that hangs, would hold the memory that the next engine needs.
        """
        try:
            await self._watch_until_gone()
        except Exception as error:
            self._failure = f"its supervision failed: {type(error).__name__}: {error}"
            logger.exception("engine %s: its supervision failed; please report this", self.process.engine_id)
        await asyncio.gather(self._report_stopped(), self.process.end(STOP_GRACE_S))

    async def _watch_until_gone(self) -> None:
        """Check and register the engine regularly. Returns when the engine's process has ended, or when the
        engine counts as failed. Raises the unexpected errors of the checks and registrations."""
        watching = asyncio.ensure_future(self._watch_process())
        beating = asyncio.ensure_future(self._send_heartbeats())
        try:
            done, _ = await asyncio.wait({watching, beating}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watching, beating):
                task.cancel()
            await asyncio.gather(watching, beating, return_exceptions=True)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Drain the engine for at most ``drain_s``, report its end to the coordinator, and end the
        process."""
        try:
            if self.process.code is None and self._failure is None:
                await self._drain_and_wait()
            if self._supervising is not None:
                # The engine must not register again after its end.
                self._supervising.cancel()
                await asyncio.gather(self._supervising, return_exceptions=True)
            await self._report_stopped("stopped")
        finally:
            await self.process.end(STOP_GRACE_S)

    async def _watch_process(self) -> None:
        """Wait until the engine's process has ended."""
        while self.process.code is None:
            await asyncio.sleep(PROCESS_POLL_S)

    async def _send_heartbeats(self) -> None:
        """Register the engine regularly while it is healthy. Returns when it has failed too many health
        checks."""
        beats = dead = 0
        every = HEARTBEATS_PER_DESCRIPTION if self.process.role is None else HEARTBEATS_PER_LINK_STATUS
        while True:
            alive = await self.process.check_health()
            dead = dead + 1 if alive is False else 0
            if dead >= MAX_FAILED_HEALTH_CHECKS:
                self._failure = "the engine reports that it is unhealthy, or refuses connections"
                logger.warning("engine %s: %s", self.process.engine_id, self._failure)
                return
            # For a slow engine no heartbeat is sent, so the core suspects it and gateways probe it.
            if alive:
                try:
                    if beats % every == every - 1:
                        await self._refresh_description()
                    await self._register()
                except Exception:
                    # A failed call must not end the supervision of an engine that is well.
                    self._rate_limited_log.log(
                        logging.ERROR, "engine %s did not register", self.process.engine_id, exc_info=True
                    )
                beats += 1
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _refresh_description(self) -> None:
        """Query the engine's description and, for a prefill or decode engine, its links. An incomplete
        description is ignored."""
        found = await self.process.describe()
        if isinstance(found, PairEngineDescription):
            self._links = await self.process.links()
            if found.unfit:
                return  # an incomplete answer, since the engine was suitable at its start
        self._description = found or self._description

    async def _register(self) -> None:
        """Register the engine with the coordinator once. Without an answer, nothing happens."""
        description = self._description
        assert description is not None
        registration = EngineRegistration(
            self.process.engine_id,
            self.process.url,
            description,
            self._epoch,
            description.paths if isinstance(description, PairEngineDescription) else None,
            self._links,
            self.wanted_engines,
        )
        self._links = {}  # sent once, since the core keeps its own estimate until the next report
        try:
            answer = await call_with_timeout(self._calls.register(registration), SUPERVISOR_CALL_TIMEOUT_S)
        except CoordinatorUnavailable:
            return
        except MessageEncodingError as error:
            invalid = "the description of engine %s is invalid: %s"
            self._rate_limited_log.log(logging.WARNING, invalid, self.process.engine_id, error)
            return
        if answer.epoch >= self._epoch:
            self._epoch = answer.epoch
            self.wanted_engines = answer.wanted_engines or self.wanted_engines

    async def _report_stopped(self, reason: str = "its process ended") -> None:
        """Report to the coordinator that the engine is gone."""
        instance = self._description.instance if self._description is not None else self.process.instance
        gone = EngineStopped(self.process.engine_id, instance, reason)
        try:
            await call_with_timeout(self._calls.engine_stopped(gone), SUPERVISOR_CALL_TIMEOUT_S)
        except CoordinatorUnavailable:
            pass  # gateways find out
        except Exception:
            logger.exception("the end of engine %s was not reported", self.process.engine_id)

    async def _drain_and_wait(self) -> None:
        """Drain the engine, and wait until it has no requests in flight, at most ``drain_s``."""
        end_s = time.monotonic() + self._drain_s
        drain = DrainRequest(self.process.engine_id)
        quiet = 0
        # Ask twice, because turns that gateways send without asking the coordinator are reported later.
        while quiet < 2 and time.monotonic() < end_s and self.process.code is None:
            with contextlib.suppress(CoordinatorUnavailable):
                drained = await call_with_timeout(self._calls.drain(drain), SUPERVISOR_CALL_TIMEOUT_S)
                quiet = quiet + 1 if not drained.in_flight else 0
            await asyncio.sleep(DRAIN_POLL_S)
        if quiet < 2:
            logger.warning("engine %s stops with requests in flight", self.process.engine_id)
