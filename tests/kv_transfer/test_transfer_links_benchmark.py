"""The benchmark of two links, small and as fast as it goes: it checks every byte itself."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_it_runs_reads_each_block_once_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    prefill_decode_links = import_module("prefill_decode_links")

    command = ["prefill_decode_links.py", "--requests", "4", "--tokens", "640", "--alone-tokens", "640"]
    command += ["--megabytes-s", "50", "--rounds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    prefill_decode_links.main()
    assert "split" in capsys.readouterr().out
    rows = json.loads((tmp_path / "prefill_decode_links.json").read_text())["rows"]
    assert len(rows) == 8
    balance = {(row["case"], row["read by"]): row["max_over_mean"] for row in rows}
    assert balance["burst", "prefill side"] == 2.0
    assert balance["burst", "shorter queue"] == 1.0
    assert balance["alone", "split"] == 1.0
    assert "| 4 at once | split |" in (tmp_path / "prefill_decode_links.md").read_text()


@pytest.mark.parametrize("option", [["--requests", "0"], ["--tokens", "127"], ["--rounds", "0"]])
def test_what_it_cannot_do_is_refused(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    prefill_decode_links = import_module("prefill_decode_links")

    with pytest.raises(SystemExit):
        prefill_decode_links.main(option)
