"""Terminals without colours, and outputs that cannot be written: no command ends with a traceback."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

SOJOURN = (sys.executable, "-m", "sojourn_server.cli")
FULL = Path("/dev/full")


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_top_runs_in_a_terminal_without_colours(live_server: str, setting: dict[str, str]) -> None:
    pytest.importorskip("textual", reason="textual is missing: pip install 'sojourn[top]'")
    main, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **setting}
    top = subprocess.Popen(
        [*SOJOURN, "top", "--url", live_server], stdin=terminal, stdout=terminal, stderr=terminal, env=env
    )
    os.close(terminal)
    shown = b""

    def shows(text: bytes) -> bool:
        nonlocal shown
        if select.select([main], [], [], 0.1)[0]:
            with suppress(OSError):  # the command has ended
                shown += os.read(main, 1 << 16)
        return text in shown or top.poll() is not None

    def end() -> str:
        return shown.decode(errors="replace")[-2000:]

    try:
        wait_until(lambda: shows(b"fixer"), end)
        os.write(main, b"?")  # a screen of text
        wait_until(lambda: shows(b"Escape: back"), end)
        os.write(main, b"qq")
        wait_until(lambda: shows(b"\0"), end)
        assert b"Traceback" not in shown, end()
        assert top.returncode == 0
    finally:
        top.kill()
        top.wait()
        os.close(main)


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is missing")
@pytest.mark.parametrize(
    "words",
    [
        ("--version",), ("--help",), ("simulate", "--help"),
        ("doctor", "--url", "URL"), ("top", "--once", "--url", "URL"), ("top", "--json", "-", "--url", "URL"),
        ("explain", "fixer", "--url", "URL"), ("explain", "fixer", "--json", "-", "--url", "URL"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_full_output_is_named_in_one_line(live_server: str, words: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        result = run([live_server if word == "URL" else word for word in words], full.fileno())
    assert result.stderr.splitlines()[-1] == (
        "sojourn: cannot write the output: No space left on device; make room or name another place"
    )
    assert "Traceback" not in result.stderr
    assert result.returncode == 1


@pytest.mark.parametrize(
    "words", [("--version",), ("top", "--json", "-"), ("explain", "fixer")], ids=" ".join
)
def test_a_reader_that_left_is_told_nothing(live_server: str, words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    more = () if words == ("--version",) else ("--url", live_server)
    result = run([*words, *more], writing)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def run(words: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SOJOURN, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
