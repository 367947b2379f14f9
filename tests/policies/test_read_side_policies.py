"""The read side: the shorter queue."""

from __future__ import annotations

import pytest
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import (
    PrefillSideRead,
    ShorterQueueRead,
    StorageReadView,
)


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "one_node", "decode_reads"),
    [
        (1.0, 0.5, False, True),
        (0.5, 1.0, False, False),
        (1.0, 1.0, False, False),
        (-0.1, -2.0, False, True),
        (1.0, 0.5, True, False),
    ],
)
def test_the_shorter_queue_reads(
    prefill_s: float, decode_s: float, one_node: bool, decode_reads: bool
) -> None:
    view = StorageReadView(prefill_s, decode_s, one_node)
    assert ShorterQueueRead().decode_reads(view) == decode_reads
    assert not PrefillSideRead().decode_reads(view)
