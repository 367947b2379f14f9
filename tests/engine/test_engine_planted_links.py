"""A hostile user plants links in a running engine's disk store: no file outside changes, and no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_tools import LOUD_BLOCK_BYTES, with_tiers
from multi_turn_programs import generate, usual_hint

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

FEW: dict[str, Any] = {"programs": 4, "turns": 2}
SECRET = b"not of the store"


@pytest.fixture(scope="module")
def stock(loud_model: str) -> list[list[int]]:
    return generate(loud_model, None, hints=False, **FEW)[0]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of an engine with a store in ``kv``, beside ``outside``."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(SECRET)
    return with_tiers(host_bytes=20 * LOUD_BLOCK_BYTES, disk=str(tmp_path / "kv"), disk_bytes=1 << 30)


def outside_of(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tmp_path / "outside").iterdir()}


def test_folders_of_blocks_that_are_links_are_not_written_to(
    loud_model: str, stock: list[list[int]], disk: dict[str, Any], tmp_path: Path
) -> None:
    """They are planted while the engine runs, before it has written a block."""

    def plant(program: int, turn: int) -> str:
        if (program, turn) == (0, 0):
            (store,) = (tmp_path / "kv").iterdir()
            assert not list(store.glob("*/*"))
            for number in range(256):
                (store / f"{number:02x}").symlink_to(tmp_path / "outside")
        return usual_hint(program)

    tokens, report = generate(loud_model, {"policy": "continuum"}, hints=plant, **FEW, **disk)
    assert tokens == stock
    assert outside_of(tmp_path) == {"secret": SECRET}
    assert report["stats"]["ledger"]["turns"] > 0


def test_blocks_that_are_links_are_neither_read_nor_written_through(
    loud_model: str, stock: list[list[int]], disk: dict[str, Any], tmp_path: Path
) -> None:
    """One engine writes blocks. Each becomes a link to a file outside, and so does its partial file."""
    assert generate(loud_model, {"policy": "continuum"}, hints=True, **FEW, **disk)[0] == stock
    blocks = list((tmp_path / "kv").glob("*/*/*.kv"))
    assert blocks
    for block in blocks:
        block.unlink()
        for planted in (block, block.with_suffix(".partial")):
            planted.symlink_to(tmp_path / "outside" / "secret")
    tokens, report = generate(loud_model, {"policy": "continuum"}, hints=True, **FEW, **disk)
    assert tokens == stock
    assert outside_of(tmp_path) == {"secret": SECRET}
    assert not any(row["tokens"]["host"] for row in report["ledger"] if row["turn"] == 1), "nothing was read"
