"""Loads scripts outside the packages as modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = str(ROOT / "benchmarks")


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


def benchmark(name: str) -> Any:
    """Import a script of benchmarks/, which can import the other scripts there from then on."""
    if BENCHMARKS not in sys.path:
        sys.path.append(BENCHMARKS)
    return importlib.import_module(name)
