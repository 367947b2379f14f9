"""The flags of an engine's command line, read as vLLM reads them."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .launch_errors import InvalidOption

_PARALLELISM_FLAGS = ("--tensor-parallel-size", "--pipeline-parallel-size")


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The flags of an engine's command line. As in vLLM, ``--a-b``, ``--a_b`` and ``--a-b=value`` name the
    same flag."""

    args: tuple[str, ...]

    def has(self, flag: str) -> bool:
        """Return whether the flag, or its ``--no-`` form, is on the command line."""
        negated = "--no-" + flag.removeprefix("--")
        return any(flag_name(arg) in (flag, negated) for arg in self.args)

    def is_set(self, flag: str) -> bool:
        """Return whether a flag without a value is on the command line, not counting its ``--no-`` form."""
        return any(flag_name(arg) == flag for arg in self.args)

    def value(self, flag: str) -> str | None:
        """Return the value of the flag's last occurrence; ``None`` if the flag is missing."""
        found = None
        for index, arg in enumerate(self.args):
            if flag_name(arg) == flag:
                if "=" in arg:
                    found = arg.split("=", 1)[1]
                elif index + 1 < len(self.args):
                    found = self.args[index + 1]
        return found

    def kv_connector(self) -> str | None:
        """Return the name of the KV connector that the flags select; ``None`` if they select none or are
        invalid."""
        if self.value("--kv-offloading-size") is not None:
            backend = self.value("--kv-offloading-backend")
            return "LMCacheConnectorV1" if backend == "lmcache" else "OffloadingConnector"
        name = self.value("--kv-transfer-config.kv-connector")
        with suppress(ValueError, RecursionError):
            document = json.loads(self.value("--kv-transfer-config") or "{}")
            name = document.get("kv_connector", name) if isinstance(document, dict) else name
        return name if isinstance(name, str) else None

    def pop_json(self, flag: str) -> tuple[EngineFlags, dict[str, Any]]:
        """Remove ``flag``. Returns the other flags, and the JSON object that is the value of ``flag``; {} if
        the flag is missing. Raises ``InvalidOption`` for any other value."""
        if any(flag_name(arg).startswith(f"{flag}.") for arg in self.args):
            raise InvalidOption(f"sojourn adds to {flag}: give it as one JSON object, not as {flag}.key")
        text = self.value(flag)
        if text is None:
            return self, {}
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidOption(f"{flag} is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise InvalidOption(f"{flag} is a JSON {type(document).__name__}; expected an object")
        rest: list[str] = []
        skip_value = False
        for arg in self.args:
            if skip_value:
                skip_value = False
            elif flag_name(arg) == flag:
                skip_value = "=" not in arg
            else:
                rest.append(arg)
        return EngineFlags(tuple(rest)), document


def flag_name(arg: str) -> str:
    """Return the normal form of a flag: ``--A_b=c`` → ``--A-b``, ``-tp=2`` → ``--tensor-parallel-size``.
    Other arguments stay unchanged."""
    name = arg.split("=", 1)[0]
    if arg.startswith("--"):
        return name.replace("_", "-")
    short, dot, key = name.partition(".")
    return f"{_SHORT_FLAGS[short]}{dot}{key}" if short in _SHORT_FLAGS else arg


_SHORT_FLAGS = {
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-pp": "--pipeline-parallel-size",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
    **{short: "--optimization-level" for short in ("-O", "-O0", "-O1", "-O2", "-O3")},
}
"""vLLM's short forms of the flags that are read here."""


def engine_workers(flags: EngineFlags) -> int:
    """Return the number of workers of one engine. A size that is no number counts as 1; vLLM refuses it."""
    return math.prod(parallel_size(flags, flag) for flag in _PARALLELISM_FLAGS)


def parallel_size(flags: EngineFlags, flag: str) -> int:
    """Return the number that follows a flag such as ``--pipeline-parallel-size``; 1 if none does."""
    size = flags.value(flag)
    return int(size) if size is not None and size.isdecimal() else 1
