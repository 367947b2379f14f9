"""The engine core reads tool calls with the API server's parser, else with sojourn's own."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.vllm import compat, tool_call_reader
from sojourn_server.vllm.tool_call_reader import ToolCallReader, TurnEnd, turn_end
from tool_call_samples import SAMPLES, WITHOUT_FORMAT

ABORTED, STOPPED = TurnFinishReason.ABORTED, TurnFinishReason.STOPPED

OWN_READS = {"cohere_command3", "cohere_command4", "openai", "dots", "minicpm5"}
"""Parsers that are stubs or need the request's tools."""


class SampleTokenizer:
    """A tokenizer whose tokens are the marks in ``SAMPLES``, and each sample is one more token."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        marks = re.findall(r"<[^<>\s\"=]+>|\[[A-Z_]+\]", "".join(SAMPLES.values()))
        self.texts = [*SAMPLES.values(), "<think>", "</think>", "<|tool_call_end|>", *sorted(set(marks))]

    def get_vocab(self) -> dict[str, int]:
        return {text: index for index, text in enumerate(self.texts)}

    vocab = property(get_vocab)

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.get_vocab().get(text, 0)]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.texts[one] for one in ids)


@pytest.fixture
def reader_of(monkeypatch):
    monkeypatch.setattr(compat, "cached_tokenizer_from_config", lambda _: SampleTokenizer(), raising=False)
    return lambda name: ToolCallReader(SimpleNamespace(skip_tokenizer_init=False), name)


def test_every_parser_that_vllm_ships_reads_its_sample(reader_of, monkeypatch, caplog):
    shipped = set(compat.ToolParserManager.list_registered())
    if (compat.installed_vllm() or "").startswith("0.32."):
        assert shipped == set(SAMPLES) | WITHOUT_FORMAT
    monkeypatch.setattr(tool_call_reader, "parse_tool_calls", lambda text: ())
    silent = set()
    for index, name in enumerate(SAMPLES):
        if name in shipped:
            reader = reader_of(name)
            for _ in range(2):  # one parser reads all outputs
                calls = [call.key for call in reader.read([index])]
                if calls != ["bash:pytest"]:
                    assert calls == [], name
                    silent.add(name)
    assert silent == OWN_READS & shipped


@pytest.mark.parametrize(
    ("parser", "sample"),
    [*((name, name) for name in sorted(OWN_READS)), ("none", "hermes"), (None, "hermes")],
)
def test_sojourns_own_parser_reads_where_vllms_cannot(reader_of, parser, sample):
    index = list(SAMPLES).index(sample)
    assert [call.key for call in reader_of(parser).read([index])] == ["bash:pytest"]


def test_a_parser_that_takes_too_long_is_not_asked_again(reader_of, monkeypatch):
    index = list(SAMPLES).index("hermes")
    reader = reader_of("hermes")
    monkeypatch.setattr(tool_call_reader, "MAX_PARSE_CPU_S", -1.0)
    for _ in range(2):
        assert [call.key for call in reader.read([index])] == ["bash:pytest"]
    assert reader._parser is None


def test_an_output_with_a_stop_string_is_read_up_to_its_end(reader_of):
    texts = ["</function", ">", "<function=bash><parameter=command>pytest", " invented later"]
    reader = reader_of(None)
    reader.tokenizer.texts = [*texts, "<function=search>"]
    ids = [2, 0, 3, 4, 0]
    assert [call.key for call in reader.read_stopped(ids, ["</function", "absent"])] == ["bash:pytest"]
    assert reader.read_stopped(ids, ["absent"]) is None
    assert reader.read_stopped([], ["</function"]) is None
    assert reader.read_stopped([3], [" invented"]) == ()


def test_only_a_tokenizer_that_does_not_load_makes_the_end_of_an_aborted_output_a_guess(
    reader_of, monkeypatch
):
    """With ``--skip-tokenizer-init`` vLLM's API server has no tokenizer either and finds no stop string."""
    aborted = SimpleNamespace(
        status=compat.RequestStatus.FINISHED_ABORTED,
        output_token_ids=[1, 2],
        sampling_params=SimpleNamespace(stop=["absent"]),
        kv_transfer_params=None,
    )

    def end_by(reader: ToolCallReader) -> TurnEnd:
        return turn_end(aborted, reader, lambda call, *args: call(*args))

    assert end_by(ToolCallReader(SimpleNamespace(skip_tokenizer_init=True))) == TurnEnd(ABORTED)
    assert end_by(reader_of(None)) == TurnEnd(ABORTED)
    assert turn_end(aborted, reader_of(None), None) == TurnEnd(ABORTED)

    def fails(_: object) -> None:
        raise OSError("no files")

    monkeypatch.setattr(compat, "cached_tokenizer_from_config", fails)
    reader = ToolCallReader(SimpleNamespace(skip_tokenizer_init=False))
    assert end_by(reader) == TurnEnd(STOPPED, (), is_guess=True)
    aborted.sampling_params.stop = []
    assert end_by(reader) == TurnEnd(ABORTED)


def test_a_turn_whose_output_cannot_be_decoded_ends_as_vllm_says(reader_of):
    request = SimpleNamespace(
        status=compat.RequestStatus.FINISHED_STOPPED,
        output_token_ids=[1],
        sampling_params=None,
        kv_transfer_params=None,
    )
    assert turn_end(request, reader_of(None), lambda call, *args: None) == TurnEnd(STOPPED)
    request.kv_transfer_params = {"do_remote_decode": True}  # any client may send it
    assert turn_end(request, reader_of(None), None) == TurnEnd(STOPPED)
    assert turn_end(request, reader_of(None), None, in_pair=True).reason is TurnFinishReason.PREFILLED
    for status in compat.RequestStatus:
        if compat.RequestStatus.is_finished(status):
            request.status = status
            reason = turn_end(request, reader_of(None), None).reason
            known = reason is not TurnFinishReason.ERROR
            assert known == (status is not compat.RequestStatus.FINISHED_ERROR), status
            if status.name in ("FINISHED_REPETITION", "FINISHED_IGNORED"):  # the agent goes on
                assert TurnEnd(reason).is_complete
