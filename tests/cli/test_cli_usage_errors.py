"""Usage errors say what is wrong and what to write, as all other errors do."""

from __future__ import annotations

import pytest
from cli_process import run_sojourn


@pytest.mark.parametrize(
    ("words", "said", "advice"),
    [
        (("explain",), "PROGRAM is missing", "write: sojourn explain [OPTIONS] PROGRAM; see"),
        (("serve",), "MODEL is missing", "write: sojourn serve [OPTIONS] MODEL; see sojourn serve"),
        (
            ("run", "--url", "http://h:1"),
            "COMMAND is missing",
            "write: sojourn run [OPTIONS] -- COMMAND...; see",
        ),
        (
            ("serve", "tiny", "--kv-host-gib", "abc"),
            "--kv-host-gib: 'abc' is no number",
            "see sojourn serve --",
        ),
        (("simulate", "--hours", "abc"), "--hours: 'abc' is no number", "see sojourn simulate --help"),
        (("trace", "import", "x"), "--from SOURCE is missing", "write: sojourn trace import [OPTIONS] "),
        (("explain", "p", "--turn", "x"), "--turn: 'x' is no whole number", "see sojourn explain --help"),
        (("explain", "p", "--turn", "0"), "--turn: '0' should be greater than or equal to 1", "see sojourn"),
        (("explain", "--bogus", "p"), "no such option: --bogus", "see sojourn explain --help"),
        (("top", "--interval"), "option '--interval' requires an argument", "see sojourn"),
        (("dcotor",), "no such command 'dcotor'", "see sojourn --help"),
        (("--bogus",), "no such option: --bogus", "see sojourn --help"),
    ],
)
def test_usage_errors_have_a_next_step(words: tuple[str, ...], said: str, advice: str) -> None:
    result = run_sojourn(*words)
    assert result.returncode == 2
    first, second = result.stderr.splitlines()
    assert first.startswith(f"error: {said}")
    assert second.startswith(f"next: {advice}")
    assert result.stdout == ""


def test_no_words_still_show_the_help() -> None:
    result = run_sojourn()
    assert "Usage:" in result.stdout + result.stderr
    assert "next:" not in result.stderr
