"""What the planner asks of the worker, request by request."""

from __future__ import annotations

from typing import Any

import pytest
from fake_transfer_requests import FULL_TOKENS, Request, full_keys, prompt, to_prefill
from sojourn_server.kv_transfer.transfer_jobs import ExpectJob, FillJob, TransferResults
from sojourn_server.kv_transfer.transfer_planner import MAX_FETCHES, TransferPlanner
from sojourn_server.kv_transfer.transfer_request import (
    MATCH_PENDING,
    NO_MATCH,
    ExternalMatch,
    ScheduledRequest,
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
    planner.scheduled([ScheduledRequest(name, tokens)], lambda request: ids(tokens))


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


def test_at_least_one_token_is_left_to_compute() -> None:
    planner = make()
    begin(planner, Request("r", prompt(1, 128)))
    planner.ask("r", 0)
    assert len(planner.take_jobs().fetches[0].keys) == 1
    begin(planner, Request("s", prompt(1, 64)))
    assert planner.ask("s", 0) == NO_MATCH


@pytest.mark.parametrize(
    ("now_computed", "found", "skip"), [(80, 240, 1), (64, 256, 0), (320, 0, 0), (336, 0, 0)]
)
def test_the_device_may_have_more_when_it_is_asked_again(now_computed: int, found: int, skip: int) -> None:
    planner = make()
    begin(planner, Request("r", prompt(1, 400)))
    planner.ask("r", 64)
    (fetch,) = planner.take_jobs().fetches
    planner.take_results(TransferResults(ready={fetch.ask: 4}))
    assert planner.ask("r", now_computed) == ExternalMatch(found)
    planner.allocated("r", ids(400), found)
    orders = planner.take_jobs()
    if found:
        assert orders.streams[0].skip == skip
        assert orders.streams[0].block_ids == ids(400)[now_computed // 16 : 20]
    else:
        assert orders.ends == [fetch.ask]


def test_where_the_device_has_lost_what_stood_before_it_is_fetched_again_but_not_for_ever() -> None:
    planner = make()
    begin(planner, Request("r", prompt(1, 4000)))
    computed = 1024
    assert planner.ask("r", computed) == MATCH_PENDING
    fetched = []
    for _ in range(MAX_FETCHES - 1):
        (fetch,) = planner.take_jobs().fetches
        fetched.append(fetch.ask)
        planner.take_results(TransferResults(ready={fetch.ask: 2}))
        computed -= FULL_TOKENS
        assert planner.ask("r", computed) == MATCH_PENDING
    orders = planner.take_jobs()
    planner.take_results(TransferResults(ready={orders.fetches[0].ask: 2}))
    assert planner.ask("r", computed - FULL_TOKENS) == NO_MATCH
    assert orders.ends == fetched[-1:]
    assert planner.take_jobs().ends == [orders.fetches[0].ask]


def test_what_the_store_does_not_have_is_asked_for_once() -> None:
    planner = make()
    begin(planner, Request("r", prompt(1, 400)))
    planner.ask("r", 0)
    planner.take_results(TransferResults(ready={planner.take_jobs().fetches[0].ask: 0}))
    assert planner.ask("r", 0) == NO_MATCH
    assert planner.ask("r", 0) == NO_MATCH
    assert not planner.take_jobs().fetches


def test_a_preempted_request_asks_again_for_what_it_has_stored() -> None:
    planner = make()
    request = begin(planner, Request("r", prompt(1, 100)))
    planner.ask("r", 0)
    planner.take_results(TransferResults(ready={planner.take_jobs().fetches[0].ask: 0}))
    planner.ask("r", 0)
    planner.allocated("r", ids(100), 0)
    request.output += [7] * 60
    assert planner.ask("r", 0) == MATCH_PENDING
    assert len(planner.take_jobs().fetches[0].keys) == 2


def test_the_prefill_side_pushes_with_the_last_chunk_and_is_held_until_that_is_over() -> None:
    planner = make()
    params = to_prefill("t", "unix:d", decode_share=0.5, epoch="e1")
    request = begin(planner, Request("r", prompt(1, 400), params))
    assert planner.ask("r", 0) == MATCH_PENDING
    (fetch,) = planner.take_jobs().fetches
    assert (fetch.decode_share, fetch.peer, fetch.total, fetch.epoch) == (0.5, "unix:d", 7, "e1")
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
    assert (push.address, push.epoch, push.block_ids) == ("unix:d", "e1", ids(400))
    assert not orders.saves, "the decode side stores it"
    step(planner, "r", 401)
    assert not planner.take_jobs().pushes
    finished = planner.finished("r", True)
    assert finished.hold
    assert finished.answer == {
        "do_remote_prefill": True, "transfer": "t", "context": push.context, "stored": 2, "epoch": "e1",
    }  # fmt: skip
    assert planner.take_jobs().holds == ["r"]
    assert len(planner) == 0


def test_a_prompt_of_whole_full_blocks_has_no_tail() -> None:
    planner = make()
    request = begin(planner, Request("r", prompt(1, 128), to_prefill("t")))
    step(planner, "r", 128)
    assert planner.take_jobs().pushes[0].keys == full_keys(request.tokens)


def answer_of(tokens: list[int], transfer: str = "t") -> dict[str, Any]:
    """What a prefill engine says of a prompt."""
    planner = make()
    begin(planner, Request("p", tokens, to_prefill(transfer)))
    step(planner, "p", len(tokens))
    answer = planner.finished("p", True).answer
    assert answer is not None
    assert parse_transfer_params(answer).transfer == transfer
    return answer


def test_the_decode_side_waits_for_the_context_and_takes_all_of_it() -> None:
    planner = make()
    tokens = prompt(1, 400)
    begin(planner, Request("r", tokens, answer_of(tokens)))
    assert planner.ask("r", 64) == MATCH_PENDING
    (expect,) = planner.take_jobs().expects
    assert planner.ask("r", 64) == MATCH_PENDING
    planner.take_results(TransferResults(prompts={expect.ask: 7}))
    assert planner.ask("r", 64) == ExternalMatch(336, is_async=True)
    planner.allocated("r", ids(400), 336)
    assert planner.take_jobs().fills == [FillJob(expect.ask, "r", 4, ids(400)[4:])]
    planner.allocated("r", ids(400), 0)
    assert not planner._entries["r"].ask


@pytest.mark.parametrize("blocks", [0, 6, 8])
def test_a_context_that_is_not_whole_is_fetched_from_the_store_instead(blocks: int) -> None:
    planner = make()
    tokens = prompt(1, 400)
    begin(planner, Request("r", tokens, answer_of(tokens)))
    planner.ask("r", 0)
    (expect,) = planner.take_jobs().expects
    planner.take_results(TransferResults(prompts={expect.ask: blocks}))
    assert planner.ask("r", 0) == MATCH_PENDING
    orders = planner.take_jobs()
    assert orders.ends == [expect.ask]
    assert len(orders.fetches) == 1
    assert not orders.fetches[0].peer


def test_a_context_of_other_tokens_is_never_used() -> None:
    planner = make()
    answer = answer_of(prompt(1, 400))
    other = prompt(1, 400)
    other[399] += 1
    begin(planner, Request("r", other, answer))
    assert planner.ask("r", 0) == MATCH_PENDING
    orders = planner.take_jobs()
    assert not orders.expects
    assert not orders.drops, "it may be another's"
    assert planner.counts["prompts_foreign"] == 1


def test_of_prompts_sent_as_one_the_one_whose_context_came_has_it() -> None:
    planner = make()
    mine, other = prompt(1, 400), prompt(2, 400)
    answer = answer_of(mine)  # a prefill engine answers a list of prompts with the last one's, or the first's
    begin(planner, Request("b", other, answer))
    begin(planner, Request("a", mine, answer))
    planner.ask("b", 0)
    planner.ask("a", 0)
    orders = planner.take_jobs()
    assert [expect.context for expect in orders.expects] == [answer["context"]]
    assert not orders.drops


def test_a_context_is_wanted_from_the_moment_when_its_request_is_in_the_queue() -> None:
    planner = make()
    tokens = prompt(1, 400)
    answer = answer_of(tokens)
    begin(planner, Request("r", tokens, answer))
    assert planner.has_jobs, "a step is made for it"
    orders = planner.take_jobs()
    assert orders.wants == [answer["context"]]
    assert not orders.expects
    planner.ask("r", 0)
    orders = planner.take_jobs()
    assert [expect.context for expect in orders.expects] == [answer["context"]]
    assert not orders.wants


@pytest.mark.parametrize("how", ["aborted", "abandoned", "here already"])
def test_a_context_that_was_wanted_and_will_not_be_asked_for_is_let_go_of(how: str) -> None:
    planner = make()
    tokens = prompt(1, 400)
    answer = answer_of(tokens)
    begin(planner, Request("r", tokens, answer))
    planner.take_jobs()
    if how == "aborted":
        planner.finished("r", False)
    elif how == "abandoned":
        planner.abandon()
    else:
        assert planner.ask("r", 400) == NO_MATCH
    assert planner.take_jobs().drops == [ExpectJob(0, answer["context"], None)]


def test_a_context_that_two_requests_want_is_let_go_of_by_the_last() -> None:
    planner = make()
    tokens = prompt(1, 400)
    answer = answer_of(tokens)
    for name in "ab":
        begin(planner, Request(name, tokens, answer))
    begin(planner, Request("refused", [0], answer))
    assert planner.take_jobs().wants == [answer["context"]]
    planner.finished("a", False)
    planner.finished("refused", False)
    assert not planner.take_jobs().drops
    planner.finished("b", False)
    assert planner.take_jobs().drops == [ExpectJob(0, answer["context"], None)]


def test_a_context_that_is_wanted_again_in_the_same_step_is_not_let_go_of() -> None:
    planner = make()
    tokens = prompt(1, 400)
    answer = answer_of(tokens)
    begin(planner, Request("a", tokens, answer))
    planner.take_jobs()
    planner.finished("a", False)
    begin(planner, Request("b", tokens, answer))
    orders = planner.take_jobs()
    assert (orders.wants, orders.drops) == ([answer["context"]], [])


def test_contexts_are_wanted_in_the_order_of_the_queue() -> None:
    planner = make()
    contexts = {}
    for number, name in enumerate("abcd", 1):
        answer = answer_of(prompt(number, 400))
        contexts[name] = answer["context"]
        begin(planner, Request(name, prompt(number, 400), answer))
    planner.order_wants("abcd")
    assert planner.take_jobs().wants == [*contexts.values()]
    planner.order_wants("abcd")
    assert not planner.take_jobs(), "nothing has changed"
    planner.ask("c", 0)
    planner.take_jobs()
    planner.order_wants(["d", "elsewhere", "c", "a"])
    assert planner.take_jobs().wants == [contexts["d"], contexts["a"], contexts["b"]]
    for name in "abd":
        planner.finished(name, False)
    assert not planner.wanted


def test_nothing_is_wanted_for_a_prompt_of_other_tokens() -> None:
    planner = make()
    begin(planner, Request("r", prompt(2, 400), answer_of(prompt(1, 400))))
    assert not planner.take_jobs().wants


def decode(planner: TransferPlanner, tokens: list[int], **said: Any) -> Request:
    """A request whose prompt is here and whose last token has been computed."""
    request = begin(planner, Request("r", tokens, {**answer_of(tokens), **said}))
    planner.ask("r", 0)
    (expect,) = planner.take_jobs().expects
    planner.take_results(TransferResults(prompts={expect.ask: -(-len(tokens) // FULL_TOKENS)}))
    found = planner.ask("r", 0)
    assert found.tokens is not None
    planner.allocated("r", ids(len(tokens)), found.tokens)
    planner.allocated("r", ids(len(tokens)), 0)
    planner.take_jobs()
    step(planner, "r", len(tokens))
    request.output.append(1)
    return request


def test_what_a_short_answer_left_unstored_is_stored_from_blocks_that_are_held() -> None:
    planner = make(max_saves=2)
    tokens = prompt(1, 20 * FULL_TOKENS + 5)
    decode(planner, tokens)
    assert [save.place for save in planner.take_jobs().saves] == [0, 1]
    assert planner.finished("r", True, ids(len(tokens))) == (True, None)
    orders = planner.take_jobs()
    assert orders.holds == ["r"]
    # Whether the last step's were taken is told only after the end: they are asked for again.
    assert [save.place for save in orders.saves] == list(range(20))
    keys = full_keys(tokens)
    assert [save.key for save in orders.saves] == keys
    assert [save.parent for save in orders.saves] == [b"", *keys[:-1]]
    assert orders.saves[3].block_ids == ids(len(tokens))[12:16]
    assert not any(save.before for save in orders.saves)
    assert len(planner) == 0


@pytest.mark.parametrize("why", ["aborted", "stored", "told", "off", "preempted"])
def test_nothing_is_held_where_nothing_is_left(why: str) -> None:
    planner = make(saves=why != "off")
    tokens = prompt(1, 4 * FULL_TOKENS + 5)
    decode(planner, tokens, **({"stored": 4} if why == "told" else {}))
    if why == "stored":
        step(planner, "r", len(tokens) + 1)
    if why == "preempted":
        planner.ask("r", 0)
    planner.take_jobs()
    assert planner.finished("r", why != "aborted", ids(len(tokens))) == (False, None)
    orders = planner.take_jobs()
    assert not orders.saves
    assert not orders.holds


def test_of_steps_planned_ahead_all_that_may_be_refused_is_asked_for_again_at_the_end() -> None:
    planner = make(max_saves=2, concurrent_steps=2)
    tokens = prompt(1, 8 * FULL_TOKENS + 5)
    request = decode(planner, tokens)
    for known in range(2):
        step(planner, "r", request.num_tokens + known)
    saves = [save.place for save in planner.take_jobs().saves]
    assert saves == [0, 1, 2, 3, 4, 5], "three steps; the results of the last two are not known"
    planner.finished("r", True, ids(len(tokens)))
    assert [save.place for save in planner.take_jobs().saves] == [2, 3, 4, 5, 6, 7]


def test_a_block_whose_last_token_is_sampled_in_a_step_that_is_under_way_is_stored_at_the_end() -> None:
    """Steps are planned ahead: that a request ends is known when the step after its last token is planned."""
    planner = make(concurrent_steps=2)
    request = decode(planner, prompt(1, FULL_TOKENS - 2))
    step(planner, "r", FULL_TOKENS - 1)
    step(planner, "r", FULL_TOKENS)
    assert not planner.take_jobs().saves, "its key is a hash of all tokens"
    request.output.append(1)
    assert planner.finished("r", True, ids(FULL_TOKENS)) == (True, None)
    assert [save.key for save in planner.take_jobs().saves] == full_keys(request.tokens)


def refilled(planner: TransferPlanner) -> None:
    """A request that was pushed, preempted, and has its KV filled in again."""
    begin(planner, Request("r", prompt(1, 128), to_prefill("t")))
    step(planner, "r", 128)
    planner.ask("r", 0)
    (fetch,) = planner.take_jobs().fetches
    planner.take_results(TransferResults(ready={fetch.ask: 1}))
    assert planner.ask("r", 0) == ExternalMatch(64, is_async=True)
    planner.allocated("r", ids(128), 64)
    planner.take_jobs()


@pytest.mark.parametrize("well", [False, True])
def test_what_ends_while_its_blocks_are_filled_keeps_them_and_no_push_is_told_of(well: bool) -> None:
    """vLLM frees the blocks when it hears that they are filled, and forgets the request."""
    planner = make(concurrent_steps=2)
    refilled(planner)
    finished = planner.finished("r", well, ids(128))
    assert finished.hold
    assert (finished.answer is not None) == well
    orders = planner.take_jobs()
    assert (orders.holds, orders.unreported) == ([], ["r"])
    assert orders.aborts == ([] if well else ["r"])


def test_what_ends_once_its_blocks_are_filled_is_held_for_its_push() -> None:
    planner = make(concurrent_steps=2)
    refilled(planner)
    planner.filled("r")
    assert planner.finished("r", False, ids(128)) == (True, None)
    orders = planner.take_jobs()
    assert (orders.holds, orders.unreported, orders.aborts) == (["r"], [], ["r"])


def test_blocks_that_vllm_does_not_keep_are_neither_pushed_nor_stored() -> None:
    planner = make()
    tokens = prompt(1, 400)
    holes = [*[0] * 6, *ids(400)[6:]]
    for name, said in (("p", to_prefill("t")), ("w", None)):
        begin(planner, Request(name, tokens, said))
        planner.scheduled([ScheduledRequest(name, 400)], lambda request: holes)
    orders = planner.take_jobs()
    assert not orders.pushes
    assert [save.place for save in orders.saves] == [2, 3, 4, 5]
    assert planner.finished("p", True, holes) == (False, None), "a gateway asks another pair"
    assert planner.counts["prompts_with_holes"] == 1


def test_a_request_that_is_refused_before_it_was_asked_for_lets_go_of_its_context() -> None:
    planner = make()
    answer = answer_of(prompt(1, 400))
    begin(planner, Request("r", [0], answer))  # as vLLM tells of one that its front end has refused
    assert planner.finished("r", False) == (False, None)
    assert planner.take_jobs().drops == [ExpectJob(0, answer["context"], None)]


def test_an_abort_ends_what_was_asked_for() -> None:
    planner = make()
    tokens = prompt(1, 400)
    begin(planner, Request("a", tokens))
    begin(planner, Request("b", tokens, answer_of(tokens)))
    planner.ask("a", 0)
    planner.ask("b", 0)
    orders = planner.take_jobs()
    asks = [orders.fetches[0].ask, orders.expects[0].ask]
    planner.take_results(TransferResults(ready={asks[0]: 3}))
    for name in "ab":
        assert planner.finished(name, False) == (False, None)
    assert planner.take_jobs().ends == asks
    planner.take_results(TransferResults(prompts={asks[1]: 7}))  # too late
    assert len(planner) == 0


def test_a_push_whose_request_is_aborted_is_aborted_too() -> None:
    planner = make()
    begin(planner, Request("r", prompt(1, 128), to_prefill("t")))
    step(planner, "r", 128)
    assert planner.finished("r", False) == (True, None)
    orders = planner.take_jobs()
    assert (orders.holds, orders.aborts) == (["r"], ["r"])


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
    assert saves[1].before == ids(400)[:8]
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


def test_on_the_decode_side_what_the_prefill_side_has_found_is_not_stored_again() -> None:
    planner = make()
    tokens = prompt(1, 400)
    begin(planner, Request("r", tokens, {**answer_of(tokens), "stored": 4}))
    step(planner, "r", 400)
    assert [save.place for save in planner.take_jobs().saves] == [4, 5]


def test_what_cannot_be_read_is_said_and_the_request_goes_without() -> None:
    planner = make()
    wrong = planner.arrived(Request("r", prompt(1, 400), {"do_remote_prefill": True, "transfer": 3}))
    assert wrong is not None
    assert "transfer is 3" in wrong
    assert planner.ask("r", 0) == MATCH_PENDING
    assert planner.take_jobs().fetches


def test_nothing_is_known_of_a_request_that_has_not_arrived() -> None:
    planner = make()
    assert planner.ask("r", 0) == NO_MATCH
    planner.allocated("r", [1, 2], 32)
    assert planner.take_jobs().not_filled == [1, 2]
    assert planner.finished("r", True) == (False, None)


def test_once_abandoned_nobody_waits() -> None:
    planner = make()
    tokens = prompt(1, 400)
    begin(planner, Request("a", tokens))
    begin(planner, Request("b", tokens, answer_of(tokens)))
    planner.ask("a", 0)
    planner.ask("b", 0)
    planner.take_jobs()
    planner.abandon()
    assert [planner.ask(name, 0) for name in "ab"] == [NO_MATCH, NO_MATCH]
    assert len(planner.take_jobs().ends) == 2


def test_what_is_given_up_before_its_step_is_never_begun() -> None:
    planner = make()
    tokens = prompt(1, 400)
    answer = answer_of(tokens)
    begin(planner, Request("a", tokens))
    begin(planner, Request("b", tokens, answer))
    planner.ask("a", 0)
    planner.ask("b", 0)
    planner.finished("a", False)
    planner.finished("b", False)
    orders = planner.take_jobs()
    assert (orders.fetches, orders.expects, orders.ends) == ([], [], [])
    assert orders.drops == [ExpectJob(0, answer["context"], None)]
