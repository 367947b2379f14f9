"""Makes frequent garbage collections cheap in a process with many imported modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_passed_over() -> Iterator[None]:
    """Restrict ``gc.collect()`` to objects that are created inside the ``with`` block.

    Otherwise each collection takes half a second, since it scans the modules of torch, vLLM and the agent
    frameworks. Older garbage stays until the end of the block; the tests do not look for it. If an engine is
    closed in this process inside the block, collections scan all objects again, which only costs time.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
