"""Reads the operator's TOML files (presets, profiles, tenants) with limits on size and complexity."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_TOML_CHARS = 4 << 20
"""Maximum length of a TOML text; ``load_toml`` rejects more. Large engine profiles have a tenth of that."""
MAX_KEY_PARTS = 1000
"""Maximum number of parts of a dotted key; ``load_toml`` rejects more. Parsing time is quadratic in this
number."""
_MAX_INTEGER = 2**63


class TomlError(ValueError):
    """A text is not TOML or exceeds the limits. The message gives the reason."""


def load_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises ``TomlError``, also for integers that do not fit into 64 bits."""
    if len(text) > MAX_TOML_CHARS:
        raise TomlError(f"{len(text)} characters; expected at most {MAX_TOML_CHARS}")
    for number, line in enumerate(text.split("\n"), start=1):
        # Commas are subtracted, because a row of numbers has a dot and a comma for each number.
        if line.count(".") - line.count(",") > MAX_KEY_PARTS:
            raise TomlError(f"line {number}: too many dots; expected keys of at most {MAX_KEY_PARTS} parts")
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise TomlError("not TOML: nested too deeply") from None
    except ValueError as error:  # also raised for a wrong date or an integer with thousands of digits
        raise TomlError(f"not TOML: {str(error)[:200]}") from None
    _check_integers(document)
    return document


def _check_integers(document: dict[str, Any]) -> None:
    values: list[Any] = [document]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
            raise TomlError(f"not TOML: an integer of {value.bit_length()} bits; expected at most 64")
