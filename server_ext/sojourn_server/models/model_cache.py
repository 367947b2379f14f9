"""The cache directory of the models *tiny* and *smol*. Parallel processes make each model only once."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

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
    ``smol`` takes 20 s and 260 MB of disk. ``progress`` prints a line on stderr. Raises ``ModelError``
    if a package for making the model is missing or the cache cannot be written. Raises ``OSError`` if writing
    the model fails, for example on a full disk.
    """
    if name not in _REVISIONS:
        return name
    directory = model_directory(name)
    if is_cached(name):
        return str(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = directory.with_suffix(".lock").open("w")
    except OSError as error:
        raise ModelError(
            f"the folder {directory.parent} cannot be written ({error})", _OTHER_CACHE
        ) from error
    with lock:
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases it, also when the process dies
        if not is_cached(name):
            if progress:
                print(f"making the model {name!r} in {directory} (first use only)", file=sys.stderr)
            _make(name, directory)
    return str(directory)


def is_cached(name: str) -> bool:
    """Return whether the model ``name`` is in the cache."""
    return (model_directory(name) / "config.json").is_file()


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


def _make(name: str, directory: Path) -> None:
    # A rename is atomic only within a file system, so the model is made in a directory beside the target.
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory.parent))
    try:
        import_module(f"{__package__}.{name}").make(partial)
        # mkdtemp and safetensors create private files, but several users may share a cache.
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
