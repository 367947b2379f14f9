"""What an agent's author meets first: names, import weight, life without a server."""

from __future__ import annotations

import pytest
import sojourn

PUBLIC = {
    "Aeg", "ArgumentError", "ConfigError", "Program", "SojournError", "Stats", "Step", "ToolCall",
    "__version__", "current_program", "flush", "headers", "init", "instrument", "program",
    "request_fields", "request_parts", "shutdown", "stats", "step", "tool", "tool_call",
    "uninstrument", "wrap",
}  # fmt: skip


def test_the_public_face_changes_only_on_purpose():
    assert set(sojourn.__all__) == PUBLIC
    for name in PUBLIC:
        member = getattr(sojourn, name)
        assert name == "__version__" or member.__doc__, f"{name} is undocumented"


ALSO_ONLINE = ("torch", "vllm", "ray", "openai", "litellm", "langchain_core", "opentelemetry")


def test_neither_the_import_nor_a_session_loads_engines_frameworks_or_their_http_clients(python, server):
    code = f"""
    import sys, sojourn
    print([name for name in {(*ALSO_ONLINE, "httpx", "asyncio", "multiprocessing")!r} if name in sys.modules])
    sojourn.init({server.url!r})
    print([name for name in {ALSO_ONLINE!r} if name in sys.modules])
    """
    assert python(code).stdout.split() == ["[]", "[]"]


def test_before_init_everything_works_and_nothing_is_sent():
    with sojourn.program("p") as p, sojourn.step("plan"), sojourn.tool_call("bash") as call:
        assert sojourn.current_program() is p
        assert call.program is p
        assert sojourn.request_parts() == ({}, {})
        assert sojourn.request_fields() == {}
        assert sojourn.headers() == {}
    assert sojourn.current_program() is None
    assert sojourn.flush() is True
    assert dict(sojourn.stats()) == {}
    assert sojourn.stats().url is None


def test_disabled_is_the_same_api_doing_nothing(python, server):
    code = f"""
    import sys, threading, openai, sojourn
    from openai import _base_client
    before = _base_client.SyncAPIClient.request
    sojourn.init({server.url!r}, threads=True)
    sojourn.instrument("openai")
    client = openai.OpenAI(api_key="k", base_url={server.base_url!r})
    kind = type(client)
    assert sojourn.wrap(client) is client and type(client) is kind
    assert _base_client.SyncAPIClient.request is before
    with sojourn.program("p") as p, sojourn.tool_call("bash"), sojourn.step("s"):
        assert sojourn.current_program() is p
        client.chat.completions.create(model="m", messages=[])
    @sojourn.tool
    def double(x): return 2 * x
    assert double(2) == 4
    stats = sojourn.stats()
    assert stats.disabled and not dict(stats), stats
    assert sojourn.request_parts() == ({{}}, {{}}) and sojourn.flush()
    assert threading.active_count() == 1, threading.enumerate()
    """
    python(code, env={"SOJOURN_DISABLED": "1"})
    (request,) = server.requests
    assert "vllm_xargs" not in request.body
    assert "x-session-id" not in request.headers
    assert server.events() == []
    assert server.probes == 0


def test_wrap_and_instrument_refuse_what_they_do_not_know():
    with pytest.raises(sojourn.ArgumentError, match="cannot wrap a dict"):
        sojourn.wrap({})
    with pytest.raises(sojourn.ArgumentError, match="'fortran' is unknown"):
        sojourn.instrument("fortran")
