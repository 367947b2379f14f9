"""The cache directory of the models *tiny* and *smol*. Parallel processes make each model only once."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

CACHE_VARIABLE = "SOJOURN_CACHE"
"""Name of the environment variable that sets the cache directory."""

_REVISIONS = {"tiny": 1, "smol": 1}
"""Model → revision of the code that makes the model. Changed code gets a new revision, so that models from
older code are not used."""

LOCAL_MODELS: tuple[str, ...] = tuple(_REVISIONS)
"""Names of the models that ``resolve_model`` makes."""

_OTHER_CACHE = f"set {CACHE_VARIABLE} to a directory that you can write, with 300 MB free"


class ModelError(RuntimeError):
    """A model cannot be made. ``message`` says what is missing, and ``next_step`` says how to get it."""

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(f"{message}: {next_step}")
        self.message = message
        self.next_step = next_step


def resolve_model(name: str, *, progress: bool = True) -> str:
    """Return the directory of the model ``tiny`` or ``smol``. Make the model if it is not in the cache.

    Any other ``name``, such as a path or a hub id, is returned unchanged. Making ``tiny`` takes about 5 s;
    ``smol`` takes 20 s and 260 MB of disk. ``progress`` shows a status line on stderr. Raises ``ModelError``
    if a package for making the model is missing or the cache cannot be written. Raises ``OSError`` if writing
    the model fails, for example on a full disk.
    """
    if name not in _REVISIONS:
        return name
    directory = model_directory(name)
    if is_cached(name):
        return str(directory)
    with _writable(directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = directory.with_suffix(".lock").open("w")
    with _locked(lock):
        if not is_cached(name):
            _make(name, directory, progress=progress)
    return str(directory)


def is_cached(name: str) -> bool:
    """Return whether the model ``name`` is in the cache; false if the cache cannot be read."""
    try:
        return (model_directory(name) / "config.json").is_file()
    except OSError:
        return False


def model_directory(name: str) -> Path:
    """Return the cache directory of the model ``name``. The directory may not exist yet. Raises ``KeyError``
    for a name that is not in ``LOCAL_MODELS``, and ``ModelError`` as ``cache_directory`` does."""
    return cache_directory() / f"{name}-{_REVISIONS[name]}"


def cache_directory() -> Path:
    """Return the cache directory: ``$SOJOURN_CACHE``, or ``~/.cache/sojourn/models``. Raises ``ModelError``
    if ``~`` is needed and the user has no home directory."""
    override = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(override).expanduser() if override else Path.home() / ".cache" / "sojourn" / "models"
    except RuntimeError as error:
        raise ModelError(
            "no home directory is known for this user, so there is no place for the models", _OTHER_CACHE
        ) from error


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` in the ``with`` block into a ``ModelError`` that names ``folder``."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"the folder {folder} cannot be written ({error})", _OTHER_CACHE) from error


def _make(name: str, directory: Path, *, progress: bool) -> None:
    # A rename is atomic only within a file system, so the model is made in a directory beside the target.
    with _writable(directory.parent):
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory.parent))
    try:
        with _status(f"making the model {name!r} in {directory} (first use only)", show=progress) as say:
            import_module(f"{__package__}.{name}").make(partial, say)
        # mkdtemp and safetensors create private files, but several users may share a cache.
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _locked(file: IO[str]) -> Iterator[None]:
    """Hold an exclusive lock on ``file``, also against other processes, and close it at the end. Waits for
    the lock without a limit. On Windows it does not lock."""
    with file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also when the process dies


@contextmanager
def _status(title: str, *, show: bool) -> Iterator[Callable[[str], None]]:
    """Show ``title`` with a spinner on stderr. Yield a function that shows the current step."""
    if not show:
        yield lambda step: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(title) as status:
        if not console.is_terminal:  # a spinner leaves no trace in a log
            console.print(title, highlight=False, soft_wrap=True)
        yield lambda step: status.update(f"{title}: {step}")
