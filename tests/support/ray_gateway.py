"""Runs ``sojourn gateway --ray`` as a child process with its own Ray cluster, and finds their processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sojourn_server.launch.engine_server import free_port

psutil = pytest.importorskip("psutil")

DEADLINE_S = 60.0
STOPPING = "stopping; requests that are on their way are finished first\n"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RayGateway:
    """The command and its processes. ``start`` waits until the gateway answers, ``stop`` until all processes
    have ended."""

    def __init__(self, home: Path, engines: Mapping[str, Any], *, start_s: float = 180.0) -> None:
        """``home`` is the folder for all files. Its path must be short, since Ray's sockets are below it.
        ``engines`` is added to the section ``engines`` of the config file. ``start_s`` is the longest wait
        for the gateway's first answer, in seconds.
        """
        self.home = home
        self.start_s = start_s
        self.log = home / "log"
        self.direct, self.served = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.direct}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            # Ray writes a token into the home folder. The path of Ray's sockets must be short.
            "HOME": str(home),
            "RAY_TMPDIR": str(home),
            "ADMIN": "root",
            "COLUMNS": "200",
        }
        self.config: dict[str, Any] = {
            "model": "tiny",
            "port": self.served,
            "direct_port": self.direct,
            "keys": {"admin": "ADMIN"},
            "engines": {"log_dir": str(home / "e"), **engines},
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[int, Any] = {}

    @property
    def config_path(self) -> Path:
        """Path of the config file that the command reads."""
        return self.home / "config.yaml"

    def start(self) -> None:
        self.config_path.write_text(json.dumps(self.config))  # JSON is YAML
        command = [sys.executable, "-m", "sojourn_server.cli", "gateway", "--ray", str(self.config_path)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + self.start_s
        while f"http://127.0.0.1:{self.served} answers" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop the command by SIGTERM, as a service manager does. Fails if a process is left, if the exit
        code is not 0, or if Ray logs anything after our last line."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        self.tree()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(DEADLINE_S)
            _, left = psutil.wait_procs(list(self.seen.values()), timeout=DEADLINE_S)
            assert not left, left
            assert code == 0, self.log.read_text()
            told = self.log.read_text().partition(STOPPING)
            assert told[1], told
            assert not _COLOURS.sub("", told[2]).strip(), "Ray says things that nobody can make use of"
        finally:
            for one in self.seen.values():
                if one.is_running():
                    one.kill()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def tree(self) -> list[Any]:
        """Return all processes below the command, and add them to ``seen``."""
        assert self.process is not None
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.seen |= {one.pid: one for one in found}
        return list(found)

    def _asked(self, ask: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each process below the command with its answer. Processes that have ended are left out."""
        for one in self.tree():
            try:
                answer = ask(one)
            except psutil.Error:
                continue
            yield one, answer

    def pids(self, title: str) -> list[int]:
        """Return the ids of the processes whose command line contains the text ``title``."""
        return [one.pid for one, words in self._asked(lambda one: one.cmdline()) if title in " ".join(words)]

    def listens_at(self, port: int) -> int:
        """Return the id of the process that listens at this TCP port. Fails if there is none."""
        for one, connections in self._asked(lambda one: one.net_connections(kind="tcp")):
            if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections):
                return int(one.pid)
        raise AssertionError(f"nobody listens at {port}")

    def run(self, script: Path, *arguments: str) -> str:
        """Run ``script`` as a driver on the cluster, and return the last line of its output. Its first
        argument is the path of the config file; ``arguments`` follow. Fails if the script fails."""
        words = itertools.chain.from_iterable(words for _, words in self._asked(lambda one: one.cmdline()))
        address = next(word.partition("=")[2] for word in words if word.startswith("--gcs-address="))
        done = subprocess.run(
            [sys.executable, str(script), str(self.config_path), *arguments],
            # Without an address, a driver would connect to any cluster on this machine. With one, Ray sends
            # its token only in this mode.
            env={**self.environment, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"},
            capture_output=True, text=True, timeout=DEADLINE_S * 2,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip().splitlines()[-1]


Made = TypeVar("Made", bound=RayGateway)


@contextmanager
def started(make: Callable[[Path], Made]) -> Iterator[Made]:
    """Start the gateway that ``make`` returns for a new folder with a short path, and yield it. At the end,
    stop the gateway and delete the folder."""
    home = Path(tempfile.mkdtemp(prefix="sjr-"))
    try:
        made = make(home)
        try:
            made.start()
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
