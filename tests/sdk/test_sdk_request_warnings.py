"""Warnings of requests that no program carries: one for each process, and only where they help."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import sojourn
import sojourn.dialects
from sdk_records import ask
from sojourn import request_warnings, runtime
from sojourn.request_warnings import logger
from sojourn.testing import FakeServer

OUTSIDE = (
    "3 requests were sent outside of programs, so the server does not protect their KV from eviction; if "
    "they are of one agent run, put @sojourn.program on the function with its loop, or "
    '"with sojourn.program():" around the loop, or start the process with "sojourn run"'
)


@pytest.fixture(autouse=True)
def said(monkeypatch, caplog):
    """The warnings of a process that gave none before."""
    monkeypatch.setattr(request_warnings, "_unsaid", {"outside": True, "unlisted": True, "empty": True})
    return lambda: [record.getMessage() for record in caplog.records]


def begin(server=None, **settings):
    sojourn.init(server and server.url, instrument=False, **settings)
    sojourn.instrument("openai")
    if server and "dialect" not in settings:
        assert runtime.session().server.answered.wait(10)


def test_a_loop_without_a_program_is_warned_of_once(server, said):
    begin(server)
    for asked in range(4):
        ask(server.base_url, stream=asked == 2)
        assert said() == ([OUTSIDE] if asked >= 2 else [])
    sojourn.shutdown()
    begin(server)
    for _ in range(3):
        ask(server.base_url)
    assert said() == [OUTSIDE]
    assert all(request.context.sojourn.implicit for request in server.requests)


def empty(label, remedy, count=2):
    return (
        f"program {label!r} ended with 0 requests, but {count} requests outside of any program ran "
        f"during it; if threads of the program sent them, {remedy}"
    )


IN_JOBS = 'run each job in "with p.here():", where p is the program'
THREADS = f"write sojourn.init(url, threads=True), or {IN_JOBS}"


def ask_in_pool(server, times=2):
    """Send requests from a pool, whose threads know no program."""
    with ThreadPoolExecutor(1) as pool:
        for _ in range(times):
            pool.submit(ask, server.base_url).result()


def test_a_program_whose_threads_lose_it_is_warned_of_once(server, said):
    begin(server)
    ask(server.base_url)  # before the program
    for _ in range(2):
        with sojourn.program("pool"):
            ask_in_pool(server)
            assert said() in ([], [empty("pool", THREADS)])
        assert said() == [empty("pool", THREADS)]


@pytest.mark.parametrize("dialect", sorted(sojourn.dialects.DIALECTS))
def test_servers_of_other_kinds_and_processes_with_programs_take_requests_outside(server, said, dialect):
    begin(server, dialect=dialect)
    with sojourn.program("p") if dialect == "sojourn" else nullcontext():
        ask(server.base_url)
    for _ in range(3):
        ask(server.base_url)
    assert sojourn.stats()["requests_ended"] == 4
    assert said() == []


def test_a_warning_that_fails_costs_the_agent_nothing(server):
    def broken(record):
        raise RuntimeError("theirs")

    begin(server)
    logger.addFilter(broken)
    try:
        assert all(ask(server.base_url).choices for _ in range(3))
    finally:
        logger.removeFilter(broken)
    assert sojourn.stats()["internal_error"] == 1


@pytest.mark.parametrize(
    ("own", "named_by", "advice"),
    [
        (None, "init()", 'write sojourn.init(url, hosts=["{there}"])'),
        ("1", "sojourn run", "give sojourn run --url http://{there}"),
        ("0", "SOJOURN_URL", "give SOJOURN_URL=http://{there}"),
    ],
)
def test_requests_that_all_go_to_a_host_that_is_not_listed_are_warned_of_once(
    server, said, monkeypatch, own, named_by, advice
):
    if own is not None:
        monkeypatch.setenv("SOJOURN_URL", server.url)
        monkeypatch.setenv("SOJOURN_OWN_PROGRAM", own)
    begin(None if own else server)
    with FakeServer() as other:
        here, there = (each.url.removeprefix("http://") for each in (server, other))
        text = (
            f"3 requests went to {there} and none to {here}, which {named_by} names: they carry no program; "
            f"if {there} is the same server or a replica, {advice.format(there=there)}"
        )
        for asked in range(5):
            with sojourn.program("p") if own is None else nullcontext():
                ask(other.base_url)
            assert said() == ([text] if asked >= 2 else [])
    assert not server.requests
    assert all(request.context is None for request in other.requests)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_run_without_a_request_to_its_server_says_so_as_it_ends(server, said, monkeypatch, elsewhere):
    monkeypatch.setenv("SOJOURN_URL", server.url)
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", "1")
    # As a provider's address, which is not that of a replica.
    monkeypatch.setattr(request_warnings, "_may_be_listed", lambda host, config: False)
    with FakeServer() as other:
        begin()
        if elsewhere:
            ask(other.base_url)
            where = f"; the last one went to {other.url.removeprefix('http://')}"
        else:
            with sojourn.program("p"):
                where = ""
        assert said() == []
        runtime.session().exit()
    advice = f"set OPENAI_BASE_URL={server.url}/v1, or the base_url of the agent's client"
    assert said() == [f"no request of an instrumented client went to {server.url}{where}; {advice}"]


@pytest.mark.parametrize("own", ["0", "1"])
def test_a_run_with_a_request_or_with_nothing_to_report_ends_without_a_word(server, said, monkeypatch, own):
    monkeypatch.setenv("SOJOURN_URL", server.url)
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", own)
    begin()
    if own == "1":
        runtime.session().exit()
        ask(server.base_url)
    with sojourn.program("p"):
        pass
    runtime.session().exit()
    assert said() == []
