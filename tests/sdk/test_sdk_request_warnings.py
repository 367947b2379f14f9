"""Warnings of requests that no program carries: one for each process, and only where they help."""

from __future__ import annotations

import contextvars
import gc
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
import sojourn
import sojourn.dialects
from openai import OpenAI, OpenAIError
from sojourn import instrumentation, request_warnings, runtime
from sojourn.config import host_key
from sojourn.request_warnings import logger
from sojourn.testing import FakeServer, refusing_url

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


def begin(server, **settings):
    sojourn.init(server.url, instrument=False, **settings)
    sojourn.instrument("openai")
    if "dialect" not in settings:
        assert runtime.session().server.answered.wait(10)


def ask(server, **more):
    with OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        answer = client.chat.completions.create(model="m", messages=[], **more)
        return list(answer) if more.get("stream") else answer  # the client must be open meanwhile


def test_a_loop_without_a_program_is_warned_of_once(server, said):
    begin(server)
    for asked in range(4):
        ask(server, stream=asked == 2)
        assert said() == ([OUTSIDE] if asked >= 2 else [])
    sojourn.shutdown()
    begin(server)
    for _ in range(3):
        ask(server)
    assert said() == [OUTSIDE]
    assert all(request.context.sojourn.implicit for request in server.requests)


def test_a_users_terminal_shows_one_line(python, server):
    code = f"""
    import sojourn
    from openai import OpenAI
    sojourn.init({server.url!r}, probe_timeout_s=10)
    for _ in range(4):
        OpenAI(base_url={server.base_url!r}, api_key="k").chat.completions.create(model="m", messages=[])
    """
    assert python(code).stderr == f"sojourn: {OUTSIDE}\n"


def test_a_replica_counts_too(server, said):
    with FakeServer() as replica:
        begin(server, hosts=[replica.url])
        for each in (replica, server, replica):
            ask(each)
    assert said() == [OUTSIDE]


def test_a_request_without_an_answer_is_not_warned_of(server, said, monkeypatch):
    begin(server, hosts=[gone := refusing_url()])
    with OpenAI(base_url=gone, api_key="k", max_retries=0) as client:
        for _ in range(3):
            with pytest.raises(OpenAIError):
                client.chat.completions.create(model="m", messages=[])
    assert said() == []


def test_a_process_with_programs_is_not_warned(server, said):
    begin(server)
    with sojourn.program("p"):
        ask(server)
    for _ in range(3):
        ask(server)
    assert said() == []


def test_a_request_that_names_its_program_is_not_warned_of(server, said):
    begin(server)
    for _ in range(3):
        ask(server, extra_body={"vllm_xargs": {"agentic_context": "{}"}})
    assert said() == []


@pytest.mark.parametrize("framework", ["langchain", "openai_agents"])
def test_a_loop_beside_a_framework_whose_adapter_makes_programs_is_warned_of(
    server, said, monkeypatch, framework
):
    """Such as a loop that calls LangChain's ``ChatOpenAI``, with no agent of LangChain around it."""
    begin(server)
    monkeypatch.setattr(instrumentation, "_active", {"openai", framework})
    for _ in range(4):
        ask(server)
    assert server.requests[0].context.sojourn.implicit
    assert said() == [OUTSIDE]


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
            pool.submit(ask, server).result()


def test_a_program_whose_threads_lose_it_is_warned_of_once(server, said):
    begin(server)
    ask(server)  # before the program
    for _ in range(2):
        with sojourn.program("pool"):
            ask_in_pool(server)
            assert said() in ([], [empty("pool", THREADS)])
        assert said() == [empty("pool", THREADS)]


def test_a_decorated_function_whose_threads_lose_it_is_warned_of(server, said):
    @sojourn.program
    def fan_out():
        ask_in_pool(server)

    begin(server)
    fan_out()
    assert said() == [empty("fan_out", THREADS)]


def test_a_program_without_a_name_is_called_by_its_id(server, said):
    begin(server)
    with sojourn.program() as p:
        ask_in_pool(server)
    assert said() == [empty(p.id, THREADS)]


@pytest.mark.parametrize("dialect", ["vllm", "thunderagent"])
def test_a_program_whose_threads_lose_it_is_warned_of_with_other_servers(server, said, dialect):
    begin(server, dialect=dialect)
    with sojourn.program("pool"):
        ask_in_pool(server)
    assert said() == [empty("pool", THREADS)]


def test_a_program_whose_long_lived_threads_lose_it_is_not_told_of_the_setting_that_it_has(server, said):
    begin(server, threads=True)
    with ThreadPoolExecutor(1) as pool:
        context = contextvars.Context()
        with sojourn.program("queue"):
            context.run(pool.submit, ask, server).result()  # as a worker that was started before
    assert said() == [empty("queue", IN_JOBS, 1)]


@pytest.mark.parametrize("own", ["client", "parts", "child", "carried"])
def test_a_program_with_requests_of_its_own_is_not_warned_of(server, said, own):
    begin(server, threads=own == "carried")
    with sojourn.program("p"):
        if own == "client":
            ask(server)
        elif own == "parts":
            assert sojourn.request_parts()[0]
        elif own == "child":
            with sojourn.program("child"):
                ask(server)
        if own == "carried":
            ask_in_pool(server)
        else:
            contextvars.Context().run(ask_in_pool, server)
    assert said() == []


def test_a_program_without_requests_during_it_is_not_warned_of(server, said):
    begin(server)
    ask(server)
    with sojourn.program("p"):
        pass
    ask(server)
    assert said() == []


def test_a_cancelled_program_is_not_warned_of(server, said):
    """Garbage collection may end it, at a moment when a handler of the user may hold a lock."""

    @sojourn.program
    def steps():
        ask_in_pool(server)
        yield

    begin(server)
    abandoned = steps()
    next(abandoned)
    del abandoned
    gc.collect()
    assert sojourn.stats()["requests_ended"] == 2
    assert said() == []


@pytest.mark.parametrize("setting", ["SOJOURN_OWN_PROGRAM", "SOJOURN_PROGRAM_ID"])
def test_a_process_with_a_program_of_its_own_is_not_warned(server, said, monkeypatch, setting):
    monkeypatch.setenv(setting, "1")
    begin(server)
    for _ in range(3):
        ask(server)
    assert server.requests[0].context.program_id == server.requests[1].context.program_id
    assert said() == []


@pytest.mark.parametrize("dialect", sorted(sojourn.dialects.DIALECTS.keys() - {"sojourn"}))
def test_servers_of_other_kinds_take_requests_outside_programs(server, said, dialect):
    begin(server, dialect=dialect)
    for _ in range(3):
        ask(server)
    assert sojourn.stats()["requests_ended"] == 3
    assert said() == []


def test_a_warning_that_fails_costs_the_agent_nothing(server):
    def broken(record):
        raise RuntimeError("theirs")

    begin(server)
    logger.addFilter(broken)
    try:
        assert all(ask(server).choices for _ in range(3))
    finally:
        logger.removeFilter(broken)
    assert sojourn.stats()["internal_error"] == 1


def unlisted(server, other):
    here, there = (each.url.removeprefix("http://") for each in (server, other))
    return (
        f"3 requests went to {there} and none to {here}, which init() names: "
        f"they carry no program; if {there} is the same server or a replica, write "
        f'sojourn.init(url, hosts=["{there}"])'
    )


def test_programs_whose_requests_all_go_to_a_host_that_is_not_listed_are_warned_of_once(server, said):
    with FakeServer() as other:
        begin(server)
        for asked in range(5):
            with sojourn.program("p"):
                ask(other)
            assert said() == ([unlisted(server, other)] if asked >= 2 else [])
    assert not server.requests
    assert all(request.context is None for request in other.requests)


@pytest.mark.parametrize(
    ("own", "named_by", "advice"),
    [
        ("1", "sojourn run", "sojourn run --url http://{there}"),
        ("0", "SOJOURN_URL", "SOJOURN_URL=http://{there}"),
    ],
)
def test_a_server_that_init_does_not_name_is_corrected_where_it_was_named(
    server, said, monkeypatch, own, named_by, advice
):
    monkeypatch.setenv("SOJOURN_URL", server.url)
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", own)
    here = server.url.removeprefix("http://")
    with FakeServer() as other:
        there = other.url.removeprefix("http://")
        sojourn.init(instrument=False)
        sojourn.instrument("openai")
        for _ in range(3):
            ask(other)
    assert said() == [
        f"3 requests went to {there} and none to {here}, which {named_by} names: they carry no program; "
        f"if {there} is the same server or a replica, give {advice.format(there=there)}"
    ]


@pytest.mark.parametrize("how", ["client", "parts"])
def test_programs_that_ask_the_listed_host_too_may_ask_any_other(server, said, how):
    with FakeServer() as other, sojourn.program("p"):
        begin(server)
        for _ in range(2):
            ask(other)
        if how == "client":
            ask(server)
        else:
            assert sojourn.request_parts()[0]
        for _ in range(5):
            ask(other)
    assert said() == []


def test_requests_outside_programs_that_go_to_another_port_are_warned_of_once(server, said):
    """As where ``init()`` names the gateway, and the client's ``base_url`` an engine behind it."""
    with FakeServer() as other:
        begin(server)
        for asked in range(5):
            ask(other)
            assert said() == ([unlisted(server, other)] if asked >= 2 else [])


def ask_elsewhere(base_url):
    """Send a request to a server that does not exist."""

    def answer(request):
        return httpx.Response(200, json={"id": "x", "choices": [], "created": 0, "model": "m"})

    with httpx.Client(transport=httpx.MockTransport(answer)) as transport:
        client = OpenAI(base_url=base_url, api_key="k", max_retries=0, http_client=transport)
        client.chat.completions.create(model="m", messages=[])


@pytest.mark.parametrize(
    ("named", "asked", "warns"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8001", True),
        ("http://localhost:8000", "http://10.1.2.3:8000", True),
        ("http://localhost:8000", "http://[fd00::1]:8000", True),
        ("http://100.64.0.1:8000", "http://192.168.0.7:8000", True),
        ("http://gateway:8080", "http://engine-0:8000", True),
        ("http://gateway.ns.svc.cluster.local", "http://host.docker.internal:8000", True),
        ("https://llm.example.com", "https://llm.example.com:8443", True),
        ("https://llm.example.com", "http://LLM.example.com", True),
        ("http://localhost:8000", "https://api.openai.com", False),
        ("http://localhost:8000", "http://8.8.8.8:8000", False),
        ("http://localhost:8000", "http://[2600::1]:8000", False),
        ("https://llm.example.com", "https://api.openai.com", False),
        ("https://llm.example.com", "http://localhost:11434", False),
        ("http://localhost:8000/vllm", "http://localhost:8000/openai", False),
    ],
)
def test_requests_outside_programs_may_go_to_real_other_services(said, named, asked, warns):
    sojourn.init(named, dialect="vllm", instrument=False)

    def send(program):
        place = host_key(asked), urlsplit(f"{asked}/v1/chat/completions").path
        for _ in range(3):
            request_warnings.warn_unlisted_host(runtime.session(), program, *place, place[0])

    send(None)
    assert len(said()) == warns
    send(sojourn.program("p").make())  # in a program, any host counts
    assert len(said()) == 1


def test_requests_to_real_other_services_do_not_count(server, said):
    with FakeServer() as other:
        begin(server)
        for _ in range(2):
            ask(other)
            ask_elsewhere("https://api.openai.com/v1")
        assert said() == []
        ask(other)
    assert said() == [unlisted(server, other)]
