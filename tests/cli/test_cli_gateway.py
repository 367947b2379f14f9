"""``sojourn gateway``: what it refuses before it starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ENGINES = ["--engines", "http://127.0.0.1:1"]


def gateway(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sojourn_server.cli", "gateway", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "no engines were named"),
        (["--engines", "localhost:8000"], "no address of an engine"),
        (["--engines", "http://h:1,http://h:1"], "named twice"),
        ([*ENGINES, "--policy", "sage"], "did you mean 'saga'"),
        ([*ENGINES, "--policy-file", "nowhere.toml"], "No such file"),
        ([*ENGINES, "--tenants", "nowhere.toml"], "No such file"),
        ([*ENGINES, "--tenants", "x.toml", "--api-key", "k"], "both given"),
        ([*ENGINES, "--admin-key", ""], "--admin-key is empty"),
        ([*ENGINES, "--api-key", " "], "--api-key is empty"),
        ([*ENGINES, "--log-level", "loud"], "--log-level is 'loud'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags: list[str], told: str) -> None:
    done = gateway(*flags)
    assert done.returncode == 2
    assert told in done.stderr
    assert "next:" in done.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = gateway(*ENGINES, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot be listened at" in done.stderr
    assert "--port" in done.stderr


def test_neither_vllm_nor_ray_nor_torch_is_loaded_for_it(tmp_path: Path) -> None:
    code = (
        "import sys; import sojourn_server.gateway.http.standalone, sojourn_server.cli.gateway; "
        "print([name for name in ('vllm', 'ray', 'torch', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
