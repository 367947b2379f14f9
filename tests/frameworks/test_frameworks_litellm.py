"""litellm beyond the scenarios: merged fields, hosts, restored functions, and unusual bodies."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sojourn
from gc_tools import imports
from old_release import run_with_release
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
def test_requests_to_other_hosts_stay_bare(server: FakeServer, provider: str) -> None:
    with FakeServer() as elsewhere:
        with sojourn.program("p"):
            ask(elsewhere, provider)
        (request,) = elsewhere.requests
    assert "vllm_xargs" not in request.body
    assert "x-session-id" not in request.headers
    assert sojourn.stats()["requests_started"] == 0


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

            asyncio.run(ours._post(None, post, (url,), given))
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


@pytest.mark.nightly
def test_the_oldest_supported_litellm(tmp_path: Path) -> None:
    """All of the above, and the table's rows, in a process of its own with litellm 1.83.0 before this one."""
    files = [__file__, str(Path(__file__).with_name("test_frameworks_scenarios.py"))]
    chosen = ["-k", "litellm and not mini", "-m", "not nightly and not engine"]
    run_with_release("litellm==1.83.0", "litellm", tmp_path, *chosen, *files)
