"""Finds misspelt flags and models of ``sojourn serve``, and misspelt flags of ``sojourn run``.

vLLM prints its whole usage for an unknown flag, and looks for an unknown model on the hub. Only close
misspellings of sojourn's flags and models are errors here. vLLM judges everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from .cli_error import CliError

CUTOFF = 0.8
"""Minimum similarity of a misspelt word to a flag or model of sojourn, by ``difflib``, 0 to 1."""
MAX_CHANGES = 2
"""Maximum number of wrong characters in a misspelt flag. By similarity alone, vLLM's ``--linear-backend``
would count as a misspelt ``--tier-backend``."""


def check_flags(args: Iterable[str], own_flags: Sequence[str]) -> None:
    """Raise ``CliError`` if a flag in ``args`` is a misspelling of one of ``own_flags``. The caller has
    already removed the correctly spelt ``own_flags`` from ``args``."""
    for arg in args:
        flag = arg.partition("=")[0]
        if not flag.startswith("--"):
            continue
        meant = closest_flag(flag, own_flags)
        if meant is not None:
            raise CliError(f"unknown flag {flag}; did you mean {meant}?", "see sojourn serve --help")


def closest_flag(flag: str, own_flags: Sequence[str]) -> str | None:
    """Return the one of ``own_flags`` that the user probably meant by ``flag``; ``None`` if none is close."""
    typed = flag.replace("_", "-")
    matches = get_close_matches(typed, own_flags, cutoff=CUTOFF)
    return next((own for own in matches if _edit_distance(typed, own) <= MAX_CHANGES), None)


def check_model(model: str, own_models: Sequence[str]) -> None:
    """Raise ``CliError`` if ``model`` is a misspelling of one of ``own_models``, and neither a directory nor
    an ``org/name``."""
    if model in own_models or "/" in model or Path(model).is_dir():
        return
    for own in get_close_matches(model.lower(), own_models, n=1, cutoff=CUTOFF):
        raise CliError(
            f"there is no model {model!r}; did you mean {own}?",
            f"give {', '.join(own_models)}, a model directory, or a hub id",
        )


def _edit_distance(typed: str, meant: str) -> int:
    """Return the number of characters to insert, delete or replace in ``typed`` to get ``meant``."""
    changes = SequenceMatcher(None, typed, meant).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changes if tag != "equal")
