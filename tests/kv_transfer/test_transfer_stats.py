"""The socket at which a traffic manager tells how it goes, for another process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.kv_transfer import transfer_stats
from sojourn_server.kv_transfer.transfer_stats import StatsServer, StatsUnavailable, fetch_stats


def test_it_tells_what_there_is_each_time() -> None:
    counts = {"asked": 0}

    def told() -> dict[str, Any]:
        counts["asked"] += 1
        return counts

    one = StatsServer(told)
    try:
        assert [fetch_stats(one.address) for _ in range(3)] == [{"asked": number} for number in (1, 2, 3)]
        assert Path(one.address).parent.stat().st_mode & 0o077 == 0, "its user's alone"
    finally:
        one.close()


def test_nothing_to_tell_is_told_as_such() -> None:
    one = StatsServer(lambda: None)
    try:
        assert fetch_stats(one.address) is None
    finally:
        one.close()


def test_once_it_is_closed_nobody_answers_and_nothing_is_left() -> None:
    one = StatsServer(dict)
    one.close()
    assert not Path(one.address).parent.exists()
    with pytest.raises(StatsUnavailable, match="/stats: "):
        fetch_stats(one.address)


def test_who_does_not_read_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_stats, "ANSWER_TIMEOUT_S", 60.0)
    big, small = {"a": "b" * (1 << 23)}, {"a": "b"}
    answers = [big, small]
    one = StatsServer(lambda: answers.pop(0), answer_s=0.05)
    try:
        with socket.socket(socket.AF_UNIX) as lazy:
            lazy.connect(one.address)
            assert fetch_stats(one.address) == small
    finally:
        one.close()
