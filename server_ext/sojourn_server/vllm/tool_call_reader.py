"""Reads tool calls from a finished request's tokens, inside the engine core.

The scheduler has token ids only. The adapter therefore decodes the end of the output, once per finished turn.
It does not decode outputs of requests without a program.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..programs.tool_call_parsers import ParsedToolCall, parse_tool_calls

MAX_TOKENS = 8192
"""Maximum number of tokens decoded. They are taken from the end of the output, where tool calls are."""

logger = logging.getLogger("vllm.sojourn")


class ToolCallReader:
    """Decodes outputs with the model's tokenizer. Without a tokenizer it finds no tool calls."""

    def __init__(self, model_config: Any) -> None:
        self._tokenizer: Any = None
        if model_config.skip_tokenizer_init:
            return
        try:
            from .compat import cached_tokenizer_from_config

            self._tokenizer = cached_tokenizer_from_config(model_config)
        except Exception as error:
            logger.warning(
                "sojourn: no tokenizer in the engine core (%s); tool calls come from client events only",
                error,
            )

    def read(self, token_ids: Sequence[int]) -> tuple[ParsedToolCall, ...]:
        """Return the tool calls of an output."""
        if self._tokenizer is None or not token_ids:
            return ()
        return parse_tool_calls(self._tokenizer.decode(list(token_ids[-MAX_TOKENS:])))
