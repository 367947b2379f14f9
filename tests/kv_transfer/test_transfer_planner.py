"""What the planner asks of the worker, request by request."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fake_transfer_requests import Request, full_keys, prompt, to_prefill
from sojourn_server.kv_transfer.transfer_jobs import FillJob, TransferResults
from sojourn_server.kv_transfer.transfer_planner import TransferPlanner
from sojourn_server.kv_transfer.transfer_request import (
    MATCH_PENDING,
    WHOLE_REQUEST,
    ExternalMatch,
    TransferRole,
    context_name,
    parse_transfer_params,
    tail_key,
)


def make(**options: Any) -> TransferPlanner:
    return TransferPlanner(block_tokens=16, blocks_per_full=4, **options)


def begin(planner: TransferPlanner, request: Request) -> Request:
    assert planner.arrived(request) is None
    return request


def ids(tokens: int, start: int = 100) -> list[int]:
    return list(range(start, start + -(-tokens // 16)))


def step(planner: TransferPlanner, name: str, tokens: int) -> None:
    """A step after which so many tokens of a request are computed."""
    planner.scheduled({name: tokens}, lambda request: ids(tokens))


def test_a_hit_is_fetched_while_the_request_has_no_blocks_and_then_streamed() -> None:
    planner = make()
    request = begin(planner, Request("r", prompt(1, 400)))
    assert planner.ask("r", 0) == MATCH_PENDING
    assert planner.ask("r", 0) == MATCH_PENDING
    (fetch,) = planner.take_jobs().fetches
    assert fetch.keys == full_keys(request.tokens)[:6]
    planner.take_results(TransferResults(ready={fetch.ask: 5}))
    assert planner.ask("r", 0) == ExternalMatch(320)
    assert planner.ask("r", 0) == ExternalMatch(320), "it did not fit this time"
    planner.allocated("r", ids(400), 320)
    (stream,) = planner.take_jobs().streams
    assert (stream.ask, stream.skip, stream.block_ids) == (fetch.ask, 0, ids(320))
    assert not planner._entries["r"].ask


def test_the_prefill_side_pushes_with_the_last_chunk_and_is_held_until_that_is_over() -> None:
    planner = make()
    params = to_prefill("t", "unix:d", decode_reads=True)
    request = begin(planner, Request("r", prompt(1, 400), params))
    assert planner.ask("r", 0) == MATCH_PENDING
    (fetch,) = planner.take_jobs().fetches
    assert (fetch.peer, fetch.total) == ("unix:d", 7)
    planner.take_results(TransferResults(ready={fetch.ask: 2}))
    planner.ask("r", 0)
    planner.allocated("r", ids(400), 128)
    step(planner, "r", 300)
    assert not planner.take_jobs().pushes
    step(planner, "r", 400)
    orders = planner.take_jobs()
    (push,) = orders.pushes
    assert push.context == fetch.context
    assert push.keys == [*full_keys(request.tokens), tail_key(push.context)]
    assert (push.address, push.block_ids) == ("unix:d", ids(400))
    assert not orders.saves, "the decode side stores it"
    step(planner, "r", 401)
    assert not planner.take_jobs().pushes
    finished = planner.finished("r", True)
    answer = {"do_remote_prefill": True, "transfer": "t", "context": push.context, "stored": 2}
    assert finished == (False, answer), "the step has copied its blocks"
    assert not planner.take_jobs()
    assert len(planner) == 0


def answer_of(tokens: list[int], transfer: str = "t") -> dict[str, Any]:
    """What a prefill engine says of a prompt."""
    planner = make()
    begin(planner, Request("p", tokens, to_prefill(transfer)))
    step(planner, "p", len(tokens))
    answer = planner.finished("p", True)[1]
    assert answer is not None
    assert parse_transfer_params(answer).transfer == transfer
    return answer


def test_the_decode_side_waits_for_the_context_and_takes_all_of_it() -> None:
    planner = make()
    tokens = prompt(1, 400)
    begin(planner, Request("r", tokens, answer_of(tokens)))
    assert planner.ask("r", 64) == MATCH_PENDING
    (expect,) = planner.take_jobs().fetches
    assert planner.ask("r", 64) == MATCH_PENDING
    planner.take_results(TransferResults(ready={expect.ask: 7}))
    assert planner.ask("r", 64) == ExternalMatch(336, is_async=True)
    planner.allocated("r", ids(400), 336)
    assert planner.take_jobs().fills == [FillJob(expect.ask, "r", 4, ids(400)[4:])]
    planner.allocated("r", ids(400), 0)
    assert not planner._entries["r"].ask


def test_each_full_block_is_stored_as_it_fills_but_what_was_found_is_not() -> None:
    planner = make(max_saves=2)
    request = begin(planner, Request("r", prompt(1, 400)))
    planner.ask("r", 0)
    planner.take_results(TransferResults(ready={planner.take_jobs().fetches[0].ask: 1}))
    planner.ask("r", 0)
    planner.allocated("r", ids(400), 64)
    planner.take_jobs()
    keys = full_keys(request.tokens)
    step(planner, "r", 400)
    saves = planner.take_jobs().saves
    assert [(save.place, save.key, save.parent) for save in saves] == [
        (1, keys[1], keys[0]),
        (2, keys[2], keys[1]),
    ]
    assert saves[1].block_ids == ids(400)[8:12]
    planner.take_results(TransferResults(stored={"r": 2}))  # one could not be taken
    places = []
    for _ in range(4):
        request.output.append(1)
        step(planner, "r", request.num_tokens)
        places += [save.place for save in planner.take_jobs().saves]
    assert places == [2, 3, 4, 5]
    request.output += [1] * (448 - request.num_tokens)
    step(planner, "r", 448)
    assert [save.place for save in planner.take_jobs().saves] == [6], "output is stored as well"


# -- What a request may say of its transfer.


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
    names = {
        context_name("t", b"\1", [1, 2], 34),
        context_name("u", b"\1", [1, 2], 34),
        context_name("t", b"\2", [1, 2], 34),
        context_name("t", b"\1", [12], 34),
        context_name("t", b"\1", [1, 2], 50),
    }
    assert len(names) == 5
