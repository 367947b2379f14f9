"""Runs ``sojourn serve`` in a process group of its own, by default on a free port.

Starts the server, waits until it answers, and stops it with all its child processes. The demo, the benchmarks
and the tests use this module.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import httpx

Progress = Callable[[float, str], None]
"""Function that is called about once a second while the server starts, with the seconds since the start and
the current stage."""

_POLL_S = 0.25
_INTERRUPT_GRACE_S = 10.0
"""Seconds that a server has to end by itself after SIGINT. Then its process group is killed."""

_STARTUP_STAGES = (
    ("Waiting for application startup", "opening the port"),
    ("KV cache size", "preparing the KV cache"),
    ("Loading weights took", "preparing the KV cache"),
    ("Starting to load model", "loading the weights"),
    ("Initializing a V1 LLM engine", "starting the worker"),
    ("Resolved architecture", "starting the engine"),
    ("making the model", "making the model (first use only)"),
    ("policy ", "importing vLLM"),
)
"""(Text, stage): if the text is in the log, the server has reached this stage of its start. The last stage
comes first. If a vLLM release does not log a text, its stage is not shown."""


class ServerStartError(RuntimeError):
    """The server ended, did not answer in time, or cannot be used. The text may end with lines of its log."""


@dataclass(eq=False, repr=False)
class EngineServer:
    """Context manager that runs ``sojourn serve MODEL``. Entering the ``with`` block waits until the server
    answers. It raises ``ServerStartError`` if the server ends, or after ``ready_timeout_s`` seconds."""

    model: str
    _: KW_ONLY
    policy: str | None = None
    """``None``: the default of ``sojourn serve``."""
    serve_args: Sequence[str] = ()
    """Flags of sojourn and vLLM, passed on unchanged."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    log_path: Path | None = None
    """``None``: a temporary file, which ``stop`` deletes."""
    api_key: str | None = None
    """The key that the server will require."""
    ready_timeout_s: float = 300.0
    progress: Progress | None = None
    port: int = 0
    """0: any free port, which is here after the start."""

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._own_log = self.log_path is None
        # A secret model alias identifies this server. Another server on a reused port does not have it.
        self._alias = f"sojourn-{secrets.token_hex(6)}"

    @property
    def url(self) -> str:
        """Root URL of the server, ``http://127.0.0.1:PORT``, without ``/v1``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the API server; ``None`` if it is not started."""
        return self._process.pid if self._process is not None else None

    @property
    def headers(self) -> dict[str, str]:
        """Headers for every request to the server: the API key, if there is one."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def __enter__(self) -> EngineServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> EngineServer:
        """Start the process, wait until the server answers, and return ``self``. If the server does not
        answer, end the process and raise ``ServerStartError``."""
        if self._process is not None:
            raise RuntimeError("this server is already started")
        self.port = self.port or _free_port()
        if self.log_path is None:
            handle, name = tempfile.mkstemp(prefix="sojourn-serve-", suffix=".log")
            os.close(handle)
            self.log_path = Path(name)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.env}
        if self.api_key:
            environment["VLLM_API_KEY"] = self.api_key  # not on the command line, where ps shows it
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # A group of its own: all child processes can be ended together, and a Ctrl-C at the
                # terminal reaches this process only.
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server: SIGINT, then SIGKILL to the whole process group. Further calls do nothing."""
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_INTERRUPT_GRACE_S)
        finally:
            # A second Ctrl-C raises out of the wait. The server has a process group of its own, so it would
            # outlive this process.
            _kill_group(process.pid)
            process.wait()
            self._process = None
            if self._own_log and self.log_path is not None:
                self.log_path.unlink(missing_ok=True)
                self.log_path = None

    def log_tail(self, lines: int = 30) -> str:
        """Return the last ``lines`` lines of the log; empty without a log."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        text = self.log_path.read_bytes().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    @property
    def _named_by_caller(self) -> bool:
        return "--served-model-name" in self.serve_args

    def _command(self) -> list[str]:
        names = [] if self._named_by_caller else ["--served-model-name", self.model, self._alias]
        policy = [] if self.policy is None else ["--policy", self.policy]
        return [
            sys.executable, "-m", "sojourn_server.cli", "serve", self.model, *policy,
            "--host", "127.0.0.1", "--port", str(self.port), *names, *self.serve_args,
        ]  # fmt: skip

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        start = time.monotonic()
        next_report = 0.0
        with httpx.Client(base_url=self.url, headers=self.headers, timeout=5.0, trust_env=False) as client:
            while True:
                elapsed_s = time.monotonic() - start
                if self.progress is not None and elapsed_s >= next_report:
                    next_report = elapsed_s + 1.0
                    log = self.log_tail(400)
                    stages = (stage for sign, stage in _STARTUP_STAGES if sign in log)
                    self.progress(elapsed_s, next(stages, "starting the process"))
                code = self._process.poll()
                if code is not None:
                    raise ServerStartError(
                        f"the server ended with code {code} while starting:\n{self.log_tail()}"
                    )
                if self._answers(client):
                    return
                if elapsed_s > self.ready_timeout_s:
                    raise ServerStartError(
                        f"the server was not ready after {self.ready_timeout_s:.0f} s:\n{self.log_tail()}"
                    )
                time.sleep(_POLL_S)

    def _answers(self, client: httpx.Client) -> bool:
        try:
            if client.get("/health").status_code != 200:
                return False
            models = client.get("/v1/models")
        except httpx.HTTPError:
            return False
        if models.status_code == 401:
            raise ServerStartError("the server needs an API key; pass api_key")
        if models.status_code != 200:
            return False
        served = {entry["id"] for entry in models.json()["data"]}
        if self._named_by_caller or self._alias in served:
            return True
        raise ServerStartError(
            f"another server answers on port {self.port}; it serves {', '.join(sorted(served))}"
        )


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill_group(group: int, timeout_s: float = 10.0) -> None:
    """Kill the remaining processes of a group, and wait at most ``timeout_s`` until they are gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError:  # macOS's answer for a group of zombies
            return
        # The leader is our child: a zombie keeps the group alive until it is reaped.
        with suppress(ChildProcessError):
            os.waitpid(group, os.WNOHANG)
        time.sleep(0.05)
