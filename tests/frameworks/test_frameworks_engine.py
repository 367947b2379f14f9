"""The APIs of the clients at a real engine. Every framework sends its requests by one of these clients; what
it reports beside them is the same for the fake server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import chat_loops as loops
import httpx
import pytest
import scenarios_anthropic
import scenarios_litellm
import scenarios_openai
import sojourn
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.launch.serve_command import FORCED_TOKENS
from sojourn_server.models.chat_format import END_OF_MESSAGE, assistant_text
from waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

MODEL = "tiny"
CALL = assistant_text("", [{"name": loops.UPPER.name, "arguments": dict(loops.UPPER.arguments)}])


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineServer]:
    pytest.importorskip("vllm")
    arguments = ["--max-model-len", "8192", "--logits-processors", FORCED_TOKENS]
    # With the worker in the engine's own process, the engine starts in two thirds of the time.
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with EngineServer(MODEL, serve_args=arguments, env=env, ready_timeout_s=400) as running:
        yield running


def get(engine: EngineServer, path: str) -> Any:
    return httpx.get(f"{engine.url}/sojourn/v1/programs{path}", timeout=30).json()


def scripted(engine: EngineServer, create: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``create`` with the tokens of the next answer in each request: a tool call, then the end."""

    def tokens(text: str) -> list[int]:
        body = {"model": MODEL, "prompt": text + END_OF_MESSAGE, "add_special_tokens": False}
        return list(httpx.post(f"{engine.url}/tokenize", json=body, timeout=30).json()["tokens"])

    answers = iter([tokens(CALL), tokens("done")])
    return lambda **given: create(**given, extra_body={"vllm_xargs": {"replay_ids": next(answers)}})


def chat(engine: EngineServer) -> Any:
    with scenarios_openai.client(f"{engine.url}/v1") as llm:
        create = scripted(engine, llm.chat.completions.create)
        return loops.tool_loop(lambda **given: create(model=MODEL, **given))


def responses(engine: EngineServer) -> Any:
    with scenarios_openai.client(f"{engine.url}/v1") as llm:
        create = scripted(engine, llm.responses.create)
        return loops.response_loop(lambda **given: create(model=MODEL, **given))


def messages(engine: EngineServer) -> Any:
    with scenarios_anthropic.client(engine.url) as llm:
        create = scripted(engine, llm.messages.create)
        return loops.tool_loop(
            lambda **given: scenarios_anthropic.chat_answer(
                create(model=MODEL, **scenarios_anthropic.arguments(**given))
            )
        )


def litellm(engine: EngineServer) -> Any:
    play = scenarios_litellm.sync(lambda complete: loops.tool_loop(scripted(engine, complete)))
    return play(f"{engine.url}/v1", MODEL)


@pytest.mark.parametrize("play", [chat, responses, messages, litellm])
def test_an_engine_answers_the_same_with_sojourn_and_takes_every_event(
    engine: EngineServer, play: Callable[[EngineServer], Any]
) -> None:
    expected = play(engine)
    before = {each["program_id"] for each in get(engine, "")["programs"]}
    sojourn.init(engine.url, probe_timeout_s=10)
    assert play(engine) == expected
    assert sojourn.flush(15), f"not every event arrived: {sojourn.stats()}"
    refused = {"outcome_rejected", "outcome_unsupported"} & dict(sojourn.stats()).keys()
    assert not refused, f"the engine did not take every event: {sojourn.stats()}"
    (id,) = {each["program_id"] for each in get(engine, "")["programs"]} - before

    def settled() -> bool:
        """The program has ended, and its ledger has both turns."""
        program = get(engine, f"/{id}")
        over = program["status"] == "ended" and not program["tools_running"]
        return over and len(program["ledger"]) == 2

    wait_until(settled)
