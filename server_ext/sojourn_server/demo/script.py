"""From scripted turns to forced tokens, and how much KV that takes.

A turn's tokens are those of the canonical assistant message and of the end-of-message token, so that
the engine stops by itself and finds the message in its prefix cache on the next turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..models.chat import CHAT_TEMPLATE, END_OF_MESSAGE, assistant_text
from .tasks import Turn

RESIDENT_PROGRAMS = 3.0
"""How many of the final contexts the KV pool holds, unless told otherwise: few enough for eviction, enough
for progress."""
MARGIN_BLOCKS = 8
"""The engine's null block, and the partly filled last block of each resident program."""


class Tokenizer:
    """The served model's tokenizer and chat template, read from its directory."""

    def __init__(self, directory: str | Path) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(Path(directory) / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with markup such as ``<|im_end|>`` as the special tokens it names."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, markup included."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def forced_ids(self, turn: Turn) -> list[int]:
        """What the model must emit for ``turn``: its message and the token that ends it."""
        return self.encode(assistant_text(turn.thought, [tool_call(turn)]) + END_OF_MESSAGE)

    def count(self, messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a conversation as the server renders it."""
        return len(self.encode(self._template.render(messages=list(messages), tools=list(tools))))

    @cached_property
    def _template(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # As transformers sets it up for chat templates.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        return environment.from_string(CHAT_TEMPLATE.read_text())


def tool_call(turn: Turn) -> dict[str, Any]:
    """The turn's command as a call of mini's ``bash`` tool."""
    return {"name": "bash", "arguments": {"command": turn.command}}


def pool_blocks(context_tokens: Sequence[int], block_tokens: int, resident: float = RESIDENT_PROGRAMS) -> int:
    """KV blocks for about ``resident`` of these final contexts; the same in every arm.

    A pure function: mean context in whole blocks, times the programs to hold, plus a small margin.
    Never less than the largest context alone needs. Raises ``ValueError`` for no contexts, or room for none.
    """
    if not 0 < resident < math.inf:
        raise ValueError(f"room for {resident} contexts; expected a number > 0")
    if not context_tokens:
        raise ValueError("no contexts to make room for")
    blocks = [math.ceil(tokens / block_tokens) for tokens in context_tokens]
    wanted = math.ceil(resident * sum(blocks) / len(blocks))
    return max(wanted, max(blocks)) + MARGIN_BLOCKS


def model_length(context_tokens: Sequence[int]) -> int:
    """``--max-model-len``: the largest context and room for what outputs may vary, in whole 256s."""
    return math.ceil((max(context_tokens) + 256) / 256) * 256
