"""Finds the tool calls in a finished output (Continuum §5.1, Appendices A and B).

vLLM's own parsers (``--tool-call-parser``) read most models' formats. This parser reads what agents make
models write as text, and what vLLM's parsers do not read without the request's tools. It tries these forms in
this order and uses the first that yields a call, since an output uses a single form:

    tagged   <function=name>…, <function name="name">…, <invoke name="name">…, to=functions.name
    JSON     {"type": "function_call", "name": …} and its variants, "tool_calls": […]    (OpenAI, Anthropic)
             {"name": …, "arguments" or "parameters": …}    (hermes, Qwen, Llama 3.1, Mistral, Cohere)
             {"commands": [{"keystrokes": …}]}    (terminal-bench)
    fenced   exactly one ```bash or ```mswea_bash_command block    (mini-swe-agent)

Fenced shell blocks are removed before the other forms are tried, so a ``curl -d '{"name": …}'`` inside a
block is no function call. The thoughts of a reasoning model (up to the last ``</think>``) are ignored.

The parser reads only the last ``MAX_TEXT_CHARS`` characters, in linear time, and never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sojourn.shell_command import command_of, is_shell_tool, main_head

MAX_TEXT_CHARS = 64 * 1024
MAX_CALLS = 64
MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One tool call found in an output: the tool's name, a shell command's head and the open items of a to-do
    list; never the arguments."""

    name: str
    """Name as the model wrote it, e.g. ``bash`` or ``get_weather``."""
    command: str | None = None
    """Head of the command, e.g. ``pytest``, if the tool is a shell."""
    plan_items: int | None = None
    """Number of items that are not completed, if the tool writes the agent's to-do list."""

    @property
    def key(self) -> str:
        """Key of the call in histories: ``bash:pytest`` or ``get_weather``."""
        return f"{self.name}:{self.command}" if self.command else self.name


def parse_tool_calls(text: str) -> tuple[ParsedToolCall, ...]:
    """Return the tool calls in a model's output, in order. The result is empty if there is no call. It is
    also empty if the only candidates are two or more fenced shell blocks."""
    text = answer_text(text)
    prose, blocks = _split_fenced_blocks(text)
    in_json = (call for value in _json_values(prose) for call in _json_calls(value, depth=4))
    calls = tuple(islice(in_json, MAX_CALLS)) or tuple(islice(_tagged_calls(prose), MAX_CALLS))
    if not calls and len(blocks) == 1:
        # As in mini-swe-agent, two blocks would be two different actions, so neither counts.
        return (ParsedToolCall("bash", main_head(blocks[0])),)
    return calls


_END_MARKS = re.compile(r"(?:\s|</s>|<eos>|<end_of_turn>|<｜end▁of▁sentence｜>|<\|[^|<>]{1,28}\|>)+\Z")
"""Special tokens such as ``<|im_end|>``. Only outputs decoded without ``skip_special_tokens`` have them."""
_END_CHARS = 256


def answer_text(text: str) -> str:
    """Return the last ``MAX_TEXT_CHARS`` characters of an output, without thoughts and without special tokens
    at the end."""
    text = text[-MAX_TEXT_CHARS:].rpartition("</think>")[2]
    return text[:-_END_CHARS] + _END_MARKS.sub("", text[-_END_CHARS:])


# --- fenced shell blocks ------------------------------------------------------------------------

_SHELL_FENCES = frozenset({"```bash", "```sh", "```shell", "```zsh"})
_AGENT_FENCE = "```mswea_bash_command"


def _split_fenced_blocks(text: str) -> tuple[str, list[str]]:
    """Return ``text`` without its fenced shell blocks, and the contents of the blocks that may be tool calls.

    If any block is marked ``mswea_bash_command`` (mini-swe-agent's own marker), only marked blocks may be
    tool calls, and ordinary ``bash`` blocks are illustrations.
    """
    if "```" not in text:
        return text, []
    prose: list[str] = []
    block: list[str] | None = None
    marked: list[str] = []
    plain: list[str] = []
    target = plain
    for line in text.split("\n"):
        word = line.strip()
        if block is None:
            opened = word.lower()
            if opened in _SHELL_FENCES or opened == _AGENT_FENCE:
                block, target = [], marked if opened == _AGENT_FENCE else plain
            else:
                prose.append(line)
        elif word == "```":
            target.append("\n".join(block))
            block = None
        else:
            block.append(line)
    if block is not None:
        prose += block  # the output was cut inside the block, so nothing is run
    blocks = [one for one in (marked or plain) if one.strip()]
    return "\n".join(prose), blocks


# --- JSON forms ---------------------------------------------------------------------------------

_JSON_START = re.compile(r'\{\s*"|\[\s*\{')
_JSON_SCAN_BUDGET = 4 * MAX_TEXT_CHARS
"""Maximum number of characters that all failed parse attempts together may read. Without this limit, nested
brackets would take quadratic time."""
_MAX_ATTEMPTS = 256
_decode = json.JSONDecoder().raw_decode


def _json_values(text: str) -> Iterator[Any]:
    """Yield the outermost JSON objects and arrays of objects in ``text``."""
    position, budget = 0, _JSON_SCAN_BUDGET
    for _ in range(_MAX_ATTEMPTS):
        start = _JSON_START.search(text, position)
        if start is None or budget <= 0:
            return
        position = start.start()
        try:
            value, position = _decode(text, position)
        except json.JSONDecodeError as error:
            unterminated = error.msg.startswith("Unterminated")
            budget -= len(text) - position if unterminated else error.pos - position + 1
            position += 1
        except (ValueError, RecursionError):  # an integer of thousands of digits, or very deep nesting
            budget -= len(text) - position
            position += 1
        else:
            yield value


_CALL_TYPES = ("function_call", "function", "tool_use", "tool_call")
_ARGUMENTS = ("arguments", "parameters", "args")


def _json_calls(value: Any, depth: int) -> Iterator[ParsedToolCall]:
    """Yield the tool calls in ``value``, down to ``depth`` levels of nesting."""
    if depth == 0:
        return
    if isinstance(value, list):
        for item in value[:MAX_CALLS]:
            yield from _json_calls(item, depth - 1)
    elif isinstance(value, dict):
        function = value.get("function", value.get("function_call"))
        if isinstance(function, dict):
            yield from _call(function.get("name"), function)
        elif value.get("type") in _CALL_TYPES or any(field in value for field in _ARGUMENTS):
            yield from _call(value.get("name", value.get("tool_name")), value)
        elif isinstance(value.get("keystrokes"), str):
            yield ParsedToolCall("bash", main_head(value["keystrokes"]))
        else:
            for field in ("tool_calls", "output", "content", "message", "choices", "commands"):
                yield from _json_calls(value.get(field), depth - 1)


# --- tagged forms -------------------------------------------------------------------------------

_TAG = re.compile(
    r"<function=[\"']?(?P<function>[\w.:-]{1,128})[\"']?>"  # Llama 3.1, Qwen3-Coder, OpenHands
    r"|<function name=[\"'](?P<minicpm>[\w.:-]{1,128})[\"']>"
    r"|<[^<>\s]{0,32}\s?invoke name=\"(?P<invoke>[\w.:-]{1,128})\"[^<>]{0,64}>"  # MiniMax, DeepSeek, dots
    r"|to=functions\.(?P<harmony>[\w.-]{1,128})"  # gpt-oss
)
_PARAMETER = re.compile(r"<[^<>\s]{0,32}\s?param(?:eter)?(?:=| name=)[\"']?([\w.-]{1,64})[\"']?[^<>]{0,64}>")


def _tagged_calls(text: str) -> Iterator[ParsedToolCall]:
    tags = list(_TAG.finditer(text))[: MAX_CALLS + 1]
    for index, tag in enumerate(tags[:MAX_CALLS]):
        body = text[tag.end() : tags[index + 1].start() if index + 1 < len(tags) else len(text)]
        arguments: Any = _parameters(body)
        if not arguments:
            arguments = next(_json_values(body), {})
        yield from _call(tag.group(tag.lastgroup or 0), {"arguments": arguments})


def _parameters(body: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    openings = list(_PARAMETER.finditer(body))[: MAX_CALLS + 1]
    for index, opening in enumerate(openings):
        end = openings[index + 1].start() if index + 1 < len(openings) else len(body)
        value = body[opening.end() : end].partition("</")[0]
        arguments.setdefault(opening.group(1), value.strip())
    return arguments


def plan_items(calls: Sequence[ParsedToolCall]) -> int | None:
    """Return the number of open items in the last to-do list that ``calls`` write; ``None`` without one."""
    return next((call.plan_items for call in reversed(calls) if call.plan_items is not None), None)


# --- from a name and arguments to a call ---------------------------------------------------------


def named_tool_call(name: str, arguments: str) -> ParsedToolCall | None:
    """Return the call of tool ``name`` with ``arguments`` in JSON; ``None`` if ``name`` is no valid name."""
    return next(iter(_call(name, {"arguments": arguments})), None)


def _call(name: Any, block: dict[str, Any]) -> list[ParsedToolCall]:
    """Return the call of tool ``name`` as a list of one; an empty list if ``name`` is no valid name.

    ``block`` is the JSON object that holds the arguments."""
    if not isinstance(name, str) or not 0 < len(name.strip()) <= MAX_NAME_CHARS:
        return []
    name = name.strip()
    if is_shell_tool(name):
        return [ParsedToolCall(name, _command_head(block))]
    return [ParsedToolCall(name, plan_items=_plan_items(name, block))]


def _arguments(block: dict[str, Any]) -> Any:
    return next((block[f] for f in (*_ARGUMENTS, "input") if f in block), None)


def _from_json(value: Any) -> Any:
    """Return ``value``, decoded if it is a text. Raises ``ValueError`` or ``RecursionError``."""
    return _decode(value.strip())[0] if isinstance(value, str) else value


_PLAN_TOOLS = frozenset({"todowrite", "writetodos", "updateplan"})
"""Tools that write the agent's whole to-do list, in lower case without underscores: those of Claude Code,
OpenCode and Qwen Code, of Gemini CLI and deepagents, and of Codex."""
_CLOSED = ("completed", "done", "cancelled")


def _plan_items(name: str, block: dict[str, Any]) -> int | None:
    if name.rpartition(".")[2].replace("_", "").lower() not in _PLAN_TOOLS:
        return None
    try:
        arguments = _from_json(_arguments(block))
        items = _from_json(arguments["todos"] if "todos" in arguments else arguments["plan"])
        return sum(item.get("status") not in _CLOSED for item in items)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None  # the arguments are no list of items


def _command_head(block: dict[str, Any]) -> str | None:
    arguments = _arguments(block)
    try:
        arguments = _from_json(arguments)
    except (ValueError, RecursionError):
        return main_head(arguments)  # some models write the bare command line
    line = command_of(arguments) if isinstance(arguments, dict) else None
    return main_head(line) if line is not None else None
