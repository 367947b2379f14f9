"""Who was refused is found by the id that the API server has, once, and the newest are remembered."""

from __future__ import annotations

import pytest
from sojourn_server.core.engine_service import MAX_REFUSALS, RefusedRequests
from virtual_engine import VirtualEngine


@pytest.mark.parametrize(
    "request_id",
    [
        "chatcmpl-9f",  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        "chatcmpl-9f-0a1b2c3d",
        "0_chatcmpl-9f-0a1b2c3d",  # n > 1
        "chatcmpl-9f-0-0a1b2c3d",  # the first prompt of several
        "12_chatcmpl-9f-3-0a1b2c3d",
        "chatcmpl-9f_0-0a1b2c3d",  # the first turn of a response
    ],
)
def test_a_refusal_is_found_by_the_id_that_the_api_server_has(request_id: str) -> None:
    refusals = RefusedRequests()
    refusals.record_refusal("chatcmpl-8e-0a1b2c3d", 5.0)
    refusals.record_refusal(request_id, 600.0)
    for other in ("chatcmpl-9", "chatcmpl-9f-", "9f", "", "chatcmpl-9f-1", "chatcmpl-7d"):
        assert refusals.take(other) is None
    assert refusals.take("chatcmpl-9f") == 600.0


def test_a_refusal_is_explained_once_with_all_its_parts() -> None:
    refusals = RefusedRequests()
    for child in range(3):
        refusals.record_refusal(f"{child}_cmpl-a-0-0a1b2c3d", 600.0)
    assert refusals.take("cmpl-a") == 600.0
    assert refusals.take("cmpl-a") is None


def test_the_newest_are_remembered() -> None:
    refusals = RefusedRequests()
    for n in range(MAX_REFUSALS + 2):
        refusals.record_refusal(f"chatcmpl-{n}x-0a1b2c3d", float(n))
    assert [refusals.take(f"chatcmpl-{n}x") for n in (1, 2)] == [None, 2.0]


def test_the_http_side_asks_for_it() -> None:
    engine = VirtualEngine()
    engine.service.refusals.record_refusal("chatcmpl-9f-0a1b2c3d", 600.0)
    assert engine.ask("refusal", request_id="chatcmpl-8e") is None
    assert engine.ask("refusal", request_id="chatcmpl-9f") == {"waited_s": 600.0}
    assert engine.ask("refusal", request_id="chatcmpl-9f") is None
    assert engine.ask("refusal") is None
