"""Finds the tool calls in a finished output (Continuum §5.1, Appendices A and B).

Models write tool calls in many forms. The parser tries the forms in this order and uses the first that yields
a call, since an output uses a single form:

    OpenAI JSON      {"type": "function_call", "name": …} and its variants, "tool_calls": […]
    hermes, Qwen     <tool_call>{"name": …, "arguments": …}</tool_call>
    GLM              <tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>
    tagged           <function=name>…, <invoke name="name">…, functions.name:0, to=functions.name,
                     [TOOL_CALLS]name[ARGS]…, call:name{…} and other marks before or around a name
    bare JSON        {"name": …, "arguments" or "parameters": …}      (Llama 3.1, Mistral, Qwen)
    keyed JSON       <|tools_prefix|>[{name: {…}}]                    (Apertus)
    pythonic         func(a=1), [f(a=1), g()]  (Llama 3, OLMo 3, LFM2), between marks or without other text
    terminal-bench   {"commands": [{"keystrokes": …}]}
    fenced           exactly one ```bash or ```mswea_bash_command block  (mini-swe-agent)

Fenced shell blocks are removed before the other forms are tried, so a ``curl -d '{"name": …}'`` inside a
block is no function call. The thoughts of a reasoning model (up to the last ``</think>``) are ignored.

The parser reads only the last ``MAX_TEXT_CHARS`` characters, in linear time, and never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sojourn.shell_command import command_of, is_shell_tool, main_head

MAX_TEXT_CHARS = 64 * 1024
MAX_CALLS = 64
MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One tool call found in an output: the tool's name and a shell command's head, never the arguments."""

    name: str
    """Name as the model wrote it, e.g. ``bash`` or ``get_weather``."""
    command: str | None = None
    """Head of the command, e.g. ``pytest``, if the tool is a shell."""

    @property
    def key(self) -> str:
        """Key of the call in histories: ``bash:pytest`` or ``get_weather``."""
        return f"{self.name}:{self.command}" if self.command else self.name


def parse_tool_calls(text: str) -> tuple[ParsedToolCall, ...]:
    """Return the tool calls in a model's output, in order. The result is empty if there is no call. It is
    also empty if the only candidates are two or more fenced shell blocks."""
    text = answer_text(text)
    prose, blocks = _split_fenced_blocks(text)
    values = list(_json_values(prose))
    for calls in (
        _openai_calls(values),
        _hermes_calls(prose),
        _tagged_calls(prose),
        _bare_json_calls(values),
        _keyed_json_calls(prose),
        _pythonic_calls(prose),
        _terminal_calls(values),
    ):
        if calls:
            return tuple(calls[:MAX_CALLS])
    # As in mini-swe-agent, two blocks would be two different actions, so neither counts.
    return (ParsedToolCall("bash", main_head(blocks[0])),) if len(blocks) == 1 else ()


def answer_text(text: str) -> str:
    """Return the last ``MAX_TEXT_CHARS`` characters of an output, without thoughts and without special tokens
    at the end."""
    return _without_end_marks(text[-MAX_TEXT_CHARS:].rpartition("</think>")[2])


_END_MARKS = ("</s>", "<eos>", "<end_of_turn>", "<｜end▁of▁sentence｜>")
_MAX_MARK_CHARS = 32
_MAX_MARKS = 8


def _without_end_marks(text: str) -> str:
    """Remove special tokens such as ``<|im_end|>`` from the end of ``text``. Only outputs decoded without
    ``skip_special_tokens`` have them."""
    for _ in range(_MAX_MARKS):
        text = text.rstrip()
        if text.endswith(_END_MARKS):
            text = text[: text.rindex("<")]
        elif text.endswith("|>") and (start := text.rfind("<|", -_MAX_MARK_CHARS)) >= 0:
            text = text[:start]
        else:
            break
    return text


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


def _openai_calls(values: list[Any]) -> list[ParsedToolCall]:
    return [call for value in values for call in _openai_blocks(value, depth=4)]


def _openai_blocks(value: Any, depth: int) -> Iterator[ParsedToolCall]:
    """Yield the function calls in ``value``, down to ``depth`` levels of nesting. The formats are those of
    OpenAI's chat completions and responses, and of Anthropic's messages."""
    if depth == 0:
        return
    if isinstance(value, list):
        for item in value[:MAX_CALLS]:
            yield from _openai_blocks(item, depth - 1)
    elif isinstance(value, dict):
        function = value.get("function", value.get("function_call"))
        if value.get("type") in ("function_call", "function", "tool_use", "tool_call") and "name" in value:
            yield from _call(value.get("name"), value)
        elif isinstance(function, dict):
            yield from _call(function.get("name"), function)
        else:
            for field in ("tool_calls", "output", "content", "message", "choices"):
                if isinstance(value.get(field), (list, dict)):
                    yield from _openai_blocks(value[field], depth - 1)


def _bare_json_calls(values: list[Any]) -> list[ParsedToolCall]:
    calls: list[ParsedToolCall] = []
    for value in values:
        for item in value[:MAX_CALLS] if isinstance(value, list) else [value]:
            if isinstance(item, dict) and any(field in item for field in ("arguments", "parameters", "args")):
                calls += _call(item.get("name", item.get("tool_name")), item)
    return calls


_KEYED_JSON_MARK = "<|tools_prefix|>"


def _keyed_json_calls(text: str) -> list[ParsedToolCall]:
    calls: list[ParsedToolCall] = []
    _, _, marked = text.partition(_KEYED_JSON_MARK)
    for value in _json_values(marked):
        for item in value[:MAX_CALLS] if isinstance(value, list) else [value]:
            if isinstance(item, dict) and len(item) == 1:
                name, arguments = next(iter(item.items()))
                calls += _call(name, {"arguments": arguments})
    return calls


def _terminal_calls(values: list[Any]) -> list[ParsedToolCall]:
    calls: list[ParsedToolCall] = []
    for value in values:
        commands = value.get("commands") if isinstance(value, dict) else None
        for command in commands[:MAX_CALLS] if isinstance(commands, list) else []:
            keystrokes = command.get("keystrokes") if isinstance(command, dict) else None
            if isinstance(keystrokes, str):
                calls.append(ParsedToolCall("bash", main_head(keystrokes)))
    return calls


def _hermes_calls(text: str) -> list[ParsedToolCall]:
    calls: list[ParsedToolCall] = []
    text = text.replace("<ifm|", "<").replace("</ifm|", "</")  # K2 Horizon marks its tags
    for part in text.split("<tool_call>")[1 : MAX_CALLS + 1]:
        body = part.split("</tool_call>", 1)[0].strip()
        if body.startswith("{"):
            try:
                value, _ = _decode(body)
            except (ValueError, RecursionError):
                continue
            calls += _call(value.get("name"), value)
        else:
            name, _, arguments = body.partition("<arg_key>")  # GLM-4.5 puts the name on a line of its own
            if arguments:
                name = name.strip().removesuffix("<tool_sep>")  # Hunyuan V3
                calls += _call(name, {"arguments": _glm_arguments(arguments)})
    return calls


_GLM_PAIR = re.compile(
    r"\s*([\w.-]{1,64})\s*</arg_key>\s*(?:<arg_type>[\w.-]{1,64}</arg_type>\s*)?<arg_value>"
)


def _glm_arguments(text: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for part in text.split("<arg_key>"):
        pair = _GLM_PAIR.match(part)
        if pair:
            arguments[pair.group(1)] = part[pair.end() :].split("</arg_value>", 1)[0]
    return arguments


# --- tagged forms -------------------------------------------------------------------------------

_TAG = re.compile(
    r"<function=[\"']?(?P<function>[\w.:-]{1,128})[\"']?>"  # Llama 3.1, Qwen3-Coder
    r"|<function name=[\"'](?P<minicpm>[\w.:-]{1,128})[\"']>"
    # MiniMax, DeepSeek V3.2 and V4 (V4.1 with a space), step3, dots
    r"|<[^<>\s]{0,32}\s?invoke name=\"(?P<invoke>[\w.:-]{1,128})\"[^<>]{0,64}>"
    r"|<\|tool_call_begin\|>\s{0,8}functions\.(?P<kimi>[\w.-]{1,128}):\d+"
    r"|<\|open\|>call tool=\"(?P<kimi3>[\w.:-]{1,128})\"[^<>|]{0,64}<\|sep\|>"
    r"|to=functions\.(?P<harmony>[\w.-]{1,128})"  # gpt-oss
    # DeepSeek V3 writes the word "function" before the separator, V3.1 the name
    r"|<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<deepseek>[\w.-]{1,128})"
    r"|\[TOOL_CALLS\]\s?(?P<mistral>[\w.-]{1,128})(?=\[(?:ARGS|CALL_ID)\]|\{)"
    r"|(?:<start_function_call>|<\|tool_call>)call:(?P<gemma>[\w.:-]{1,128})(?=\{)"
    r"|begin_tool_name:plamo\|>(?P<plamo>[\w.:-]{1,128})<"
)
_PARAMETER = re.compile(
    r"<[^<>\s]{0,32}\s?param(?:eter)?(?:=| name=)[\"']?(?P<tag>[\w.-]{1,64})[\"']?[^<>]{0,64}>"
    r"|<\|open\|>argument key=\"(?P<kimi3>[\w.-]{1,64})\"[^<>|]{0,64}<\|sep\|>"
    r"|\]<\]minimax\[>\[<(?P<minimax>[\w.-]{1,64})>"
    r"|(?<![\w.-])(?P<gemma>[\w.-]{1,64}):(?:<escape>|<\|\"\|>)"
)
_VALUE_END = re.compile(r"</|<\|close\|>|\]<\]minimax\[>\[|<escape>|<\|\"\|>")


def _tagged_calls(text: str) -> list[ParsedToolCall]:
    calls: list[ParsedToolCall] = []
    tags = list(_TAG.finditer(text))[: MAX_CALLS + 1]
    for index, tag in enumerate(tags[:MAX_CALLS]):
        body = text[tag.end() : tags[index + 1].start() if index + 1 < len(tags) else len(text)]
        arguments: Any = _parameters(body)
        if not arguments:
            arguments = next(_json_values(body), {})
        calls += _call(tag.group(tag.lastgroup or 0), {"arguments": arguments})
    return calls


def _parameters(body: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    openings = list(_PARAMETER.finditer(body))[: MAX_CALLS + 1]
    for index, opening in enumerate(openings):
        end = openings[index + 1].start() if index + 1 < len(openings) else len(body)
        closing = _VALUE_END.search(body, opening.end(), end)
        value = body[opening.end() : closing.start() if closing else end]
        arguments.setdefault(opening.group(opening.lastgroup or 0), value.strip())
    return arguments


# --- pythonic form ------------------------------------------------------------------------------

_PYTHON_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"?' r"|'(?:[^'\\]|\\.)*'?" r"|[\[\](){}]|[A-Za-z_][\w.]*|\s+|.", re.DOTALL
)
_PYTHON_TAGS = re.compile(r"<\|(?:python_tag|python_start|python_end|eom_id|eot_id)\|>")
_PYTHON_MARKS = (("<|tool_call_start|>", "<|tool_call_end|>"), ("<function_calls>", "</function_calls>"))
"""Marks around pythonic calls. Other text may stand outside of them."""


def _pythonic_calls(text: str) -> list[ParsedToolCall]:
    """Return the calls if ``text``, or the part between marks, has only calls ``name(key=value, …)``. Return
    an empty list if there is other text."""
    for begin, end in _PYTHON_MARKS:
        if begin in text:
            text = text.split(begin, 1)[1].split(end, 1)[0]
    text = _PYTHON_TAGS.sub("", text).strip()
    if not text.endswith((")", ")]")):
        return []
    calls: list[ParsedToolCall] = []
    name = before = key = ""
    arguments: dict[str, str] = {}
    depth, base = 0, 1 if text.startswith("[") else 0
    for found in _PYTHON_TOKEN.finditer(text):
        token = found.group()
        if token.isspace():
            continue
        if token in "([{":
            if depth == base and not (token == "(" and name):
                return []
            depth += 1
        elif token in ")]}":
            depth -= 1
            if depth == base:
                if before not in ("(", ",") and not key:
                    return []  # positional arguments: probably prose or code, not a tool call
                calls += _call(name, {"arguments": arguments})
                name, key, arguments = "", "", {}
        elif depth <= base:
            if token.isidentifier() or token.replace(".", "_").isidentifier():
                if name:
                    return []
                name = token
            elif token not in ",;":
                return []
        elif depth == base + 1:
            if token == "=" and before.isidentifier():
                key = before
            elif before == "=" and token[0] in "\"'":
                arguments.setdefault(key, token.strip("\"'"))
        before = token
        if depth < 0 or len(calls) > MAX_CALLS:
            return []
    return calls if depth == 0 and not name else []


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
    if not is_shell_tool(name):
        return [ParsedToolCall(name)]
    return [ParsedToolCall(name, _command_head(block))]


def _command_head(block: dict[str, Any]) -> str | None:
    arguments = next((block[f] for f in ("arguments", "parameters", "args", "input") if f in block), None)
    if isinstance(arguments, str):
        try:
            arguments, _ = _decode(arguments.strip())
        except (ValueError, RecursionError):
            return main_head(arguments)  # some models write the bare command line
    line = command_of(arguments) if isinstance(arguments, dict) else None
    return main_head(line) if line is not None else None
