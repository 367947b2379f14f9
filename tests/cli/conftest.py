from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tested_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend that a tested release of vLLM is installed, and give this test its own cache."""
    from sojourn_server.vllm import compat

    monkeypatch.setattr(compat, "installed_vllm", lambda: compat.TESTED_VLLM[-1])
    monkeypatch.setenv("SOJOURN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SOJOURN_UNTESTED_VLLM", raising=False)
