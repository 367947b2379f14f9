"""What a request may say of its transfer."""

from __future__ import annotations

from typing import Any

import pytest
from sojourn_server.kv_transfer.transfer_request import (
    MAX_TRANSFER_BYTES,
    WHOLE_REQUEST,
    TransferRole,
    context_name,
    parse_transfer_params,
    transfer_answer_params,
)

TO_PREFILL = {"do_remote_decode": True, "transfer": "t", "peer": "unix:/d"}
TO_DECODE = {"do_remote_prefill": True, "transfer": "t", "context": "t.1"}


@pytest.mark.parametrize("given", [None, {}, {"do_remote_decode": False}, {"program": "a"}])
def test_who_says_nothing_does_all_of_it(given: Any) -> None:
    assert parse_transfer_params(given) == WHOLE_REQUEST


def test_what_is_said_is_read_and_what_is_not_ours_is_let_be() -> None:
    params = parse_transfer_params(
        {**TO_PREFILL, "decode_reads": True, "epoch": "e", "remote_prefill_cached_tokens": 5}
    )
    assert (params.role, params.peer, params.decode_reads) == (TransferRole.PREFILL, "unix:/d", True)
    answer = transfer_answer_params(params, "t.1", 3)
    decode = parse_transfer_params({**answer, "remote_prefill_cached_tokens": 5})
    assert (decode.role, decode.context, decode.stored, decode.epoch) == (TransferRole.DECODE, "t.1", 3, "e")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({**TO_PREFILL, "do_remote_decode": "yes"}, "true or false"),
        ({**TO_PREFILL, **TO_DECODE}, "both"),
        ({**TO_PREFILL, "transfer": ""}, "transfer"),
        ({**TO_PREFILL, "transfer": "x" * (MAX_TRANSFER_BYTES + 1)}, "at most 200"),
        ({**TO_PREFILL, "transfer": "\ud800"}, "transfer"),
        ({**TO_PREFILL, "peer": 7}, "peer is 7"),
        ({**TO_PREFILL, "decode_reads": 1}, "decode_reads is 1"),
        ({**TO_PREFILL, "epoch": 3}, "epoch is 3"),
        ({**TO_DECODE, "context": None}, "context is None"),
        ({**TO_DECODE, "stored": -1}, "stored is -1"),
        ({**TO_DECODE, "stored": "3"}, "stored is '3'"),
    ],
)
def test_what_is_wrong_is_named(given: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
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
