"""Collecting garbage often, where much is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_passed_over() -> Iterator[None]:
    """``gc.collect()`` looks meanwhile at what is made meanwhile.

    Beside torch, vLLM and the frameworks it takes half a second otherwise, to find nothing among their
    modules. Garbage from before stays until the end: it is no finding of the tests that collect here. An
    engine that is closed in this process lets everything be looked at again, which costs time alone.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
