"""Fixtures that start one cluster for all tests here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from ray_cluster import Cluster
from ray_gateway import started


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray.serve")
    with started(Cluster) as made:
        yield made
