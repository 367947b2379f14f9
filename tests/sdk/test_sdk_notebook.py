"""A program that no ``with`` block can span: opened in one cell of a notebook, ended in another.

Each cell may run in a context of its own, so what one cell sets in a context variable the next does not see.
"""

from __future__ import annotations

import asyncio
import contextvars
import textwrap
import threading
from collections.abc import Callable

import pytest
import sojourn
from openai import OpenAI
from sojourn import runtime
from sojourn.program import process_programs
from sojourn.testing import FakeServer
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart


class Notebook:
    """Cells that share their names and nothing else."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {}

    def run(self, code: str) -> None:
        contextvars.Context().run(exec, textwrap.dedent(code), self.names)


@pytest.fixture(autouse=True)
def nothing_stays_open():
    yield
    left = list(process_programs)
    process_programs.clear()
    assert not left


@pytest.fixture
def cells(online):
    notebook = Notebook()
    notebook.run("import sojourn")
    return notebook.run, notebook.names


def ends(server: FakeServer) -> list[tuple[str, str]]:
    assert sojourn.flush(60)
    return [(e.program_id, e.status) for e in server.program_events() if isinstance(e, ProgramEnd)]


def test_a_with_block_can_not_do_it(cells):
    run, names = cells
    run("scope = sojourn.program('x'); p = scope.__enter__()")
    run("seen = sojourn.current_program()")
    assert names["seen"] is None, "or the tests below show nothing"
    names["p"].end()


def test_what_one_cell_opens_is_the_program_of_the_next_ones(online, cells):
    run, names = cells
    names["client"] = OpenAI(api_key="k", base_url=online.base_url)
    run("p = sojourn.program('agent', agent_type='chat').open()")
    run("with sojourn.tool_call('bash', 'c1'): pass")
    run("client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])")
    run("inner = sojourn.current_program()")
    run("p.end()")
    run("after = sojourn.current_program()")
    names["client"].close()
    p = names["p"]
    assert names["inner"] is p
    assert names["after"] is None
    assert [r.context.program_id for r in online.requests] == [p.id]
    assert ends(online) == [(p.id, "ok")]
    told = {(type(e).__name__, e.program_id) for e in online.program_events()}
    told.discard(("Heartbeat", p.id))  # on a slow machine
    assert told == {(n, p.id) for n in ("ProgramStart", "ToolStart", "ToolStop", "ProgramEnd")}


def test_threads_and_tasks_of_a_cell_belong_to_it_too(cells):
    run, names = cells
    seen: list[object] = []

    def look() -> None:
        seen.append(sojourn.current_program())

    async def gather() -> None:
        await asyncio.gather(asyncio.to_thread(look), asyncio.create_task(_call(look)))

    names.update(look=look, asyncio=asyncio, threading=threading, gather=gather)
    run("p = sojourn.program('agent').open()")
    run("t = threading.Thread(target=look); t.start(); t.join()")
    run("asyncio.run(gather())")
    run("p.end()")
    assert seen == [names["p"]] * 3


async def _call(function: Callable[[], None]) -> None:
    function()


def test_a_block_inside_a_cell_is_its_child_and_the_next_cell_is_back_in_it(cells):
    run, names = cells
    run("p = sojourn.program('agent').open()")
    run("with sojourn.tool_call('delegate', 'c1'), sojourn.program('sub') as sub: inner = sub.parent_id")
    run("@sojourn.program('worker')\ndef work(): return sojourn.current_program().parent_id")
    run("seen = (inner, sub.call_id, work(), sojourn.current_program())")
    p = names["p"]
    assert names["seen"] == (p.id, "c1", p.id, p)
    run("with sojourn.step('plan'): node = sojourn.request_fields()")
    assert '"node":"plan"' in str(names["node"])
    run("p.end()")


def test_a_cell_run_again_begins_afresh_and_nests_nothing(online, cells):
    run, names = cells
    opened = []
    for _ in range(4):
        run("p = sojourn.program('agent').open()")
        opened.append(names["p"])
        assert names["p"].parent_id is None
        assert process_programs == [names["p"]]
    run("p.end()")
    assert ends(online) == [(p.id, "cancelled") for p in opened[:3]] + [(opened[3].id, "ok")]


def test_a_child_named_as_such_stands_in_front_of_its_parent(online, cells):
    run, names = cells
    run("p = sojourn.program('agent', tenant='acme').open()")
    run("q = sojourn.program('sub', parent=p).open()")
    run("r = sojourn.program('sub', parent=p.id).open()  # a sibling: takes q's place, not p's")
    run("seen = sojourn.current_program()")
    p, q, r = names["p"], names["q"], names["r"]
    assert names["seen"] is r
    assert (q.parent_id, r.parent_id, q.tenant) == (p.id, p.id, "acme")
    run("r.end()")
    run("seen = sojourn.current_program()")
    assert names["seen"] is p
    run("s = sojourn.program('other').open()")
    names["s"].end("error")
    assert ends(online) == [(q.id, "cancelled"), (r.id, "ok"), (p.id, "cancelled"), (names["s"].id, "error")]


def test_a_cell_that_raises_leaves_it_open(cells):
    run, names = cells
    run("p = sojourn.program('agent').open()")
    with pytest.raises(ZeroDivisionError):
        run("1 / 0")
    run("seen = sojourn.current_program()")
    assert names["seen"] is names["p"]
    run("p.end(); p.end()")


def test_an_open_program_sends_heartbeats_between_cells(online, cells):
    run, names = cells
    run("p = sojourn.program('agent').open()")
    its_id = names.pop("p").id
    due, _ = runtime.session().heartbeats.take_due(runtime.clock() + 100)
    assert [p.id for p in due] == [its_id]
    run("sojourn.current_program().end()")
    assert runtime.session().heartbeats.take_due(runtime.clock() + 200)[0] == []


def test_an_open_program_survives_a_second_init(cells):
    run, names = cells
    run("p = sojourn.program('agent').open()")
    with FakeServer() as second:
        names["url"] = second.url
        run("sojourn.init(url)")
        run("with sojourn.tool_call('bash'): pass")
        run("p.end()")
        assert sojourn.flush(60)
        assert {e.program_id for e in second.program_events()} == {names["p"].id}
        sojourn.shutdown()


def test_an_open_program_is_cancelled_when_the_process_ends(python, server, tmp_path):
    path = tmp_path / "run.id"
    code = f"""
    import sojourn
    sojourn.init({server.url!r})
    p = sojourn.program("agent", resume={str(path)!r}).open()
    q = sojourn.program("sub", parent=p).open()
    print(p.id, q.id)
    """
    p, q = python(code).stdout.split()
    ended = [(e.program_id, e.status) for e in server.program_events() if isinstance(e, ProgramEnd)]
    assert ended == [(q, "cancelled"), (p, "cancelled")]
    assert path.read_text().strip() == p


def test_a_cell_with_a_resume_file_run_again_goes_on_with_the_same_program(cells, tmp_path):
    run, names = cells
    names["path"] = tmp_path / "run.id"
    run("p = sojourn.program('agent', resume=path).open()")
    first = names["p"]
    run("p = sojourn.program('agent', resume=path).open()")
    assert names["p"].id == first.id
    assert names["p"] is not first
    run("p.end()")
    assert not (tmp_path / "run.id").exists()


def test_the_children_of_a_fork_belong_to_it_and_do_not_end_it(python, server):
    code = f"""
    import os, sojourn
    sojourn.init({server.url!r})
    p = sojourn.program("agent", id="p").open()
    pid = os.fork()
    if pid == 0:
        with sojourn.tool_call("kid"): pass
        sojourn.flush(5)
        sojourn.runtime.session().exit()
        os._exit(0)
    os.waitpid(pid, 0)
    p.end()
    """
    python(code)
    events = server.program_events()
    assert [(e.tool, e.program_id) for e in events if isinstance(e, ToolStart)] == [("kid", "p")]
    assert [e.status for e in events if isinstance(e, ProgramEnd)] == ["ok"]


def test_in_a_real_ipython(python, server, tmp_path):
    pytest.importorskip("IPython")
    code = f"""
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.run_line_magic("colors", "nocolor")
    for cell in [
        "import sojourn, asyncio\\nsojourn.init({server.url!r})",
        "p = sojourn.program('agent', id='nb-1').open()",
        "with sojourn.tool_call('sync'): pass",
        "await asyncio.sleep(0)\\nwith sojourn.tool_call('top level await'): pass",
        "p = sojourn.program('agent', id='nb-2').open()",
        "async def f():\\n  with sojourn.tool_call('in a task'): pass\\nawait asyncio.create_task(f())",
        "p.end()\\nassert sojourn.flush(60)",
    ]:
        shell.run_cell(cell, store_history=True).raise_error()
    """
    python(code, env={"IPYTHONDIR": str(tmp_path)})
    told = [(type(e), e.program_id, getattr(e, "status", None)) for e in server.program_events()]
    assert [t for t in told if t[0] is ProgramEnd] == [
        (ProgramEnd, "nb-1", "cancelled"),
        (ProgramEnd, "nb-2", "ok"),
    ]
    assert [t[1] for t in told if t[0] is ProgramStart] == ["nb-1", "nb-2"]
    tools = [(e.tool, e.program_id) for e in server.program_events() if isinstance(e, ToolStart)]
    assert tools == [("sync", "nb-1"), ("top level await", "nb-1"), ("in a task", "nb-2")]
