"""``sojourn gateway --ray``: a cluster, our own or one that runs, and the application on it until stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from .actor import ACTOR_NAME
from .config import RayConfig
from .deployments import GATEWAY, GATEWAY_CPUS, STREAM_GRACE_S, application
from .process import END_S
from .progress import StartLines, Up, gist, told

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 200 << 20
"""On a cluster of our own: hardly anything is put there."""
SCALES_UP = (
    "This may be due to waiting for the cluster to auto-scale or for a runtime environment to be installed. "
)
"""Serve's word of replicas that find no place. A cluster of our own does neither."""
TAKE_OFF_MARGIN_S = 20.0
"""Beyond what engines and gateways get to end."""


def connect(config: RayConfig, **options: Any) -> None:
    """Start a cluster, or join one that runs. ``options`` go to ``ray.init``.

    Raises ``RuntimeError`` where it has too few CPUs for all that is to run: Ray would wait without a word.
    """
    if config.is_local:
        options = {
            # Only numbers that Ray counts down: a small machine may have more running than it has cores.
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
                f"the cluster has {there:g} CPUs; {_engines(config, num_cpus=True)} and {config.gateways} "
                f"gateways reserve {needed_cpus(config):g}"
            )


def needed_cpus(config: RayConfig, *, most: bool = False) -> float:
    """What all engines and gateways reserve, at least or at most."""
    engines = sum(
        (one.max if most and one.max is not None else one.min) * one.num_cpus
        for one in (group.engines for group in config.groups)
    )
    return engines + config.gateways * GATEWAY_CPUS


def deploy(config: RayConfig, say: Callable[[str], None] = lambda text: None) -> None:
    """Put the application on the cluster; returns when it is running. Raises ``RuntimeError``.

    ``say`` is told, from another thread, what is up so far.
    """
    lines = StartLines(config.least_engines, config.gateways, time.monotonic())
    serve.start(http_options={"host": config.host, "port": config.port})
    with told(lines, lambda: look(config), say):
        try:
            serve.run(application(config), name=config.name, route_prefix="/")
        except RuntimeError as error:
            # Serve says here which deployments failed, and in their own status of what.
            why = ""
            with contextlib.suppress(Exception):
                why = gist(look(config).trouble)
            raise RuntimeError(f"{gist(str(error))} {why}".strip()) from error


def look(config: RayConfig) -> Up:
    """What of the application is up, as Serve's controller has it."""
    found = serve.status().applications.get(config.name)
    if found is None:
        return Up(0, 0)
    running, troubles = {}, []
    for name, deployment in found.deployments.items():
        running[name] = deployment.replica_states.get("RUNNING", 0)  # type: ignore[call-overload]
        # Of engines that take their time nothing needs to be said.
        if deployment.message and "slow __init__" not in deployment.message:
            hint = SCALES_UP if config.is_local else ""
            troubles.append(deployment.message.replace(hint, ""))
    engines = sum(running.get(group.name, 0) for group in config.groups)
    return Up(engines, running.get(GATEWAY, 0), troubles[0] if troubles else "")


def stop(config: RayConfig) -> None:
    """Take it off again: engines are drained first. A cluster of our own ends."""
    _take_off(config)
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=config.namespace))
    # With a cluster of our own Serve ends too. Its own shutdown takes seconds more, and is a call that its
    # controller does not outlive, which Ray reports as an error.
    ray.shutdown()


def _take_off(config: RayConfig) -> None:
    drain_s = max(group.engines.drain_s for group in config.groups)
    longest_s = max(drain_s + END_S, STREAM_GRACE_S) + TAKE_OFF_MARGIN_S
    end_s = time.monotonic() + longest_s
    while True:
        try:
            serve.delete(config.name)
        except TimeoutError:
            # Ray waits for a minute, engines may take longer to be left by all.
            if time.monotonic() < end_s:
                continue
            logger.warning("not all engines and gateways have ended after %.0f s", longest_s)
        except Exception as error:
            logger.debug("the application cannot be taken off: %s", error)
        return


def serve_until_stopped(config: RayConfig, say: Callable[[str], None]) -> None:
    """Start, wait for SIGINT or SIGTERM, stop. ``set_environment`` comes before the import of this."""
    stopped = threading.Event()
    began = up = False

    def stop_now(*_: object) -> None:
        stopped.set()
        if not up:
            # What starts is waited for inside Ray, which only an exception leaves.
            raise KeyboardInterrupt

    try:
        _handle_signals(stop_now)
        _quiet()
        connect(config, log_to_driver=False, logging_level=logging.WARNING, namespace=config.namespace)
        # Ray's own handlers end the process at once, and leave engines no time.
        _handle_signals(stop_now)
        say(f"{_engines(config)} of {config.model} start; logs: {log_place(config)}")
        if not stopped.is_set():  # some code of Ray's swallows what a handler raises
            began = True
            deploy(config, say)
        up = True
        if not stopped.is_set():
            say(f"{'pairs' if config.in_pairs else f'policy {config.policy}'}: {addresses(config)}")
        while not stopped.wait(1.0):
            pass
        say("stopping; requests that are on their way are finished first")
    except KeyboardInterrupt:
        say("stopped while engines were starting")
    finally:
        _handle_signals(signal.SIG_IGN)
        if began:
            stop(config)
        else:
            # What has our name on a cluster that runs is somebody else's. And to ask Serve starts a cluster
            # where there is none.
            ray.shutdown()


def _quiet() -> None:
    """In this process Serve says only what is wrong: what it does is said by us, in terms of engines."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def _handle_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def addresses(config: RayConfig) -> str:
    """Where it answers."""
    here = f"http://{config.host}"
    direct = "" if config.direct_port is None else f", and {here}:{config.direct_port} without Serve's proxy"
    return f"{here}:{config.port} answers{direct}"


def _engines(config: RayConfig, *, num_cpus: bool = False) -> str:
    told = []
    for _, role, engines in config.groups:
        kind = "engine" if role is None else f"{role} engine"
        each = f"{engines.min} {kind}{'' if engines.min == 1 else 's'}"
        of = f" of {role or 'engines'}.num_cpus {engines.num_cpus:g}" if num_cpus else ""
        told.append(each + of)
    return " and ".join(told)


def log_place(config: RayConfig) -> str:
    """Where engines write."""
    from .deployments import log_dir

    return ", ".join(dict.fromkeys(str(group.engines.log_dir or log_dir()) for group in config.groups))
