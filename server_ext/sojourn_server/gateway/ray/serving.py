"""``sojourn gateway --ray``: a cluster, our own or one that runs, and the application on it until stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from .actor import ACTOR_NAME
from .config import RayConfig
from .deployments import GATEWAY_CPUS, application

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 200 << 20
"""On a cluster of our own: hardly anything is put there."""


def connect(config: RayConfig, **options: Any) -> None:
    """Start a cluster, or join one that runs. ``options`` go to ``ray.init``.

    Raises ``RuntimeError`` where it has too few CPUs for all that is to run: Ray would wait without a word.
    """
    if config.is_local:
        options = {
            # Only numbers that Ray counts down: a small machine may have more running than it has cores.
            "num_cpus": max(
                os.cpu_count() or 1,
                math.ceil(needed_cpus(config, config.engines.max or config.engines.min)) + 1,
            ),
            "include_dashboard": config.dashboard,
            "object_store_memory": OBJECT_STORE_BYTES,
            **options,
        }
        ray.init(**options)
    else:
        ray.init(address=config.address, **options)
        there = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
        if there < needed_cpus(config, config.engines.min):
            raise RuntimeError(
                f"the cluster has {there:g} CPUs; {config.engines.min} engines of engines.num_cpus "
                f"{config.engines.num_cpus:g} and {config.gateways} gateways reserve "
                f"{needed_cpus(config, config.engines.min):g}"
            )


def needed_cpus(config: RayConfig, engines: int) -> float:
    """What so many engines and all gateways reserve."""
    return engines * config.engines.num_cpus + config.gateways * GATEWAY_CPUS


def deploy(config: RayConfig) -> None:
    """Put the application on the cluster; returns when it is running. Raises ``RuntimeError``."""
    serve.start(http_options={"host": config.host, "port": config.port})
    serve.run(application(config), name=config.name, route_prefix="/")


def stop(config: RayConfig) -> None:
    """Take it off again: engines are drained first. A cluster of our own ends."""
    with contextlib.suppress(Exception):
        serve.delete(config.name)
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=config.namespace))
    if config.is_local:
        with contextlib.suppress(Exception):
            serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


def serve_until_stopped(config: RayConfig, say: Callable[[str], None]) -> None:
    """Start, wait for SIGINT or SIGTERM, stop. ``set_environment`` comes before the import of this."""
    stopped = threading.Event()
    connect(config, log_to_driver=False, namespace=config.namespace)
    up = False

    def stop_now(*_: object) -> None:
        stopped.set()
        if not up:
            # What starts is waited for inside Ray, which only an exception leaves.
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        # Ray's own handlers end the process at once, and leave engines no time.
        signal.signal(number, stop_now)
    try:
        say(f"{config.engines.min} engines of {config.model} start; logs: {log_place(config)}")
        deploy(config)
        up = True
        say(f"policy {config.policy}: http://{config.host}:{config.port} answers")
        while not stopped.wait(1.0):
            pass
        say("stopping; requests that are on their way are finished first")
    except KeyboardInterrupt:
        say("stopped while engines were starting")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        stop(config)


def log_place(config: RayConfig) -> str:
    """Where engines write."""
    from .deployments import log_dir

    return str(config.engines.log_dir or log_dir())
