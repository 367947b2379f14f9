"""The command head of a shell line: the class by which the durations of ``bash`` calls are told apart.

A small reading of the shell for the client's side: it agrees with the server's own
reader on what agents usually write, and gives a poorer answer, never an error, on the rest.
"""

from __future__ import annotations

import contextlib
import re
import shlex

_MAX_CHARS = 4096
_MAX_HEAD_CHARS = 64
_TRIVIAL = frozenset(
    [
        ":",
        ".",
        "cd",
        "echo",
        "export",
        "exit",
        "false",
        "popd",
        "printf",
        "pushd",
        "pwd",
        "set",
        "shopt",
        "source",
        "true",
        "ulimit",
        "umask",
        "unset",
    ]
)
"""They return at once, so they say nothing about how long the line takes."""
_FILTERS = frozenset(
    [
        "awk",
        "cat",
        "column",
        "cut",
        "egrep",
        "fgrep",
        "grep",
        "head",
        "jq",
        "less",
        "more",
        "rg",
        "sed",
        "sort",
        "tail",
        "tee",
        "tr",
        "uniq",
        "wc",
    ]
)
"""Behind a pipe they only wait for the command before."""
_PREFIXES = frozenset(
    [
        "!",
        "command",
        "env",
        "exec",
        "nice",
        "nohup",
        "stdbuf",
        "sudo",
        "time",
        "timeout",
        "if",
        "then",
        "else",
        "do",
        "while",
        "until",
        "{",
    ]
)
_NO_COMMAND = frozenset(["[", "[[", "case", "done", "esac", "fi", "for", "function", "select", "}"])
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1(.*?\n)(?:.*?\n)?[ \t]*\2[ \t]*(?=\n|$)", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_OPTION_OR_NUMBER = re.compile(r"-.*|[\d.]+[smhd]?")


def command_head(line: object) -> str | None:
    """The program that dominates ``line``: the last that is not trivial, else the first, else ``None``."""
    if not isinstance(line, str):
        return None
    text = _HEREDOC.sub(r"\3", line[:_MAX_CHARS])
    words = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars="();<>|&")
    words.whitespace_split = True
    words.commenters = ""
    heads: list[tuple[str, bool]] = []
    with contextlib.suppress(ValueError):  # an open quote: what was read until there still counts
        _collect(words, heads)
    for head, piped in reversed(heads):
        if head not in _TRIVIAL and not (piped and head in _FILTERS):
            return head
    return heads[0][0] if heads else None


def _collect(words: shlex.shlex, heads: list[tuple[str, bool]]) -> None:
    at_head, piped, after_prefix, skip = True, False, False, False
    for word in words:
        if set(word) <= set("<>&") and set(word) & set("<>"):
            skip = True  # a redirection: its target is no command
        elif set(word) <= set("();|&"):
            at_head, piped, after_prefix, skip = True, word in ("|", "|&"), False, False
        elif skip:
            skip = False
        elif at_head and word in _PREFIXES:
            after_prefix = True
        elif at_head and (_ASSIGNMENT.match(word) or (after_prefix and _OPTION_OR_NUMBER.fullmatch(word))):
            continue
        elif at_head:
            at_head = False
            if word in _NO_COMMAND:
                continue
            heads.append((word.rstrip("/").rsplit("/", 1)[-1][:_MAX_HEAD_CHARS] or word, piped))
