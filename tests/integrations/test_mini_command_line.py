"""The ``mini`` command itself, unchanged, below ``sojourn run`` and with ``--agent-class``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mini_server import MiniServer, calls

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")
MINI = shutil.which(
    "mini", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
SCRIPT = [calls("echo hi"), calls("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]

pytestmark = pytest.mark.skipif(MINI is None, reason="the mini command is not installed")


def run_mini(
    server: MiniServer, cwd: Path, *, before: tuple[str, ...] = (), after: tuple[str, ...] = (), url: str = ""
) -> None:
    settings = [f"model.model_kwargs.api_base={server.url}/v1", "model.model_kwargs.api_key=x"]
    line = [*before, str(MINI), "-c", "mini.yaml", *(part for text in settings for part in ("-c", text))]
    line += ["-m", "openai/m", "-y", "--exit-immediately", "-t", "it", "-o", str(cwd / "run.json"), *after]
    environment = {
        **os.environ,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": str(cwd / "config"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **({"SOJOURN_URL": url} if url else {}),
    }
    result = subprocess.run(
        line, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr


def assert_one_program(server: MiniServer, agent_type: str) -> None:
    assert [event["agent_type"] for event in server.told("program_start")] == [agent_type]
    assert [event["call_id"] for event in server.told("tool_start")] == ["call-0-0", "call-1-0"]
    assert len(server.told("tool_stop")) == 2
    assert len(server.told("program_end")) == 1
    assert all("agentic_context" in body["vllm_xargs"] for _, body, _ in server.requests)


def test_sojourn_run_needs_no_change_to_the_command(tmp_path: Path) -> None:
    sojourn = (sys.executable, "-c", "from sojourn_server.cli import main; main()")
    with MiniServer(SCRIPT) as server:
        run_mini(server, tmp_path, before=(*sojourn, "run", "--url", server.url, "--"))
        assert_one_program(server, "InteractiveAgent")


def test_the_agent_class_is_enough(tmp_path: Path) -> None:
    with MiniServer(SCRIPT) as server:
        name = "sojourn_integrations.mini_swe_agent.InteractiveAgent"
        run_mini(server, tmp_path, after=("--agent-class", name), url=server.url)
        assert_one_program(server, "InteractiveAgent")
