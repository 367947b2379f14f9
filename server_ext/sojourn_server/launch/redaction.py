"""Command lines as they may be shown and stored: without what only the server should know."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"

SECRET_FLAGS = ("--api-key", "--hf-token")
"""vLLM's flags whose values are secrets."""

_USERINFO = re.compile(r"(?<=://)[^/?#\s@\"']+(?=@)")
_SHORTEST = len("--hf-")
"""Of an abbreviation, which argparse takes as well: ``--api-k`` is ``--api-key``."""


def redacted(argv: Sequence[str]) -> list[str]:
    """``argv`` with ``***`` for each value of a secret flag and for a name and password inside a URL."""
    shown: list[str] = []
    secret = False
    for arg in argv:
        if arg.startswith("--"):
            flag, equals, _ = arg.partition("=")
            secret = _is_secret(flag)
            shown.append(f"{flag}={HIDDEN}" if secret and equals else without_userinfo(arg))
        elif secret and not arg.startswith("-"):
            shown.append(HIDDEN)  # --api-key takes several; a value too many is hidden, never one too few
        else:
            secret = secret and not arg.startswith("-")
            shown.append(without_userinfo(arg))
    return shown


def without_userinfo(text: str) -> str:
    """``text`` with ``***`` for the name and password of each URL in it."""
    return _USERINFO.sub(HIDDEN, text)


def _is_secret(flag: str) -> bool:
    name = flag.replace("_", "-")
    return len(name) >= _SHORTEST and any(known.startswith(name) for known in SECRET_FLAGS)
