"""What ``sojourn demo`` writes down about itself."""

from __future__ import annotations

import sys

from sojourn_server.cli import demo


def test_the_stored_command_line_holds_no_secret(monkeypatch):
    line = ["sojourn", "demo", "--url", "http://me:sk-1@host:8000", "--api-key", "sk-2", "--seed=3"]
    monkeypatch.setattr(sys, "argv", line)
    assert demo.command_line() == "sojourn demo --url 'http://***@host:8000' --api-key '***' --seed=3"
