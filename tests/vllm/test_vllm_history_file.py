"""The history file: whatever happens to it, the engine starts and a good file stays good."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.core.scheduler_state import Histories
from sojourn_server.vllm.history_file import HistoryFile
from turns import change_config
from vllm.config import ParallelConfig


def history_file(path: Path, now: float = 0.0) -> HistoryFile:
    return HistoryFile(str(path), now)


def histories_of(count: int) -> Histories:
    histories = Histories()
    for _ in range(count):
        histories.tools.observe("bash", 3.0)
    return histories


def join_saves() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("sojourn-history"):
            thread.join(10)


def test_what_was_saved_is_loaded(tmp_path: Path, warnings: list[str]) -> None:
    path = tmp_path / "deep" / "h.json"
    history_file(path).load()
    assert warnings == [], "a missing file is a cold start without a word"
    history_file(path).save(histories_of(3))
    assert history_file(path).load().tools.snapshot() == histories_of(3).tools.snapshot()
    assert os.listdir(path.parent) == ["h.json"]


def test_ranks_of_a_dense_model_write_files_of_their_own(
    make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes each of them an engine of its own, which does not know the number of ranks."""
    settings = {"history_file": str(tmp_path / "h.json"), "recording_file": str(tmp_path / "recording")}
    for rank in (0, 1, 2):

        def make_rank(config: Any, rank: int = rank) -> None:
            config.parallel_config = ParallelConfig(data_parallel_size=3)
            config.parallel_config.data_parallel_index = rank
            config.parallel_config.reconfigure_for_independent_dp_rank()

        change_config(monkeypatch, make_rank)
        make_engine(settings=settings).scheduler.sojourn.shutdown()
    names = {path.name for path in tmp_path.iterdir()}
    ranks = ("", ".rank1", ".rank2")
    assert names == {f"{name}{rank}" for name in ("h.json", "recording") for rank in ranks}


@pytest.mark.parametrize(
    "content",
    [b"{half", b"[]", b"null", b'{"tools": 3, "turns": []}', b'{"tools": [], "turns": {}}', b"\xff"],
)
def test_a_file_that_cannot_be_used_is_kept_under_another_name(
    tmp_path: Path, warnings: list[str], content: bytes
) -> None:
    path = tmp_path / "h.json"
    path.write_bytes(content)
    assert history_file(path).load().tools.snapshot() == histories_of(0).tools.snapshot()
    assert (tmp_path / "h.json.unreadable").read_bytes() == content
    assert not path.exists()
    assert len(warnings) == 1


def test_what_cannot_be_read_stays_as_it_is(tmp_path: Path, warnings: list[str]) -> None:
    history = history_file(tmp_path)  # a folder
    history.load()
    history.save(histories_of(1))
    assert tmp_path.is_dir()
    assert len(warnings) == 1


def test_a_save_that_fails_is_only_logged_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    path = tmp_path / "h.json"
    history_file(path).save(histories_of(3))

    def full(self: Path, *_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    history_file(path).save(histories_of(4))
    assert len(warnings) == 1
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["h.json"]
    assert history_file(path).load().tools.snapshot() == histories_of(3).tools.snapshot()


def test_the_background_save_and_the_last_one_do_not_write_into_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """The engine stops while a save is under way: the last one waits for it, and it is the one that stays."""
    path = tmp_path / "h.json"
    file = history_file(path)
    begun, proceed = threading.Event(), threading.Event()
    dumps = json.dumps

    def slow_dumps(document: Any, **options: Any) -> str:
        text = dumps(document, **options)
        if not begun.is_set():
            begun.set()
            assert proceed.wait(10)
        return text

    monkeypatch.setattr(json, "dumps", slow_dumps)
    file.save_if_due(histories_of(2), 1000.0)
    assert begun.wait(10)
    last = threading.Thread(target=file.save, args=(histories_of(5),))
    last.start()
    proceed.set()
    last.join(10)
    assert not last.is_alive()
    join_saves()
    assert warnings == []
    assert os.listdir(tmp_path) == ["h.json"]
    assert history_file(path).load().tools.snapshot() == histories_of(5).tools.snapshot()


def test_it_is_saved_every_five_minutes(tmp_path: Path) -> None:
    file = history_file(tmp_path / "h.json", 1000.0)
    for now, due in ((1000.0, False), (1299.0, False), (1300.0, True)):
        file.save_if_due(histories_of(1), now)
        join_saves()
        assert (tmp_path / "h.json").exists() == due
