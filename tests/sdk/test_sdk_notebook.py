"""A program that no ``with`` block can span: opened in one cell of a notebook, ended in another.

Each cell may run in a context of its own, so what one cell sets in a context variable the next does not see.
"""

from __future__ import annotations

import contextvars
import textwrap

import pytest
from sdk_records import ask, told
from sojourn.program import process_programs
from sojourn.testing import FakeServer
from sojourn.wire_events import Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop


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
    return [(e.program_id, e.status) for e in told(server, ProgramEnd)]


def test_what_one_cell_opens_is_the_program_of_the_next_ones(online, cells):
    run, names = cells
    names["ask"] = lambda: ask(online.base_url)
    run("p = sojourn.program('agent', agent_type='chat').open()")
    run("with sojourn.tool_call('bash', 'c1'): pass")
    run("ask()")
    run("inner = sojourn.current_program()")
    run("p.end()")
    run("after = sojourn.current_program()")
    p = names["p"]
    assert names["inner"] is p
    assert names["after"] is None
    assert [r.context.program_id for r in online.requests] == [p.id]
    assert ends(online) == [(p.id, "ok")]
    kinds = {type(e) for e in told(online)} - {Heartbeat}  # which comes on a slow machine
    assert kinds == {ProgramStart, ToolStart, ToolStop, ProgramEnd}


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
    assert ends(server) == [(q, "cancelled"), (p, "cancelled")]
    assert path.read_text().strip() == p
