"""The servers of ``soak.py``: engines and gateways that are started, killed, restarted and looked into."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from gateway_processes import free_port
from prometheus_client.parser import text_string_to_metric_families
from sojourn_server.launch.engine_server import EngineServer

TENANT_KEYS = {"agents": "key-of-agents", "hostile": "key-of-the-hostile"}
ADMIN_KEY = "key-of-the-operator"
STOP_BOUND_S = 75.0
"""Longest time from SIGTERM to the end of a server; a gateway gives streams a minute."""
READY_S = 300.0
SILENT_PROGRAM_S = 120
"""Until a gateway forgets a program whose client was killed: less than a round."""
MOST_PROGRAMS = 500
"""In an engine's table. It is full within ten minutes, so that growth after them is a leak; the default of
20,000 fills for hours."""
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
    "SOJOURN_HISTORY": "off",
}
"""oneDNN keeps a compiled kernel for each number of tokens in a batch: 1,024 of them, some 300 MiB, which
fill for an hour. 64 are there within minutes."""


@dataclass
class ProcessState:
    """One process of a server."""

    role: str
    pid: int
    since: float
    """When it was created; with the pid it names a life."""
    rss_mib: float
    file_descriptors: int
    half_closed: int
    """Connections whose other end is gone and which this process has not closed."""


@dataclass
class ServerState:
    """What a server says of itself and the system of its processes; ``counts`` have to be 0 in silence."""

    name: str
    counts: dict[str, float] = field(default_factory=dict)
    tables: dict[str, float] = field(default_factory=dict)
    """Sizes that have a bound."""
    processes: list[ProcessState] = field(default_factory=list)


class Engine:
    """An engine with host memory and disk below its device; it keeps its port over restarts."""

    def __init__(self, name: str, policy: str, folder: Path) -> None:
        self.name = f"engine {name}"
        self._flags = (
            *ENGINE_ARGS, "--served-model-name", "tiny", f"engine-{name}",
            "--kv-disk", str(folder / "kv"), "--kv-disk-name", name,
        )  # fmt: skip
        self._policy = policy
        self._logs = folder
        self._port = free_port()
        self._lives = 0
        self._server: EngineServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._server is not None
        assert self._server.pid is not None
        return self._server.pid

    @property
    def alive(self) -> bool:
        return self._server is not None and self._server.pid is not None and _answers(f"{self.url}/health")

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._lives += 1
        log = self._logs / f"{self.name.replace(' ', '-')}-{self._lives}.log"
        self._server = EngineServer(
            "tiny", policy=self._policy, serve_args=self._flags, env=ENGINE_ENV, log_path=log,
            port=self._port, ready_timeout_s=READY_S,
        ).start()  # fmt: skip

    def stop(self, how: str = "SIGINT") -> None:
        """End it: by a signal to the API server, by SIGKILL to all its processes, or by that to its core."""
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
                _wait_for_end(server.pid, self.name, how)
            elif how == "SIGTERM":
                os.kill(server.pid, signal.SIGTERM)
                _wait_for_end(server.pid, self.name, how)
        finally:
            server.stop()

    def step(self) -> None:
        """Have it run a step: results of copies come back with the next one, and an idle engine has none."""
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30, trust_env=False)
        answer.raise_for_status()

    def state(self) -> ServerState:
        """As now, or half a second ago."""
        told = _get(f"{self.url}/sojourn/v1/stats")
        pool, tiers = told["pool"], told["tiers"]
        moved = tiers.get("traffic", {})
        metrics = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        own = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0}
        for family in text_string_to_metric_families(metrics):
            if family.name in own:
                own[family.name] = sum(sample.value for sample in family.samples)
        counts = {
            "requests": told["requests"],
            "vLLM's running requests": own["vllm:num_requests_running"],
            "vLLM's waiting requests": own["vllm:num_requests_waiting"],
            "leases": told["leases"]["count"],
            "leased blocks": told["leases"]["blocks"] + pool["leased"],
            "blocks not back": pool["total"] - pool["cached"] - pool["free"],
            "copies under way": moved.get("jobs", 0),
            "host blocks not back": moved.get("pinned_host_blocks", 0),
        }
        tables = {
            "programs": float(sum(told["programs"].values())),
            "evictions remembered": told["tombstones"],
            "host blocks used": tiers.get("host", {}).get("used", 0),
        }
        return ServerState(self.name, counts, tables, process_states(self.pid, "API server"))


class Gateway:
    """A gateway with tenants and a state file; it keeps its port over restarts."""

    def __init__(self, name: str, engines: list[Engine], folder: Path) -> None:
        self.name = f"gateway {name}"
        self._port = free_port()
        self._engines = len(engines)
        tenants = folder / "tenants.toml"
        lines = [f'{tenant} = ["{key}"]\n' for tenant, key in TENANT_KEYS.items()]
        tenants.write_text("[tenants]\n" + "".join(lines), encoding="utf-8")
        self._command = [
            sys.executable, "-m", "sojourn_server.cli", "gateway",
            "--engines", ",".join(engine.url for engine in engines), "--port", str(self._port),
            "--tenants", str(tenants), "--admin-key", ADMIN_KEY, "--state", str(folder / f"{name}.state"),
            "--silent-program-s", str(SILENT_PROGRAM_S),
        ]  # fmt: skip
        self._logs = folder
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until it listens; engines may be away."""
        self._lives += 1
        with (self._logs / f"{self.name.replace(' ', '-')}-{self._lives}.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + READY_S
        while not _listens(f"{self.url}/health"):
            if not self.alive or time.monotonic() > end:
                raise RuntimeError(f"{self.name} did not start")
            time.sleep(0.2)

    def stop(self, how: str = "SIGTERM") -> None:
        """End it by this signal. Raises ``RuntimeError`` if SIGTERM does not end it in its time."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGKILL if how == "SIGKILL" else signal.SIGTERM)
        try:
            process.wait(STOP_BOUND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"{self.name} had not ended {STOP_BOUND_S:.0f} s after SIGTERM") from None

    def state(self) -> ServerState:
        """As now."""
        assert self._process is not None
        replicas = _get(f"{self.url}/sojourn/v1/replicas", ADMIN_KEY)
        waiting = httpx.get(f"{self.url}/health", timeout=30, trust_env=False).json()["waiting"]
        programs = _get(f"{self.url}/sojourn/v1/programs?limit=1", ADMIN_KEY)["total"]
        up = sum(one["health"] == "up" for one in replicas["replicas"])
        counts = {
            "requests waiting": waiting,
            "requests in flight": sum(one["in_flight"] for one in replicas["replicas"]),
            "requests queued for a replica": sum(one["queued"] for one in replicas["replicas"]),
            "replicas missing": self._engines - up,
        }
        return ServerState(
            self.name, counts, {"programs": programs}, process_states(self._process.pid, "gateway")
        )


Server = Engine | Gateway


def process_role(process: psutil.Process) -> str | None:
    """The role of an engine's child process; ``None``: Python's own helper processes."""
    words = " ".join([process.name(), *process.cmdline()])
    if "EngineCore" in words:
        return "engine core"
    return "worker" if "Worker" in words else None


def process_states(pid: int, role: str) -> list[ProcessState]:
    """A server's process and its children."""
    first = psutil.Process(pid)
    found = [(role, first), *((process_role(child), child) for child in first.children(recursive=True))]
    return [_process_state(name, process) for name, process in found if name is not None]


def _process_state(role: str, process: psutil.Process) -> ProcessState:
    closed = sum(one.status == psutil.CONN_CLOSE_WAIT for one in process.net_connections("tcp"))
    return ProcessState(
        role=role, pid=process.pid, since=process.create_time(),
        rss_mib=round(process.memory_info().rss / 2**20, 2), file_descriptors=process.num_fds(),
        half_closed=closed,
    )  # fmt: skip


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


def _listens(url: str) -> bool:
    try:
        httpx.get(url, timeout=10, trust_env=False)
    except httpx.HTTPError:
        return False
    return True


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=30, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
