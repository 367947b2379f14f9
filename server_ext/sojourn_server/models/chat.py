"""The canonical form of an assistant message: what a model must emit to be found in the cache again.

A prefix cache compares tokens. On the next turn the client sends the assistant message back as
structured data and the server renders it again; only if that gives the text the model emitted,
token for token, is the KV of that text found. ``chat_template.jinja`` and ``assistant_text``
write the same form:

    {content}\\n<tool_call>\\n{"name": "bash", "arguments": {"command": "ls"}}\\n</tool_call>

- JSON as ``json.dumps(..., ensure_ascii=False)`` writes it: ``", "`` and ``": "``, keys in the order
  they came. vLLM's hermes parser re-writes the arguments so, and transformers' ``tojson`` does too.
- The content is kept as it is. Before the first tool call it ends with a newline, and where it does not
  one is added: the hermes parser returns everything before ``<tool_call>``, the newline included.
- Content does not start with white space: the newline after ``assistant`` in the prompt is one
  token, and white space rendered directly after it would merge with it into another one.
- Several calls are joined by one newline; ``<|im_end|>`` ends the message and is not part of the text.

Text that contains ``</tool_call>`` or ``<|im_end|>`` cannot round-trip in this format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""The template both models carry; ``sojourn serve`` passes it as ``--chat-template``."""

END_OF_MESSAGE = "<|im_end|>"
"""The token that ends a message; forced token ids end with it, so that the engine stops by itself."""


def assistant_text(content: str | None, tool_calls: Iterable[Mapping[str, Any]] | None = None) -> str:
    """The text a model must emit for the template to reproduce this assistant message.

    ``tool_calls`` are OpenAI tool calls (``{"function": {"name", "arguments"}}``) or the bare
    functions; ``arguments`` is a mapping or its JSON text. Leading white space of ``content`` is
    dropped, see above. Raises ``ValueError`` where the message cannot round-trip.
    """
    text = (content or "").lstrip()
    calls = [_tool_call(call) for call in tool_calls or ()]
    for part, forbidden in [(text, "<tool_call>"), *((call, "</tool_call>") for call in calls)]:
        if forbidden in part or END_OF_MESSAGE in part:
            raise ValueError(
                f"the message contains {forbidden} or {END_OF_MESSAGE} and cannot be told from markup"
            )
    if calls and text and not text.endswith("\n"):
        text += "\n"
    return text + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def _tool_call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"arguments of {function.get('name')!r} are a {type(arguments).__name__}, not an object"
        )
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
