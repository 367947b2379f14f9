"""A lasting fault does not fill the log."""

from __future__ import annotations

import logging

import pytest
from sojourn_server.metrics.rate_limited_log import RateLimitedLog


def test_a_repeated_message_is_logged_once_in_10_s_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = RateLimitedLog(logging.getLogger("test"), lambda: now[0])
    for now[0] in (0, 1, 2, 11, 12, 30):
        log.log(logging.WARNING, "cannot read %s", f"file {now[0]}")
    log.log(logging.WARNING, "another")
    assert caplog.messages == [
        "cannot read file 0", "cannot read file 11 (2 more since the last one)",
        "cannot read file 30 (1 more since the last one)", "another",
    ]  # fmt: skip
