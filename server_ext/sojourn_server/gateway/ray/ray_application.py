"""Starts, watches and stops the application on Ray Serve, and reports progress while engines start."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

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
OBJECT_STORE_BYTES = 200 << 20
"""Size in bytes of a local cluster's object store, which is hardly used."""
REMOVAL_MARGIN_S = 20.0
"""Extra seconds for the removal of the application, beyond the grace times of engines and gateways."""


def connect(config: RayConfig, **options: Any) -> None:
    """Start a Ray cluster, or connect to a running one. ``options`` are passed to ``ray.init``."""
    if not config.is_local:
        ray.init(address=config.address, **options)
        return
    engines = sum((one.max or one.min) * one.num_cpus for _, _, one in config.groups)
    ray.init(
        # Ray only counts reserved CPUs, so the number may exceed the machine's cores.
        num_cpus=max(os.cpu_count() or 1, math.ceil(engines + config.number_of_gateways * GATEWAY_CPUS) + 1),
        include_dashboard=config.dashboard,
        object_store_memory=OBJECT_STORE_BYTES,
        **options,
    )


def deploy_application(config: RayConfig, stopped: threading.Event, say: Callable[[str], None]) -> None:
    """Deploy the application, and wait until it runs or ``stopped`` is set. ``say`` gets a line on progress
    at each change, and every ``REPEAT_INTERVAL_S``. Raises ``RuntimeError`` with the reason if Serve gives
    up."""
    began_s = said_s = time.monotonic()
    before = ""
    serve.start(http_options={"host": config.host, "port": config.port})
    target = serve.RunTarget(application(config), name=config.name, route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    while not stopped.wait(STATUS_POLL_S):
        up, trouble = "Ray does not answer", ""
        try:
            status = serve.status().applications.get(config.name)
        except (RayError, TimeoutError):
            status = None
        if status is not None:
            up, trouble = describe_progress(config, status.deployments)
            if status.status == "RUNNING":
                return
            if status.status == "DEPLOY_FAILED":
                raise RuntimeError(trouble or summarize_error(status.message))
        now_s = time.monotonic()
        if up + trouble != before or now_s - said_s >= REPEAT_INTERVAL_S:
            before, said_s = up + trouble, now_s
            say(f"{up} after {now_s - began_s:.0f} s" + (f"; {trouble}" if trouble else ""))


def describe_progress(config: RayConfig, deployments: Mapping[str, Any]) -> tuple[str, str]:
    """Return (a text on the numbers of engines and gateways that run, Serve's message about failed ones in
    one line). ``deployments``: their statuses, as Serve reports them."""
    running = {name: one.replica_states.get("RUNNING", 0) for name, one in deployments.items()}
    engines = sum(running.get(group.name, 0) for group in config.groups)
    # Slow starts are normal for engines.
    troubles = [one.message for one in deployments.values() if "slow __init__" not in one.message]
    gateways = f"{running.get(GATEWAY, 0)} of {config.number_of_gateways} gateways are up"
    up = f"{engines} of {sum(group.engines.min for group in config.groups)} engines and {gateways}"
    return up, summarize_error(next(filter(None, troubles), ""))


def summarize_error(trouble: str) -> str:
    """Shorten Serve's message about failed replicas to one line: its first line, which says what Serve does
    next, and its last line."""
    lines = [line.strip() for line in trouble.splitlines() if line.strip()]
    shown = [lines[0].removesuffix("Error:").strip(), *lines[1:][-1:]] if lines else []
    return " ".join(
        part if len(part) <= MAX_SHOWN_CHARS else f"{part[: MAX_SHOWN_CHARS - 3]}..." for part in shown
    )


def stop_application(config: RayConfig) -> None:
    """Drain the engines, remove the application, and disconnect from Ray. A local cluster is stopped. Errors
    are logged."""
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
        break
    # Serve ends with a local cluster. Its own shutdown takes seconds longer, and Ray reports the end of its
    # controller as an error.
    ray.shutdown()


def serve_until_stopped(config: RayConfig, say: Callable[[str], None]) -> None:
    """Start the application, wait for SIGINT or SIGTERM, and stop the application. ``say``: function that is
    called with each line for the operator. Call ``set_ray_environment`` before importing this module."""
    stopped = threading.Event()
    began = False
    try:
        _handle_signals(lambda *_: stopped.set())
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process reports progress itself
        connect(config, log_to_driver=False, logging_level=logging.WARNING)
        # Ray's own handlers end the process at once, without draining the engines.
        _handle_signals(lambda *_: stopped.set())
        engines = " and ".join(
            f"{one.min} {f'{role} ' if role else ''}engine{'' if one.min == 1 else 's'}"
            for _, role, one in config.groups
        )
        logs = ", ".join(dict.fromkeys(str(log_dir(group)) for group in config.groups))
        say(f"{engines} of {config.model} start; logs: {logs}")
        if not stopped.is_set():
            began = True
            deploy_application(config, stopped, say)
        if stopped.is_set():
            say("stopped while engines were starting")
            return
        say(f"{'pairs' if config.in_pairs else f'policy {config.policy}'}: {listen_addresses(config)}")
        stopped.wait()
        say("stopping; requests that are on their way are finished first")
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
