"""Starts, watches and stops the application on Ray Serve, and reports progress while engines start."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve

from .deployments import GATEWAY, GATEWAY_CPUS, STREAM_GRACE_S, application, log_dir
from .engine_process import STOP_GRACE_S
from .ray_config import RayConfig

logger = logging.getLogger(__name__)

REPEAT_INTERVAL_S = 15.0
"""Seconds without a change after which the last progress line is repeated."""
STATUS_POLL_S = 1.0
"""Seconds between two queries for the numbers of running replicas."""
MAX_SHOWN_CHARS = 200
"""Maximum length of each shown part of an error."""


@dataclass(frozen=True, slots=True)
class RunningReplicas:
    """Numbers of running engines and gateways, and Serve's message about failed ones."""

    engines: int
    gateways: int
    trouble: str = ""
    """Serve's message about replicas that failed to start, often many lines; empty: none failed."""


class StartupProgress:
    """Formats progress lines: one per change, and one after each ``REPEAT_INTERVAL_S`` without a change."""

    def __init__(self, engines: int, gateways: int, began_s: float) -> None:
        """``engines``, ``gateways``: numbers of engines and gateways to wait for. ``began_s``: time at which
        the start began, on the same clock as the ``now_s`` passed to ``line()``."""
        self._engines, self._gateways = engines, gateways
        self._began_s = self._last_line_s = began_s
        self._before = RunningReplicas(0, 0)

    def line(self, up: RunningReplicas, now_s: float) -> str | None:
        """Return the line to report at ``now_s``; ``None``: there is nothing to report. ``up``: numbers of
        engines and gateways that run now."""
        if up == self._before and now_s - self._last_line_s < REPEAT_INTERVAL_S:
            return None
        self._before, self._last_line_s = up, now_s
        line = (
            f"{up.engines} of {self._engines} engines and {up.gateways} of {self._gateways} gateways are up "
            f"after {now_s - self._began_s:.0f} s"
        )
        return f"{line}; {summarize_error(up.trouble)}" if up.trouble else line


def summarize_error(trouble: str) -> str:
    """Shorten Serve's message about failed replicas to one line. The result consists of the message's first
    line, which says what Serve does next, and its last line."""
    lines = [line.strip() for line in trouble.splitlines() if line.strip()]
    if not lines:
        return ""
    first = lines[0].removesuffix("Error:").strip()
    shown = [first] if len(lines) == 1 else [first, lines[-1]]
    return " ".join(
        part if len(part) <= MAX_SHOWN_CHARS else f"{part[: MAX_SHOWN_CHARS - 3]}..." for part in shown
    )


@contextlib.contextmanager
def report_progress(
    lines: StartupProgress,
    read: Callable[[], RunningReplicas],
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    poll_s: float = STATUS_POLL_S,
) -> Iterator[None]:
    """Context manager that reports progress from another thread during its block, since Ray waits silently in
    the caller's thread.

    ``read``: function that returns the numbers of running replicas. ``say``: function that is called with
    each progress line. ``poll_s``: seconds between two calls of ``read``. If ``read`` raises, the last line
    is repeated after ``REPEAT_INTERVAL_S``, with the remark that Ray does not answer.
    """
    over = threading.Event()
    last = RunningReplicas(0, 0)

    def run() -> None:
        nonlocal last
        while not over.wait(poll_s):
            silent = ""
            try:
                last = read()
            except Exception:
                # The application is not ready, ends, or lost its controller. This is no reason to fail the
                # start.
                silent = "; Ray does not answer"
            line = lines.line(last, clock())
            if line is not None and not over.is_set():
                say(line + silent)

    thread = threading.Thread(target=run, name="start-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(STATUS_POLL_S)


OBJECT_STORE_BYTES = 200 << 20
"""Size in bytes of a local cluster's object store, which is hardly used."""
CLUSTER_SCALING_HINT = (
    "This may be due to waiting for the cluster to auto-scale or for a runtime environment to be installed. "
)
"""Part of Serve's message about replicas that it cannot place. This part is wrong for a local cluster, so it
is not shown there."""
REMOVAL_MARGIN_S = 20.0
"""Extra seconds for the removal of the application, beyond the grace times of engines and gateways."""


def connect(config: RayConfig, **options: Any) -> None:
    """Start a Ray cluster, or connect to a running one. ``options`` are passed to ``ray.init``. Raises
    ``RuntimeError`` if a running cluster has too few CPUs, since Ray would wait silently."""
    if config.is_local:
        options = {
            # Ray only counts reserved CPUs, so the number may exceed the machine's cores.
            "num_cpus": max(
                os.cpu_count() or 1,
                math.ceil(needed_cpus(config, most=True)) + 1,
            ),
            "include_dashboard": config.dashboard,
            "object_store_memory": OBJECT_STORE_BYTES,
            **options,
        }
        ray.init(**options)
    else:
        ray.init(address=config.address, **options)
        there = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
        if there < needed_cpus(config):
            raise RuntimeError(
                f"the cluster has {there:g} CPUs; {_describe_engines(config, num_cpus=True)} and "
                f"{config.gateways} gateways reserve {needed_cpus(config):g}"
            )


def needed_cpus(config: RayConfig, *, most: bool = False) -> float:
    """Return the number of CPUs that all engines and gateways together reserve, for the minimum number of
    engines. ``most``: compute for the maximum number of engines instead."""
    engines = sum(
        (one.max if most and one.max is not None else one.min) * one.num_cpus
        for one in (group.engines for group in config.groups)
    )
    return engines + config.gateways * GATEWAY_CPUS


def deploy_application(config: RayConfig, say: Callable[[str], None] = lambda text: None) -> None:
    """Deploy the application, and wait until it runs. Raises ``RuntimeError`` with Serve's reason. ``say``:
    function that is called with each progress line, in another thread."""
    lines = StartupProgress(config.total_min_engines, config.gateways, time.monotonic())
    serve.start(http_options={"host": config.host, "port": config.port})
    with report_progress(lines, lambda: running_replicas(config), say):
        try:
            serve.run(application(config), name=config.name, route_prefix="/")
        except RuntimeError as error:
            # Serve names the failed deployments here, and the reasons in their status.
            why = ""
            with contextlib.suppress(Exception):
                why = summarize_error(running_replicas(config).trouble)
            raise RuntimeError(f"{summarize_error(str(error))} {why}".strip()) from error


def running_replicas(config: RayConfig) -> RunningReplicas:
    """Return the numbers of running replicas, as Serve's controller reports them."""
    found = serve.status().applications.get(config.name)
    if found is None:
        return RunningReplicas(0, 0)
    running, troubles = {}, []
    for name, deployment in found.deployments.items():
        running[name] = deployment.replica_states.get("RUNNING", 0)  # type: ignore[call-overload]
        # Slow starts are normal for engines.
        if deployment.message and "slow __init__" not in deployment.message:
            hint = CLUSTER_SCALING_HINT if config.is_local else ""
            troubles.append(deployment.message.replace(hint, ""))
    engines = sum(running.get(group.name, 0) for group in config.groups)
    return RunningReplicas(engines, running.get(GATEWAY, 0), troubles[0] if troubles else "")


def stop_application(config: RayConfig) -> None:
    """Drain the engines, remove the application, and disconnect from Ray. A local cluster is stopped."""
    _remove_application(config)
    # Serve ends with a local cluster. Its own shutdown takes seconds longer, and Ray reports the end of its
    # controller as an error.
    ray.shutdown()


def _remove_application(config: RayConfig) -> None:
    """Remove the application from Serve, and wait until its engines are drained. Errors are logged."""
    drain_s = max(group.engines.drain_s for group in config.groups)
    longest_s = max(drain_s + STOP_GRACE_S, STREAM_GRACE_S) + REMOVAL_MARGIN_S
    end_s = time.monotonic() + longest_s
    while True:
        try:
            serve.delete(config.name)
        except TimeoutError:
            # Ray waits for a minute; a drain may take longer.
            if time.monotonic() < end_s:
                continue
            logger.warning("not all engines and gateways have ended after %.0f s", longest_s)
        except Exception as error:
            logger.debug("the application cannot be removed: %s", error)
        return


def serve_until_stopped(config: RayConfig, say: Callable[[str], None]) -> None:
    """Start the application, wait for SIGINT or SIGTERM, and stop the application. ``say``: function that is
    called with each line for the operator. Call ``set_ray_environment`` before importing this module."""
    stopped = threading.Event()
    began = up = False

    def stop_now(*_: object) -> None:
        stopped.set()
        if not up:
            # Only an exception interrupts Ray while it waits for the start.
            raise KeyboardInterrupt

    try:
        _handle_signals(stop_now)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process reports progress itself
        connect(config, log_to_driver=False, logging_level=logging.WARNING)
        # Ray's own handlers end the process at once, without draining the engines.
        _handle_signals(stop_now)
        say(f"{_describe_engines(config)} of {config.model} start; logs: {log_directories(config)}")
        if not stopped.is_set():  # Ray may swallow an exception of a signal handler
            began = True
            deploy_application(config, say)
        up = True
        if not stopped.is_set():
            say(f"{'pairs' if config.in_pairs else f'policy {config.policy}'}: {listen_addresses(config)}")
        while not stopped.wait(1.0):
            pass
        say("stopping; requests that are on their way are finished first")
    except KeyboardInterrupt:
        say("stopped while engines were starting")
    finally:
        _handle_signals(signal.SIG_IGN)
        if began:
            stop_application(config)
        else:
            # Do not remove an application. On a running cluster, an application of this name belongs to
            # another operator. Without a cluster, asking Serve would start one.
            ray.shutdown()


def _handle_signals(handler: Any) -> None:
    """Set the handler of SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def listen_addresses(config: RayConfig) -> str:
    """Return a text for the operator with the addresses at which the gateways answer."""
    here = f"http://{config.host}"
    direct = "" if config.direct_port is None else f", and {here}:{config.direct_port} without Serve's proxy"
    return f"{here}:{config.port} answers{direct}"


def _describe_engines(config: RayConfig, *, num_cpus: bool = False) -> str:
    """Return a text with the minimum number of engines of each role. ``num_cpus``: whether the text also
    states the number of CPUs that each engine reserves."""
    texts = []
    for _, role, engines in config.groups:
        kind = "engine" if role is None else f"{role} engine"
        cpus = f" of {role or 'engines'}.num_cpus {engines.num_cpus:g}" if num_cpus else ""
        texts.append(f"{engines.min} {kind}{'' if engines.min == 1 else 's'}{cpus}")
    return " and ".join(texts)


def log_directories(config: RayConfig) -> str:
    """Return the folders of engines' logs, separated by commas."""
    return ", ".join(dict.fromkeys(str(group.engines.log_dir or log_dir()) for group in config.groups))
