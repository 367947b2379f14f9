"""The web page in a headless Chromium: key, live data, table, dialog, hostile names, accessibility.

Screenshots lie in ``out/page``. ``make setup`` brings the browser (``tests/support/headless_browser.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import live_frames
import msgspec
import pytest
from api_test_engines import KEY, ScriptedEngine, client_of, engine_answers, served
from headless_browser import headless_chromium
from page_viewer import DRAWN, cells, check_accessible, opened, shot
from sojourn_server.api import live_stream
from sojourn_server.cli.top_view import COLUMNS, program_view
from sojourn_server.metrics.live_frame import FRAME_VERSION, EngineRow, LiveFrame, ProgramRow
from sojourn_server.policies.costs.engine_profile import PrefillCurve
from virtual_engine import VirtualEngine, prompt

HOSTILE = '<img src=x onerror="window.hurt=1">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless_chromium() as found:
        yield found


class Scene:
    """A made-up engine: its rows change between two frames, and it explains turns of a virtual one."""

    def __init__(self, rows: list[ProgramRow]) -> None:
        self.rows = rows
        self.turns = 10
        self.virtual = VirtualEngine(curve=PrefillCurve(0.0, 0.0, 0.01))
        lease = self.virtual.turn("agent-1", prompt(40))
        assert lease is not None
        self.virtual.wait(lease.ttl_s + 5.0)
        self.virtual.evict(prompt(40), by=HOSTILE)
        self.virtual.turn("agent-1", prompt(60))
        self.engine = ScriptedEngine(
            engine_answers(snapshot=self.snapshot, program=lambda asked: self.virtual.ask("program", **asked))
        )

    def snapshot(self, asked: dict[str, Any]) -> Any:
        self.turns += 1
        engine = EngineRow(
            engine="0", now_s=100.0 + self.turns, policy="sojourn", block_tokens=16, block_bytes=1 << 20,
            blocks={"running": 30, "leased": 40, "cached": 20, "free": 10},
            tiers={"host": {"used": 64, "free": 192}}, requests=3, running_requests=2,
            leases=1, turns=self.turns, prompt_tokens=1000 * self.turns, device_tokens=800 * self.turns,
            new_tokens=100 * self.turns, lost_tokens={"evicted": 100 * self.turns},
        )  # fmt: skip
        full = asked.get("changed_within_s") is None
        rows = self.rows if full else self.rows[:20]
        return msgspec.to_builtins(
            {"engine": engine, "programs": rows, "total": len(self.rows), "full": full}
        )


row = partial(live_frames.row, lease_until_s=4000.0)


@contextmanager
def watched(browser: Any, scene: Scene, *keys: str, **options: Any) -> Iterator[Any]:
    """The page of the scene behind a real server."""
    app = client_of(scene.engine, keys).app
    with served(app) as address, opened(browser, f"http://{address}", **options) as page:
        yield page


def test_a_viewer_signs_in_and_reads_why_a_turn_was_slow(browser: Any) -> None:
    scene = Scene([row("agent-1"), row("agent-2", status="reasoning", requests=1, tool=None)])
    with watched(browser, scene, KEY, key=KEY, color_scheme="light") as page:
        page.wait_for_selector("#key-form:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "key"
        assert page.locator("#data").is_hidden()
        check_accessible(page)
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("refused this key").wait_for()
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="agent-1").wait_for()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        check_accessible(page)
        page.wait_for_function(DRAWN, arg=[0, 114, 178])
        shot(page, "light")
        button = page.get_by_role("button", name="agent-1")
        button.focus()
        page.keyboard.press("Enter")
        told = client_of(scene.engine).get("/sojourn/v1/programs/agent-1/explain").json()
        page.locator(".explanation", has_text=told["text"]).wait_for()
        assert HOSTILE in told["text"], "who took the blocks is named"
        assert "gaps" in page.locator(".timeline").get_attribute("aria-label")
        assert page.locator("#program-dialog li", has_text=told["decision_lines"][0]).count() == 1
        assert page.locator("#program-dialog tbody th").all_text_contents()[-3:] == [
            "\u2003tail", "\u2003lost: expired", "decoding",
        ]  # fmt: skip
        check_accessible(page)
        shot(page, "explanation")
        page.get_by_role("button", name="Turn 1").press("Enter")
        page.get_by_text("Explanation of turn 1").wait_for()
        assert page.evaluate("document.activeElement.textContent") == "Turn 1"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.textContent") == "agent-1"
        page.get_by_role("button", name="Forget the key").click()
        page.wait_for_selector("#key-form:not([hidden])")
        assert page.evaluate("sessionStorage.length") == 0
        assert page.locator("#data").is_hidden()


def test_a_narrow_page_shows_that_tables_go_on_and_since_when_it_records(browser: Any) -> None:
    with watched(browser, Scene([row("agent-1")]), color_scheme="light") as page:
        page.get_by_text(re.compile("This page has recorded since ..:..:.., when it was opened")).wait_for()
        wide = page.locator(".scroll:has(#program-table)")
        assert "more" not in wide.get_attribute("class")
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_selector(".scroll.more:has(#program-table)")
        check_accessible(page)
        shot(page, "narrow")
        wide.evaluate("box => { box.scrollLeft = box.scrollWidth }")
        page.wait_for_selector(".scroll:not(.more):has(#program-table)")


def test_hostile_names_stay_text(browser: Any) -> None:
    names = {"name": HOSTILE, "tool": HOSTILE, "tenant": HOSTILE, "lease_reason": HOSTILE, "placed": HOSTILE}
    scene = Scene([row(HOSTILE, **names, parent_program_id=HOSTILE, engine="0"), row("javascript:alert(1)")])
    with watched(browser, scene, expected="404|TrustedHTML") as page:
        page.get_by_role("button", name="javascript:alert(1)").wait_for()
        found = page.locator("#program-table tbody tr", has_text=HOSTILE)
        assert found.locator("td").nth(1).text_content() == HOSTILE
        page.locator("#memory-chart summary").click()
        page.locator("#memory-chart tbody th", has_text=HOSTILE).wait_for()
        found.get_by_role("button").click()
        page.get_by_text("no program has this id").first.wait_for(state="attached")
        assert page.locator("#program-title").text_content() == f"{HOSTILE}"
        assert page.evaluate("[window.hurt, document.images.length]") == [None, 0]
        refused = page.evaluate("() => { try { document.body.innerHTML = 'x' } catch (e) { return e.name } }")
        assert refused == "TypeError", "the browser itself refuses markup from strings"


def test_two_thousand_programs_are_sorted_filtered_and_paged(browser: Any) -> None:
    rows = [row(f"p{n:04}", context_tokens=n, device_blocks=n % 7) for n in range(2_000)]
    scene = Scene(rows)
    with watched(browser, scene, color_scheme="dark", reduced_motion="reduce") as page:
        page.get_by_text("1 to 50 of 2000").wait_for()
        assert len(cells(page)) == 50
        head = page.get_by_role("columnheader", name=re.compile("^context"))
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        assert cells(page)[0][0] == "p1999"
        page.get_by_role("button", name="Next").press("Enter")
        assert cells(page)[0][0] == "p1949"
        assert "sorted by context, descending" in page.locator("#table-status").text_content()
        page.get_by_label("Filter").fill("p123")
        page.get_by_text("1 to 10 of 10", exact=True).wait_for()
        # In the rows their order is held, while their numbers go on.
        first = page.locator("#program-table tbody button").first
        first.focus()
        waited = cells(page)[0][3]
        scene.rows = [msgspec.structs.replace(one, context_tokens=-one.context_tokens) for one in rows]
        page.wait_for_function(
            "was => document.querySelector('#program-table tbody td:nth-child(4)').textContent != was",
            arg=waited,
        )
        assert cells(page)[0][0] == "p1239"
        check_accessible(page)
        shot(page, "dark-2000")


def test_the_page_and_top_say_the_same(browser: Any) -> None:
    rows = [
        row("thinking", status="reasoning", requests=1, running=True, tool=None, since_s=-7000.0),
        row("waiting", status="reasoning", requests=1, tool=None, lease_until_s=-5.0, since_s=-6630.0),
        row("gated", status="gated", device_blocks=0, lease_blocks=0, lease_until_s=None, ttft_s=None),
        row("tool", since_s=10.0, lost_tokens=123_456, device_blocks=1500, saved_s=0.04),
        row("idle", tool=None, since_s=-500_000.0, turns=1_200_000),
        row("returned", tool_ended=True, since_s=-400_000.0),
        row("silent", status="expired", placed="host", device_blocks=0),
        row("offloaded", status="ended", device_blocks=0, lease_blocks=0, lease_until_s=None, disk_blocks=3),
        row("ended", status="ended", lease_blocks=0, lease_until_s=None),
    ]
    scene = Scene(rows)
    with watched(browser, scene) as page:
        page.get_by_role("button", name="ended").wait_for()
        page.get_by_role("button", name="Pause").click()
        shown = {line[0]: line for line in cells(page)}
    texts = {column.name: column.text for column in COLUMNS}
    engine = EngineRow(engine="0", now_s=100.0 + scene.turns, block_bytes=1 << 20)
    for one in rows:
        view = program_view(one, {"0": engine})
        line = shown[one.program_id]
        assert line[1] == texts["STATE"](view)
        assert line[7:10] == [texts[name](view) for name in ("CTX", "TURN", "TTFT")]
        assert line[11] == texts["LOST"](view)
        assert line[6][:2] == texts["LEASE"](view)[:2]
        if one.since_s < 0:  # so long ago that a second more does not show
            assert line[3] == texts["FOR"](view)
        tier, _, size = texts["KV"](view).partition(" ")
        assert (line[4].replace("device", "dev"), line[5].replace("–", "")) == (tier, size)


def test_a_broken_stream_is_said_and_mended(browser: Any) -> None:
    scene = Scene([row("agent-1")])
    with watched(browser, scene) as page:
        page.get_by_role("button", name="agent-1").wait_for()
        failing = [True]

        def broken(asked: dict[str, Any]) -> Any:
            if failing:
                raise RuntimeError("broken on purpose")
            return scene.snapshot(asked)

        scene.engine.per_engine[0]["snapshot"] = broken
        page.get_by_text("the server ended the stream; trying again").wait_for()
        failing.clear()
        page.wait_for_function("() => document.getElementById('connection').textContent == 'live'")


def test_a_page_of_another_release_than_the_server_is_loaded_again_once(
    browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_stream, "LiveFrame", partial(LiveFrame, v=FRAME_VERSION + 1))
    with watched(browser, Scene([row("agent-1")])) as page:
        page.get_by_text("this page is of another release than the server").wait_for()
        assert page.evaluate("performance.getEntriesByType('navigation')[0].type") == "reload"
        assert page.locator("#data").is_hidden()
