"""Has an engine server fork its processes, for tests that start many servers.

Python imports this module at its start if this folder is in ``PYTHONPATH``. vLLM spawns the processes of a
CPU engine, and each imports vLLM and torch anew: eight seconds of a core. A forked process has what its
server has imported. vLLM starts one more process to look at a model that is new on the machine; here the
server looks itself. A test whose server is to spawn, as a user's does, sets ``SOJOURN_TEST_SPAWN`` for it.
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
    """A spawned process has none of its server's sockets: else the port would outlive the server."""
    import socket
    import stat

    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:  # this very list's
            continue
        if is_socket:
            one = socket.socket(fileno=int(name))
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens or one.family == socket.AF_UNIX:
                one.detach()


def count_for_several_processes() -> None:
    """A spawned process imports ``prometheus_client`` when its server has named the folder of all counts."""
    values = sys.modules.get("prometheus_client.values")
    if values is not None:
        values.ValueClass = values.get_value_class()  # type: ignore[attr-defined]


def fork_where_vllm_spawns() -> None:
    import multiprocessing.context
    import multiprocessing.popen_fork

    class Forked(multiprocessing.popen_fork.Popen):
        def _launch(self, process_obj: object) -> None:
            import gc

            gc.freeze()  # the child's collections do not copy the pages of what is imported
            super()._launch(process_obj)

    class WithoutPort:
        """The process to start; closes the server's port first."""

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
    """Make vLLM import a model's class in this process. It starts a process for that, since the import may
    initialise CUDA, and caches the answer on disk until another release of vLLM runs."""
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
    """Scheduler and workers of an engine ask for a second after each message whether there is another, as
    often as they can: several engines take the cores from each other so. The second after its making, in
    which a queue gets to know its readers, remains."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def record_read(self: Any) -> None:
        self.last_read = time.monotonic() - self.busy_loop_s + SPIN_S

    SpinCondition.record_read = record_read


if SERVER_MAIN_MODULE in sys.orig_argv and "SOJOURN_TEST_SPAWN" not in os.environ:
    fork_where_vllm_spawns()
    inspect_models_here()
