"""Tasks of the demo: small broken repositories, and the turns in which an agent fixes them.

Each folder under ``tasks/`` holds ``repo/`` and ``task.toml``: the issue, the command that tests the
repository, and the scripted turns. The commands need only Python and a POSIX shell.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ..policies.toml_document import load_toml

TASKS_FOLDER = Path(__file__).parent / "tasks"
TEST_TIMEOUT_S = 60.0
FINAL_TURNS = 4
"""Number of final turns of every task: edit, test, check, submit. All earlier turns only read files."""
_OPENING_TOKENS = 900
"""Number of tokens of a first prompt: mini-swe-agent's instructions, the tool and the issue."""


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One scripted turn: a thought, and the command after it."""

    thought: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTask:
    """One task: a broken repository, and the turns that fix it."""

    name: str
    issue: str
    test: str
    """Shell command that succeeds once the repository is fixed."""
    context_tokens: int
    """Tokens of the whole conversation with SmolLM2's tokenizer, measured once and checked by a test."""
    turns: tuple[ScriptedTurn, ...]

    def copy_to(self, directory: Path) -> Path:
        """Copy the broken repository to a folder below ``directory``. Return the path of the copy."""
        return Path(shutil.copytree(TASKS_FOLDER / self.name / "repo", directory / self.name))

    def shortened(self, turns: int) -> DemoTask:
        """Return the same task with only ``turns`` turns. The final turns (edit, test, check, submit) stay.
        Turns that only read files are dropped, the latest first.

        ``context_tokens`` becomes an estimate, which tends to be too large.
        """
        grown = (self.context_tokens - _OPENING_TOKENS) * turns // len(self.turns)
        return replace(
            self,
            turns=self.turns[: turns - FINAL_TURNS] + self.turns[-FINAL_TURNS:],
            context_tokens=_OPENING_TOKENS + grown,
        )

    def is_fixed(self, repository: Path) -> bool:
        """Return whether the task's original tests pass in ``repository``. They are first copied over the
        repository's own tests, which the agent may have changed."""
        shutil.copytree(TASKS_FOLDER / self.name / "repo" / "tests", repository / "tests", dirs_exist_ok=True)
        try:
            result = subprocess.run(
                ["/bin/sh", "-c", self.test],
                cwd=repository,
                env={**os.environ, **shell_environment()},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TEST_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return False
        return result.returncode == 0


def load_tasks(count: int | None = None) -> list[DemoTask]:
    """Return the first ``count`` tasks in a fixed order; ``None``: all tasks. If ``count`` exceeds the number
    of tasks, they repeat."""
    tasks = [_load(folder) for folder in sorted(TASKS_FOLDER.iterdir()) if (folder / "task.toml").is_file()]
    return tasks if count is None else [tasks[index % len(tasks)] for index in range(count)]


def shell_environment() -> dict[str, str]:
    """Return environment variables for the agents' commands. They put this Python first on ``PATH`` and make
    outputs reproducible."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        "PATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "",  # "1" hides the modules of the repository
        "LC_ALL": "C",
        "PAGER": "cat",
        "COLUMNS": "100",
    }


def _load(folder: Path) -> DemoTask:
    document = load_toml((folder / "task.toml").read_text())
    turns = tuple(ScriptedTurn(turn["thought"], turn["command"].strip()) for turn in document.pop("turn"))
    return DemoTask(name=folder.name, turns=turns, **document)
