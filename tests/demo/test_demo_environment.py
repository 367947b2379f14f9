"""The variables that the demo sets for its agents' libraries: proxies, and mini-swe-agent's settings."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from echo_engine import EchoEngine
from sojourn_server.demo.demo_agent import prepare_environment
from sojourn_server.demo.demo_run import warm_up

PROXY_VARIABLES = ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy")


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy for all hosts at a port that refuses connections."""
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as bound:  # not listening, and taken
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{bound.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("dead_proxy")
def test_the_agents_client_reaches_a_server_on_this_machine_past_the_proxy(tmp_path: Path) -> None:
    with EchoEngine() as engine:
        prepare_environment(tmp_path)
        warm_up(engine.url, "m")
    assert len(engine.bodies) == 1


@pytest.mark.usefixtures("dead_proxy")
def test_an_error_of_the_agents_client_names_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with EchoEngine() as engine:
        prepare_environment(tmp_path, "http://engine.example:8000")
        # The proxy stays in force, and this server is behind it.
        expected = rf"first request to {re.escape(engine.url)} failed: .*Error"
        with pytest.raises(RuntimeError, match=expected):
            warm_up(engine.url, "m")
    assert engine.bodies == []
    assert capfd.readouterr().out == ""  # stdout may carry the JSON


def test_settings_of_the_user_for_mini_swe_agent_stay_out_of_the_demo(tmp_path: Path) -> None:
    user, own = tmp_path / "user", tmp_path / "demo"
    (user / "mini-swe-agent").mkdir(parents=True)
    (user / "mini-swe-agent" / ".env").write_text("OF_THE_USER=1\n")
    own.mkdir()
    code = (
        "import os, sys; from pathlib import Path\n"
        "from sojourn_server.demo.demo_agent import prepare_environment\n"
        "prepare_environment(Path(sys.argv[1]))\n"
        "import minisweagent\n"
        "print(minisweagent.global_config_dir, os.environ.get('OF_THE_USER'))"
    )
    environment = {**os.environ, "XDG_CONFIG_HOME": str(user)}
    environment.pop("MSWEA_GLOBAL_CONFIG_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", code, str(own)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == f"{own} None", done.stderr
