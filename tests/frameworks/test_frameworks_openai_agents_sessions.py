"""Programs of the OpenAI Agents SDK that outlive one run: sessions and approvals."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sojourn
from openai_agents_fixtures import agents_for, named, only, recorded, run
from sojourn.testing import FakeServer, ToolUse
from sojourn.wire_events import ProgramStart
from sojourn_integrations.program_cache import ProgramCache

agents = pytest.importorskip("agents")

pytestmark = pytest.mark.timeout(120)
HAS_APPROVALS = hasattr(agents, "RunState")
Runner = agents.Runner


# ---- sessions


def beating() -> bool:
    return sojourn.runtime.session().heartbeats.promised


async def still_beating() -> bool:
    """After a session was let go of. The thread that read it has it for a moment more than its answer."""
    deadline_s = time.monotonic() + 60
    while beating() and time.monotonic() < deadline_s:
        gc.collect()
        await asyncio.sleep(0.01)
    return beating()


async def test_a_conversation_is_one_program_until_its_session_is_gone(server: FakeServer) -> None:
    async with agents_for(server) as factory:
        conversation = agents.SQLiteSession("c1")
        clerk = factory.agent("clerk")
        await Runner.run(clerk, "Hello.", session=conversation)
        await Runner.run(factory.agent("other"), "Not part of it.")
        await run(clerk, "Go on.", streamed=True, session=conversation)
        before = named(recorded(server, ended=False), "clerk")
        assert (before.ends, before.nodes) == ([], ("clerk", "clerk"))
        assert before.steps_left == (), "the limit of a run is none of the conversation"
        assert len(before.requests[-1].body["messages"]) > len(before.requests[0].body["messages"])
        conversation.close()
        del conversation
        assert not await still_beating()
        assert named(recorded(server), "clerk").status == "ok"


async def test_a_stored_conversation_goes_on_with_the_next_session_object(
    server: FakeServer, tmp_path: Path
) -> None:
    def open_it() -> Any:
        return agents.SQLiteSession("someone@example.com", tmp_path / "talks.db")

    async with agents_for(server) as factory:
        clerk = factory.agent("clerk")
        for _ in range(2):
            conversation = open_it()
            await Runner.run(clerk, "Hello.", session=conversation)
            assert beating()
            conversation.close()
            del conversation
            assert not await still_beating(), "nobody holds it: its lease may run out"
        first = only(recorded(server, ended=False))
        assert (first.ends, first.nodes) == ([], ("clerk", "clerk"))
        assert "example" not in first.start.program_id
        sojourn.shutdown()
        sojourn.init(server.url, probe_timeout_s=5)
        conversation = open_it()
        await Runner.run(clerk, "Once more.", session=conversation)
        conversation.close()
    assert sojourn.flush(60)
    starts = [event for event in server.program_events() if isinstance(event, ProgramStart)]
    assert [event.program_id for event in starts] == [first.start.program_id] * 2


class Conversations:
    """Stands for the API of OpenAI that keeps conversations."""

    def __init__(self) -> None:
        self.conversations = self
        self.items = SimpleNamespace(list=self.read, create=self.write)
        self.count = 0

    async def read(self, **_: Any) -> AsyncIterator[Any]:
        for each in ():
            yield each

    async def write(self, **_: Any) -> None:
        pass

    async def create(self, **_: Any) -> Any:
        self.count += 1
        return SimpleNamespace(id=f"conv_{self.count}")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_session_that_gets_its_id_in_its_first_run_is_one_program(
    server: FakeServer, streamed: bool
) -> None:
    api = Conversations()
    async with agents_for(server) as factory:
        clerk = factory.agent("clerk")
        session = agents.OpenAIConversationsSession(openai_client=api)
        for _ in range(2):
            await run(clerk, "Hello.", streamed=streamed, session=session)
        del session
        again = agents.OpenAIConversationsSession(conversation_id="conv_1", openai_client=api)
        await run(clerk, "Hello.", streamed=streamed, session=again)
        program = only(recorded(server, ended=False))
        assert (program.ends, program.nodes) == ([], ("clerk",) * 3)


# ---- approvals


@pytest.mark.skipif(not HAS_APPROVALS, reason="no approvals in this version")
@pytest.mark.parametrize("via_json", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_resumed_run_is_the_same_program(server: FakeServer, via_json: bool, streamed: bool) -> None:
    @agents.function_tool(needs_approval=True)
    def erase() -> str:
        """Erases."""
        return "erased"

    server.script = [ToolUse("erase"), "done"]
    async with agents_for(server) as factory:
        clerk = factory.agent("clerk", erase)
        first = await run(clerk, "Go.", streamed=streamed)
        waiting_told = only(recorded(server, ended=False))
        assert (waiting_told.ends, waiting_told.tools) == ([], ())
        state = first.to_state()
        if via_json:
            state = await agents.RunState.from_string(clerk, state.to_string())
        for item in state.get_interruptions():
            state.approve(item)
        assert (await run(clerk, state, streamed=streamed)).final_output.strip() == "done"
    program = only(recorded(server))
    assert (program.status, program.nodes) == ("ok", ("clerk", "clerk"))
    assert [tool.tool for tool in program.tools] == ["erase"]
    assert program.steps_left == (9, 8), "of the ten turns that both runs have together"


# ---- what is kept


def test_only_so_many_are_kept(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn_integrations.program_cache.MAX_CACHED_PROGRAMS", 3)
    sojourn.init(server.url, probe_timeout_s=5)
    kept = ProgramCache()
    programs = [sojourn.program(f"p{number}").make().start() for number in range(5)]
    for number, program in enumerate(programs):
        kept.keep(number, program)
        kept.find(0)  # which is therefore not the least recently used one
    assert [program.is_open for program in programs] == [True, False, False, True, True]
    kept.clear()
    assert len(kept) == 0
    assert {each.status for each in recorded(server).values()} == {"ok"}
