"""The repositories are broken, the scripts fix them in a real shell, and contexts have the stated length."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from sojourn_server.cli.demo import QUICK_TURNS
from sojourn_server.demo.demo_tasks import DemoTask, load_tasks
from sojourn_server.demo.scripted_tokens import model_length, pool_blocks
from sojourn_server.models import LOCAL_MODELS, is_cached, model_directory
from task_dry_run import CountingTokenizer, DryRun, dry_run_task

TASKS = load_tasks()


@pytest.fixture(scope="session")
def tokenizer() -> CountingTokenizer:
    """Both models made here have SmolLM2's tokenizer."""
    for name in LOCAL_MODELS:
        if is_cached(name):
            return CountingTokenizer(model_directory(name))
    pytest.skip("neither tiny nor smol has been made yet")


WAITING = ("courier", "crontick", "larder", "turnstile")
"""Tasks whose tests sleep."""


@pytest.fixture(scope="module")
def waiting_runs(tokenizer: CountingTokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, DryRun]:
    """Runs of the tasks that sleep, all at once."""
    folder, lock = tmp_path_factory.mktemp("waiting"), threading.Lock()

    class OneAtATime(CountingTokenizer):
        """The tokenizers of Hugging Face fail in several threads at once."""

        def __init__(self) -> None:
            pass

        def count(self, *args: Any) -> int:
            with lock:
                return tokenizer.count(*args)

    def run(task: DemoTask) -> DryRun:
        return dry_run_task(task, folder / task.name, OneAtATime())

    tasks = [task for task in TASKS if task.name in WAITING]
    with ThreadPoolExecutor(len(tasks)) as pool:
        return dict(zip((task.name for task in tasks), pool.map(run, tasks), strict=True))


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, id=task.name, marks=[pytest.mark.slow] if task.name in WAITING else [])
        for task in TASKS
    ],
)
def test_the_script_fixes_the_repository(
    task: DemoTask, tokenizer: CountingTokenizer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if task.name in WAITING:
        done = request.getfixturevalue("waiting_runs")[task.name]
    else:
        done = dry_run_task(task, tmp_path, tokenizer)
    assert (done.before, done.after, done.exit_status) == (False, True, "Submitted")
    # One turn sees the tests fail; all other commands succeed.
    assert sorted(done.returncodes) == [0] * (len(done.returncodes) - 1) + [1]
    # Failing tests print paths, whose length depends on the temporary folder.
    assert done.context_tokens == pytest.approx(task.context_tokens, rel=0.05)
    assert 3_000 <= done.context_tokens <= 6_000
    assert all(
        later > earlier for earlier, later in zip(done.prompt_tokens, done.prompt_tokens[1:], strict=False)
    )


def test_a_shortened_script_fixes_the_repository_too(
    tokenizer: CountingTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PYTHONSAFEPATH", "1"
    )  # of the user: keeps python -m unittest from importing the tests
    for task in TASKS:
        if task.name in WAITING:
            continue
        short = task.shortened(QUICK_TURNS)
        done = dry_run_task(short, tmp_path, tokenizer)
        assert (done.before, done.after, done.exit_status) == (False, True, "Submitted")
        assert len(done.seconds) == QUICK_TURNS
        assert done.context_tokens <= 1.1 * short.context_tokens


def test_eight_different_tasks_of_eight_to_twelve_turns() -> None:
    assert len({task.name for task in TASKS}) == 8
    assert all(8 <= len(task.turns) <= 12 for task in TASKS)


def test_an_agent_that_empties_the_tests_has_fixed_nothing(tmp_path: Path) -> None:
    task = next(task for task in TASKS if task.name == "ledger")
    repository = task.copy_to(tmp_path)
    (repository / "tests" / "test_ledger.py").write_text("")
    assert not task.is_fixed(repository)


def test_forced_ids_are_the_message_and_its_end(tokenizer: CountingTokenizer) -> None:
    end = tokenizer.encode("}}\n</tool_call><|im_end|>")
    for task in TASKS:
        for turn in task.turns:
            ids, thought = tokenizer.forced_ids(turn), tokenizer.encode(turn.thought)
            assert (ids[: len(thought)], ids[-len(end) :]) == (thought, end)


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
