"""The demo's tasks: small broken repositories, and the turns by which an agent mends them.

Each folder under ``tasks/`` holds ``repo/`` and ``task.toml``: the issue, the command that tests the
repository, and the scripted turns. Nothing but Python and a POSIX shell is needed to run them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "tasks"
TEST_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What the agent thinks and then runs."""

    thought: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One repository to mend."""

    name: str
    issue: str
    test: str
    """Shell command that succeeds once the repository is mended."""
    context_tokens: int
    """Tokens of the whole conversation at its end with SmolLM2's tokenizer, measured once and tested."""
    turns: tuple[Turn, ...]

    def copy_to(self, directory: Path) -> Path:
        """A fresh broken copy of the repository below ``directory``; returns its path."""
        return Path(shutil.copytree(FOLDER / self.name / "repo", directory / self.name))

    def is_fixed(self, repository: Path) -> bool:
        """Run the tests as they were shipped, independently of what the agent believes or changed."""
        shutil.copytree(FOLDER / self.name / "repo" / "tests", repository / "tests", dirs_exist_ok=True)
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


def load_tasks(count: int | None = None) -> list[Task]:
    """All tasks in a fixed order, or ``count`` programs' worth: beyond the last it starts again.

    Raises ``ValueError`` for a count below 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"{count} programs; expected at least 1")
    tasks = [_load(folder) for folder in sorted(FOLDER.iterdir()) if (folder / "task.toml").is_file()]
    return tasks if count is None else [tasks[index % len(tasks)] for index in range(count)]


def shell_environment() -> dict[str, str]:
    """Variables for the agents' commands: this Python first, and nothing that makes outputs vary."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        "PATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "LC_ALL": "C",
        "PAGER": "cat",
        "COLUMNS": "100",
    }


def _load(folder: Path) -> Task:
    document = tomllib.loads((folder / "task.toml").read_text())
    turns = tuple(Turn(turn["thought"], turn["command"].strip()) for turn in document.pop("turn"))
    return Task(name=folder.name, turns=turns, **document)
