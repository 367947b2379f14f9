"""The ``mini`` command itself, unchanged, below ``sojourn run``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sojourn.testing import FakeServer, ToolUse
from sojourn.wire_events import Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")
WHERE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
MINI = shutil.which("mini", path=WHERE)
OFFLINE = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
SOJOURN = (sys.executable, "-c", "from sojourn_server.cli import main; main()")
SCRIPT = [
    ToolUse("bash", {"command": command}, f"call-{number}")
    for number, command in enumerate(("echo hi", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
]

pytestmark = pytest.mark.skipif(MINI is None, reason="the mini command is not installed")


def test_sojourn_run_needs_no_change_to_the_command(tmp_path: Path) -> None:
    with FakeServer(SCRIPT) as server:
        model = (f"model.model_kwargs.api_base={server.base_url}", "model.model_kwargs.api_key=x")
        settings = [part for text in ("mini.yaml", *model) for part in ("-c", text)]
        command = [str(MINI), "-m", "openai/m", "-y", "--exit-immediately", "-t", "it", "-o", "run.json"]
        result = subprocess.run(
            [*SOJOURN, "run", "--url", server.url, "--", *command, *settings],
            cwd=tmp_path,
            env={**os.environ, **OFFLINE, "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        events = [event for event in server.program_events() if not isinstance(event, Heartbeat)]
    kinds = [type(event) for event in events]
    assert kinds == [ProgramStart, *[ToolStart, ToolStop] * 2, ProgramEnd]
    assert [event.agent_type for event in events if isinstance(event, ProgramStart)] == ["InteractiveAgent"]
    assert [event.call_id for event in events if isinstance(event, ToolStart)] == ["call-0", "call-1"]
    assert all(request.context is not None for request in server.requests)
