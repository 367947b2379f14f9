"""How a gateway faces its clients: the limit of open files, and offers of other protocols."""

from __future__ import annotations

import resource

import pytest
from sojourn_server.gateway.http.gateway_server import (
    MAX_OPEN_FILES,
    raise_open_file_limit,
    uvicorn_settings,
)


@pytest.mark.parametrize(
    ("soft", "hard", "most_waiting", "limit", "warns"),
    [
        (1024, 1 << 20, 20_000, MAX_OPEN_FILES, False),
        (1024, resource.RLIM_INFINITY, 20_000, MAX_OPEN_FILES, False),
        (1024, 1 << 20, 100_000, 200_000, False),
        (1024, 4096, 20_000, 4096, True),
        (1024, 30_000, 20_000, 30_000, False),
        (1 << 20, 1 << 20, 20_000, 1 << 20, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 20_000, resource.RLIM_INFINITY, False),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    soft: int,
    hard: int,
    most_waiting: int,
    limit: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    assert raise_open_file_limit(most_waiting) == (limit if limit != resource.RLIM_INFINITY else None)
    assert limits[-1] == (limit, hard)
    assert uvicorn_settings()["limit_concurrency"] == (limit // 2 if limit > 0 else None)
    assert bool(caplog.records) == warns
