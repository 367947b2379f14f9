"""Runs a server in a process group of its own, on a free port, and stops it with all its child processes.

``EngineServer`` is for the demo, the benchmarks and the tests. Engines on Ray run in a ``ServerProcess`` too.
"""

from __future__ import annotations

import os
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
ANSWER_TIMEOUT_S = 5.0
"""Maximum seconds to wait for an answer of a server."""
_KILL_S = 10.0
"""Maximum seconds until the killed processes of a group are gone."""
_INTERRUPT_GRACE_S = 10.0
"""Seconds that a server has to end by itself after SIGINT. Then its process group is killed."""

_STARTUP_STAGES = (
    ("Waiting for application startup", "opening the port"),
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


@dataclass(eq=False, repr=False, kw_only=True)
class ServerProcess:
    """A server in a child process. Not thread-safe, but ``end`` also ends ``wait_until_ready``."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port, which is here after the start."""
    log_path: Path | None = None
    """File of the server's output."""
    api_key: str | None = None
    """The key that the server will require."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    """The server's process; ``None``: not started."""
    _is_ended: bool = field(default=False, init=False)
    """Whether ``end`` has killed the process group, whose number may then belong to other processes."""

    @property
    def url(self) -> str:
        """Root URL of the server, without ``/v1``."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers for every request to the server: the API key, if there is one."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def code(self) -> int | None:
        """The exit code; ``None``: the server runs, or was not started."""
        return self.process.poll() if self.process is not None else None

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, with its output in ``log_path``."""
        assert self.log_path is not None
        self.log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # A group of its own: all child processes can be ended together, and a Ctrl-C at the
                # terminal reaches this process only.
                start_new_session=True,
            )
        self._is_ended = False

    def wait_until_ready(self, timeout_s: float, progress: Progress | None = None) -> None:
        """Wait until the server answers. Raises ``ServerStartError`` if it ends, or after ``timeout_s``."""
        start, next_report = time.monotonic(), 0.0
        while True:
            elapsed_s = time.monotonic() - start
            if progress is not None and elapsed_s >= next_report:
                next_report = elapsed_s + 1.0
                log = self.log_tail(400)
                stages = (stage for sign, stage in _STARTUP_STAGES if sign in log)
                progress(elapsed_s, next(stages, "starting the process"))
            if self.code is not None:
                raise ServerStartError(
                    f"the server ended with code {self.code} while starting:\n{self.log_tail()}"
                )
            if self.is_healthy():
                return
            if elapsed_s > timeout_s:
                raise ServerStartError(
                    f"the server was not ready after {timeout_s:.0f} s:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def is_healthy(self) -> bool | None:
        """Check the server's health. False: it says that it is unhealthy, or refuses connections. ``None``:
        unknown, for example because it does not answer in time."""
        try:
            answer = self.get("/health")
        except httpx.ConnectError as error:
            return False if "refused" in str(error) else None
        except httpx.HTTPError:
            return None
        return answer.is_success or (False if answer.status_code in (500, 503) else None)

    def get(self, path: str) -> httpx.Response:
        """Return the server's answer. Raises ``httpx.HTTPError``."""
        # Without TLS. The certificates of ``verify`` would take 20 ms of CPU at each request.
        return httpx.get(
            self.url + path, headers=self.headers, timeout=ANSWER_TIMEOUT_S, trust_env=False, verify=False
        )

    def end(self, grace_s: float, first: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal ``first``, and wait at most ``grace_s`` for the server's end. Then kill its process
        group, so that no child is left. Further calls have no effect."""
        process = self.process
        if process is None or self._is_ended:
            return
        try:
            if process.poll() is None:
                process.send_signal(first)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=grace_s)
        finally:
            # Also if a second Ctrl-C raises out of the wait, since the group would outlive this process.
            end_s = time.monotonic() + _KILL_S
            with suppress(ProcessLookupError, PermissionError):  # the latter is macOS's for zombies
                while time.monotonic() < end_s:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.poll()  # the leader is our child: a zombie keeps the group alive
                    time.sleep(0.02)
            process.wait()
            self._is_ended = True

    def log_tail(self, lines: int = 30) -> str:
        """Return the last ``lines`` lines of the log; empty without a log."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        text = self.log_path.read_bytes().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])


@dataclass(eq=False, repr=False)
class EngineServer(ServerProcess):
    """Context manager that runs ``sojourn serve MODEL``. Entering the ``with`` block waits until the server
    answers. It raises ``ServerStartError`` if the server ends, or after ``ready_timeout_s`` seconds. The log
    is a temporary file, which ``stop`` deletes, if ``log_path`` is ``None``."""

    model: str
    _: KW_ONLY
    policy: str | None = None
    """``None``: the default of ``sojourn serve``."""
    serve_args: Sequence[str] = ()
    """Flags of sojourn and vLLM, passed on unchanged."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    ready_timeout_s: float = 300.0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._own_log = self.log_path is None

    @property
    def pid(self) -> int | None:
        """Process id of the API server; ``None`` if it is not started."""
        return self.process.pid if self.process is not None else None

    def __enter__(self) -> EngineServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> EngineServer:
        """Start the process, wait until the server answers, and return ``self``. If the server does not
        answer, end the process and raise ``ServerStartError``."""
        if self.process is not None:
            raise RuntimeError("this server is already started")
        self.port = free_port(self.host, self.port)  # else the server on the port would be taken for this one
        if self.log_path is None:
            handle, name = tempfile.mkstemp(prefix="sojourn-serve-", suffix=".log")
            os.close(handle)
            self.log_path = Path(name)
        # Not on the command line, where ps shows it.
        key = {"VLLM_API_KEY": self.api_key} if self.api_key else {}
        self.launch(self._command(), {**os.environ, **self.env, **key})
        try:
            self.wait_until_ready(self.ready_timeout_s, self.progress)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server: SIGINT, then SIGKILL to the whole process group. Further calls do nothing."""
        if self.process is None:
            return
        self.end(_INTERRUPT_GRACE_S, signal.SIGINT)
        self.process = None
        if self._own_log and self.log_path is not None:
            self.log_path.unlink(missing_ok=True)
            self.log_path = None

    def _command(self) -> list[str]:
        policy = [] if self.policy is None else ["--policy", self.policy]
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        serve = [sys.executable, "-m", "sojourn_server.cli", "serve", self.model]
        return [*serve, *policy, *address, *self.serve_args]


def free_port(host: str, port: int = 0) -> int:
    """Return a TCP port that is free at ``host`` now: ``port``, or any if it is 0. Another process may take
    it before the server does. Raises ``ServerStartError`` if ``port`` is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ServerStartError(f"cannot listen on {host or '*'}:{port}: {error.strerror}") from None
