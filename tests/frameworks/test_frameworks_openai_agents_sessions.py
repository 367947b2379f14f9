"""Programs of the OpenAI Agents SDK that outlive one run: sessions and approvals."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sojourn
from openai_agents_fixtures import agents_for, fails, named, only, recorded, run
from sojourn.program import Program
from sojourn.testing import FakeServer, ToolUse
from sojourn.wire_events import ProgramStart
from sojourn_integrations.openai_agents import conversation_keys
from sojourn_integrations.openai_agents.conversation_keys import conversation_key
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


async def test_a_failed_run_does_not_end_its_conversation(server: FakeServer) -> None:
    server.script = [ToolUse("fails"), "better"]
    async with agents_for(server) as factory:
        conversation = agents.SQLiteSession("c1")
        with pytest.raises(agents.UserError):
            await Runner.run(
                factory.agent("clerk", fails(failure_error_function=None)), "Go.", session=conversation
            )
        await conversation.clear_session()
        await Runner.run(factory.agent("clerk"), "Again.", session=conversation)
        assert only(recorded(server, ended=False)).nodes == ("clerk", "clerk")
        sojourn.uninstrument("openai_agents")
        assert only(recorded(server)).status == "ok"
        conversation.close()


class Conversations:
    """Stands for the API of OpenAI that keeps conversations."""

    def __init__(self) -> None:
        self.conversations = self
        self.items = SimpleNamespace(list=self.read, create=self.write)
        self.count = 0

    def read(self, **_: Any) -> AsyncIterator[Any]:
        async def nothing() -> AsyncIterator[Any]:
            for each in ():
                yield each

        return nothing()

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


class ListSession(agents.memory.session.SessionABC):
    """A user's session class, with a store that the session does not own."""

    def __init__(self, session_id: str, store: list[Any]) -> None:
        self.session_id, self.session_settings, self.store = session_id, None, store

    async def get_items(self, limit: int | None = None) -> list[Any]:
        return list(self.store)

    async def add_items(self, items: list[Any]) -> None:
        self.store += items

    async def pop_item(self) -> Any:
        return self.store.pop()

    async def clear_session(self) -> None:
        self.store.clear()


async def test_a_session_object_for_each_run_of_one_store_is_one_program(server: FakeServer) -> None:
    store: list[Any] = []
    async with agents_for(server) as factory:
        clerk = factory.agent("clerk")
        for _ in range(3):
            await Runner.run(clerk, "Hello.", session=ListSession("1", store))
        program = only(recorded(server, ended=False))
        assert (program.ends, program.nodes) == ([], ("clerk",) * 3)


# ---- approvals


def guarded_tool() -> Any:
    @agents.function_tool(needs_approval=True)
    def erase() -> str:
        """Erases."""
        return "erased"

    return erase


@pytest.mark.skipif(not HAS_APPROVALS, reason="no approvals in this version")
@pytest.mark.parametrize("via_json", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_resumed_run_is_the_same_program(server: FakeServer, via_json: bool, streamed: bool) -> None:
    server.script = [ToolUse("erase"), "done"]
    async with agents_for(server) as factory:
        clerk = factory.agent("clerk", guarded_tool())

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


@pytest.mark.skipif(not HAS_APPROVALS, reason="no approvals in this version")
async def test_a_run_that_waits_for_an_approval_sends_no_heartbeats(server: FakeServer) -> None:
    server.script = [ToolUse("erase"), "done"]
    async with agents_for(server) as factory:
        beats = []

        @agents.function_tool(needs_approval=True)
        def erase() -> str:
            """Erases."""
            beats.append(beating())
            return "erased"

        clerk = factory.agent("clerk", erase)
        state = (await Runner.run(clerk, "Go.")).to_state()
        assert not beating()
        for item in state.get_interruptions():
            state.approve(item)
        await Runner.run(clerk, state)
        assert beats == [True]
    assert only(recorded(server)).status == "ok"


# ---- what is kept


def open_programs(count: int) -> list[Program]:
    return [sojourn.program(f"p{number}").make().start() for number in range(count)]


def test_only_so_many_are_kept(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn_integrations.program_cache.MAX_CACHED_PROGRAMS", 3)
    sojourn.init(server.url, probe_timeout_s=5)
    kept = ProgramCache()
    programs = open_programs(5)
    for number, program in enumerate(programs):
        kept.keep(number, program)
        kept.find(0)  # which is therefore not the least recently used one
    assert [program.is_open for program in programs] == [True, False, False, True, True]
    kept.clear()
    assert len(kept) == 0
    assert {each.status for each in recorded(server).values()} == {"ok"}


def test_a_new_session_of_sojourn_knows_none_of_the_old_ones_programs(server: FakeServer) -> None:
    sojourn.init(server.url, probe_timeout_s=5)
    kept = ProgramCache()
    (program,) = open_programs(1)
    kept.keep("a", program)
    sojourn.shutdown()
    sojourn.init(server.url, probe_timeout_s=5)
    assert kept.find("a") is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_begins_anew() -> None:
    code = (
        "import os, sojourn\n"
        "from sojourn_integrations.program_cache import ProgramCache\n"
        "kept = ProgramCache()\n"
        "program = sojourn.program('a').make().start()\n"
        "kept.keep('a', program)\n"
        "kept._lock.acquire()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(0 if kept.find('a') is None else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert kept.find('a') is program\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# ---- ids


def test_a_files_conversation_has_another_id_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of different machines often share their path, session names and even network address."""

    def id_of() -> str:
        return conversation_key(SimpleNamespace(session_id="1", db_path="talks.db")).program_id

    here = id_of()
    assert id_of() == here
    monkeypatch.setattr(conversation_keys, "machine_id", lambda: b"another")
    assert id_of() != here
