"""Hidden states of a real engine: they come out, something learns from them, and no token is another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_tools import float32_engine, said, scheduler_of
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.launch.serve_command import SCHEDULER_CLS, WORKER_CLS
from waiting import wait_until

pytestmark = pytest.mark.engine

REQUESTS = 12
LENGTHS = [5 + 9 * (number % 7) for number in range(REQUESTS)]


def say(llm: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of outputs of several lengths, more of them than run at once."""
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
    return [said(output.outputs[0]) for output in llm.generate(prompts, params, use_tqdm=False)]


def hidden_states_of(llm: Any) -> dict[str, Any]:
    return dict(json.loads(scheduler_of(llm).sojourn_call("stats", ""))["output_lengths"])


@pytest.mark.timeout(600)
def test_hidden_states_come_out_and_no_token_is_another(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sojourn_server.predictors import background_trainer
    from sojourn_server.vllm import hidden_state_capture

    # So that the few tokens of this test are enough.
    monkeypatch.setattr(hidden_state_capture.HiddenStateCapture.__init__, "__defaults__", (4,))
    # Nor does it matter how long the thread takes that learns, or when it may run.
    monkeypatch.setitem(background_trainer.BackgroundTrainer.__init__.__kwdefaults__, "share", 1e6)
    monkeypatch.setattr(background_trainer, "BURST_S", 1e6)
    monkeypatch.setattr(background_trainer, "MAX_QUEUED_MESSAGES", 10_000)
    shape = {
        "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 256,
    }  # fmt: skip
    with float32_engine(tiny_model, **shape) as llm:
        stock = say(llm)
    ours = {"scheduler_cls": SCHEDULER_CLS, "worker_cls": WORKER_CLS}
    sojourn = {"policy": "tetris-learned", "strict": True}
    with float32_engine(tiny_model, **shape, **ours, additional_config={"sojourn": sojourn}) as llm:
        outputs = say(llm)
        wait_until(lambda: hidden_states_of(llm)["network"]["examples"] >= REQUESTS, within_s=200)
        known = hidden_states_of(llm)
    assert outputs == stock
    assert [len(tokens) for tokens, _ in outputs] == LENGTHS
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
