"""Tool calls read from a finished request's tokens, inside the engine core.

The scheduler sees token ids only. The text is decoded once per finished turn
of a program, never for other traffic, and only its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from ..program.toolcalls import ToolCall, parse_tool_calls

MAX_TOKENS = 8192
"""Tool calls stand at the end; of longer outputs only this many last tokens are decoded."""

logger = init_logger("vllm.sojourn")


class ToolCallReader:
    """Decodes outputs with the model's own tokenizer; without one, no output shows a tool call."""

    def __init__(self, model_config: Any) -> None:
        self._tokenizer: Any = None
        if model_config.skip_tokenizer_init:
            return
        try:
            from vllm.tokenizers import cached_tokenizer_from_config

            self._tokenizer = cached_tokenizer_from_config(model_config)
        except Exception as error:
            logger.warning(
                "sojourn: no tokenizer in the engine core (%s); tool calls are known from client events only",
                error,
            )

    def read(self, token_ids: Sequence[int]) -> tuple[ToolCall, ...]:
        """The tool calls in an output."""
        if self._tokenizer is None or not token_ids:
            return ()
        return parse_tool_calls(self._tokenizer.decode(list(token_ids[-MAX_TOKENS:])))
