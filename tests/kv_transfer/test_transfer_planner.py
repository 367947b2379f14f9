"""What a request may say of its transfer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fake_transfer_requests import Request
from sojourn_server.kv_transfer.transfer_jobs import FetchJob, TransferResults
from sojourn_server.kv_transfer.transfer_planner import TransferPlanner
from sojourn_server.kv_transfer.transfer_request import (
    MATCH_PENDING,
    WHOLE_REQUEST,
    ExternalMatch,
    TransferRole,
    context_name,
    parse_transfer_params,
)

TO_PREFILL = {"do_remote_decode": True, "transfer": "t", "peer": "unix:/d"}
TO_DECODE = {"do_remote_prefill": True, "transfer": "t", "context": "t.1"}


@pytest.mark.parametrize("given", [None, {}, {"do_remote_decode": False}, {"program": "a"}])
def test_who_says_nothing_does_all_of_it(given: Any) -> None:
    assert parse_transfer_params(given) == WHOLE_REQUEST


def test_what_is_said_is_read_and_what_is_not_ours_is_let_be() -> None:
    params = parse_transfer_params({**TO_PREFILL, "decode_reads": True, "remote_prefill_cached_tokens": 5})
    assert (params.role, params.peer, params.decode_reads) == (TransferRole.PREFILL, "unix:/d", True)
    answer = {"do_remote_prefill": True, "transfer": params.transfer, "context": "t.1", "stored": 3}
    decode = parse_transfer_params({**answer, "remote_prefill_cached_tokens": 5})
    assert (decode.role, decode.context, decode.stored) == (TransferRole.DECODE, "t.1", 3)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({**TO_PREFILL, "do_remote_decode": "yes"}, "got `str` - at `$.do_remote_decode`"),
        ({**TO_PREFILL, **TO_DECODE}, "both"),
        ({**TO_PREFILL, "transfer": ""}, "transfer"),
        ({**TO_PREFILL, "transfer": "\ud800"}, "transfer"),
        ({**TO_PREFILL, "peer": 7}, "got `int` - at `$.peer`"),
        ({**TO_PREFILL, "decode_reads": 1}, "decode_reads"),
        ({**TO_DECODE, "context": None}, "got `null` - at `$.context`"),
        ({**TO_PREFILL, "do_remote_decode": False, "do_remote_prefill": True}, "context is missing"),
        ({**TO_DECODE, "stored": -1}, "stored"),
        ({**TO_DECODE, "stored": "3"}, "stored"),
    ],
)
def test_what_is_wrong_is_named(given: Any, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        parse_transfer_params(given)


def test_other_prompts_have_other_names() -> None:
    prompts = ([1] * 34, [2] * 34, [*[1] * 33, 2], [1] * 50)
    names = {context_name(Request("r", tokens), "t", 16) for tokens in prompts}
    assert len(names | {context_name(Request("r", prompts[0]), "u", 16)}) == 5


def test_a_decode_request_expects_its_prompt_from_its_arrival_on() -> None:
    """So the prompt stays in the buffers while the request is queued."""
    planner, request = TransferPlanner(block_tokens=16, blocks_per_full=4), Request("r", [1] * 34)
    request.kv_transfer_params = {**TO_DECODE, "context": context_name(request, "t", 16)}
    assert planner.arrived(request) is None
    assert planner.take_jobs().fetches == [FetchJob(1, [], request.kv_transfer_params["context"])]
    assert planner.ask("r", 0) == MATCH_PENDING
    planner.take_results(TransferResults(ready={1: 1}))
    assert planner.ask("r", 16) == ExternalMatch(18, is_async=True)


def test_blocks_whose_saves_are_not_known_to_have_worked_are_saved_at_the_end_with_what_is_left() -> None:
    planner, request = TransferPlanner(block_tokens=16, blocks_per_full=4), Request("r", [1] * 260)
    planner.arrived(request)
    ids = list(range(100, 117))
    planner.scheduled({"r": 200}, lambda name: ids)
    assert [save.place for save in planner.take_jobs().saves] == [0, 1, 2]
    planner.take_results(TransferResults(stored={"r": 2}))  # one was refused
    planner.scheduled({"r": 260}, lambda name: ids)
    assert [save.place for save in planner.take_jobs().saves] == [2, 3]
    assert planner.finished("r", True, ids) == (True, None)
    jobs = planner.take_jobs()
    assert ([save.place for save in jobs.saves], jobs.holds) == ([2, 3], ["r"])
    assert jobs.saves[0].block_ids == ids[8:12]
