"""One cluster for all tests here."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from ray_cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray.serve")
    home = Path(tempfile.mkdtemp(prefix="sjr-"))
    made = Cluster(home)
    try:
        made.start()
        yield made
    finally:
        try:
            made.stop()
        finally:
            shutil.rmtree(home, ignore_errors=True)
