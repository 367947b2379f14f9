"""Reading the TOML files that describe hardware and models: shipped ones by name, others by path."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED_PROFILES = Path(__file__).parent / "profiles"


class LatencyProfileError(ValueError):
    """A profile is missing or wrong; the text names file and field, and what was expected."""


def shipped_profile_names(kind: str) -> list[str]:
    """Names of the profiles of a ``kind`` (``hardware`` or ``models``) that come with sojourn, sorted."""
    return sorted(path.stem for path in (SHIPPED_PROFILES / kind).glob("*.toml"))


def is_profile_path(name: str) -> bool:
    """Whether ``name`` means a file of the user's rather than a shipped profile."""
    return name.endswith(".toml") or "/" in name or Path(name).is_file()


def find_profile_file(name: str, kind: str) -> Path:
    """The file of a shipped profile or of the user's own. Raises ``LatencyProfileError``."""
    if is_profile_path(name):
        path = Path(name)
        if not path.is_file():
            raise LatencyProfileError(f"{path}: no such file")
        return path
    known = shipped_profile_names(kind)
    if name in known:
        return SHIPPED_PROFILES / kind / f"{name}.toml"
    wanted = name.lower()
    near = [other for other in known if other.startswith(wanted)] if wanted else []
    near = near or difflib.get_close_matches(wanted, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    noun = "model" if kind == "models" else kind
    raise LatencyProfileError(
        f"unknown {noun} {name!r}; expected one of {', '.join(known)}, or a TOML file{hint}"
    )


def read_profile_toml(path: Path) -> dict[str, Any]:
    """The document. Raises ``LatencyProfileError``."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LatencyProfileError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LatencyProfileError(f"{path}: not TOML: {error}") from error


def reject_unknown_fields(path: Path, found: Mapping[str, Any], known: list[str]) -> None:
    """A misspelt field would silently keep its default: refuse it."""
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; expected {', '.join(known)}"
            raise LatencyProfileError(f"{path}: unknown field {key!r}{hint}")


def parse_number(path: Path, where: str, value: Any, *, least: float = 0.0, most: float = math.inf) -> float:
    """A finite number in [least, most]; ``where`` names its field."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not least <= value <= most:
        bounds = f"≥ {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise LatencyProfileError(f"{path}: {where} is {value!r}; expected a number {bounds}")
    return float(value)


def parse_integer(path: Path, where: str, value: Any, *, least: int = 1) -> int:
    """A whole number ≥ least."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LatencyProfileError(f"{path}: {where} is {value!r}; expected a whole number ≥ {least}")
    return value


def parse_text(path: Path, where: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise LatencyProfileError(f"{path}: {where} is {value!r}; expected a text")
    return value
