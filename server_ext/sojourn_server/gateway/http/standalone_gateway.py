"""Builds a gateway for one machine: a core in this process, engines at given addresses, a state file."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from starlette.applications import Starlette

from ...policies.cluster_preset import ClusterPreset
from ...routing.affinity_core import AffinityCore
from ...routing.routing_core import RoutingCore
from ...routing.routing_events import PairRole
from ...routing.routing_from_preset import (
    PAIR_REASONS,
    PrefillDecodeRules,
    build_pair_core,
    build_routing_core,
    routing_reasons,
)
from ...routing.routing_limits import RoutingLimits
from ...routing.routing_state import RoutingState
from .engine_monitor import POLL_S, EngineMonitor
from .engine_queries import ResidencyTracker
from .gateway_app import Gateway, GatewayOptions
from .gateway_metrics import GatewayMetrics
from .pair_monitor import PairMonitor
from .replica_addresses import ReplicaAddress, ReplicaAddresses
from .routing_backend import LocalRoutingBackend
from .tenant_keys import TenantKeys

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 2.0
"""Seconds between two writes of the state file."""
ENCODED_PROGRAMS = 2000
"""Number of programs that are encoded at once. This takes about a millisecond."""
MAX_STATE_AGE_S = 3600.0
"""Maximum age, in seconds, of a state file. An older one is ignored, since the engines' KV has probably
changed."""


class _SavedState(msgspec.Struct):
    """Content of a state file, and the time at which it was written."""

    unix_s: float
    core: RoutingState


def prepare_state_file(path: Path) -> None:
    """Create the folder of a state file, and check that the file can be written. Raises ``OSError``."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(draft)
    os.unlink(name)


class RoutingStateFile:
    """A file with a routing core's state. Each write replaces the whole file. Read and write errors are
    logged and do not stop the gateway. ``clock``: the core's clock. ``wall``: Unix time in seconds."""

    def __init__(
        self,
        path: Path,
        core: AffinityCore,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._core = core
        self._clock = clock
        self._wall = wall
        self._written = -1
        """Value of the core's ``changes`` when the file was last written without an error."""
        self._taken = 0
        """Number of snapshots taken so far."""
        self._newest = 0
        """Number of the snapshot in the file; 0: written by an earlier gateway."""
        self._lock = threading.Lock()
        """Held during a write."""

    def restore(self) -> int:
        """Restore the core, which must be new, from the file. Returns the number of restored programs; 0: the
        file is missing, too old or invalid."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_SavedState)
            age_s = max(0.0, self._wall() - kept.unix_s)
            if age_s > MAX_STATE_AGE_S:
                logger.info("%s is %.0f s old; programs start without homes", self._path, age_s)
                return 0
            self._core.restore(kept.core, self._clock(), age_s)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s cannot be used (%s); programs start without homes", self._path, error)
            return 0
        return len(self._core.programs)

    async def run(self) -> None:
        """Write the file every two seconds if something changed or the last write failed, and once more when
        cancelled."""
        try:
            while True:
                await asyncio.sleep(SAVE_INTERVAL_S)
                changes = self._core.changes
                if changes == self._written:
                    continue
                if await asyncio.to_thread(self._write, *self._take_snapshot()):
                    self._written = changes
        finally:
            self._write(*self._take_snapshot())

    def _take_snapshot(self) -> tuple[int, _SavedState]:
        """(number of the snapshot, snapshot). The snapshot does not change later."""
        self._taken += 1
        return self._taken, _SavedState(self._wall(), self._core.snapshot(self._clock()))

    def _write(self, number: int, state: _SavedState) -> bool:
        """Write a snapshot, unless the file has a newer one. When the gateway stops, its last write may
        overtake an earlier one that a thread has not begun. Returns False if the write failed; the failure is
        logged."""
        draft = self._path.with_name(f"{self._path.name}.partial")
        with self._lock:
            if number < self._newest:
                return True
            try:
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.writelines(_encoded(state))
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(self._path)
                self._newest = number
                return True
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._path, error)
                with contextlib.suppress(OSError):
                    draft.unlink()
                return False


def _encoded(state: _SavedState) -> Iterator[bytes]:
    """Yield ``state`` as JSON, in parts. The event loop cannot run while a part is encoded, so programs are
    encoded in slices of ``ENCODED_PROGRAMS``. Everything else is one part: replicas and estimates, which
    ``tenant_statistics`` keeps below two megabytes."""
    core = state.core
    fields = {name: getattr(core, name) for name in core.__struct_fields__ if name != "programs"}
    yield msgspec.json.encode({"unix_s": state.unix_s, "core": fields}).removesuffix(b"}}") + b',"programs":['
    for start in range(0, len(core.programs), ENCODED_PROGRAMS):
        part = msgspec.json.encode(core.programs[start : start + ENCODED_PROGRAMS])
        yield (b"," if start else b"") + part[1:-1]
    yield b"]}}"


def build_gateway(
    urls: Sequence[str],
    preset: ClusterPreset,
    tenants: TenantKeys,
    options: GatewayOptions,
    *,
    limits: RoutingLimits | None = None,
    poll_s: float = POLL_S,
    state: Path | None = None,
) -> tuple[Gateway, Starlette]:
    """Build a gateway in front of the engines at ``urls``; return it with its ASGI application. ``poll_s``:
    seconds between two polls of an engine. ``state``: file in which the core's state is saved, and from which
    it is restored at the next start; ``None``: the state is not saved."""
    core = build_routing_core(preset, limits)
    gateway, backend = _build(core, tenants, options, routing_reasons(preset))
    monitor = EngineMonitor(
        urls, backend, gateway.replicas, gateway.session, engine_key=options.engine_key, poll_s=poll_s
    )
    gateway.monitor = monitor

    def speaks_sojourn(address: ReplicaAddress) -> bool:
        description = monitor.description_of(address.replica_id)
        return description is not None and description.speaks_sojourn

    residency = ResidencyTracker(
        backend,
        gateway.replicas,
        gateway.forwarder.names,
        gateway.queries,
        speaks_sojourn,
    )
    state_file = RoutingStateFile(state, core) if state is not None else None
    if state_file is not None:
        state_file.restore()
        core.suspect_all(time.monotonic())  # engines may have ended with the former gateway
        for replica in list(core.fleet):
            monitor.expect(replica.replica_id, replica.instance)

    def background() -> list[Awaitable[None]]:
        tasks: list[Awaitable[None]] = [monitor.run(), backend.run(), residency.run()]
        return [*tasks, state_file.run()] if state_file is not None else tasks

    return gateway, gateway.app(background, monitor.poll_all)


def build_prefill_decode_gateway(
    prefill: Sequence[str],
    decode: Sequence[str],
    tenants: TenantKeys,
    options: GatewayOptions,
    *,
    rules: PrefillDecodeRules | None = None,
    limits: RoutingLimits | None = None,
    poll_s: float = POLL_S,
) -> tuple[Gateway, Starlette]:
    """Build a gateway in front of prefill and decode engines; return it with its ASGI application.

    ``prefill``, ``decode``: URLs of the engines. ``rules``: how pairs are chosen; ``None``: the defaults of
    ``PrefillDecodeRules``. ``poll_s``: seconds between two polls of an engine. Raises ``ValueError`` if URLs
    are missing or repeated, and for wrong rules.
    """
    rules = rules or PrefillDecodeRules()
    core = build_pair_core(rules, limits)
    roles = {**dict.fromkeys(prefill, PairRole.PREFILL), **dict.fromkeys(decode, PairRole.DECODE)}
    if not prefill or not decode or len(roles) < len(prefill) + len(decode):
        raise ValueError("expected addresses of prefill engines and of decode engines, each address once")
    options = dataclasses.replace(options, in_pairs=True, read_side=rules.read_side)
    gateway, backend = _build(core, tenants, options, PAIR_REASONS)
    monitor = PairMonitor(
        roles, backend, gateway.replicas, gateway.session, engine_key=options.engine_key, poll_s=poll_s
    )
    backend.links_of = monitor.links_of
    gateway.monitor = monitor
    return gateway, gateway.app(lambda: [monitor.run(), backend.run()], monitor.poll_all)


def _build(
    core: RoutingCore, tenants: TenantKeys, options: GatewayOptions, reasons: Iterable[str]
) -> tuple[Gateway, LocalRoutingBackend]:
    metrics = GatewayMetrics(reasons)
    backend = LocalRoutingBackend(core)
    backend.on_request_decision = metrics.decided
    return Gateway(backend, ReplicaAddresses(), tenants, options, metrics), backend
