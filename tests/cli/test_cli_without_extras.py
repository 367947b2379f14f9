"""``pip install sojourn`` without extras: working commands, and the message of the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tomllib
from sojourn.testing import FakeServer
from sojourn_server.cli import COMMAND_LINE_PACKAGES, EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def without(blocked: tuple[str, ...], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a Python that finds everything of this environment but the packages ``blocked``."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
    folders = os.pathsep.join(str(ROOT / name) for name in ("sdk", "server_ext", "integrations"))
    return subprocess.run(
        [sys.executable, "-c", block + code, *arguments],
        env={**os.environ, "PYTHONPATH": folders, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


MAIN = "from sojourn_server.cli import main; main()"


def test_every_extra_that_a_message_names_exists() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS.values()) <= extras.keys()
    named = {re.split(r"[<>=;\[ ]", each)[0] for each in extras["server"]}
    assert set(COMMAND_LINE_PACKAGES) <= named
    for extra in ("vllm", "cpu", "gateway", "ray", "demo", "dev"):
        assert "sojourn[server]" in extras[extra], extra
    for extra in ("cpu", "demo"):  # vLLM does not bring gguf, with which the small models are read
        assert any(each.startswith("gguf") for each in extras[extra]), extra


@pytest.mark.parametrize(
    "arguments", [(), ("--help",), ("simulate",), ("top",), ("doctor",), ("explain", "p")]
)
def test_the_command_line_names_its_extra_in_one_line(arguments: tuple[str, ...]) -> None:
    extra = "top" if arguments[:1] in (("top",), ("doctor",), ("explain",)) else "server"
    result = without(COMMAND_LINE_PACKAGES, MAIN, *arguments)
    assert result.returncode == 1
    assert result.stderr == (
        "sojourn: the command line needs httpx, rich, typer: "
        f"pip install '.[{extra}]' in a checkout of sojourn; sojourn run works without them\n"
    )


def test_the_version_needs_no_extra_and_an_old_python_is_named() -> None:
    result = without(COMMAND_LINE_PACKAGES, MAIN, "--version")
    assert (result.returncode, result.stdout) == (0, f"sojourn {PROJECT['version']}\n")
    old = "sys.version_info = (3, 9, 0); " + MAIN
    result = without(COMMAND_LINE_PACKAGES, old, "--version")
    assert result.returncode == 1
    assert "expected 3.10 or newer" in result.stderr


def test_a_dry_run_needs_no_vllm(tmp_path: Path) -> None:
    code = "from sojourn_server.vllm import compat; compat.installed_vllm = lambda: None; " + MAIN
    result = without(("vllm", "torch", "transformers"), code, "serve", "org/name", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "org/name" in result.stdout
    assert "vLLM is not installed here" in result.stderr


def test_a_command_names_the_extra_it_lacks() -> None:
    gateway_packages = tuple(package for package, extra in EXTRAS.items() if extra == "gateway")
    result = without(gateway_packages, MAIN, "gateway", "--engines", "http://127.0.0.1:9")
    assert result.returncode != 0
    assert "[gateway]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["sojourn", *COMMAND_LINE_PACKAGES])
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_a_foreign_file_in_place_of_a_package_is_named(tmp_path: Path, name: str, file: str) -> None:
    foreign = tmp_path / file.format(name)
    foreign.parent.mkdir(exist_ok=True)
    foreign.touch()
    result = subprocess.run(
        [sys.executable, "-c", MAIN, "top", "--once"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stderr == (f"sojourn: {foreign} hides the package {name}; rename it, or see PYTHONPATH\n")
    assert result.returncode == 1


def test_run_works_in_the_light_install_and_says_what_is_wrong() -> None:
    run = partial(without, COMMAND_LINE_PACKAGES, MAIN, "run")
    with FakeServer() as server:
        shown = "import os; print(os.environ['SOJOURN_URL'])"
        result = run("--url", server.url, "--", sys.executable, "-c", shown)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{server.url}\n", "")
    result = run("--", "no-such-command-here")
    assert result.returncode == 127
    assert "error: there is no command 'no-such-command-here'\nnext: " in result.stderr


def test_the_sdk_and_the_integrations_import_alone() -> None:
    blocked = (*COMMAND_LINE_PACKAGES, "certifi", "tomli", "torch", "vllm", "ray")
    code = """
import sojourn, sojourn_integrations
from sojourn_integrations import langgraph, litellm, instance_method_wrapper, mini_swe_agent, otel, safe_scope
from sojourn.testing import FakeServer
with FakeServer() as server:
    sojourn.init(server.url)
    with sojourn.program("loop"), sojourn.tool_call("bash"):
        pass
    assert sojourn.flush(60), sojourn.stats()
    sojourn.shutdown()
    print([type(event).__name__ for event in server.program_events()])
"""
    result = without(blocked, code)
    assert result.stdout == "['ProgramStart', 'ToolStart', 'ToolStop', 'ProgramEnd']\n", result.stderr
