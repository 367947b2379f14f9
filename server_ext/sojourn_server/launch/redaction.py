"""Removes secrets from command lines and URLs, for logs and files."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"

SECRET_FLAGS = ("--api-key", "--hf-token")
"""vLLM's flags whose values are secrets."""

_USERINFO = re.compile(r"(?<=://)[^/?#\s@\"']+(?=@)")


def redacted(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``***`` for the values of secret flags, and for names and passwords in URLs."""
    shown: list[str] = []
    secret = False
    for arg in argv:
        if arg.startswith("-"):
            flag, equals, _ = arg.partition("=")
            name = flag.replace("_", "-")  # argparse accepts abbreviations, such as --api-k
            secret = len(name) >= len("--hf-") and any(known.startswith(name) for known in SECRET_FLAGS)
            shown.append(f"{flag}={HIDDEN}" if secret and equals else without_userinfo(arg))
        else:  # --api-key takes several values: hide all arguments up to the next flag
            shown.append(HIDDEN if secret else without_userinfo(arg))
    return shown


def without_userinfo(text: str) -> str:
    """Return ``text`` with ``***`` for the name and password of each URL in it."""
    return _USERINFO.sub(HIDDEN, text)
