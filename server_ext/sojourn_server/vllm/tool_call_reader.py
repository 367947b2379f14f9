"""Reads a turn's finish reason and tool calls from a finished request, inside the engine core.

The scheduler has token ids only. So the end of the output is decoded, once per finished turn of a program.
The text also shows whether vLLM's API server aborted the request because of a stop string.

The API server's parser (``--tool-call-parser``) knows the model's format of tool calls, so it reads first. If
it finds no call, sojourn's own parser reads the output, because agents such as mini-swe-agent write commands
as text and do not use the API's tool calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..core.events_and_actions import TurnFinishReason
from ..programs.tool_call_parsers import (
    MAX_CALLS,
    ParsedToolCall,
    answer_text,
    named_tool_call,
    parse_tool_calls,
)
from .compat import Request, RequestStatus

MAX_TOKENS = 8192
"""Maximum number of tokens decoded, from the end of the output, where tool calls are."""

MAX_PARSE_CPU_S = 0.25
"""Maximum CPU seconds of vLLM's parser for one output, or it is not used again: the engine waits for it, and
a hostile output may slow down its regular expressions. The work of sojourn's own parser is bounded."""

_REASONS = {
    RequestStatus.FINISHED_STOPPED: TurnFinishReason.STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED: TurnFinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: TurnFinishReason.ABORTED,
    # vLLM reports these two without an error, as finish reasons "repetition" and "length". So the agent goes
    # on.
    RequestStatus.FINISHED_REPETITION: TurnFinishReason.STOPPED,
    RequestStatus.FINISHED_IGNORED: TurnFinishReason.LENGTH,
}

logger = logging.getLogger("vllm.sojourn")


class TurnEnd(NamedTuple):
    reason: TurnFinishReason
    tool_calls: tuple[ParsedToolCall, ...] = ()
    is_guess: bool = False
    """Whether an aborted request with stop strings counts as stopped because its output could not be read, or
    another engine generates the output."""

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole: one ended for repetition or at ``max_tokens`` would end there
        again."""
        return self.reason not in (TurnFinishReason.ABORTED, TurnFinishReason.ERROR)


class ToolCallReader:
    """Decodes outputs with the model's tokenizer, and finds tool calls in them; none without a tokenizer."""

    def __init__(self, model_config: Any, parser: str | None = None, plugin: str | None = None) -> None:
        """``parser``: name of a vLLM tool parser; ``plugin``: Python file that registers it."""
        self.tokenizer: Any = None
        self._parser: Any = None
        self._finds_no_stop: bool = model_config.skip_tokenizer_init
        """Whether the API server has no tokenizer either, and so finds no stop string."""
        if self._finds_no_stop:
            return
        try:
            from .compat import cached_tokenizer_from_config

            self.tokenizer = cached_tokenizer_from_config(model_config)
        except Exception as error:
            what = "sojourn: no tokenizer in the engine core (%s); tool calls come from client events only"
            logger.warning(what, error)
            return
        if parser is None:
            return
        try:
            from .compat import ToolParserManager

            if plugin is not None:
                ToolParserManager.import_tool_parser(plugin)
            self._parser = ToolParserManager.get_tool_parser(parser)(self.tokenizer)
        except Exception as error:
            what = "sojourn: tool parser %s does not load in the engine core (%s); sojourn's own is used"
            logger.warning(what, parser, error)

    def read(self, token_ids: Sequence[int]) -> tuple[ParsedToolCall, ...]:
        if self.tokenizer is None or not token_ids:
            return ()
        return self._read_text(self._decode_tail(token_ids))

    def read_stopped(
        self, token_ids: Sequence[int], stop: Sequence[str]
    ) -> tuple[ParsedToolCall, ...] | None:
        """Return the tool calls of an output up to the end of its first stop string; ``None`` if no stop
        string ended the output. Without the tokenizer, every output that is not empty counts as stopped,
        without tool calls; but none if the API server has no tokenizer either (``skip_tokenizer_init``)."""
        if not token_ids:
            return None
        if self.tokenizer is None:
            # If a disconnection counts as a stop, the lease that it leaves ends by itself. If a stop counted
            # as a disconnection, an agent with a stop string would lose its context at each turn.
            return None if self._finds_no_stop else ()
        # The abort comes some tokens after the stop string, so the string is not at the end.
        text = self._decode_tail(token_ids)
        ends = [text.index(each) + len(each) for each in stop if each in text]
        return self._read_text(text[: min(ends)]) if ends else None

    def _decode_tail(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids[-MAX_TOKENS:])))

    def _read_text(self, text: str) -> tuple[ParsedToolCall, ...]:
        """Return the tool calls that vLLM's parser finds; sojourn's own without it, or if it finds none."""
        if self._parser is None:
            return parse_tool_calls(text)
        start, calls = time.thread_time(), []
        try:
            found = self._parser.extract_tool_calls(answer_text(text), _REQUEST).tool_calls
            calls = [named_tool_call(call.function.name, call.function.arguments) for call in found]
        except Exception as error:  # such as the parser of gpt-oss, which is a stub
            logger.debug("sojourn: vLLM's tool parser failed: %s", error)
        spent_s = time.thread_time() - start
        if spent_s > MAX_PARSE_CPU_S:
            self._parser = None
            what = "sojourn: vLLM's tool parser took %.2f s for one output; sojourn's own is used from now on"
            logger.warning(what, spent_s)
        return tuple(call for call in calls if call is not None)[:MAX_CALLS] or parse_tool_calls(text)


_REQUEST = SimpleNamespace(
    tools=None, tool_choice="auto", chat_template_kwargs=None, skip_special_tokens=False
)
"""Takes the place of the chat request, with the fields that parsers read. The engine core does not know the
request's tools. Most parsers use them only for the types of arguments; those that look up the called tool
find no call."""


def turn_end(
    request: Request, reader: ToolCallReader, guarded: Callable[..., Any] | None, *, in_pair: bool = False
) -> TurnEnd:
    """Return how ``request`` ended, and the tool calls in its output. ``guarded`` calls a function and
    returns ``None`` if it raises, so a turn also ends if its output cannot be decoded. Without it, no output
    is decoded. ``in_pair``: whether the request's ``kv_transfer_params`` can mean that another engine
    generates the output."""
    reason = _REASONS.get(request.status, TurnFinishReason.ERROR)
    transfer = request.kv_transfer_params if in_pair else None
    if isinstance(transfer, dict) and transfer.get("do_remote_decode") and TurnEnd(reason).is_complete:
        return TurnEnd(TurnFinishReason.PREFILLED, is_guess=True)
    if guarded is None:
        return TurnEnd(reason)
    if reason is TurnFinishReason.STOPPED:
        return TurnEnd(reason, guarded(reader.read, request.output_token_ids) or ())
    params = request.sampling_params
    if reason is TurnFinishReason.ABORTED and params is not None and params.stop:
        # vLLM's API server finds stop strings, and then aborts the request in the engine core.
        calls = guarded(reader.read_stopped, request.output_token_ids, params.stop)
        if calls is not None:
            return TurnEnd(TurnFinishReason.STOPPED, calls, is_guess=reader.tokenizer is None)
    return TurnEnd(reason)
