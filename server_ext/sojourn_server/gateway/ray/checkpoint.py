"""What a coordinator leaves to the next one, in a file that is replaced as a whole."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from ..core.state import CoreState
from .messages import Place

logger = logging.getLogger(__name__)

VERSION = 1


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One coordinator's, as it was then."""

    version: int = VERSION
    epoch: int
    unix_s: float
    core: CoreState | None
    """``None``: this coordinator has only just begun."""
    engines: dict[str, list[Place]]
    """Replicas by engine."""


class _Head(msgspec.Struct):
    version: int
    epoch: int


def read_checkpoint(path: Path) -> Checkpoint | None:
    """``None``: there is none, or none that can be read, which is logged."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Checkpoint)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("checkpoint %s cannot be used: %s", path, error)
        return None


def read_epoch(path: Path) -> int:
    """Of whoever wrote it last; 0: nobody, or it cannot be read."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_Head).epoch
    except (OSError, msgspec.DecodeError):
        return 0


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> int:
    """Replace it, unless a later coordinator has; returns the epoch of whoever's it is now.

    Raises ``OSError`` where it cannot be written.
    """
    found = read_epoch(path)
    if found > checkpoint.epoch:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{checkpoint.epoch}.tmp")
    try:
        draft.write_bytes(msgspec.msgpack.encode(checkpoint))
        os.chmod(draft, 0o600)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return checkpoint.epoch
