"""Where made models lie, and how two processes make one of them only once.

A model is written into a temporary directory beside its final place and renamed,
so a directory that exists is complete; a file lock keeps a second process waiting
for the first instead of repeating its work.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

if sys.platform != "win32":
    import fcntl

CACHE_VARIABLE = "SOJOURN_CACHE"
"""Environment variable naming the directory the made models lie in."""

_REVISIONS = {"tiny": 1, "smol": 1}
"""Raised whenever a recipe changes, so that an old cache is not mistaken for the new model."""

LOCAL_MODELS: tuple[str, ...] = tuple(_REVISIONS)
"""Names ``resolve_model`` makes; everything else passes through."""


class ModelError(RuntimeError):
    """A model cannot be made here: what is missing, and in ``next_step`` how to get it."""

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(f"{message}: {next_step}")
        self.message = message
        self.next_step = next_step


def resolve_model(name: str, *, progress: bool = True) -> str:
    """The directory of a model made here, or ``name`` itself: a path or a hub id.

    On first use ``tiny`` takes about 5 s and ``smol`` about 20 s and 260 MB of disk, most
    of it importing; ``progress`` says so on stderr. Raises ``ModelError`` where the
    packages the models are made from are absent.
    """
    if name not in _REVISIONS:
        return name
    directory = model_directory(name)
    if is_cached(name):
        return str(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_suffix(".lock")):
        if not is_cached(name):
            _make(name, directory, progress=progress)
    return str(directory)


def is_cached(name: str) -> bool:
    """Whether ``name`` has been made already."""
    return (model_directory(name) / "config.json").is_file()


def model_directory(name: str) -> Path:
    """Where the model ``name`` lies or will lie; ``KeyError`` for names that are not made here."""
    return cache_directory() / f"{name}-{_REVISIONS[name]}"


def cache_directory() -> Path:
    """``$SOJOURN_CACHE``, or ``~/.cache/sojourn/models``."""
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override).expanduser() if override else Path.home() / ".cache" / "sojourn" / "models"


def _make(name: str, directory: Path, *, progress: bool) -> None:
    # A rename is only atomic within a file system, so the work is done beside the target.
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory.parent))
    try:
        with _status(f"making the model {name!r} in {directory} (first use only)", show=progress) as say:
            import_module(f"{__package__}.{name}").make(partial, say)
        # mkdtemp and safetensors make private things; a cache may be shared between users.
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` between processes; waits for as long as it takes."""
    with path.open("w") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets the lock go, also when the process dies


@contextmanager
def _status(title: str, *, show: bool) -> Iterator[Callable[[str], None]]:
    """A spinner with the current step; yields ``say(step)``."""
    if not show:
        yield lambda step: None
        return
    from sojourn_server.cli.console import console

    with console.status(title) as status:
        if not console.is_terminal:  # a spinner leaves no trace in a log
            console.print(title, highlight=False, soft_wrap=True)
        yield lambda step: status.update(f"{title}: {step}")
