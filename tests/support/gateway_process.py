"""Runs ``sojourn gateway`` as a child process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from sojourn_server.launch.engine_server import ServerProcess, free_port
from waiting import wait_until

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


class GatewayProcess(ServerProcess):
    """Context manager that starts a gateway for the engines ``urls``, waits until it knows all of them, and
    stops it at the end. Its output goes to ``log_path``; ``flags`` are added to its command line."""

    def __init__(
        self, urls: list[str], log_path: Path, *flags: str, constants: Mapping[str, float] | None = None
    ) -> None:
        """``constants`` has values of module constants in the gateway, by their names below
        ``sojourn_server``, for example ``{"routing.affinity_strategy.MIN_ENGINE_WAIT_S": 0.5}``."""
        super().__init__(port=free_port("127.0.0.1"), log_path=log_path)
        self._engines = len(urls)
        self._command = [
            sys.executable, "-c", _WITH_CONSTANTS, json.dumps(dict(constants or {})),
            "gateway", "--engines", ",".join(urls), "--port", str(self.port), *flags,
        ]  # fmt: skip

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.code is not None

    def __enter__(self) -> GatewayProcess:
        self.launch(self._command, {**os.environ, "COLUMNS": "200"})
        try:
            self.wait_until_ready(60.0)
            wait_until(lambda: self.get("/health").json()["replicas"] >= self._engines, self.log_tail)
        except BaseException:
            self.end(0.0)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.end(20.0)
