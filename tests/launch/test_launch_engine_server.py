"""``EngineServer`` against a stand-in for ``sojourn serve``: quick, and able to misbehave."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
from pathlib import Path

import pytest
from sojourn_server.launch.engine_server import EngineServer, ServerStartError

STAND_IN = textwrap.dedent(
    """
    import http.server, os, signal, subprocess, sys
    mode, args = os.environ.get("MODE", ""), sys.argv[1:]
    port = int(args[args.index("--port") + 1])
    print("(Worker pid=1) INFO 01-02 03:04:05 [x.py:1] Starting to load model x", flush=True)
    if mode == "crash":
        sys.exit("no such model")
    if mode == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("helper", helper.pid, flush=True)
    if mode == "silent":
        import time; time.sleep(600)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()

    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


class StandIn(EngineServer):
    def __init__(self, script: Path, **options) -> None:
        super().__init__("tiny", **options)
        self.script = script

    def _command(self) -> list[str]:
        command = super()._command()
        assert command[1:4] == ["-m", "sojourn_server.cli", "serve"]
        return [sys.executable, str(self.script), *command[4:]]


@pytest.fixture
def server(tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(STAND_IN)

    def make(mode="", **options):
        return StandIn(script, env={"MODE": mode}, **options)

    return make


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_it_answers_while_it_is_open_and_is_gone_after(server):
    said = []
    with server(progress=lambda elapsed_s, line: said.append((elapsed_s, line))) as running:
        assert running.url == f"http://127.0.0.1:{running.port}"
        assert is_listening(running.port)
        assert "Starting to load" in running.log_tail()
        log = running.log_path
    assert not is_listening(running.port)
    assert running.pid is None
    assert not log.exists()
    assert {stage for _, stage in said} <= {"starting the process", "loading the weights"}
    assert said
    running.stop()  # again: nothing to do


def test_a_server_that_dies_is_reported_with_its_log(server):
    with pytest.raises(ServerStartError, match="no such model") as error, server("crash"):
        pass
    assert "code 1" in str(error.value)


def test_a_server_that_is_never_ready_is_stopped(server):
    silent = server("silent", ready_timeout_s=1.0)
    with pytest.raises(ServerStartError, match="not ready after 1 s"):
        silent.start()
    assert silent.pid is None


def test_another_server_on_the_port_is_not_taken_for_the_engine(server):
    taken = pytest.raises(ServerStartError, match=r"cannot listen on .*: Address already in use")
    with socket.create_server(("127.0.0.1", 0)) as other, taken:
        server(port=other.getsockname()[1]).start()


def test_a_named_log_stays_and_the_api_key_is_used_and_not_on_the_command_line(server, tmp_path):
    log = tmp_path / "logs" / "serve.log"
    with server(api_key="s3cret", log_path=log) as running:
        assert running.headers == {"Authorization": "Bearer s3cret"}
        assert b"s3cret" not in Path(f"/proc/{running.pid}/cmdline").read_bytes()
    assert "Starting to load" in log.read_text()


def test_the_whole_group_ends_also_when_the_server_ignores_the_request(server, monkeypatch):
    monkeypatch.setattr("sojourn_server.launch.engine_server._INTERRUPT_GRACE_S", 0.3)
    with server("stubborn") as running:
        helper = int(running.log_tail().split("helper ")[1].split()[0])
        assert is_running(helper)
        assert os.getpgid(helper) == running.pid
        leader = running.pid
    assert not is_running(helper)
    assert not is_running(leader)
