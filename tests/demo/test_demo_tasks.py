"""The repositories are broken, the scripts fix them in a real shell, and contexts have the stated length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from echo_engine import ByteTokenizer, EchoEngine
from jinja2.sandbox import ImmutableSandboxedEnvironment
from sojourn_server.cli.demo import QUICK_TURNS
from sojourn_server.demo.demo_agent import prepare_environment
from sojourn_server.demo.demo_report import succeeded
from sojourn_server.demo.demo_run import run_arm
from sojourn_server.demo.demo_tasks import load_tasks
from sojourn_server.demo.scripted_tokens import Tokenizer, model_length, pool_blocks
from sojourn_server.models import CHAT_TEMPLATE, LOCAL_MODELS, is_cached, model_directory

TASKS = load_tasks()


class CountingTokenizer(Tokenizer):
    """Also counts the tokens of a conversation as the server renders it."""

    def count(self, messages: list[Any], tools: list[Any]) -> int:
        # The same settings as transformers uses for chat templates.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        template = environment.from_string(CHAT_TEMPLATE.read_text())
        return len(self.encode(template.render(messages=messages, tools=tools)))


@pytest.fixture(scope="session")
def tokenizer() -> CountingTokenizer:
    """Both models made here have SmolLM2's tokenizer."""
    for name in LOCAL_MODELS:
        if is_cached(name):
            return CountingTokenizer(model_directory(name))
    pytest.skip("neither tiny nor smol has been made yet")


WAITING = ("courier", "crontick", "larder", "turnstile")
"""Tasks whose tests sleep."""


@pytest.mark.parametrize("turns", [None, QUICK_TURNS])
@pytest.mark.parametrize("waiting", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_scripts_fix_the_repositories(
    waiting: bool,
    turns: int | None,
    tokenizer: CountingTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare_environment(tmp_path)
    # Of the user: keeps ``python -m unittest`` from importing the tests.
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    tasks = [task for task in TASKS if (task.name in WAITING) == waiting]
    tasks = [task if turns is None else task.shortened(turns) for task in tasks]
    with EchoEngine() as engine:
        record = run_arm(
            "stock", tasks, engine.url, "m", ByteTokenizer(),  # type: ignore[arg-type]
            seed=1, directory=tmp_path, watch=lambda *_: None,
        )  # fmt: skip
    assert succeeded([record]), [(each.task, each.error, each.fixed) for each in record.programs]
    for task in tasks:
        bodies = [body for body in engine.forced if task.issue in body["messages"][1]["content"]]
        assert len(bodies) == len(task.turns)
        prompts = [tokenizer.count(body["messages"], body["tools"]) for body in bodies]
        assert prompts == sorted(set(prompts)), "each is longer than the one before"
        context_tokens = prompts[-1] + len(tokenizer.forced_ids(task.turns[-1]))
        if turns is None:
            results = [message for message in bodies[-1]["messages"] if message["role"] == "tool"]
            failed = ["<returncode>0</returncode>" not in result["content"] for result in results]
            assert sum(failed) == 1, "one turn sees the tests fail; all other commands succeed"
            # Failing tests print paths, whose length depends on the temporary folder.
            assert context_tokens == pytest.approx(task.context_tokens, rel=0.05)
            assert 3_000 <= context_tokens <= 6_000
        assert context_tokens <= 1.1 * task.context_tokens


def test_an_agent_that_empties_the_tests_has_fixed_nothing(tmp_path: Path) -> None:
    task = next(task for task in TASKS if task.name == "ledger")
    repository = task.copy_to(tmp_path)
    assert not task.is_fixed(repository)
    (repository / "tests" / "test_ledger.py").write_text("")
    assert not task.is_fixed(repository)


def test_a_turns_prompt_begins_with_the_last_turns_prompt_and_answer(tokenizer: CountingTokenizer) -> None:
    """What the demo measures: the server's rendering of a message is the tokens that were forced."""
    turn = TASKS[0].turns[0]
    user = {"role": "user", "content": "go"}
    call = {"function": {"name": "bash", "arguments": {"command": turn.command}}}
    answer = {"role": "assistant", "content": turn.thought + "\n", "tool_calls": [call]}
    opening = len(tokenizer.encode("<|im_start|>assistant\n"))
    before, after = tokenizer.count([user], []), tokenizer.count([user, answer], [])
    newline = 1
    assert after == before + opening + len(tokenizer.forced_ids(turn)) + newline


def test_the_pool_holds_about_three_programs() -> None:
    contexts = [task.context_tokens for task in TASKS]
    blocks = pool_blocks(contexts, 32, 3.0)
    mean_blocks = sum(contexts) / len(contexts) / 32
    assert 3.0 <= blocks / mean_blocks <= 3.2
    assert blocks == pool_blocks(list(reversed(contexts)), 32, 3.0)
    assert pool_blocks([32, 32, 3200], 32, 3.0) >= 100  # the largest fits alone
    assert blocks * 32 >= model_length(contexts) >= max(contexts)
    for few in (0.5, 1.0, 1.5):  # else vLLM does not start
        assert (pool_blocks(contexts, 32, few) - 1) * 32 >= model_length(contexts)
