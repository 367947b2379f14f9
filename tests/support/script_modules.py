"""Loads scripts outside the packages as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def load_script(path: str) -> Any:
    """Load the script at ``path`` below the repository's root. It is in ``sys.modules``, which its
    dataclasses need."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@contextmanager
def benchmark(name: str) -> Iterator[Any]:
    """Yield a script of benchmarks/. Inside the ``with`` block it can import the other scripts there."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(folder)
