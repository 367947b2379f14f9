"""``sojourn top``: lines of 80 columns that say what the frame says; keys sort, filter, pause and explain."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from cli_process import invoke, refused
from live_frames import frame, row
from rich.cells import cell_len
from rich.console import Group
from rich.text import Text
from sojourn_server.cli.cli_error import CliError
from sojourn_server.cli.explain import turn_table
from sojourn_server.cli.live_client import LiveClient
from sojourn_server.cli.top import explanation_of
from sojourn_server.cli.top_view import COLUMNS, SORTABLE, TopView, shows_leases, sorted_programs
from sojourn_server.metrics.live_frame import LiveFrame, ProgramRow
from test_cli_explain import FOUND, explanation, shown
from waiting import wait_until_async

HOSTILE = "<img onerror=x>[bold]\n\x1b[31m" + "x" * 200


PROGRAMS = (
    row("busy", status="reasoning", running=True, requests=1, since_s=99.0, tool=None, lost_tokens=200),
    row("held", turns=7, context_tokens=99, ttft_s=3.0, reused_tokens=4),
    row(
        "queued", status="reasoning", requests=1, since_s=40.0, tool=None, lease_until_s=99.0, device_blocks=9
    ),
    row(HOSTILE, tool="工具" * 30, tenant="t", lease_until_s=None, lease_blocks=0),
    row("gone", status="ended", tool=None, since_s=10.0, lease_until_s=None, device_blocks=0, lease_blocks=0),
)


def test_the_lines_fit_eighty_columns_and_say_what_the_frame_says() -> None:
    shown = frame(*PROGRAMS, engines=2)
    views = sorted_programs(shown)
    texts = [line.plain.rstrip() for line in TopView(shown, 80, url="http://h:8000").page()]
    for text in texts:
        assert cell_len(text) <= 80, text
        assert text.isprintable(), text
    page = "\n".join(texts)
    assert "running 10% leased 20% cached 30% free 40% of 100M" in page
    assert "1 host" in page
    assert "80% reused, 20% computed again (evicted 300, expired 100)" in page
    assert [view.state for view in views] == ["thinking", "waiting", "tool", "tool", "ended"]
    line = next(text for text in texts if text.startswith("held"))
    assert " ".join(line.split()) == "held tool pytest 10s 30s 99 dev 64.0M 7 3.0s 0"
    assert next(text for text in texts if text.startswith("queued")).split()[1:4] == ["waiting", "60s", "due"]


def test_engines_that_only_observe_are_not_the_policy_of_a_pair() -> None:
    def title(*policies: str) -> str:
        engines = [msgspec.structs.replace(frame().engines[0], policy=policy) for policy in policies]
        return TopView(msgspec.structs.replace(frame(), engines=engines), 80).header()[0].plain.rstrip()

    assert title("sojourn", "observe").endswith("policy sojourn")
    assert title("observe", "observe").endswith("policy observe")


def test_a_policy_without_leases_shows_places_and_reused_tokens_instead() -> None:
    bare = {"lease_blocks": 0, "lease_until_s": None, "lease_reason": None, "reused_tokens": 2500}
    rows = [
        row("here", placed="device", **bare),
        row("apart", placed="host", **bare),
        row("back", placed="waiting", status="gated", **bare),
        row("there", placed="device", **bare),
    ]

    def live(*rows: ProgramRow, **fields: Any) -> LiveFrame:
        blocks = {"running": 10, "leased": 0, "cached": 50, "free": 40}
        fields = {"leases": 0, "grants_leases": False, "blocks": blocks, **fields}
        shown = frame(*rows)
        return msgspec.structs.replace(shown, engines=[msgspec.structs.replace(shown.engines[0], **fields)])

    shown = live(*rows)
    texts = [line.plain.rstrip() for line in TopView(shown, 80).page()]
    assert not any("lease" in text.lower() for text in texts)
    assert any(text.endswith("· placed 2 device, 1 host, 1 waiting") for text in texts)
    assert shows_leases(shown) is False
    line = next(text for text in texts if text.startswith("back"))
    assert " ".join(line.split()) == "back gated pytest 10s 2.5k 12.3k waiting 3 0.4s 0"
    assert cell_len(line) <= 80
    # Without a program the engine tells, and a lease is always shown.
    assert shows_leases(live()) is False
    assert shows_leases(live(row("here"))) is True
    assert shows_leases(live(grants_leases=True)) is True
    assert shows_leases(live(grants_leases=True, error="does not answer")) is False


def test_every_column_sorts_and_the_filter_finds_tools_and_states() -> None:
    shown = frame(*PROGRAMS)
    for name in SORTABLE:
        views = sorted_programs(shown, sort=name)
        assert {view.row.program_id for view in views} == {one.program_id for one in PROGRAMS}
        key = next(column.sort_key for column in COLUMNS if column.name.lower() == name)
        assert key(views[0]) > key(sorted_programs(shown, sort=name, reverse=True)[0])
    assert sorted_programs(shown, sort="lease")[0].row.program_id == "queued"
    assert sorted_programs(shown, sort="lost")[0].row.program_id == "busy"
    assert [view.row.program_id for view in sorted_programs(shown, needle="PYTEST")] == ["held"]
    assert [view.row.program_id for view in sorted_programs(shown, needle="wait")] == ["queued"]


# -- the command ---------------------------------------------------------------------------


def test_once_prints_and_json_names_the_fields(serve: Any) -> None:
    server = serve({"/sojourn/v1/stream": frame(*PROGRAMS)})
    printed = invoke("top", "--url", "h:8000/v1/", "--api-key", "key", "--once", "--sort", "lost")
    lines = printed.stdout.splitlines()
    assert lines[0].startswith("sojourn top  http://h:8000")
    assert sum(line.startswith(("busy", "held", "gone")) for line in lines) == 3
    [request] = server.asked
    assert request.headers["authorization"] == "Bearer key"
    assert request.url.params["once"] == "1"
    document = json.loads(invoke("top", "--json", "-").stdout)
    first = document["programs"][0]
    assert (first["program_id"], first["state"], first["for_s"]) == ("busy", "thinking", 1.0)
    assert document["engines"][0]["blocks"]["leased"] == 20
    assert refused("top", "--once", "--sort", "colour").message == "--sort colour is unknown"


@pytest.mark.parametrize(
    ("answer", "message", "next_step"),
    [
        ((404, "no"), "404", "same release"),
        ((401, {"error": {"message": "wrong key"}}), "401 wrong key", "--api-key, or set VLLM_API_KEY"),
        ((403, {"error": {"message": "no admin key", "next": "set one"}}), "403 no admin key", "set one"),
        ((200, {}), "something else than a live frame", "same release"),
        ((503, {"error": {"message": "busy", "next": "try again"}}), "busy", "try again"),
    ],
)
def test_a_wrong_server_is_named_with_the_next_step(
    serve: Any, answer: Any, message: str, next_step: str
) -> None:
    serve({"/sojourn/v1/stream": answer})
    error = refused("top", "--once")
    assert message in error.message
    assert next_step in error.next_step


def test_a_programs_turns_are_a_table(serve: Any) -> None:
    turn = {
        "turn": 4, "seconds": {"queued": 0.5, "prefilling": 2.0, "decoding": 3.0}, "evictor": "rival",
        "tokens": {"prompt": 5000, "device": 1000, "host": 0, "new": 0, "lost": {"evicted": 4000}},
        "preemptions": 0, "gap_s": 74.0, "tool_before": "bash:pytest",
    }  # fmt: skip
    document = {"status": "acting", "turns": 4, "context_tokens": 5000, "ledger": [turn]}

    server = serve({"/sojourn/v1/programs/a/b": document, "/sojourn/v1/programs/a/b/explain": FOUND})
    client = LiveClient("http://h")
    text = shown(explanation_of(client, "a/b"))
    assert server.asked[-1].url.raw_path == b"/sojourn/v1/programs/a%2Fb/explain"
    assert text.startswith(f"{shown(explanation())}\nacting (its tool runs, or it is idle), 4 turns"), (
        "as sojourn explain says it"
    )
    server.answers["/sojourn/v1/programs/a/b/explain"] = {"text": "another release"}
    with pytest.raises(CliError, match="something else than an explanation"):
        explanation_of(client, "a/b")
    del server.answers["/sojourn/v1/programs/a/b/explain"]
    assert shown(explanation_of(client, "a/b")).rstrip() == turn_table(document)
    assert turn_table({"program_id": "a/b", "engine": document}) == turn_table(document)
    assert turn_table({**document, "outcome": "ok"}).startswith("ended (ok), 4 turns")
    assert (
        "   4   0.5s    2.0s   3.0s   5.0k   1.0k  4.0k evicted 4.0k, taken by rival, bash:pytest 74s" in text
    )


# -- the full screen -----------------------------------------------------------------------


async def test_keys_sort_filter_pause_and_explain() -> None:
    pytest.importorskip("textual", reason="textual is missing: pip install 'sojourn[top]'")
    from sojourn_server.cli.top_app import ExplanationScreen, ProgramTable, TopApp
    from textual.widgets import Static

    asked: list[str] = []
    frames = [0]
    seen: set[str] = set()

    def fetch() -> LiveFrame:
        frames[0] += 1
        if "up" not in seen:
            raise CliError("http://h does not answer", "start it")
        if "programs" not in seen:
            return frame()
        return frame(*PROGRAMS, *(row(f"many{number:03}", turns=number) for number in range(100)))

    def explain(program_id: str) -> Group:
        asked.append(program_id)
        return Group(Text("[b]because[/b] of " + program_id))

    app = TopApp(fetch, explain, url="http://h", interval_s=0.1)
    async with app.run_test(size=(80, 24)) as pilot:
        table = app.query_one(ProgramTable)

        def head(id: str = "#header") -> str:
            return str(app.query_one(id, Static).content)

        def listed() -> list[str | None]:
            return [option.id for option in table.options]

        def selected() -> str | None:
            return table.highlighted_option and table.highlighted_option.id

        await wait_until_async(lambda: "next: start it" in head())
        seen.add("up")
        await wait_until_async(lambda: "no programs yet: sojourn run --url http://h" in head("#heading"))
        seen.add("programs")
        await wait_until_async(lambda: len(listed()) == 105)
        await pilot.pause()
        assert "1/105" in head()
        assert table.scrollable_content_region.width == 80, "no bar hides the last column"
        assert table.size.height >= 15
        shown = [table.render_line(y).text for y in range(table.size.height)]
        assert shown[0].startswith("busy")
        assert "thinking" in shown[0]

        await pilot.press("j", "j")
        chosen = selected()
        assert chosen == listed()[2]
        await pilot.press("s", "s", "s", "s", "s")  # by turn
        assert listed()[0] == "many099"
        assert selected() == chosen, "the cursor stays on its program"
        await pilot.press("r")
        assert listed()[0] == "many000"
        await pilot.press("end")
        assert selected() == listed()[-1]
        assert table.scroll_offset.y > 60
        await pilot.press("g")
        assert selected() == listed()[0]

        await pilot.press("slash", *"queued", "enter")
        assert listed() == ["queued"]
        await pilot.press("e")
        await wait_until_async(lambda: isinstance(app.screen, ExplanationScreen) and asked == ["queued"])
        text = app.screen.query_one("#explanation-text")
        await wait_until_async(lambda: "[b]because[/b] of queued" in text.render_line(0).text)
        await pilot.press("escape")
        assert not isinstance(app.screen, ExplanationScreen)
        await pilot.press("question_mark")
        await wait_until_async(lambda: isinstance(app.screen, ExplanationScreen))
        meanings = app.screen.query_one("#explanation-text")

        def shown_meanings() -> str:
            return "\n".join(meanings.render_line(y).text for y in range(meanings.size.height))

        await wait_until_async(lambda: all(f"{column.name} " in shown_meanings() for column in COLUMNS))
        assert "computed again: their KV was lost" in " ".join(shown_meanings().split())
        await pilot.press("question_mark")
        assert not isinstance(app.screen, ExplanationScreen)
        await pilot.press("escape")
        assert len(listed()) == 105
        await pilot.press("enter")
        await wait_until_async(lambda: asked[1:] == ["many000"])
        await pilot.press("escape")

        await pilot.press("p")
        await wait_until_async(lambda: not app._asking)
        before = frames[0]
        assert "PAUSED" in head()
        await asyncio.sleep(0.3)
        assert frames[0] == before
        await pilot.press("p")
        await wait_until_async(lambda: frames[0] > before)
