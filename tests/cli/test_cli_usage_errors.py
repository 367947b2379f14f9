"""Usage errors say what is wrong and what to write, as all other errors do."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_process import refused, run_sojourn


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


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "x", "--url", "http://h", "--json"),
        ("simulate", "synthetic:x", "--save"),
        ("demo", "--plot"),
    ],
    ids=" ".join,
)
def test_a_file_in_a_missing_folder_is_refused_at_once(tmp_path: Path, words: tuple[str, ...]) -> None:
    error = refused(*words, str(tmp_path / "none" / "x.json.gz"))
    assert error.message.endswith(f"x.json.gz: there is no folder {tmp_path / 'none'}")
    assert error.next_step == f"mkdir -p {tmp_path / 'none'}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [("top", "--once"), ("explain", "p"), ("doctor",), ("policy", "on")], ids=" ".join
)
def test_the_server_may_be_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SOJOURN_URL", "no-server.invalid:1")
    result = run_sojourn(*words)
    assert "http://no-server.invalid:1 does not answer: the name" in result.stdout + result.stderr
    assert result.returncode > 0


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, live_server: str) -> None:
    result = run_sojourn("top", "--url", live_server, "--json", str(tmp_path / ("x" * 300)))
    assert result.stderr.splitlines()[-2:] == [
        f"error: {tmp_path / ('x' * 300)}: File name too long",
        "next: make room or name another place, and run it again",
    ]
    assert result.returncode == 1


def test_no_words_still_show_the_help() -> None:
    result = run_sojourn()
    assert "Usage:" in result.stdout + result.stderr
    assert "next:" not in result.stderr


def test_ctrl_c_ends_a_start_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn_server.cli.build_app", Mock(side_effect=KeyboardInterrupt))
    result = run_sojourn("top", "--once")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
