"""Runs ``sojourn gateway`` as a child process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import httpx

_WITH_CONSTANTS = """
import json, runpy, sys
from importlib import import_module
for place, value in json.loads(sys.argv.pop(1)).items():
    module, _, constant = place.rpartition(".")
    names = vars(import_module(f"sojourn_server.{module}"))
    assert constant in names, place
    names[constant] = value
runpy.run_module("sojourn_server.cli", run_name="__main__")
"""


class GatewayProcess:
    """Context manager that starts a gateway for the engines ``urls``, waits until it knows all of them, and
    stops it at the end. Its output goes to ``log_path``; ``flags`` are added to its command line."""

    def __init__(
        self, urls: list[str], log_path: Path, *flags: str, constants: Mapping[str, float] | None = None
    ) -> None:
        """``constants`` has values of module constants in the gateway, by their names below
        ``sojourn_server``, for example ``{"routing.affinity_strategy.MIN_ENGINE_WAIT_S": 0.5}``."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.log_path = log_path
        self._engines = len(urls)
        self._command = [
            sys.executable, "-c", _WITH_CONSTANTS, json.dumps(dict(constants or {})),
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

    @property
    def has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

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
