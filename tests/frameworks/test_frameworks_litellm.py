"""litellm beyond the scenarios: merged fields, hosts, restored functions, and unusual bodies."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sojourn
from gc_tools import imports
from sojourn import request_warnings
from sojourn.testing import FakeServer

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
if find_spec("litellm") is None:
    pytest.skip("litellm is not installed", allow_module_level=True)
litellm: Any = None

pytestmark = pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning")

MESSAGES = [{"role": "user", "content": "hi"}]
BOTH = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
"""Through the openai client, and through litellm's own."""


@pytest.fixture(scope="module", autouse=True)
def import_litellm() -> None:
    """It takes four seconds: here rather than above, where each process of a run would."""
    global litellm
    with imports():
        import litellm


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        sojourn.init(fake.url, probe_timeout_s=5)
        yield fake


def ask(server: FakeServer, provider: str, **more: Any) -> Any:
    settings = {"api_base": server.base_url, "api_key": "none", "messages": MESSAGES, **more}
    return litellm.completion(model=f"{provider}/m", **settings)


@BOTH
def test_fields_and_headers_of_the_users_own_win(server: FakeServer, provider: str) -> None:
    body = {"mine": 1, "vllm_xargs": {"replay_ids": [1, 2]}}
    headers = {"x-mine": "yes", "x-sEssion-iD": "mine"}
    with sojourn.program("p") as program:
        ask(server, provider, extra_body=body, extra_headers=headers)
    (request,) = server.requests
    assert (request.body["mine"], request.headers["x-mine"], request.headers["x-session-id"]) == (
        1,
        "yes",
        "mine",
    )
    assert request.body["vllm_xargs"]["replay_ids"] == [1, 2]
    assert request.context is not None
    assert request.context.program_id == program.id
    assert body == {"mine": 1, "vllm_xargs": {"replay_ids": [1, 2]}}  # theirs is not touched


@BOTH
@pytest.mark.parametrize(
    "xargs", [{"agentic_context": '{"program_id":"mine"}'}, "text", ["list"]], ids=["context", "text", "list"]
)
def test_what_cannot_be_merged_stays_and_costs_no_event(
    server: FakeServer, provider: str, xargs: Any
) -> None:
    with sojourn.program("p"), sojourn.tool_call("bash"):
        ask(server, provider, extra_body={"vllm_xargs": xargs})
    assert server.requests[0].body["vllm_xargs"] == xargs
    assert sojourn.flush(60)
    recorded = [type(event).__name__ for event in server.program_events()]
    assert recorded == ["ProgramStart", "ToolStart", "ToolStop", "ProgramEnd"]
    assert sojourn.stats()["inject_error"] == 0


@BOTH
def test_requests_to_other_hosts_stay_bare(server: FakeServer, provider: str) -> None:
    with FakeServer() as elsewhere:
        with sojourn.program("p"):
            ask(elsewhere, provider)
        (request,) = elsewhere.requests
    assert "vllm_xargs" not in request.body
    assert "x-session-id" not in request.headers
    assert sojourn.stats()["requests_started"] == 0


@BOTH
def test_replicas_get_the_program_id_and_no_events(provider: str) -> None:
    with FakeServer() as home, FakeServer() as replica:
        sojourn.init(home.url, hosts=[replica.url], probe_timeout_s=5)
        with sojourn.program("p") as program:
            ask(replica, provider)
        (request,) = replica.requests
        assert request.headers["x-session-id"] == program.id
        assert request.events == []


@BOTH
def test_exceptions_are_litellms_own(server: FakeServer, provider: str) -> None:
    server.fail_next = 1
    with pytest.raises(litellm.InternalServerError) as ours, sojourn.program("p"):
        ask(server, provider, max_retries=0)
    assert ours.traceback[-1].frame.f_globals["__name__"].partition(".")[0] == "litellm"
    assert (sojourn.stats()["requests_started"], sojourn.stats()["requests_failed"]) == (1, 1)


@BOTH
def test_retries_that_all_fail_are_one_failed_request(server: FakeServer, provider: str) -> None:
    server.fail_next = 99
    with pytest.raises(litellm.InternalServerError):
        ask(server, provider, num_retries=2, max_retries=0)
    stats = sojourn.stats()
    assert stats["request_attempts"] == len(server.requests) > 1
    assert (stats["requests_started"], stats["requests_failed"]) == (1, 1)
    # The process's own program is open; no request of it is.
    assert len({request.context.request_id for request in server.requests if request.context}) == 1


@pytest.mark.parametrize("name", ["completion", "acompletion", "atext_completion", "aresponses"])
def test_a_routers_retries_are_one_request_and_a_second_call_another(server: FakeServer, name: str) -> None:
    asked: dict[str, Any] = {"aresponses": {"input": "hi"}, "atext_completion": {"prompt": "hi"}}.get(
        name, {"messages": MESSAGES}
    )
    provider = "openai" if name == "aresponses" else "hosted_vllm"  # litellm's own HTTP sends all of these
    deployment = {"model": f"{provider}/m", "api_base": server.base_url, "api_key": "none"}
    models = [{"model_name": "any", "litellm_params": deployment}]
    router = litellm.Router(models, num_retries=2, retry_after=0, disable_cooldowns=True)

    async def call() -> None:
        found = getattr(router, name)(model="any", max_retries=0, **asked)
        if name != "completion":
            await found

    for number in (1, 2):
        server.fail_next = 2
        asyncio.run(call())
        stats = sojourn.stats()
        assert (stats["requests_started"], stats["request_attempts"]) == (number, 3 * number)
    assert len({request.context.request_id for request in server.requests if request.context}) == 2


def test_events_on_attempts_that_failed_arrive_with_the_one_that_did_not(server: FakeServer) -> None:
    server.fail_next = 2
    with sojourn.program("p"):
        with sojourn.tool_call("bash", "c"):
            pass
        ask(server, "hosted_vllm", num_retries=3)
    assert sojourn.flush(60)
    recorded = [type(event).__name__ for event in server.program_events()]
    assert recorded == ["ProgramStart", "ToolStart", "ToolStop", "ProgramEnd"]


def test_functions_imported_by_name_before_are_covered() -> None:
    completion = litellm.completion  # as ``from litellm import completion`` before init()
    with FakeServer() as server:
        sojourn.init(server.url, probe_timeout_s=5)
        assert litellm.completion is not completion
        completion(model="hosted_vllm/m", api_base=server.base_url, messages=MESSAGES)
        assert server.requests[0].context is not None


ROUTER_METHODS = ("function_with_fallbacks", "async_function_with_fallbacks")


def test_the_very_same_functions_are_put_back() -> None:
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler

    def patched() -> list[Any]:
        names = (
            "completion",
            "acompletion",
            "responses",
            "aresponses",
            "text_completion",
            "atext_completion",
        )
        methods = [kind.post for kind in (HTTPHandler, AsyncHTTPHandler)]
        # From 1.109 at the latest the router's core is in Rust and has no such method.
        central = [name for name in ROUTER_METHODS if hasattr(litellm.Router, name)]
        router = [getattr(litellm.Router, name) for name in central or names]
        return methods + [getattr(litellm, name) for name in names] + router

    before = patched()
    with FakeServer() as server:
        sojourn.init(server.url)
        assert "litellm" in sojourn.stats().instrumented
        assert all(ours is not theirs for ours, theirs in zip(patched(), before, strict=True))
        sojourn.init(server.url, hosts=["other:1"])  # a second session patches nothing twice
        ask(server, "hosted_vllm")
        assert sojourn.stats()["requests_started"] == 1
    sojourn.shutdown()
    assert all(ours is theirs for ours, theirs in zip(patched(), before, strict=True))


def test_an_unfamiliar_litellm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from litellm.llms.custom_httpx import http_handler

    monkeypatch.delattr(http_handler, "AsyncHTTPHandler")
    completion, post = litellm.completion, http_handler.HTTPHandler.post
    with FakeServer() as server:
        sojourn.init(server.url)
        assert "litellm" not in sojourn.stats().instrumented
        assert sojourn.stats()["attach_error"] == 1
        assert (litellm.completion, http_handler.HTTPHandler.post) == (completion, post)


def test_one_handler_can_be_wrapped(server: FakeServer) -> None:
    sojourn.uninstrument("litellm")
    handler = litellm.HTTPHandler() if hasattr(litellm, "HTTPHandler") else _handler()
    ask(server, "hosted_vllm", client=handler)
    assert server.requests[0].context is None
    assert sojourn.wrap(handler) is handler
    ask(server, "hosted_vllm", client=handler)
    assert server.requests[1].context is not None
    sojourn.instrument("litellm")
    ask(server, "hosted_vllm", client=handler)
    assert sojourn.stats()["requests_started"] == 2


@pytest.mark.parametrize("way", ["sync", "async"])
def test_positional_arguments_stay_what_they_are(server: FakeServer, way: str) -> None:
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

    url, body = server.base_url + "/chat/completions", {"model": "m", "messages": MESSAGES}
    given = (url, None, body, {"a": "1"}, {"x-mine": "yes"})
    handler = _handler() if way == "sync" else AsyncHTTPHandler()

    def post(*args: Any, **kwargs: Any) -> Any:
        answer = handler.post(*args, **kwargs)
        return answer if way == "sync" else asyncio.run(answer)

    with sojourn.program("p") as program:
        assert post(*given).status_code == 200
        for extra in ((given, {"headers": {}}), ((*given, *range(20)), {})):
            with pytest.raises(TypeError, match=r"post\(\)"):  # litellm's own
                post(*extra[0], **extra[1])
    (request,) = server.requests
    assert request.context.program_id == program.id
    assert (request.headers["x-mine"], request.body["messages"]) == ("yes", MESSAGES)
    assert (sojourn.stats()["requests_started"], sojourn.stats()["inject_error"]) == (1, 0)


def _handler() -> Any:
    from litellm.llms.custom_httpx.http_handler import HTTPHandler

    return HTTPHandler()


def test_an_internal_error_leaves_the_request_bare(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("sojourn_integrations.litellm._body", broken)
    assert ask(server, "hosted_vllm").choices[0].message.content == server.reply
    assert server.requests[0].context is None
    assert sojourn.stats()["inject_error"] == 1


POSTS: dict[str, dict[str, Any]] = {
    "data": {"data": json.dumps({"messages": MESSAGES, "text": "é \ud800"})},
    "bytes": {"data": json.dumps({"messages": MESSAGES}).encode()},
    "content": {"content": json.dumps({"messages": MESSAGES, "number": float("inf")})},
    "json": {"json": {"messages": MESSAGES}},
    "array": {"data": "[1, 2]"},
    "no json": {"data": "a=b"},
    "nothing": {},
}


@pytest.mark.parametrize("given", POSTS.values(), ids=POSTS)
@pytest.mark.parametrize("way", ["sync", "async"])
def test_bodies_of_every_form_arrive_as_they_are(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], way: str
) -> None:
    """Only fields are added, and only to JSON objects; the header says the rest."""
    from sojourn_integrations import litellm as ours

    sent: dict[str, Any] = {}

    class Response:
        is_closed, stream = True, None

    with FakeServer() as server:
        sojourn.init(server.url, probe_timeout_s=5)
        url = server.base_url + "/chat/completions"
        if way == "sync":
            ours._post(None, lambda *_, **kwargs: sent.update(kwargs) or Response(), (url,), given)
        else:

            async def post(*_: Any, **kwargs: Any) -> Any:
                sent.update(kwargs)
                return Response()

            asyncio.run(ours._async_post(None, post, (url,), given))
    assert sent["headers"].keys() == {"X-Session-ID"}
    (name,) = given or [None]
    if name is None:
        assert sent.keys() == {"headers"}
        return
    if name == "json":
        assert sent[name] == {**given[name], "vllm_xargs": sent[name]["vllm_xargs"]}
    elif "{" in str(given[name]):
        arrived = json.loads(sent[name])
        assert arrived.pop("vllm_xargs")
        assert arrived == json.loads(given[name])
    else:
        assert sent[name] == given[name]
    assert sojourn.stats()["inject_error"] == 0


def test_concurrent_calls_inside_one_retrying_call_are_requests_of_their_own(server: FakeServer) -> None:
    from sojourn.outgoing_request import RetryScope

    async def both() -> None:
        settings: dict[str, Any] = {"api_base": server.base_url, "messages": MESSAGES}
        with RetryScope():
            await asyncio.gather(*(litellm.acompletion(model="hosted_vllm/m", **settings) for _ in range(2)))

    server.reply_delay_s = 0.05
    asyncio.run(both())
    assert len({request.context.request_id for request in server.requests if request.context}) == 2
    stats = sojourn.stats()
    assert stats["requests_started"] == stats["requests_ended"] == 2


def test_a_hook_that_asks_again_sends_a_request_of_its_own(server: FakeServer) -> None:
    import httpx
    from litellm.llms.custom_httpx.http_handler import HTTPHandler

    left = [lambda: ask(server, "hosted_vllm")]

    def before(_: Any) -> None:
        if left:
            left.pop()()

    with sojourn.program("p") as program, httpx.Client(event_hooks={"request": [before]}) as http:
        ask(server, "hosted_vllm", client=HTTPHandler(client=http))
    contexts = [request.context for request in server.requests if request.context]
    assert [context.program_id for context in contexts] == [program.id] * 2
    assert len({context.request_id for context in contexts}) == 2
    stats = sojourn.stats()
    assert stats["requests_started"] == stats["requests_ended"] == 2


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "failed"])
def test_a_task_that_outlives_the_request_it_began_in_sends_requests_of_its_own(
    server: FakeServer, fails: bool
) -> None:
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

    server.fail_next = int(fails)
    body = {"model": "m", "messages": MESSAGES}

    async def main() -> None:
        begun: list[asyncio.Task[Any]] = []
        over = asyncio.Event()

        async def worker() -> None:
            await over.wait()
            await handler.post(server.base_url + "/chat/completions", json=body)

        async def before(_: Any) -> None:
            if not begun:
                begun.append(asyncio.create_task(worker()))

        handler = AsyncHTTPHandler(event_hooks={"request": [before]})
        with sojourn.program("p"):
            try:
                await handler.post(server.base_url + "/chat/completions", json=body)
            except Exception:
                assert fails
        over.set()
        await begun[0]
        await handler.close()

    asyncio.run(main())
    contexts = [request.context for request in server.requests]
    assert len({context and context.request_id for context in contexts} - {None}) == 2
    assert sojourn.stats()["requests_started"] == 2


def test_a_request_that_another_context_closes_is_counted_and_raises_nothing(server: FakeServer) -> None:
    """As when its event loop goes away: Python then closes the coroutine wherever it is collected."""
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler
    from sojourn_integrations.litellm import _async_post

    @types.coroutine
    def forever(*args: Any, **kwargs: Any) -> Any:
        while True:
            yield

    body = {"model": "m", "messages": MESSAGES}
    posted = _async_post(
        AsyncHTTPHandler(), forever, (server.base_url + "/chat/completions",), {"json": body}
    )
    contextvars.copy_context().run(posted.send, None)
    posted.close()
    stats = sojourn.stats()
    assert (stats["requests_cancelled"], stats["context_reset_failed"]) == (1, 1)


@BOTH
def test_requests_to_another_provider_of_one_gateway_stay_bare(server: FakeServer, provider: str) -> None:
    sojourn.init(server.url + "/vllm", dialect="vllm")
    with sojourn.program("p") as program:
        for path in ("/vllm/v1", "/openai/v1", "/vllm/v1"):
            ask(server, provider, api_base=server.url + path)
    sent = [request for request in server.requests if request.path.endswith("/chat/completions")]
    assert [request.headers.get("x-session-id") for request in sent] == [program.id, None, program.id]
    assert sojourn.stats()["requests_started"] == 2


@pytest.mark.slow
def test_the_oldest_supported_litellm(tmp_path: Path) -> None:
    """All of the above, and the table's rows, in a process of its own with litellm 1.83.0 before this one."""
    line = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(tmp_path),
        "litellm==1.83.0",
    ]
    fetched = subprocess.run(line, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"litellm 1.83.0 is not to be had here: {fetched.stderr.strip()[-200:]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    files = [__file__, str(Path(__file__).with_name("test_frameworks_scenarios.py"))]
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "litellm and not mini",
        "-m",
        "not slow and not engine",
    ]
    result = subprocess.run(
        [*tests, "-p", "no:cacheprovider", *files], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:]
    # Its import would take six seconds of a core, and the tests above have done it.
    code = "from importlib.util import find_spec; print(find_spec('litellm').origin)"
    where = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert where.stdout.startswith(str(tmp_path))


@BOTH
def test_requests_that_get_no_program_are_warned_of(
    server: FakeServer, provider: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_warnings, "_unsaid", {"outside": True, "unlisted": True})
    with FakeServer() as other, sojourn.program("p"):
        for _ in range(3):
            ask(other, provider)
    sojourn.shutdown()
    sojourn.init(server.url, probe_timeout_s=5)
    for _ in range(3):
        ask(server, provider)
    said = [record.getMessage() for record in caplog.records if record.name == "sojourn"]
    assert [text.partition(",")[0] for text in said] == [
        f"3 requests went to {other.url.removeprefix('http://')} and none to "
        f"{server.url.removeprefix('http://')}",
        "3 requests were sent outside of programs",
    ]
