"""``sojourn serve`` for real: one stock server on the tiny model, over HTTP."""

from __future__ import annotations

import httpx
import psutil
import pytest
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.launch.serve_command import FORCED_TOKENS
from sojourn_server.models import assistant_text, resolve_model

pytestmark = pytest.mark.engine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
BLOCK_SIZE = 32


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("vllm")
    arguments = ["--max-model-len", "4096", "--logits-processors", FORCED_TOKENS]
    env = {"TORCHDYNAMO_DISABLE": "0"}
    with EngineServer("tiny", policy="stock", serve_args=arguments, env=env, api_key="k3y") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(resolve_model("tiny", progress=False))


def post(server, **body):
    return httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "tiny", "max_tokens": 200, **body},
        headers=server.headers,
        timeout=60,
    )


def test_a_turn_finds_the_whole_turn_before_in_the_cache(server, tokenizer):
    """Template, forced tokens, tool parser and prefix cache agree to the token."""
    messages = [{"role": "system", "content": "You fix bugs. " * 20}, {"role": "user", "content": "Fix it."}]
    tokens_before = None
    for content, command in [
        ("I look.", 'grep -rn "it\'s" é.py | head\n'),
        (None, "ls"),
        ("Three:\n\n", "cat <<'E' > f\n {}\nE\n"),
        ("So.", "pytest -q"),
    ]:
        text = assistant_text(content, [{"name": "bash", "arguments": {"command": command}}])
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        answer = post(server, messages=messages, tools=TOOLS, vllm_xargs={"replay_ids": ids}).json()

        choice, usage = answer["choices"][0], answer["usage"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert usage["completion_tokens"] == len(ids)
        assert message["tool_calls"][0]["function"]["name"] == "bash"
        if tokens_before is not None:
            # The last token's KV is never computed, so the last block counts only if it is beyond that.
            reusable = (tokens_before - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert usage["prompt_tokens_details"]["cached_tokens"] == reusable
        tokens_before = usage["total_tokens"]
        call = message["tool_calls"][0]
        messages += [
            {"role": "assistant", "content": message["content"], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "output\n" * 30},
        ]


def test_an_id_beyond_the_vocabulary_does_not_take_the_engine_down(server):
    messages = [{"role": "user", "content": "x"}]
    answer = post(server, messages=messages, max_tokens=3, vllm_xargs={"replay_ids": [10_000_000]})
    assert answer.status_code in (200, 400)
    assert post(server, messages=messages, max_tokens=1).status_code == 200


def test_stock_has_neither_our_scheduler_nor_our_routes(server):
    main = psutil.Process(server.pid)
    group = [main, *main.children(recursive=True)]
    assert len(group) >= 3  # the API server, the engine core, the worker
    command = " ".join(word for process in group for word in process.cmdline())
    assert "scheduler-cls" not in command
    assert "additional-config" not in command
    assert httpx.get(f"{server.url}/sojourn/v1/capabilities", headers=server.headers).status_code == 404
