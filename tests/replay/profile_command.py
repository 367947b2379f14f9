"""The command ``sojourn profile`` for the tests of this directory."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from sojourn_server.cli.profile import register
from sojourn_server.profiling import machine_speed
from typer.testing import CliRunner


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["profile", *arguments])


def measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make measured copies so small that they take almost no time, since the tests do not measure this
    machine."""
    monkeypatch.setattr(machine_speed.measure_bandwidth, "__defaults__", (1 << 20, None))
