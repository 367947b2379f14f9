"""Has an engine server fork its processes, for tests that start many servers.

Python imports this module at its start if this folder is in ``PYTHONPATH``. vLLM spawns the processes of a
CPU engine, and each imports vLLM and torch anew: eight seconds of a core. A forked process has what its
server has imported. vLLM starts one more process to inspect a model that is new on the machine. Here the
server inspects the model itself. A test sets ``SOJOURN_TEST_SPAWN`` for a server that should spawn, as a
user's server does.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

SPIN_S = 0.001
SERVER_MAIN_MODULE = "sojourn_server.vllm.server_main"
REGISTRY_MODULE = "vllm.model_executor.models.registry"


def close_listening_sockets() -> None:
    """Close the server's listening sockets in a forked process, as in a spawned one. Otherwise the port would
    outlive the server."""
    import socket
    import stat

    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:  # descriptor of the list itself
            continue
        if is_socket:
            one = socket.socket(fileno=int(name))
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens or one.family == socket.AF_UNIX:
                one.detach()


def count_for_several_processes() -> None:
    """Let ``prometheus_client`` count for several processes. A spawned process imports it after the server
    has set the counters' folder, but a forked process has imported it before."""
    values = sys.modules.get("prometheus_client.values")
    if values is not None:
        values.ValueClass = values.get_value_class()  # type: ignore[attr-defined]


def fork_where_vllm_spawns() -> None:
    import multiprocessing.context
    import multiprocessing.popen_fork

    class Forked(multiprocessing.popen_fork.Popen):
        def _launch(self, process_obj: object) -> None:
            import gc

            gc.freeze()  # so that collections in the child do not copy the pages of imports
            super()._launch(process_obj)

    class WithoutPort:
        """Wraps the process to start, and closes the server's port in it first."""

        def __init__(self, process: object) -> None:
            self._process = process

        def _bootstrap(self, **kwargs: object) -> int:
            close_listening_sockets()
            count_for_several_processes()
            return self._process._bootstrap(**kwargs)  # type: ignore[attr-defined, no-any-return]

    multiprocessing.context.SpawnProcess._Popen = staticmethod(  # type: ignore[method-assign, assignment]
        lambda process: Forked(WithoutPort(process))
    )


def inspect_models_here() -> None:
    """Make vLLM import a model's class in this process. vLLM itself starts a process for that, since the
    import may initialise CUDA, and caches the result on disk until another release of vLLM runs."""
    import subprocess

    run = subprocess.run

    def run_unless_asked_for_a_model(command: object, **kwargs: object) -> object:
        if not isinstance(command, list) or command[-1:] != [REGISTRY_MODULE]:
            return run(command, **kwargs)  # type: ignore[call-overload]
        import pickle

        inspect, output = pickle.loads(kwargs["input"])  # type: ignore[arg-type]
        with open(output, "wb") as file:
            pickle.dump(inspect(), file)
        return subprocess.CompletedProcess(command, 0)

    subprocess.run = run_unless_asked_for_a_model  # type: ignore[assignment]


def spin_for_a_moment_only() -> None:
    """Shorten busy waiting to ``SPIN_S``. After each message, an engine's scheduler and workers poll for the
    next one for a second without pause, so several engines compete for the cores. The busy second after a
    queue's creation, in which its readers connect, is unchanged."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def record_read(self: Any) -> None:
        self.last_read = time.monotonic() - self.busy_loop_s + SPIN_S

    SpinCondition.record_read = record_read


if SERVER_MAIN_MODULE in sys.orig_argv and "SOJOURN_TEST_SPAWN" not in os.environ:
    fork_where_vllm_spawns()
    inspect_models_here()
