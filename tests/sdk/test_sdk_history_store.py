"""The history file between processes: content, ageing, and files that cannot be used."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.config import Config, Environment
from sojourn.errors import ConfigError
from sojourn.learning import history_store as module
from sojourn.learning.history_store import VERSION, DurationSample, HistoryStore
from sojourn.learning.run_trace import ProgramRun
from sojourn.stats import Counters

RUN = ProgramRun(
    path=(("plan",), ("a", "b"), ("täglich 日",)),
    turn_nodes=("plan", None, "b"),
    turns=3,
    tools=(("plan", "bash"),),
)
CALLS = [DurationSample("bash", "pytest", 1.5, "ok"), DurationSample("search", None, 30.0, "timeout")]


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "history.sqlite3"


def rows(path: Path, table: str) -> int:
    database = sqlite3.connect(path)
    try:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    finally:
        database.close()


def change(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        for statement in statements:
            database.execute(statement)
    finally:
        database.close()


# ---- what it keeps


def test_what_is_saved_is_there_for_the_next_process(path: Path, counters: Counters):
    assert HistoryStore(path, counters).load() == ([], [])
    assert not path.exists()  # looking makes no file
    assert HistoryStore(path, counters).save(CALLS, [("coder", RUN)])
    assert HistoryStore(path, counters).load() == (CALLS, [("coder", RUN)])
    assert not counters.snapshot()


def test_reading_can_be_stopped_between_rows(path: Path, counters: Counters):
    HistoryStore(path, counters).save(CALLS, [("coder", RUN)] * 5)
    answers = [False] * len(CALLS) + [False, False, True]
    recorded = HistoryStore(path, counters).load(lambda: answers.pop(0))
    assert recorded is not None
    assert recorded.durations == CALLS
    assert recorded.runs == [("coder", RUN)] * 2
    assert not counters.snapshot()


@pytest.mark.skipif(sys.platform == "win32", reason="modes are POSIX's")
def test_only_its_owner_may_read_it(path: Path, counters: Counters):
    HistoryStore(path, counters).save(CALLS, [])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_hosts_that_share_a_home_can_share_the_file(path: Path, counters: Counters):
    """A write-ahead log goes by memory that all who use it share: over NFS that ends in a corrupt file."""
    assert HistoryStore(path, counters).save(CALLS, [])
    with module._connected(path) as database:
        database.execute("BEGIN IMMEDIATE")
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert database.execute("PRAGMA synchronous").fetchone() == (2,)  # a crash leaves it whole
    assert os.listdir(path.parent) == [path.name]


def test_a_writer_waits_for_a_reader(path: Path, counters: Counters, monkeypatch):
    monkeypatch.setattr(module, "BUSY_TIMEOUT_S", 5.0)
    HistoryStore(path, counters).save(CALLS, [])
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("BEGIN")
    database.execute("SELECT * FROM durations").fetchall()
    done = threading.Timer(0.1, database.close)
    done.start()
    assert HistoryStore(path, counters).save(CALLS, [])
    done.join()


def test_rows_are_bounded_for_each_key_and_in_all(path: Path, counters: Counters, monkeypatch):
    monkeypatch.setattr(module, "MAX_SAMPLES", 5)
    monkeypatch.setattr(module, "MAX_RUNS_A_KIND", 3)
    monkeypatch.setattr(module, "MAX_DURATION_ROWS", 12)
    monkeypatch.setattr(module, "MAX_RUN_ROWS", 7)
    history = HistoryStore(path, counters)
    for number in range(4):
        history.save([DurationSample(f"t{number}", None, float(n), "ok") for n in range(9)], [])
        history.save([], [(f"k{number}", RUN._replace(turns=n + 3)) for n in range(5)])
    recorded = history.load()
    assert recorded is not None
    assert [(row.tool, row.duration_s) for row in recorded.durations] == [
        *[("t1", n) for n in (7, 8)], *[("t2", n) for n in range(4, 9)], *[("t3", n) for n in range(4, 9)]
    ]  # fmt: skip
    assert [(kind, run.turns) for kind, run in recorded.runs] == [
        ("k1", 7), *[("k2", n) for n in (5, 6, 7)], *[("k3", n) for n in (5, 6, 7)]
    ]  # fmt: skip


def test_a_run_too_long_to_keep_is_left_out(path: Path, counters: Counters):
    long = ProgramRun(path=tuple((f"{number}" + "n" * 200,) for number in range(250)))
    assert HistoryStore(path, counters).save([], [("k", long), ("k", RUN)])
    assert HistoryStore(path, counters).load() == ([], [("k", RUN)])


names = st.text(min_size=1, max_size=60).map(lambda text: text.encode("utf-8", "replace").decode())
nodes = st.one_of(st.none(), names)


@given(
    st.lists(
        st.tuples(names, nodes, st.floats(0, 1e9), st.sampled_from(["ok", "timeout", "error"])), max_size=5
    ),
    names,
    st.lists(st.lists(names, min_size=1, max_size=3), max_size=5),
    st.lists(nodes, max_size=5),
)
def test_any_names_come_back_as_they_were(tmp_path_factory, calls, kind, groups, turn_nodes):
    path = tmp_path_factory.mktemp("h") / "h.sqlite3"
    durations = [DurationSample(*call) for call in calls]
    run = ProgramRun(path=tuple(map(tuple, groups)), turn_nodes=tuple(turn_nodes), turns=len(turn_nodes))
    history = HistoryStore(path, Counters())
    assert history.save(durations, [(kind, run)])
    assert history.load() == (durations, [(kind, run)])


def test_rows_that_we_would_not_have_written_are_passed_over(path: Path, counters: Counters):
    HistoryStore(path, counters).save(CALLS, [("coder", RUN)])
    change(
        path,
        "INSERT INTO durations (tool, class, duration_s, status) VALUES"
        " ('', '', 1, 'ok'), ('t', '', -1, 'ok'), ('t', '', 'long', 'ok'), ('t', '', 1, 'so so'),"
        " ('t', '', 9e999, 'ok'), (x'00ff', '', 1, 'ok')",
        "INSERT INTO runs (kind, run) VALUES ('k', 'not json'), ('k', '[[],[],\"many\",[],true,true]'),"
        " ('k', '[[[]],[],0,[],true,true]'), ('k', '[[],[\"a\"],0,[],true,true]'), (7, '[]'),"
        " ('k', x'ff'), ('k', replace(hex(zeroblob(9000)), '0', '[')),"
        " ('k', '[[],[],1' || replace(hex(zeroblob(200)), '0', '9') || ',[],true,true]'),"
        " ('k', '[[],[],-1,[],true,true]'), ('k', '[[[\"a\"]],[],0,[[\"a\",\"\"]],true,true]')",
    )
    assert HistoryStore(path, counters).load() == (CALLS, [("coder", RUN)])
    assert not counters.snapshot()


# ---- where it cannot be used


def unusable(path: Path, counters: Counters, caplog: pytest.LogCaptureFixture) -> bool:
    """It fails once, says so once, and never touches the file again."""
    before = path.read_bytes() if path.is_file() else None
    history = HistoryStore(path, counters)
    with caplog.at_level(logging.WARNING, "sojourn"):
        results = [history.load(), history.save(CALLS, []), history.load(), history.save(CALLS, [])]
    after = path.read_bytes() if path.is_file() else None
    return (
        not any(results)
        and not history.usable
        and before == after
        and counters["history_error"] == 1
        and len([record for record in caplog.records if str(path) in record.message]) == 1
    )


@pytest.mark.parametrize("content", [b"not a database at all" * 50, b"SQLite format 3\x00" + b"\xff" * 4096])
def test_a_corrupt_file_is_left_alone(path: Path, counters: Counters, caplog, content: bytes):
    path.parent.mkdir()
    path.write_bytes(content)
    assert unusable(path, counters, caplog)


def test_a_damaged_page_is_a_failure_like_any_other(path: Path, counters: Counters):
    history = HistoryStore(path, counters)
    history.save([DurationSample("t", f"c{n}", 1.0, "ok") for n in range(2000)], [])
    data = bytearray(path.read_bytes())
    data[4096 * 3 :] = os.urandom(len(data) - 4096 * 3)
    path.write_bytes(data)
    history.load()
    history.save(CALLS, [])
    assert not history.usable


def test_another_version_is_left_alone(path: Path, counters: Counters, caplog):
    HistoryStore(path, counters).save(CALLS, [])
    change(path, f"PRAGMA user_version = {VERSION + 1}")
    assert unusable(path, counters, caplog)
    assert rows(path, "durations") == 2


def test_a_database_of_something_else_is_left_alone(path: Path, counters: Counters, caplog):
    path.parent.mkdir()
    change(path, "CREATE TABLE durations (mine INTEGER)", "INSERT INTO durations VALUES (1)")
    assert unusable(path, counters, caplog)
    assert rows(path, "durations") == 1


def test_a_folder_in_its_place(path: Path, counters: Counters, caplog):
    path.mkdir(parents=True)
    assert unusable(path, counters, caplog)


def test_a_file_in_place_of_its_folder(tmp_path: Path, counters: Counters, caplog):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "history.sqlite3"
    history = HistoryStore(path, counters)
    assert not history.save(CALLS, [])
    assert not history.usable


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path, counters: Counters):
    tmp_path.chmod(0o500)
    try:
        history = HistoryStore(tmp_path / "history.sqlite3", counters)
        assert not history.save(CALLS, [])
        assert not history.usable
    finally:
        tmp_path.chmod(0o700)


def test_a_disk_that_is_full(path: Path, counters: Counters, monkeypatch):
    history = HistoryStore(path, counters)
    assert history.save(CALLS, [])
    size = path.stat().st_size // 4096

    def small(database: sqlite3.Connection, check=module._check) -> None:
        check(database)
        database.execute(f"PRAGMA max_page_count = {size}")

    monkeypatch.setattr(module, "_check", small)
    many = [DurationSample("t", f"{n}" * 50, 1.0, "ok") for n in range(500)]
    assert not history.save(many, [])
    assert not history.usable
    assert rows(path, "durations") == 2  # all or nothing


def test_a_file_locked_by_another_process_is_tried_again(path: Path, counters: Counters, monkeypatch):
    monkeypatch.setattr(module, "BUSY_TIMEOUT_S", 0.01)
    history = HistoryStore(path, counters)
    history.save(CALLS, [])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert not history.save(CALLS, [])
    assert history.usable
    assert counters["history_busy"] == 1
    other.execute("ROLLBACK")
    other.close()
    assert history.save(CALLS, [])
    assert rows(path, "durations") == 4


def test_the_tables_may_be_made_between_two_looks_at_the_file(path: Path, counters: Counters, monkeypatch):
    look = module._number
    looks: list[str] = []

    def slow(database: sqlite3.Connection, pragma: str) -> int:
        number = look(database, pragma)
        if not looks:
            looks.append(pragma)
            other = HistoryStore(path, Counters())
            monkeypatch.setattr(module, "_open_connections", threading.Lock())  # another process has its own
            assert other.save(CALLS, [])
        return number

    monkeypatch.setattr(module, "_number", slow)
    assert HistoryStore(path, counters).save(CALLS, [])
    assert not counters.snapshot()
    assert rows(path, "durations") == 4


def test_many_processes_make_and_share_one_file(path: Path, counters: Counters, python):
    code = f"""
        import sys
        from sojourn.learning.history_store import DurationSample, HistoryStore
        from sojourn.stats import Counters
        from sojourn.learning.run_trace import ProgramRun
        history = HistoryStore({str(path)!r}, Counters())
        saved = 0
        for number in range(20):
            for _ in range(100):
                if history.save([DurationSample("t", sys.argv[-1], float(number), "ok")], []):
                    saved += 1
                    break
        assert history.usable and saved == 20, (history.usable, saved, history._counters.snapshot())
    """
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            python(f"import sys; sys.argv.append('{number}')\n" + __import__("textwrap").dedent(code))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    recorded = HistoryStore(path, counters).load()
    assert recorded is not None
    for number in range(4):
        mine = [row.duration_s for row in recorded.durations if row.tool_class == str(number)]
        assert mine == [float(n) for n in range(20)]


# ---- forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_until_no_connection_is_open(path: Path, counters: Counters):
    history = HistoryStore(path, counters)
    history.save(CALLS, [])
    stop = threading.Event()
    opened = 0

    def work() -> None:
        nonlocal opened
        while not stop.is_set():
            opened += history.save(CALLS, [("k", RUN)])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(15):
            pid = os.fork()
            if pid == 0:
                # A connection that crossed would be an open file here; and a lock that did would hang.
                try:
                    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
                except OSError:
                    links = []
                open_here = any(link.startswith(str(path)) for link in links)
                os._exit(1 if open_here else 0 if HistoryStore(path, Counters()).save(CALLS, []) else 2)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) in (0, 2)  # 2: busy, which is no fault
    finally:
        stop.set()
        thread.join()
    assert history.usable
    assert opened


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(module, "FORK_WAIT_S", 0.05)
    with module._open_connections:  # a file on a network that does not answer
        started_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if module._open_connections.acquire(timeout=30) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert time.monotonic() - started_s < 60
    assert not module._open_connections.locked()


# ---- where it is


def resolve(env: dict[str, str], history=None) -> str | None:
    environment = Environment.read({"HOME": "/home/me", **env})
    return Config.resolve("http://h:1", history=history, environment=environment).history


def test_the_usual_place(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", "linux")
    assert resolve({}) == "/home/me/.local/share/sojourn/history.sqlite3"
    assert resolve({"XDG_DATA_HOME": "/data"}) == "/data/sojourn/history.sqlite3"
    assert resolve({"XDG_DATA_HOME": "relative"}) == "/home/me/.local/share/sojourn/history.sqlite3"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert resolve({}) == "/home/me/Library/Application Support/sojourn/history.sqlite3"
    monkeypatch.setattr(sys, "platform", "win32")
    assert resolve({}) is None
    assert resolve({"LOCALAPPDATA": "/c/local"}) == "/c/local/sojourn/history.sqlite3"


def test_a_user_without_a_home_keeps_none(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert resolve({}) is None


@pytest.mark.parametrize("off", ["off", "0", "no", "False", " OFF "])
def test_none_by_environment_or_by_argument(off: str):
    assert resolve({"SOJOURN_HISTORY": off}) is None
    assert resolve({"SOJOURN_HISTORY": "/there/h"}, history=False) is None
    assert (
        resolve({"SOJOURN_HISTORY": off, "XDG_DATA_HOME": "/data"}, True) == "/data/sojourn/history.sqlite3"
    )


def test_a_word_that_turns_it_on_is_no_path():
    assert resolve({"SOJOURN_HISTORY": "on", "XDG_DATA_HOME": "/data"}) == "/data/sojourn/history.sqlite3"


def test_a_place_of_ones_own(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    assert resolve({"SOJOURN_HISTORY": "/there/h"}) == "/there/h"
    assert resolve({"SOJOURN_HISTORY": "~/h"}) == "/home/me/h"
    assert resolve({"SOJOURN_HISTORY": "/there/h"}, history=Path("here")) == str(tmp_path / "here")
    for wrong in (b"bytes", 7, ""):
        with pytest.raises(ConfigError, match="history is"):
            resolve({}, history=wrong)
