"""litellm beyond the scenarios: merged fields, hosts, restored functions, and unusual bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sojourn
from gc_tools import imports
from old_release import run_with_release
from sojourn.testing import FakeServer

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
def test_fields_of_the_users_own_win_and_requests_to_other_hosts_stay_bare(
    server: FakeServer, provider: str
) -> None:
    body = {"mine": 1, "vllm_xargs": {"replay_ids": [1, 2]}}
    headers = {"x-mine": "yes", "x-sEssion-iD": "mine"}
    with FakeServer() as elsewhere, sojourn.program("p") as program:
        ask(server, provider, extra_body=body, extra_headers=headers)
        ask(elsewhere, provider)
    (request,), (bare,) = server.requests, elsewhere.requests
    assert (request.body["mine"], request.body["vllm_xargs"]["replay_ids"]) == (1, [1, 2])
    assert (request.headers["x-mine"], request.headers["x-session-id"]) == ("yes", "mine")
    assert request.context is not None
    assert request.context.program_id == program.id
    assert body == {"mine": 1, "vllm_xargs": {"replay_ids": [1, 2]}}  # theirs is not touched
    assert "vllm_xargs" not in bare.body
    assert "x-session-id" not in bare.headers
    assert sojourn.stats()["requests_started"] == 1


@pytest.mark.parametrize("name", ["completion", "acompletion", "atext_completion", "aresponses"])
def test_a_routers_retries_are_one_request_and_a_second_call_another(server: FakeServer, name: str) -> None:
    asked: dict[str, Any] = {"aresponses": {"input": "hi"}, "atext_completion": {"prompt": "hi"}}.get(
        name, {"messages": MESSAGES}
    )
    provider = "openai" if name == "aresponses" else "hosted_vllm"  # litellm's own HTTP sends all of these
    deployment = {"model": f"{provider}/m", "api_base": server.base_url}
    # With a second deployment a router does not wait before it tries again.
    models = [{"model_name": "any", "litellm_params": {**deployment, "api_key": key}} for key in "ab"]
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


CHAT = {"messages": MESSAGES}
POSTS: dict[str, dict[str, Any]] = {
    "data": {"data": json.dumps({**CHAT, "text": "é \ud800"})},
    "bytes": {"data": json.dumps(CHAT).encode()},
    "content": {"content": json.dumps({**CHAT, "number": float("inf")})},
    "json": {"json": CHAT},
    "array": {"data": "[1, 2]"},
    "no json": {"data": "a=b"},
    "nothing": {},
}


@pytest.mark.parametrize("given", POSTS.values(), ids=POSTS)
@pytest.mark.parametrize("is_async", [False, True])
def test_bodies_of_every_form_arrive_as_they_are(
    server: FakeServer, given: dict[str, Any], is_async: bool
) -> None:
    """Only fields are added, and only to JSON objects; the header says the rest."""
    from sojourn_integrations import litellm as ours

    response = SimpleNamespace(is_closed=True, stream=None)
    sent: dict[str, Any] = {}

    def post(*_: Any, **kwargs: Any) -> Any:
        sent.update(kwargs)
        return response

    async def async_post(*_: Any, **kwargs: Any) -> Any:
        return post(**kwargs)

    url = (server.base_url + "/chat/completions",)
    if is_async:
        asyncio.run(ours._post(None, async_post, url, given))
    else:
        ours._post(None, post, url, given)
    assert sent.pop("headers").keys() == {"X-Session-ID"}
    assert sent.keys() == given.keys()
    for name, body in given.items():
        if name == "json" or "{" in str(body):
            arrived = sent[name] if name == "json" else json.loads(sent[name])
            assert arrived.pop("vllm_xargs")
            assert arrived == (body if name == "json" else json.loads(body))
        else:
            assert sent[name] == body
    assert sojourn.stats()["inject_error"] == 0


@pytest.mark.nightly
def test_the_oldest_supported_litellm(tmp_path: Path) -> None:
    """All of the above, and the table's rows, in a process of its own with litellm 1.83.0 before this one."""
    files = [__file__, str(Path(__file__).with_name("test_frameworks_scenarios.py"))]
    chosen = ["-k", "litellm and not mini", "-m", "not nightly and not engine"]
    run_with_release("litellm==1.83.0", "litellm", tmp_path, *chosen, *files)
