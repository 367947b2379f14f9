"""The web page of a running gateway before two engines, in a headless Chromium: keys, tenants, replicas,
tiers, timeline, explanation, accessibility. Screenshots lie in ``out/page``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import GatewayProcess
from headless_browser import headless_chromium
from page_viewer import DRAWN, cells, check_accessible, opened, shot
from sojourn.wire_events import ProgramStart, ToolStart
from virtual_engine import VirtualEngine, prompt
from virtual_fake_engine import VirtualFakeEngine

ADMIN = "root-key-4711"
TENANTS = {"a": "key-of-a-0815", "b": "key-of-b-0816"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless_chromium() as found:
        yield found


class Replicas:
    """Two engines in the event loop of a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.fakes = [VirtualFakeEngine() for _ in range(2)]

    def run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(60)

    def change(self, how: Callable[[], object]) -> None:
        """Change a virtual engine in the thread that answers for it."""

        async def changed() -> None:
            how()

        self.run(changed())

    def at(self, name: str) -> VirtualFakeEngine:
        return next(fake for fake in self.fakes if fake.name == name)


@contextmanager
def running_replicas() -> Iterator[Replicas]:
    replicas = Replicas()
    thread = threading.Thread(target=replicas.loop.run_forever)
    thread.start()
    try:
        for fake in replicas.fakes:
            replicas.run(fake.start())
        yield replicas
    finally:
        for fake in replicas.fakes:
            replicas.run(fake.stop())
        replicas.loop.call_soon_threadsafe(replicas.loop.stop)
        thread.join()
        replicas.loop.close()


def chat(url: str, tenant: str, program: str) -> str:
    """Run a request of a program; the replica that answered, which is the program's home from then on."""
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
        headers={"X-Session-ID": program, "Authorization": f"Bearer {TENANTS[tenant]}"},
        timeout=60, trust_env=False,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Sojourn-Replica"]


def run_turn(engine: VirtualEngine, program: str, tokens: list[int]) -> None:
    """A turn that waits, computes its prompt and writes its answer; a tool follows."""
    request = engine.arrive(program, tokens)
    engine.wait(0.4)
    engine.admit(request)
    engine.wait(1.2)
    engine.program_scheduler.first_token(request, engine.now)
    engine.wait(2.0)
    engine.finish(request)


def run_coder(engine: VirtualEngine) -> None:
    """Two turns of ``a/coder``, whose context ``b/rival`` takes between them; a child waits for its turn."""
    engine.tiers = {"host": {"used": 300, "free": 100}}
    engine.send(ProgramStart(program_id="a/coder", seq=-1, name="coder"))
    run_turn(engine, "a/coder", prompt(400))
    engine.wait(60.0)
    engine.evict(prompt(400), by="b/rival")
    run_turn(engine, "a/coder", prompt(480))
    engine.send(ProgramStart(program_id="a/child", seq=-1, parent_program_id="a/coder"))
    engine.arrive("a/child", prompt(40, seed=5))


def run_rival(engine: VirtualEngine) -> None:
    """A turn of ``b/rival``, then its tool."""
    engine.tiers = {"host": {"used": 20, "free": 380}, "disk": {"used": 700, "free": 300}}
    run_turn(engine, "b/rival", prompt(800, seed=1))
    engine.send(ToolStart(program_id="b/rival", seq=-1, call_id="c", tool="bash", tool_class="pytest"))


def sign_in(page: Any, key: str) -> None:
    page.wait_for_selector("#key-form:not([hidden])")
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Connect").click()


def engine_row(page: Any, name: str) -> dict[str, str]:
    """A row of the engines' table, by the column's head."""
    found: dict[str, str] = page.evaluate(
        """name => {
            const table = document.getElementById("engine-table");
            const row = [...table.tBodies[0].rows].find((row) => row.cells[0].textContent === name);
            const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
            return Object.fromEntries(heads.map((head, index) => [head, row.cells[index].textContent]));
        }""",
        name,
    )
    return found


def wait_for_health(page: Any, name: str, health: str) -> None:
    page.locator("#engine-table tbody tr", has_text=name).filter(has_text=health).wait_for()


def test_an_operator_and_a_tenant_look_at_a_running_gateway(browser: Any, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    lines = "".join(f'{name} = ["{key}"]\n' for name, key in TENANTS.items())
    tenants.write_text(f"[tenants]\n{lines}")
    with running_replicas() as replicas:
        urls = [fake.url for fake in replicas.fakes]
        flags = ("--tenants", str(tenants), "--admin-key", ADMIN, "--policy", "sojourn")
        with GatewayProcess(urls, tmp_path / "gateway.log", *flags) as gateway:
            home = chat(gateway.url, "a", "coder")
            other = next(fake.name for fake in replicas.fakes if fake.name != home)
            coder, rival = replicas.at(home), replicas.at(other)
            replicas.change(lambda: run_coder(coder.virtual))
            replicas.change(lambda: run_rival(rival.virtual))
            with opened(browser, gateway.url, key=ADMIN, color_scheme="dark") as page:
                look_as_operator(page, home, other)
                replicas.run(rival.kill())
                wait_for_health(page, other, "does not answer")
                page.get_by_text(f"Engine {other} does not answer.").wait_for()
                assert engine_row(page, home)["health"] == "answers"
                shot(page, "gateway-replica-down")
                replicas.run(rival.restart())
                wait_for_health(page, other, "answers")
                page.get_by_role("button", name="Forget the key").click()
                page.wait_for_selector("#key-form:not([hidden])")
                assert page.locator("#data").is_hidden()
            with opened(browser, gateway.url, key=TENANTS["a"], color_scheme="light") as page:
                look_as_tenant(page)


def look_as_operator(page: Any, home: str, other: str) -> None:
    sign_in(page, ADMIN)
    page.get_by_role("button", name="coder").wait_for()
    page.get_by_role("button", name="rival").wait_for()
    rows = {line[0]: line for line in cells(page)}
    assert {name: line[-2:] for name, line in rows.items()} == {
        "coder": ["a", home], "child": ["a", home], "rival": ["b", other],
    }  # fmt: skip
    assert [rows[name][1] for name in ("coder", "child", "rival")] == ["tool", "waiting", "tool"]
    assert (rows["rival"][2], rows["rival"][4]) == ("bash:pytest", "device")
    for name, host, disk in ((home, "used 75%", "–"), (other, "used 5%", "used 70%")):
        row = engine_row(page, name)
        assert (row["health"], row["policy"]) == ("answers", "fixed-ttl")
        assert "leased" in row["device memory"]
        assert host in row["host"]
        assert disk in row["disk"]
    page.get_by_label("Tier").select_option("disk")
    page.get_by_label("Split by").select_option("state")
    page.get_by_label("Tier").select_option("device")
    page.wait_for_function(DRAWN, arg=[0, 158, 115])
    check_accessible(page)
    shot(page, "gateway-dark")
    page.get_by_role("button", name="coder").click()
    page.locator(".explanation", has_text="by program b/rival").wait_for()
    told = page.locator(".timeline").get_attribute("aria-label")
    assert "Timeline of 2 turns" in told
    assert "queued 0.8s, prefilling 2.4s, decoding 4.0s" in told
    assert page.locator(".timeline rect.tool title").text_content() == "gap (bash:pytest) before turn 2: 60s"
    assert page.get_by_text("taken by b/rival").count() >= 1
    check_accessible(page)
    shot(page, "gateway-explanation")
    page.keyboard.press("Escape")


def look_as_tenant(page: Any) -> None:
    sign_in(page, TENANTS["b"] + "x")
    page.get_by_text("refused this key").wait_for()
    sign_in(page, TENANTS["a"])
    page.get_by_role("button", name="coder").wait_for()
    assert {line[0] for line in cells(page)} == {"coder", "child"}
    page.get_by_text("This key sees no totals of the engines").wait_for()
    numbers = page.locator("#numbers > div")
    assert numbers.filter(has_text="Computed again").locator("dd").first.text_content() == "400"
    assert numbers.filter(has_text="Device KV in use").locator("dd").first.text_content() == "–"
    assert [line[5] for line in cells(page) if line[0] == "coder"] == ["7.5K"]
    page.get_by_role("button", name="coder").click()
    page.locator(".explanation", has_text="evicted by another program after the lease").wait_for()
    assert "rival" not in page.content()
    check_accessible(page)
    shot(page, "gateway-tenant")
