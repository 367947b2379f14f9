"""One text format for assistant messages, so that a prefix cache finds their KV again on the next turn.

A prefix cache compares tokens. On the next turn the client sends the assistant message back as structured
data, and the server renders it as text again. The cache finds the KV only if the rendered tokens equal the
generated tokens. So ``chat_template.jinja`` and ``assistant_text`` write the same format:

    {content}\\n<tool_call>\\n{"name": "bash", "arguments": {"command": "ls"}}\\n</tool_call>

- JSON has the format of ``json.dumps(..., ensure_ascii=False)``: separators ``", "`` and ``": "``, keys in
  their given order. vLLM's hermes parser and transformers' ``tojson`` use this format for arguments too.
- The content is unchanged, except that it ends with a newline before the first tool call. The hermes parser
  returns everything before ``<tool_call>``, the newline included.
- The content does not start with white space. In the prompt, the newline after ``assistant`` is one token.
  White space after this newline would merge with it into a different token.
- One newline separates calls. ``<|im_end|>`` ends the message and is not part of the text.

A message with ``<tool_call>`` in its content, ``</tool_call>`` in a call, or ``<|im_end|>`` anywhere cannot
be written in this format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""Path of the chat template of both models; ``sojourn serve`` passes it as ``--chat-template``."""

END_OF_MESSAGE = "<|im_end|>"
"""The token that ends a message. Forced tokens must end with it, so that the engine stops by itself."""


def assistant_text(content: str | None, tool_calls: Iterable[Mapping[str, Any]] | None = None) -> str:
    """Return the text of an assistant message, as the chat template renders it and a model must generate it.

    ``tool_calls`` are OpenAI tool calls (``{"function": {"name", "arguments"}}``) or the bare functions;
    ``arguments`` is a mapping or its JSON text. Leading white space of ``content`` is dropped (see the
    module). Raises ``ValueError`` if the text would be parsed into a different message, or if ``arguments``
    is not a JSON object.
    """
    text = (content or "").lstrip()
    calls = [_tool_call(call) for call in tool_calls or ()]
    for part, forbidden in [(text, "<tool_call>"), *((call, "</tool_call>") for call in calls)]:
        if forbidden in part or END_OF_MESSAGE in part:
            raise ValueError(
                f"the message contains {forbidden} or {END_OF_MESSAGE}, which the parser reads as markup"
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
