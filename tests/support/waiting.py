"""Functions that wait for a condition instead of sleeping for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

PATIENCE_S = 120.0
"""Default of the longest wait, in seconds. A busy, slow machine needs a minute; a hanging test ends here."""
EVERY_S, MOST_S = 0.005, 0.05
"""Seconds until a condition is looked at again. They grow, because many conditions ask a server, which takes
as much time of the processor as what the test waits for."""


def wait_until(
    condition: Callable[[], Result], message: Callable[[], object] = lambda: "", within_s: float = PATIENCE_S
) -> Result:
    """Call ``condition`` until its result is true and return it. Raises ``AssertionError`` with ``message()``
    after ``within_s`` seconds."""
    end_s, pause_s = time.monotonic() + within_s, EVERY_S
    while not (result := condition()):
        assert time.monotonic() < end_s, f"not within {within_s:.0f} s: {message()}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, MOST_S)
    return result


async def wait_until_async(condition: Callable[[], Result], within_s: float = PATIENCE_S) -> Result:
    """Do the same as ``wait_until`` on an event loop, without blocking the loop."""
    end_s, pause_s = time.monotonic() + within_s, EVERY_S
    while not (result := condition()):
        assert time.monotonic() < end_s, f"not within {within_s:.0f} s"
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, MOST_S)
    return result
