"""``sojourn gateway`` as a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx

_PATIENT = """
import runpy
from sojourn_server.gateway.http import program_migrator
program_migrator.LEAST_WAIT_S = program_migrator.MOST_WAIT_S
runpy.run_module("sojourn_server.cli", run_name="__main__")
"""


class GatewayProcess:
    """Context manager: started, waited for until it knows all engines, stopped."""

    def __init__(self, urls: list[str], log_path: Path, *flags: str, patient: bool = False) -> None:
        """``patient``: for a moving program's KV it waits as long as it ever does, however little that saves:
        beside other tests a disk may take longer than computing a short context anew."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.log_path = log_path
        self._engines = len(urls)
        self._command = [
            sys.executable, *(("-c", _PATIENT) if patient else ("-m", "sojourn_server.cli")),
            "gateway", "--engines", ",".join(urls), "--port", str(self.port), *flags,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> GatewayProcess:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"}
            )
        end = time.monotonic() + 60
        while True:
            try:
                answer = httpx.get(f"{self.url}/health", timeout=5, trust_env=False)
                if answer.status_code == 200 and answer.json()["replicas"] >= self._engines:
                    return self
            except httpx.HTTPError:
                pass
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the gateway did not start:\n{self.log_path.read_text()[-3000:]}")
            time.sleep(0.05)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
