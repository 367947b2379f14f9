"""The servers of ``soak.py``: starts, stops and inspects engines and gateways."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
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


class Engine:
    """An engine with host memory and disk for KV. The port stays the same over restarts."""

    def __init__(self, name: str, policy: str, folder: Path) -> None:
        self.name = f"engine {name}"
        self._flags = (
            *ENGINE_ARGS, "--served-model-name", "tiny", f"engine-{name}", "--kv-disk", str(folder / "kv"),
        )  # fmt: skip
        self._policy = policy
        self._logs = folder
        self._port = free_port("127.0.0.1")
        self._lives = 0
        self._server: EngineServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def alive(self) -> bool:
        return self._server is not None and self._server.pid is not None and bool(_answers(self.url))

    def start(self) -> None:
        """Start the engine and wait until it answers."""
        self._lives += 1
        log = self._logs / f"{self.name.replace(' ', '-')}-{self._lives}.log"
        self._server = EngineServer(
            "tiny", policy=self._policy, serve_args=self._flags, env=ENGINE_ENV, log_path=log,
            port=self._port, ready_timeout_s=READY_S,
        ).start()  # fmt: skip

    def stop(self, how: str = "SIGINT") -> None:
        """Stop the engine. ``how`` is a signal: ``SIGINT`` or ``SIGTERM`` goes to the API server, ``SIGKILL``
        to all processes. With ``core``, SIGKILL goes to the engine core only."""
        server, self._server = self._server, None
        if server is None or server.pid is None:
            return
        try:
            if how == "SIGKILL":
                os.killpg(os.getpgid(server.pid), signal.SIGKILL)
            elif how == "core":
                for child in psutil.Process(server.pid).children():
                    if process_role(child) == "engine core":
                        child.kill()
            elif how == "SIGTERM":
                os.kill(server.pid, signal.SIGTERM)
            if how in ("core", "SIGTERM"):
                _wait_for_end(server.pid, self.name, how)
        finally:
            server.stop()

    def step(self) -> None:
        """Make the engine run steps. An idle engine runs none, but reports finished copies only in a step."""
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30, trust_env=False)
        answer.raise_for_status()

    def state(self) -> ServerState:
        """Return the engine's state, which may be half a second old."""
        told = _get(f"{self.url}/sojourn/v1/stats")
        pool, moved = told["blocks"], told["tiers"].get("traffic", {})
        metrics = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        own = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
        for family in text_string_to_metric_families(metrics):
            if family.name in own:
                own[family.name] = sum(sample.value for sample in family.samples)
        counts = {
            "requests": told["requests"],
            "vLLM's running requests": own["vllm:num_requests_running"],
            "vLLM's waiting requests": own["vllm:num_requests_waiting"],
            "leases": told["leases"],
            "leased blocks": pool["leased"],
            "blocks not back": pool["running"] + pool["leased"],
            "copies under way": moved.get("jobs", 0),
            "host blocks not back": moved.get("pinned_host_blocks", 0),
            "programs too many": max(0, sum(told["programs"].values()) - MOST_PROGRAMS),
        }
        assert self._server is not None
        assert self._server.pid is not None
        return ServerState(self.name, counts, process_states(self._server.pid, "API server"))


class Gateway:
    """A gateway with tenants. The port stays the same over restarts."""

    def __init__(self, name: str, engines: list[Engine], folder: Path) -> None:
        self.name = f"gateway {name}"
        self._server = ServerProcess(port=free_port("127.0.0.1"))
        self._engines = len(engines)
        tenants = folder / "tenants.toml"
        lines = [f'{tenant} = ["{key}"]\n' for tenant, key in TENANT_KEYS.items()]
        tenants.write_text("[tenants]\n" + "".join(lines), encoding="utf-8")
        self._command = [
            sys.executable, "-m", "sojourn_server.cli", "gateway",
            "--engines", ",".join(engine.url for engine in engines), "--port", str(self._server.port),
            "--tenants", str(tenants), "--admin-key", ADMIN_KEY,
            "--silent-program-s", str(SILENT_PROGRAM_S),
        ]  # fmt: skip
        self._logs = folder
        self._lives = 0

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def alive(self) -> bool:
        return self._server.process is not None and self._server.code is None

    def start(self) -> None:
        """Start the gateway and wait until it has an engine."""
        self._lives += 1
        self._server.log_path = self._logs / f"{self.name.replace(' ', '-')}-{self._lives}.log"
        self._server.launch(self._command, os.environ)
        self._server.wait_until_ready(READY_S)

    def stop(self, how: str = "SIGTERM") -> None:
        """Stop the gateway with the signal ``how``. Raises ``RuntimeError`` if it still runs ``STOP_BOUND_S``
        seconds later."""
        if self.alive:
            began = time.monotonic()
            self._server.end(STOP_BOUND_S, signal.SIGKILL if how == "SIGKILL" else signal.SIGTERM)
            if time.monotonic() > began + STOP_BOUND_S:
                raise RuntimeError(f"{self.name} had not ended {STOP_BOUND_S:.0f} s after SIGTERM")

    def state(self) -> ServerState:
        """Return the gateway's current state."""
        assert self._server.process is not None
        replicas = _get(f"{self.url}/sojourn/v1/replicas", ADMIN_KEY)
        waiting = httpx.get(f"{self.url}/health", timeout=30, trust_env=False).json()["waiting"]
        programs = _get(f"{self.url}/sojourn/v1/programs?limit=1", ADMIN_KEY)["total"]
        up = sum(one["health"] == "up" for one in replicas["replicas"])
        counts = {
            "requests waiting": waiting,
            "requests in flight": sum(one["in_flight"] for one in replicas["replicas"]),
            "requests queued for a replica": sum(one["queued"] for one in replicas["replicas"]),
            "replicas missing": self._engines - up,
            "programs too many": max(0, programs - MOST_GATEWAY_PROGRAMS),
        }
        return ServerState(self.name, counts, process_states(self._server.process.pid, "gateway"))


Server = Engine | Gateway


def process_role(process: psutil.Process) -> str | None:
    """Return the role of an engine's child process; ``None`` for Python's own helper processes."""
    words = " ".join([process.name(), *process.cmdline()])
    if "EngineCore" in words:
        return "engine core"
    return "worker" if "Worker" in words else None


def process_states(pid: int, role: str) -> list[ProcessState]:
    """Return the states of a server's process, which has the role ``role``, and of its children."""
    first = psutil.Process(pid)
    found = [(role, first), *((process_role(child), child) for child in first.children(recursive=True))]
    return [
        ProcessState(
            role=name, pid=process.pid, since=process.create_time(),
            rss_mib=round(process.memory_info().rss / 2**20, 2), file_descriptors=process.num_fds(),
            half_closed=sum(one.status == psutil.CONN_CLOSE_WAIT for one in process.net_connections("tcp")),
        )
        for name, process in found if name is not None
    ]  # fmt: skip


def _wait_for_end(pid: int, name: str, how: str) -> None:
    process = psutil.Process(pid)
    with suppress(psutil.NoSuchProcess):
        end = time.monotonic() + STOP_BOUND_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                raise RuntimeError(f"{name} had not ended {STOP_BOUND_S:.0f} s after {how}")
            time.sleep(0.2)


def _get(url: str, key: str | None = None) -> Mapping[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    answer = httpx.get(url, headers=headers, timeout=30, trust_env=False)
    answer.raise_for_status()
    found: Mapping[str, Any] = answer.json()
    return found


def _answers(url: str) -> bool | None:
    """Whether a server is healthy; ``None`` if it does not answer."""
    try:
        return httpx.get(f"{url}/health", timeout=30, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return None
