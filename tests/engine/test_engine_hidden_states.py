"""Hidden states of a real engine: they come out, something learns from them, and no token is another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from engine_tools import scheduler_of
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.launch.serve_command import WORKER_CLASSES

pytestmark = pytest.mark.engine

REQUESTS = 12
LENGTHS = [5 + 9 * (number % 7) for number in range(REQUESTS)]


class Said(NamedTuple):
    """What a request came to."""

    tokens: list[int]
    logprobs: list[float]


def say(llm: Any) -> list[Said]:
    """Outputs of several lengths, more of them than run at once."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0,
            max_tokens=length,
            ignore_eos=True,
            logprobs=0,
            extra_args={"agentic_context": json.dumps({"program_id": f"P{n}"})},
        )
        for n, length in enumerate(LENGTHS)
    ]
    prompts = [
        {"prompt_token_ids": [1 + (7919 * (n + 1) * (i + 3)) % 4000 for i in range(20 + 30 * n)]}
        for n in range(REQUESTS)
    ]
    answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        Said(
            list(answer.token_ids),
            [by[token].logprob for by, token in zip(answer.logprobs, answer.token_ids, strict=True)],
        )
        for answer in answers
    ]


def hidden_states_of(llm: Any) -> dict[str, Any]:
    return dict(json.loads(scheduler_of(llm).sojourn_call("stats", ""))["output_lengths"])


@pytest.mark.timeout(600)
def test_hidden_states_come_out_and_no_token_is_another(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from sojourn_server.predictors import background_trainer
    from sojourn_server.vllm import hidden_state_capture

    # So that the few tokens of this test are enough.
    monkeypatch.setattr(hidden_state_capture.HiddenStateCapture.__init__, "__defaults__", (4,))
    # Nor does it matter how long the thread takes that learns, or when it may run.
    monkeypatch.setitem(background_trainer.BackgroundTrainer.__init__.__kwdefaults__, "share", 1e6)
    monkeypatch.setattr(background_trainer, "BURST_S", 1e6)
    monkeypatch.setattr(background_trainer, "MAX_QUEUED_MESSAGES", 10_000)
    settings = {"dtype": "float32", "max_num_batched_tokens": 128}
    stock = say(make_llm(None, **settings))
    llm = make_llm("tetris-learned", sojourn={"strict": True}, worker_cls=WORKER_CLASSES["cpu"], **settings)
    ours = say(llm)
    assert [one.tokens for one in ours] == [one.tokens for one in stock]
    assert [one.logprobs for one in ours] == [one.logprobs for one in stock]
    assert [len(one.tokens) for one in ours] == LENGTHS
    end_s = time.monotonic() + 200
    while (known := hidden_states_of(llm))["network"]["examples"] < REQUESTS:
        assert time.monotonic() < end_s, known
        time.sleep(0.05)
    assert known["outputs"] == REQUESTS
    # A state every four steps of each output, but of those from beyond its end.
    assert sum(length // 4 for length in LENGTHS) * 0.5 < known["network"]["examples"] <= sum(LENGTHS)
    assert known["network"]["missed_notes"] == 0
    assert known["network"]["skipped_states"] == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_learns_tells_of_it_and_keeps_it(tmp_path: Path) -> None:
    """As it is started by ``sojourn serve``: the engine in a process of its own."""
    pytest.importorskip("vllm")
    file, log = tmp_path / "lengths", tmp_path / "log"
    arguments = ["--max-model-len", "1024", "--sojourn-network", str(file), "--shutdown-timeout", "10"]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        EngineServer("tiny", policy="tetris-learned", serve_args=arguments, env=env, log_path=log) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http,
    ):
        body = {"model": "tiny", "prompt": ["Tell me a story."] * 4, "max_tokens": 60, "ignore_eos": True}
        for number in range(4):
            answer = http.post("/v1/completions", json=body, headers={"x-session-id": f"p{number}"})
            assert answer.status_code == 200
        known = http.get("/sojourn/v1/stats").json()["output_lengths"]
    assert known["outputs"] == 16
    assert known["network"]["examples"] > 0
    assert file.exists(), log.read_text()[-2000:]
