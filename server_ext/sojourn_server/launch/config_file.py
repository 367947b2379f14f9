"""Reads the YAML file of vLLM's ``--config``, as the flags that vLLM makes of it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from .launch_errors import InvalidOption


def read_config_file(path: str) -> tuple[str, ...]:
    """Return the flags in the file, as vLLM's ``FlexibleArgumentParser.load_config_file`` reads them: each
    key is the name of a flag, an object is JSON, and a list is several values.

    For a key with the value false vLLM looks for a flag ``--no-KEY`` in its parser, and ignores the key if
    there is none. Here the result always has ``--no-KEY``, unless the key itself begins with ``no-``: the
    user has set the key, so no default of ours replaces it. Raises ``InvalidOption``, which names the file.
    """
    flags: list[str] = []
    for key, value in _read_document(path).items():
        if not isinstance(key, str):
            raise InvalidOption(f"--config {path}: {_short(repr(key))} is no flag's name")
        if key == "config":
            raise InvalidOption(f"--config {path}: names another config file; expected one file in all")
        if isinstance(value, bool):
            if value:
                flags.append(f"--{key}")
            elif not key.startswith(("no-", "no_")):
                flags.append(f"--no-{key}")
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)] if value else []
        elif isinstance(value, dict):
            flags.append(f"--{key}={_as_json(path, key, value)}")
        else:
            flags.append(f"--{key}={value}")
    return tuple(flags)


def _read_document(path: str) -> dict[Any, Any]:
    if path.rsplit(".", 1)[-1] not in ("yaml", "yml"):
        raise InvalidOption(f"--config {path}: expected a file named .yaml or .yml")
    try:
        # vLLM requires PyYAML. We do not, so a --dry-run elsewhere may lack it.
        yaml = import_module("yaml")
    except ImportError:
        raise InvalidOption(f"--config {path}: PyYAML, which reads it, is not installed") from None
    try:
        with Path(path).open(
            encoding="utf-8"
        ) as file:  # an open file, because YAML's errors would quote lines of a text, secrets included
            document = yaml.safe_load(file)
    except OSError as error:
        raise InvalidOption(f"--config {path}: cannot read the file: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The message of a YAML error has several lines.
        raise InvalidOption(f"--config {path} is not YAML: {_short(str(error))}") from None
    if not isinstance(document, dict):
        what = "is empty" if document is None else f"is a {type(document).__name__}"
        raise InvalidOption(f"--config {path} {what}; expected flag: value, one flag a line")
    return document


def _as_json(path: str, key: str, value: dict[Any, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"--config {path}: {_short(key)} cannot be JSON: {_short(str(error))}") from None


def _short(text: str) -> str:
    """Return the beginning of ``text`` in one line."""
    return " ".join(text.split())[:300]
