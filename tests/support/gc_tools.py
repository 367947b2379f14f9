"""Makes garbage collections cheap in a process with many imported modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_really_freeze, _really_unfreeze = gc.freeze, gc.unfreeze


@contextmanager
def old_objects_passed_over() -> Iterator[None]:
    """Restrict garbage collections to objects that are created inside the ``with`` block.

    Otherwise each collection takes half a second, since it scans the modules of torch, vLLM and the agent
    frameworks. Older garbage stays until the end of the outermost block, and tests do not check it. An engine
    in this process freezes all objects when it starts and unfreezes them when it ends. Inside the block, it
    does neither.
    """
    outermost = gc.freeze is _really_freeze
    _really_freeze()
    gc.freeze = gc.unfreeze = _do_nothing
    try:
        yield
    finally:
        if outermost:
            gc.freeze, gc.unfreeze = _really_freeze, _really_unfreeze
            gc.unfreeze()


def pass_over_more() -> None:
    """Inside such a block, restrict collections to objects that are created from now on. Objects that exist
    now and become garbage later stay until the end of the block."""
    if gc.freeze is _do_nothing:
        gc.collect()  # what is garbage by now is still reported
        _really_freeze()


@contextmanager
def imports() -> Iterator[None]:
    """Collect no garbage in the block, whose imports create a million lasting objects. No later collection
    scans the objects that exist at the block's end."""
    enabled = gc.isenabled()
    if enabled:
        gc.collect()  # what is garbage by now is still reported
    gc.disable()
    try:
        yield
    finally:
        _really_freeze()
        if enabled:
            gc.enable()


def _do_nothing(*_: Any) -> None:
    pass
