"""Reads the operator's TOML files: presets, profiles, tenants."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import tomllib


class TomlError(ValueError):
    """A text is not TOML. The message gives the reason."""


def load_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises ``TomlError``."""
    try:
        return tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        raise TomlError(f"not TOML: {str(error)[:200]}") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message, ``; did you mean 'NAME'?``, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
