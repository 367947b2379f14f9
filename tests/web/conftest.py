"""One scripted engine and a client of its routes."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from web_tools import ScriptedEngine, client_of, engine_answers


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(engine_answers())


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)
