"""Usage errors say what is wrong and what to write, as all other errors do."""

from __future__ import annotations

import pytest
from cli_process import run_sojourn


@pytest.mark.parametrize(
    ("words", "said", "advice"),
    [
        (
            ("serve", "tiny", "--kv-disk-gib", "abc"),
            "invalid value for '--kv-disk-gib'",
            "see sojourn serve --",
        ),
        (("trace", "import", "x"), "missing option '--from'", "see sojourn trace import --help"),
        (("explain", "p", "--turn", "0"), "invalid value for '--turn'", "see sojourn explain --help"),
        (("explain", "--bogus", "p"), "no such option: --bogus", "see sojourn explain --help"),
        (("dcotor",), "no such command 'dcotor'", "see sojourn --help"),
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
