"""The flags of ``sojourn serve``: our own, each declared as a field of an options class, and vLLM's, on the
command line and in the YAML file of its ``--config``, read as vLLM reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from sojourn.errors import InputError


class InvalidOption(InputError):
    """An option cannot be used. The error's text says what was expected. ``next_step`` says what to do; it is
    empty if the text already says so."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step


def refuse(wrong: Mapping[str, bool]) -> None:
    """Raise ``InvalidOption`` with the first of the messages whose value is true."""
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise InvalidOption(message)


def own_flag(
    name: str, help: str, *, default: Any = None, shown_default: str | None = None, is_path: bool = False
) -> Any:
    """Return a field that is also a flag of ``sojourn serve``: ``name`` with its ``help``. ``shown_default``:
    the default in the help, if it is not ``default``. ``is_path``: the value is a path."""
    return field(
        default=default,
        metadata={"flag": name, "help": help, "shown_default": shown_default, "is_path": is_path},
    )


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The flags of an engine's command line. As in vLLM, ``--a-b``, ``--a_b`` and ``--a-b=value`` name the
    same flag."""

    args: tuple[str, ...]
    """The arguments of the command line, flags and values."""
    from_file: tuple[str, ...] = ()
    """The flags and values in the file that ``--config`` names. The command line takes precedence."""

    @classmethod
    def read(cls, args: Sequence[str]) -> EngineFlags:
        """Return the flags of the command line ``args`` and of the file that its ``--config`` names. Raises
        ``InvalidOption`` for an unusable file."""
        rest: list[str] = []
        from_file: tuple[str, ...] = ()
        values = iter(args)
        for arg in values:
            name, equals, path = arg.partition("=")
            if name != "--config":
                rest.append(arg)
                continue
            path = path if equals else next(values, "")
            rest += ["--config", path]  # vLLM ignores the file in --config=FILE
            from_file = read_config_file(path)
        return cls(tuple(rest), from_file)

    @property
    def in_effect(self) -> tuple[str, ...]:
        """The flags of the file, then those of the command line. The last occurrence of a flag counts."""
        return (*self.from_file, *self.args)

    @property
    def names(self) -> set[str]:
        """The names of all flags, without keys of their values."""
        return {flag_name(arg).split(".", 1)[0] for arg in self.in_effect}

    def has(self, flag: str) -> bool:
        """Return whether the flag, its ``--no-`` form, or a key of its value (``--flag.key``) is given."""
        return not self.names.isdisjoint((flag, "--no-" + flag.removeprefix("--")))

    def is_set(self, flag: str) -> bool:
        """Return whether exactly this flag is given. Its ``--no-`` form and its keys do not count."""
        return any(flag_name(arg) == flag for arg in self.in_effect)

    def value(self, flag: str) -> str | None:
        """Return the value of the flag's last occurrence; ``None`` if the flag is missing."""
        args = self.in_effect
        for arg, following in reversed([*zip(args, (*args[1:], None), strict=False)]):
            value = arg.split("=", 1)[1] if "=" in arg else following
            if flag_name(arg) == flag and value is not None:
                return value
        return None

    def kv_connector(self) -> str | None:
        """Return the name of the KV connector that the flags select; ``None`` if they select none, or if
        their values are invalid."""
        if self.value("--kv-offloading-size") is not None:
            backend = self.value("--kv-offloading-backend")
            return "LMCacheConnectorV1" if backend == "lmcache" else "OffloadingConnector"
        name = self.value("--kv-transfer-config.kv-connector")
        with suppress(ValueError, RecursionError):
            document = json.loads(self.value("--kv-transfer-config") or "{}")
            name = document.get("kv_connector", name) if isinstance(document, dict) else name
        return name if isinstance(name, str) else None

    def pop_json(self, flag: str) -> tuple[EngineFlags, dict[str, Any]]:
        """Return (the other flags, the JSON object that is the value of ``flag``). The object is empty if the
        flag is missing. Raises ``InvalidOption`` for any other value, and for the form ``flag.key``."""
        if any(flag_name(arg).startswith(f"{flag}.") for arg in self.in_effect):
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
        return EngineFlags(_without(flag, self.args), _without(flag, self.from_file)), document


def flag_name(arg: str) -> str:
    """Return the normal form of a flag: ``--A_b=c`` → ``--A-b``, ``-tp=2`` → ``--tensor-parallel-size``.
    Other arguments stay unchanged."""
    name = arg.split("=", 1)[0]
    if arg.startswith("--"):
        return name.replace("_", "-")
    short, dot, key = name.partition(".")
    return f"{_SHORT_FLAGS[short]}{dot}{key}" if short in _SHORT_FLAGS else arg


def _without(flag: str, args: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``args`` without all occurrences of ``flag`` and their values. ``flag`` takes one value."""
    return tuple(
        arg
        for before, arg in zip(("", *args), args, strict=False)
        if flag_name(arg) != flag and (flag_name(before) != flag or "=" in before)
    )


_SHORT_FLAGS = {
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-dpe": "--data-parallel-external-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-pp": "--pipeline-parallel-size",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
    **{short: "--optimization-level" for short in ("-O", "-O0", "-O1", "-O2", "-O3")},
}
"""Short form → flag, for the flags that this package reads."""


def engine_workers(flags: EngineFlags) -> int:
    """Return the number of workers of one engine. A size that is no number counts as 1; vLLM rejects it."""
    return math.prod(
        parallel_size(flags, flag) for flag in ("--tensor-parallel-size", "--pipeline-parallel-size")
    )


def parallel_size(flags: EngineFlags, flag: str) -> int:
    """Return the value of a flag such as ``--pipeline-parallel-size``; 1 if it is missing or no number."""
    size = flags.value(flag)
    return int(size) if size is not None and size.isdecimal() else 1


# --- the file of --config ---------------------------------------------------------------------


def read_config_file(path: str) -> tuple[str, ...]:
    """Return the flags in the file, as vLLM's ``FlexibleArgumentParser.load_config_file`` reads them: each
    key is the name of a flag, an object is JSON, and a list is several values.

    A key with the value false becomes ``--no-KEY``, so that no default of sojourn replaces what the user has
    set. (vLLM ignores such a key if its parser has no ``--no-KEY``.) A key that begins with ``no-`` and has
    the value false is left out. Raises ``InvalidOption``, which names the file.
    """
    flags: list[str] = []
    for key, value in _read_document(path).items():
        if value is True:
            flags.append(f"--{key}")
        elif value is False:
            flags += [] if str(key).startswith(("no-", "no_")) else [f"--no-{key}"]
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)] if value else []
        else:
            flags.append(f"--{key}={json.dumps(value, default=str) if isinstance(value, dict) else value}")
    return tuple(flags)


def _read_document(path: str) -> dict[Any, Any]:
    try:
        yaml = import_module("yaml")
    except ModuleNotFoundError:
        raise InvalidOption(f"--config {path} needs PyYAML, as vLLM does", "pip install pyyaml") from None
    document, wrong = None, ": expected a file named .yaml or .yml"
    if path.endswith((".yaml", ".yml")):
        try:
            # An open file, because YAML's errors would quote lines of a text, secrets included.
            with Path(path).open(encoding="utf-8") as file:
                document = yaml.safe_load(file)
            what = "is empty" if document is None else f"is a {type(document).__name__}"
            wrong = f" {what}; expected flag: value, one flag a line"
        except OSError as error:
            wrong = f": cannot read the file: {error.strerror}"
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            wrong = " is not YAML: " + " ".join(str(error).split())[:300]
    if isinstance(document, dict):
        return document
    raise InvalidOption(f"--config {path}{wrong}")
