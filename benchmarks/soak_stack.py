"""The servers of ``soak.py``: starts, stops and inspects engines and gateways."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
from sojourn_server.demo.demo_run import read_counts
from sojourn_server.launch.engine_server import EngineServer, ServerProcess, free_port

TENANT_KEYS = {"agents": "key-of-agents", "floods": "key-of-floods"}
ADMIN_KEY = "key-of-the-operator"
STOP_BOUND_S = 75.0
"""Maximum seconds from SIGTERM to the end of a server. A gateway waits up to a minute for streams."""
READY_S = 300.0
SILENT_PROGRAM_S = 120
"""Seconds until a gateway forgets a silent program, for example one of a killed client. A round takes
longer."""
MOST_PROGRAMS = 500
"""Maximum number of programs in an engine's table. It is full within ten minutes, so that later growth is a
leak."""
MOST_GATEWAY_PROGRAMS = 200_000
ENGINE_ARGS = (
    "--max-model-len", "2048", "--max-num-seqs", "16", "--num-gpu-blocks-override", "256",
    "--kv-host-gib", "0.005", "--kv-disk-gib", "0.02", "--sojourn-option", f"max_programs={MOST_PROGRAMS}",
)  # fmt: skip
ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
"""Environment of an engine. oneDNN caches a compiled kernel for each number of tokens in a batch. By default
it keeps so many kernels that a process grows for an hour. A limit of 64 is reached within minutes."""


@dataclass
class ProcessState:
    """Measurements of one process of a server."""

    role: str
    pid: int
    since: float
    """Time of creation. Together with the pid it identifies the process."""
    rss_mib: float
    file_descriptors: int
    half_closed: int
    """Number of connections that the peer has closed but this process has not."""


@dataclass
class ServerState:
    """A server's own statistics, and measurements of its processes. All ``counts`` must be 0 in silence."""

    name: str
    counts: dict[str, float]
    processes: list[ProcessState]


class SoakServer(ServerProcess):
    """A server that is ended and started again. The port stays the same; each life has a log of its own."""

    name: str
    role: str
    """Role of the process that is started first."""
    logs: Iterator[Path]

    @property
    def alive(self) -> bool:
        return self.process is not None and self.code is None

    def end_by(self, how: str) -> None:
        """End the server by the signal ``how``. With ``core``, only the engine core is killed, upon which the
        server must end by itself. Raises ``RuntimeError`` if it still runs ``STOP_BOUND_S`` seconds later."""
        if self.process is None:
            return
        end_s = time.monotonic() + STOP_BOUND_S
        if how == "core":
            for child in psutil.Process(self.process.pid).children():
                if process_role(child) == "engine core":
                    child.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_BOUND_S)
        self.end(STOP_BOUND_S, signal.SIGKILL if how == "core" else signal.Signals[how])
        if time.monotonic() > end_s:
            raise RuntimeError(f"{self.name} had not ended {STOP_BOUND_S:.0f} s after {how}")

    def ask(self, path: str) -> Any:
        """Return the JSON at ``path``. Raises ``httpx.HTTPError``."""
        return self.get(path).raise_for_status().json()

    def state_of(self, counts: dict[str, float]) -> ServerState:
        """Return the server's state with these counts, and with measurements of its processes."""
        first = psutil.Process(self.process.pid)
        roles = [(self.role, first)]
        roles += [(process_role(child), child) for child in first.children(recursive=True)]
        processes = [
            ProcessState(
                role=role, pid=process.pid, since=process.create_time(),
                rss_mib=round(process.memory_info().rss / 2**20, 2), file_descriptors=process.num_fds(),
                half_closed=sum(
                    each.status == psutil.CONN_CLOSE_WAIT for each in process.net_connections("tcp")
                ),
            )
            for role, process in roles if role is not None
        ]  # fmt: skip
        return ServerState(self.name, counts, processes)


class Engine(SoakServer, EngineServer):
    """An engine with host memory and disk for KV."""

    role = "API server"

    def __init__(self, name: str, policy: str, folder: Path) -> None:
        self.name = f"engine {name}"
        self.logs = (folder / f"engine-{name}-{life}.log" for life in count(1))
        names = ("--served-model-name", "tiny", f"engine-{name}", "--kv-disk", str(folder / "kv"))
        super().__init__(
            "tiny", policy=policy, serve_args=(*ENGINE_ARGS, *names), env=ENGINE_ENV,
            port=free_port("127.0.0.1"), ready_timeout_s=READY_S,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return super().alive and bool(self.is_healthy())

    def start(self) -> Engine:
        """Start the engine and wait until it answers."""
        self.log_path = next(self.logs)
        super().start()
        return self

    def end_by(self, how: str) -> None:
        """Do as for every server, and make the engine ready for another start."""
        try:
            super().end_by(how)
        finally:
            self.stop()

    def step(self) -> None:
        """Make the engine run steps. An idle engine runs none, but reports finished copies only in a step."""
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30, trust_env=False)
        answer.raise_for_status()

    def state(self) -> ServerState:
        """Return the engine's state, which may be half a second old."""
        told = self.ask("/sojourn/v1/stats")
        pool, moved = told["blocks"], told["tiers"].get("traffic", {})
        metrics = read_counts(self.url)
        return self.state_of(
            {
                "requests": told["requests"],
                "vLLM's running requests": metrics["vllm:num_requests_running"],
                "vLLM's waiting requests": metrics["vllm:num_requests_waiting"],
                "leases": told["leases"],
                "leased blocks": pool["leased"],
                "blocks not back": pool["running"] + pool["leased"],
                "copies under way": moved.get("jobs", 0),
                "host blocks not back": moved.get("pinned_host_blocks", 0),
                "programs too many": max(0, sum(told["programs"].values()) - MOST_PROGRAMS),
            }
        )


class Gateway(SoakServer):
    """A gateway with tenants."""

    role = "gateway"

    def __init__(self, name: str, engines: list[Engine], folder: Path) -> None:
        super().__init__(port=free_port("127.0.0.1"), api_key=ADMIN_KEY)
        self.name = f"gateway {name}"
        self.logs = (folder / f"gateway-{name}-{life}.log" for life in count(1))
        self._engines = len(engines)
        tenants = folder / "tenants.toml"
        lines = [f'{tenant} = ["{key}"]\n' for tenant, key in TENANT_KEYS.items()]
        tenants.write_text("[tenants]\n" + "".join(lines), encoding="utf-8")
        self._command = [
            sys.executable, "-m", "sojourn_server.cli", "gateway",
            "--engines", ",".join(engine.url for engine in engines), "--port", str(self.port),
            "--tenants", str(tenants), "--admin-key", ADMIN_KEY,
            "--silent-program-s", str(SILENT_PROGRAM_S),
        ]  # fmt: skip

    def start(self) -> None:
        """Start the gateway and wait until it has an engine."""
        self.log_path = next(self.logs)
        self.launch(self._command, os.environ)
        self.wait_until_ready(READY_S)

    def stop(self) -> None:
        """End the gateway. Raises ``RuntimeError`` like ``end_by``."""
        self.end_by("SIGTERM")

    def state(self) -> ServerState:
        """Return the gateway's current state."""
        replicas = self.ask("/sojourn/v1/replicas")["replicas"]
        programs = self.ask("/sojourn/v1/programs?limit=1")["total"]
        return self.state_of(
            {
                "requests waiting": self.get("/health").json()["waiting"],
                "requests in flight": sum(one["in_flight"] for one in replicas),
                "requests queued for a replica": sum(one["queued"] for one in replicas),
                "replicas missing": self._engines - sum(one["health"] == "up" for one in replicas),
                "programs too many": max(0, programs - MOST_GATEWAY_PROGRAMS),
            }
        )


Server = Engine | Gateway


def process_role(process: psutil.Process) -> str | None:
    """Return the role of an engine's child process; ``None`` for Python's own helper processes."""
    words = " ".join([process.name(), *process.cmdline()])
    if "EngineCore" in words:
        return "engine core"
    return "worker" if "Worker" in words else None
