"""Forced tokens of scripted turns, and the size of the KV pool for them.

The forced tokens of a turn are its assistant message, as the chat template writes it, and the end-of-message
token. So the engine stops by itself. On the next turn it finds the message in its prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..models.chat_format import END_OF_MESSAGE, assistant_text
from .demo_tasks import ScriptedTurn

MARGIN_BLOCKS = 8
"""Additional blocks of the KV pool: the engine's null block, and each program's partly filled last block."""


class Tokenizer:
    """Tokenizer of the served model, read from its directory."""

    def __init__(self, directory: str | Path) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(Path(directory) / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``. Markup such as ``<|im_end|>`` becomes a special token."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def forced_ids(self, turn: ScriptedTurn) -> list[int]:
        """Return the token ids that the model must emit for ``turn``: its message and the end-of-message
        token."""
        return self.encode(assistant_text(turn.thought, [tool_call(turn)]) + END_OF_MESSAGE)


def tool_call(turn: ScriptedTurn) -> dict[str, Any]:
    """Return the turn's command as a call of mini-swe-agent's ``bash`` tool."""
    return {"name": "bash", "arguments": {"command": turn.command}}


def pool_blocks(context_tokens: Sequence[int], block_tokens: int, resident: float) -> int:
    """Return the number of blocks of a KV pool that holds about ``resident`` contexts.

    ``context_tokens``: the length of each program's final context. The pool holds ``resident`` times the mean
    context, and ``MARGIN_BLOCKS`` blocks more. It holds at least one request of ``model_length`` tokens,
    because vLLM does not start with less.
    """
    blocks = [math.ceil(tokens / block_tokens) for tokens in context_tokens]
    wanted = math.ceil(resident * sum(blocks) / len(blocks))
    return max(wanted + MARGIN_BLOCKS, math.ceil(model_length(context_tokens) / block_tokens) + 1)


def model_length(context_tokens: Sequence[int]) -> int:
    """Return the value of ``--max-model-len``: the largest context plus 256 spare tokens, rounded up to a
    multiple of 256."""
    return math.ceil((max(context_tokens) + 256) / 256) * 256
