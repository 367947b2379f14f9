"""``sojourn run``: the command stays the user's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOJOURN = [sys.executable, "-c", "from sojourn_server.cli import main; main()"]
UNUSED = "http://127.0.0.1:9"


def sojourn_run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "SOJOURN_URL")}
    line = [*SOJOURN, "run", "--url", UNUSED, "--", *command]
    return subprocess.run(line, env=env | environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a framework that only looks like mini."""
    module = tmp_path / "minisweagent" / "agents" / "default.py"
    module.parent.mkdir(parents=True)
    for folder in (module.parent, module.parent.parent):
        (folder / "__init__.py").write_text("")
    body = "    def __init__(self): self.model = self.env = None\n    def run(self): return 7\n"
    module.write_text("class DefaultAgent:\n" + body)
    return tmp_path


def test_exit_code_output_and_arguments_are_the_commands_own() -> None:
    result = sojourn_run("sh", "-c", 'echo "$1" "$SOJOURN_URL"; exit 7', "-", "--url")
    assert (result.returncode, result.stdout) == (7, f"--url {UNUSED}\n")


def test_says_when_nobody_answers() -> None:
    result = sojourn_run("true")
    assert result.returncode == 0
    assert f"no sojourn server answers at {UNUSED}" in result.stderr


def test_a_signal_ends_it_as_it_would_end_the_command() -> None:
    result = sojourn_run("sh", "-c", "kill -TERM $$")
    assert result.returncode == -signal.SIGTERM


def test_unknown_commands_name_a_next_step(tmp_path: Path) -> None:
    result = sojourn_run("no-such-command-here")
    assert result.returncode == 127
    assert "there is no command 'no-such-command-here'" in result.stderr
    assert "next:" in result.stderr
    script = tmp_path / "agent.py"
    script.write_text("")
    assert f"sojourn run -- python {script}" in sojourn_run(str(script)).stderr.replace("\n", "")


def test_mini_is_instrumented_when_it_is_imported(packages: Path) -> None:
    code = (
        "import sys, minisweagent.agents.default as d; "
        "print('sojourn_integrations.mini_swe_agent' in sys.modules, "
        "hasattr(d.DefaultAgent.run, '__wrapped__'), d.DefaultAgent().run())"
    )
    result = sojourn_run(sys.executable, "-c", code, PYTHONPATH=str(packages))
    assert result.stdout.strip() == "True True 7", result.stderr


def test_grandchildren_are_reached_too(packages: Path) -> None:
    code = "import minisweagent.agents.default as d; print(hasattr(d.DefaultAgent.run, '__wrapped__'))"
    result = sojourn_run("sh", "-c", f'"{sys.executable}" -c "{code}"', PYTHONPATH=str(packages))
    assert result.stdout.strip() == "True", result.stderr


def test_other_pythons_pay_nothing() -> None:
    code = "import sys; print([m for m in sys.modules if m.partition('.')[0] in ('sojourn', 'httpx')])"
    assert sojourn_run(sys.executable, "-c", code).stdout.strip() == "[]"


def test_the_users_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.mine = __file__\n")
    code = (
        "import sys, sitecustomize; "
        "print(sys.mine == sitecustomize.__file__, any('autostart' in entry for entry in sys.path))"
    )
    result = sojourn_run(sys.executable, "-c", code, PYTHONPATH=str(tmp_path))
    assert result.stdout.strip() == "True False", result.stderr


def test_a_python_without_our_packages_is_left_alone(packages: Path) -> None:
    # -S: no site-packages, as in a foreign interpreter; the hook is run by hand as site would.
    code = (
        "import sys, runpy, os; folder = os.environ['PYTHONPATH'].split(os.pathsep)[0]; "
        "runpy.run_path(folder + '/sitecustomize.py'); "
        "import minisweagent.agents.default as d; print(d.DefaultAgent().run())"
    )
    result = sojourn_run(sys.executable, "-S", "-c", code, PYTHONPATH=str(packages))
    assert result.stdout.strip() == "7"
    assert "sojourn: not attached" in result.stderr
