"""Checks the web page in a headless Chromium: opens it, reads its table, takes screenshots, runs axe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).parents[2] / "out" / "page"
DRAWN = """([red, green, blue]) => {
    const canvas = document.querySelector("#memory-chart .plot canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let found = 0;
    for (let i = 0; i < data.length; i += 4)
        found += data[i] === red && data[i + 1] === green && data[i + 2] === blue;
    return found > 1000;
}"""
"""JavaScript function that returns whether the chart has an area of a colour."""


@contextmanager
def opened(browser: Any, url: str, *, key: str = "", expected: str = "401", **settings: Any) -> Iterator[Any]:
    """Yield the page in a new browser profile. At the end, fails if the page loaded anything from another
    host, if it has errors that do not match ``expected``, or if an address contained the ``key``."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB", **settings)
    context.set_default_timeout(60_000)
    # On a system with LANG=C, Chromium reports this language. uPlot once drew nothing with it.
    context.add_init_script(
        "Object.defineProperty(Navigator.prototype, 'language', {get: () => 'en-US@posix'})"
    )
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(f"{url}/sojourn")
        yield page
        # The browser warns about this test's own reading of pixels.
        assert [error for error in errors if not re.search(f"{expected}|getImageData", error)] == []
        assert [address for address in asked if not address.startswith((url, "data:,"))] == []
        assert not key or not [address for address in asked if key in address]
    finally:
        context.close()


def shot(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def check_accessible(page: Any) -> None:
    """Check that axe finds no violation of WCAG 2.2 AA or of its best practices."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is missing")
    # The debugger evaluates this, so the page's content security policy does not apply.
    page.evaluate(f"() => {{ {axe.AXE_FILE_PATH.read_text(encoding='utf-8')} }}")
    found = page.evaluate("async () => (await axe.run()).violations")
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def cells(page: Any) -> list[list[str]]:
    rows: list[list[str]] = page.eval_on_selector_all(
        "#program-table tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return rows
