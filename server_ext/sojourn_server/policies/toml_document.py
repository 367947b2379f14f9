"""Reads the operator's TOML files: presets, profiles, tenants."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import tomllib

_MAX_INTEGER = 2**63


class TomlError(ValueError):
    """A text is not TOML. The message gives the reason."""


def load_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises ``TomlError``, also for integers that do not fit into 64 bits."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise TomlError("not TOML: nested too deeply") from None
    except ValueError as error:  # also raised for a wrong date or an integer with thousands of digits
        raise TomlError(f"not TOML: {str(error)[:200]}") from None
    values: list[Any] = [document]
    while values:
        value = values.pop()
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
            raise TomlError(f"not TOML: an integer of {value.bit_length()} bits; expected at most 64")
    return document


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message, ``; did you mean 'NAME'?``, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
