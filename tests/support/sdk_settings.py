"""Settings of the SDK that ``sojourn.init`` does not take, for tests in this process and in others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sojourn.config import Config

PATH = str(Path(__file__).parent)
"""This folder, as the entry of ``PYTHONPATH`` for a process that imports this module."""

_resolve: Any = Config.resolve.__func__  # type: ignore[attr-defined]


def resolve_with(**settings: Any) -> Any:
    """Return a replacement for ``Config.resolve`` that sets the fields ``settings`` of its result. A test
    installs it with ``monkeypatch``."""

    def resolve(cls: type[Config], *args: Any, **kwargs: Any) -> Config:
        config: Config = dataclasses.replace(_resolve(cls, *args, **kwargs), **settings)
        return config

    return classmethod(resolve)
