"""One scripted engine and a client of its routes."""

from __future__ import annotations

import pytest
from api_test_engines import ScriptedEngine, client_of, engine_answers
from fastapi.testclient import TestClient


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(engine_answers())


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)
