"""Parses a shell tool's call far enough to find the program it runs (Continuum App. B).

It understands quoting, operators, groups, here-documents and the usual prefixes. Other syntax gives a less
precise answer, never an error. The work is linear in the first ``MAX_COMMAND_CHARS`` characters; the rest is
not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_COMMAND_CHARS = 8192
MAX_HEAD_CHARS = 64
"""Maximum length of a head (the name of a command's program); longer heads are cut. Bounds the size of
histories, which use heads as keys."""

SHELL_TOOLS = frozenset(
    {"bash", "bash_tool", "container.exec", "exec", "exec_command", "execute_bash", "execute_command"}
    | {"local_shell", "powershell", "run_bash", "run_command", "run_in_terminal", "run_shell_command"}
    | {"run_terminal_cmd", "sh", "shell", "shell_command", "terminal"}
)
"""Lower-case names of tools that run a command line. Their history keys include the command's head, e.g.
``bash:pytest``, since durations depend on the command."""

_COMMAND_ARGUMENTS = ("command", "cmd", "script", "keystrokes", "code", "input")

TRIVIAL_HEADS = frozenset(
    {":", ".", "cd", "echo", "export", "exit", "false", "popd", "printf", "pushd", "pwd", "set"}
    | {"shopt", "source", "true", "ulimit", "umask", "unset"}
)
"""Commands that return at once. They do not determine the duration of a line."""

_FILTERS = frozenset(
    {"awk", "cat", "column", "cut", "egrep", "fgrep", "grep", "head", "jq", "less", "more", "rg", "sed"}
    | {"sort", "tail", "tee", "tr", "uniq", "wc"}
)
"""Commands that only wait for the command before the pipe: ``pytest -q | tail`` counts as ``pytest``."""

_PREFIXES = frozenset({"command", "env", "exec", "nice", "nohup", "stdbuf", "sudo", "time", "timeout"})
_SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
_LEADING_WORDS = frozenset({"!", "{", "do", "elif", "else", "if", "then", "until", "while"})
_NO_COMMAND = frozenset({"}", "[", "[[", "case", "done", "esac", "fi", "for", "function", "select"})

_NOT_HEADS = _PREFIXES | _SHELLS | _LEADING_WORDS | _NO_COMMAND
"""Words in the position of a command that are not its head."""

_SPACE = re.compile(r"(?:[ \t\r]|\\\n)+")
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|[;|\n()]|&(?!>)")
_REDIRECT = re.compile(r"\d*(?:<<<|<<-?|>>|>\||[<>]&|<>|[<>])|&>>?")
_HEREDOC_END = re.compile(r"""[ \t]*(['"]?)([\w.+-]+)\1""")
_PLAIN = re.compile(r"[^\s'\"\\;|&()<>`$]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_ONE_COMMAND = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.+-]*)(?:[ \t]+[A-Za-z0-9_./:@%,+-]+)*[ \t]*")
"""Matches a name and plain words: the fast path for most commands of agents."""
_NUMBER = re.compile(r"[+-]?[\d.]+[smhd]?")


class Command(NamedTuple):
    """One simple command of a line."""

    words: tuple[str, ...]
    """Head and arguments, unquoted, without assignments and prefixes; never empty."""
    piped: bool
    """Whether the command reads another command's output."""

    @property
    def head(self) -> str:
        """Name of the program without its folder."""
        name = self.words[0].rstrip("/")
        return (name.rsplit("/", 1)[-1] or self.words[0])[:MAX_HEAD_CHARS]


def is_shell_tool(name: str) -> bool:
    """Return whether a tool runs a command line. An extension's name may stand in front, as in
    ``developer__shell`` (Goose)."""
    return name.lower().rpartition("__")[2] in SHELL_TOOLS


def command_of(arguments: Mapping[str, Any]) -> str | None:
    """Return the command line of a shell tool's call; ``None`` without one. Of a list such as
    ``["bash", "-lc", "pytest -q"]`` this is the script, or else the program. ``None`` also for a command in
    the background (Claude Code, Qwen Code): its call returns at once."""
    if any(arguments.get(field) in (True, "true") for field in ("run_in_background", "is_background")):
        return None
    for value in map(arguments.get, _COMMAND_ARGUMENTS):
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            is_script = len(value) > 2 and value[1][:1] == "-" and value[1][-1:] == "c"
            return str(value[2 if is_script else 0])
    return None


def main_head(line: str) -> str | None:
    """Return the head of the command that probably takes most of the line's time: the last one that is not
    trivial. If all are trivial, returns the first head.

    Filters after a pipe count as trivial. Returns ``None`` if ``line`` has no command.
    """
    commands = commands_of(line)
    for command in reversed(commands):
        head = command.head
        if head not in TRIVIAL_HEADS and not (command.piped and head in _FILTERS):
            return head
    return commands[0].head if commands else None


def command_class(line: str) -> str | None:
    """Return ``main_head(line)``, for use as the class of a tool call. Returns ``None`` if there is no head,
    or if the head does not look like a program's name. Such a head, for example a quoted sentence, may
    contain arguments. Arguments are never sent."""
    if len(line) <= MAX_COMMAND_CHARS and (found := _ONE_COMMAND.fullmatch(line)):
        head = found[1]
        if head not in _NOT_HEADS:
            return head[:MAX_HEAD_CHARS]
    head = main_head(line)
    return head if head is not None and _NAME.fullmatch(head) else None


def commands_of(line: str) -> list[Command]:
    """Return the simple commands of ``line``, without assignments (``A=1 cmd``), prefixes (``timeout 9 cmd``)
    and bodies of here-documents. The script of ``bash -c '…'`` is parsed too, one level deep."""
    commands: list[Command] = []
    for command in _simple_commands(line[:MAX_COMMAND_CHARS]):
        inner = _inline_script(command)
        opened = _simple_commands(inner) if inner is not None else []
        if opened:
            commands.append(Command(opened[0].words, command.piped))
            commands += opened[1:]
        else:
            commands.append(command)
    return commands


def _simple_commands(text: str) -> list[Command]:
    commands: list[Command] = []
    words: list[str] = []
    heredocs: list[str] = []
    piped = False
    target_next = False  # the word to come is a redirection's file, not an argument
    position = 0
    while position < len(text):
        if found := _SPACE.match(text, position):
            position = found.end()
        elif text[position] == "#" and (position == 0 or text[position - 1] in " \t\n;"):
            newline = text.find("\n", position)
            position = len(text) if newline < 0 else newline
        elif found := _REDIRECT.match(text, position):
            position = found.end()
            target_next = True
            if found.group().lstrip("0123456789") in ("<<", "<<-"):
                end = _HEREDOC_END.match(text, position)
                if end is not None:
                    heredocs.append(end.group(2))
                    position = end.end()
                    target_next = False
        elif found := _OPERATOR.match(text, position):
            operator = found.group()
            position = found.end()
            _append_command(words, piped, commands)
            words = []
            target_next = False
            piped = operator in ("|", "|&")
            if operator == "\n":
                for end_word in heredocs:
                    position = _after_heredoc(text, position, end_word)
                heredocs = []
        else:
            word, position = _word(text, position)
            if not target_next:
                words.append(word)
            target_next = False
    _append_command(words, piped, commands)
    return commands


def _append_command(words: list[str], piped: bool, commands: list[Command]) -> None:
    """Strip keywords, assignments and prefixes from ``words`` and append the command, if any, to
    ``commands``. ``piped``: the command reads another command's output."""
    start = 0
    while start < len(words) and (words[start] in _LEADING_WORDS or _ASSIGNMENT.match(words[start])):
        start += 1
    while start < len(words) and words[start] in _PREFIXES:
        after = start + 1
        while after < len(words) and (
            words[after].startswith("-") or _ASSIGNMENT.match(words[after]) or _NUMBER.fullmatch(words[after])
        ):
            after += 1
        if after == len(words):
            break  # a prefix on its own, e.g. `env`, is the command
        start = after
    if start < len(words) and words[start] and words[start] not in _NO_COMMAND:
        commands.append(Command(tuple(words[start:]), piped))


def _word(text: str, position: int) -> tuple[str, int]:
    """Return the unquoted word at ``position``, and the position after it."""
    start = position
    parts: list[str] = []
    while position < len(text):
        found = _PLAIN.match(text, position)
        if found:
            parts.append(found.group())
            position = found.end()
            continue
        char = text[position]
        if char in "'`":
            end = _until(text, char, position + 1)
            parts.append(text[position + 1 : end] if char == "'" else text[position : end + 1])
            position = end + 1
        elif char == '"':
            end = _closing_quote(text, position + 1)
            parts.append(text[position + 1 : end])
            position = end + 1
        elif char == "\\":
            parts.append(text[position + 1 : position + 2].strip("\n"))
            position += 2
        elif char == "$":
            end = _after_substitution(text, position) if text.startswith("$(", position) else position + 1
            parts.append(text[position:end])
            position = end
        elif position == start:
            position += 1  # a stray "&", part of "&>" that is no redirection here
        else:
            break
    return "".join(parts), position


def _until(text: str, char: str, position: int) -> int:
    found = text.find(char, position)
    return len(text) if found < 0 else found


def _closing_quote(text: str, position: int) -> int:
    while position < len(text) and text[position] != '"':
        position += 2 if text[position] == "\\" else 1
    return min(position, len(text))


def _after_substitution(text: str, position: int) -> int:
    """Return the position after ``$(…)``. Counts parentheses and ignores quotes."""
    depth = 0
    for index in range(position + 1, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index + 1
    return len(text)


def _after_heredoc(text: str, position: int, end_word: str) -> int:
    while position < len(text):
        line_end = _until(text, "\n", position)
        if text[position:line_end].strip() == end_word:
            return min(line_end + 1, len(text))
        position = line_end + 1
    return len(text)


def _inline_script(command: Command) -> str | None:
    """Return the script of ``bash -c SCRIPT`` or ``bash -lc SCRIPT``; ``None`` for another command."""
    if command.head not in _SHELLS:
        return None
    for index, word in enumerate(command.words[1:-1], start=1):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return command.words[index + 1]
    return None
