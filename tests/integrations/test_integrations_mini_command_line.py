"""The ``mini`` and ``mini-extra`` commands themselves, unchanged, below ``sojourn run`` and with
``--agent-class``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sojourn.testing import FakeServer, LlmRequest, ToolUse
from sojourn.wire_events import Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")
WHERE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
MINI = shutil.which("mini", path=WHERE)
MINI_EXTRA = shutil.which("mini-extra", path=WHERE)
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


def run_mini(folder: Path, server: FakeServer, *command: str, settings: tuple[str, ...], **more: str) -> None:
    """Run a command of mini's below ``sojourn run``, with settings given as ``-c``."""
    model = (f"model.model_kwargs.api_base={server.base_url}", "model.model_kwargs.api_key=x")
    given = [part for text in (*settings, *model) for part in ("-c", text)]
    environment = {**os.environ, **OFFLINE, "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "config"), **more}
    line = [*SOJOURN, "run", "--url", server.url, "--", *command, *given]
    result = subprocess.run(
        line,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_sojourn_run_needs_no_change_to_the_command(tmp_path: Path) -> None:
    with FakeServer(SCRIPT) as server:
        command = [str(MINI), "-m", "openai/m", "-y", "--exit-immediately", "-t", "it"]
        run_mini(tmp_path, server, *command, "-o", str(tmp_path / "run.json"), settings=("mini.yaml",))
        events = [event for event in server.program_events() if not isinstance(event, Heartbeat)]
    kinds = [type(event) for event in events]
    assert kinds == [ProgramStart, *[ToolStart, ToolStop] * 2, ProgramEnd]
    assert [event.agent_type for event in events if isinstance(event, ProgramStart)] == ["InteractiveAgent"]
    assert [event.call_id for event in events if isinstance(event, ToolStart)] == ["call-0", "call-1"]
    assert all(request.context is not None for request in server.requests)


INSTANCES = ("toy__repo-1", "toy__repo-2", "toy__repo-3")


def look_then_submit(request: LlmRequest) -> ToolUse:
    """By what the prompt holds: instances run side by side."""
    looked = any(message["role"] == "tool" for message in request.body["messages"])
    return ToolUse(
        "bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo patch" if looked else "ls"}
    )


@pytest.mark.nightly  # half a minute of imports; scenarios_mini.py and an example run instances too
@pytest.mark.skipif(MINI_EXTRA is None, reason="the mini-extra command is not installed")
def test_every_instance_of_a_swebench_run_is_a_program(tmp_path: Path) -> None:
    """Its own loop, threads and files; the data set is a toy, and commands run here and not in Docker."""
    rows = [{"instance_id": id, "problem_statement": f"Mend {id}."} for id in INSTANCES]
    (tmp_path / "datasets.py").write_text(f"def load_dataset(path, split):\n    return {rows!r}\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with FakeServer(look_then_submit) as server:
        command = [str(MINI_EXTRA), "swebench", "-m", "openai/m", "-w", "2", "--environment-class", "local"]
        settings = ("swebench.yaml", f"environment.cwd={tmp_path}")
        run_mini(tmp_path, server, *command, "-o", str(tmp_path / "out"), settings=settings, PYTHONPATH=path)
        events = server.program_events()
        requests = list(server.requests)
    patches = json.loads((tmp_path / "out" / "preds.json").read_text())
    assert {id: patch["model_patch"] for id, patch in patches.items()} == dict.fromkeys(INSTANCES, "patch\n")
    starts = [event for event in events if isinstance(event, ProgramStart)]
    assert sorted(str(start.name) for start in starts) == list(INSTANCES)
    assert {start.agent_type for start in starts} == {"ProgressTrackingAgent"}
    ids = sorted(start.program_id for start in starts)
    assert sorted(event.program_id for event in events if isinstance(event, ProgramEnd)) == ids
    for kind in (ToolStart, ToolStop):
        assert sorted(event.program_id for event in events if isinstance(event, kind)) == sorted(ids * 2)
    assert sorted(request.context.program_id for request in requests if request.context) == sorted(ids * 2)
    assert len(requests) == 6
