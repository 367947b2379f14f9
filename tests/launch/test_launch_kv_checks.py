"""Checks of host memory, disk and pairs before an engine starts, on real folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sojourn_server.kv_offload.shared_store import KvIdentity, SharedStore
from sojourn_server.launch import kv_options
from sojourn_server.launch.engine_flags import InvalidOption
from sojourn_server.launch.kv_options import (
    GIB,
    KvOffloadOptions,
    PrefillDecodeOptions,
    check_host_memory,
    check_machine,
)
from sojourn_server.launch.launch_environment import MachineMemory, read_memory, shares_memory_with_gpu

WEIGHTS = "/models/a [('w', 1, 2)]"
IDENTITY = KvIdentity(
    model=f"{WEIGHTS} torch.float32 abc None auto",
    kv_dtype="float32",
    block_tokens=32,
    block_bytes=1000,
    layers=3,
    hash_scheme="sha256/seed=0/32",
    vllm_version="0.32.0",
)


def make_store(root: Path) -> None:
    SharedStore(root, IDENTITY, budget_bytes=GIB)


def check(disk: Path, *, version: str = "0.32.0", weights: str = WEIGHTS) -> list[str]:
    wanted = KvOffloadOptions(host_gib="1e-6", disk=str(disk), disk_gib=1e-6)
    return check_machine(wanted, PrefillDecodeOptions(), version, weights)


def test_a_new_folder_and_a_store_of_the_same_kind_are_fine_and_stay_as_they_are(tmp_path: Path) -> None:
    assert check(tmp_path / "new" / "folder") == []
    make_store(tmp_path / "kv")
    before = sorted(tmp_path.rglob("*"))
    assert check(tmp_path / "kv") == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_of_another_release_or_of_other_weights_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    with pytest.raises(InvalidOption, match=r"0\.32\.0"):
        check(tmp_path, version="0.33.0")
    with pytest.raises(InvalidOption, match="cannot be used"):
        check(tmp_path, weights="/models/b [('w', 9, 9)]")


def test_more_host_memory_than_there_is_is_refused_and_too_little_is_noted() -> None:
    memory = MachineMemory(8 * GIB, 2 * GIB, "this machine")
    assert check_host_memory(1, memory, "--kv-host-gib") == []
    (note,) = check_host_memory(4, memory, "--kv-host-gib")
    assert "--kv-host-gib is 4, but 2.00 GiB of the 8.00 GiB of this machine are available now" in note
    with pytest.raises(InvalidOption, match=r"expected at most the 8\.00 GiB of this machine"):
        check_host_memory(9, memory, "--kv-host-gib")


def pair(store: Path, **options: Any) -> list[str]:
    wanted = PrefillDecodeOptions(role="decode", store=str(store), buffer_gib=1e-6, **options)
    return check_machine(KvOffloadOptions(), wanted, "0.32.0", WEIGHTS)


def test_the_store_of_a_pair_is_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="does not exist") as refused:
        pair(tmp_path / "store")
    assert "mount it" in refused.value.next_step
    assert pair(tmp_path) == []


def test_host_memory_and_buffers_of_a_pair_are_checked_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MachineMemory(8 * GIB, 8 * GIB, "this machine")
    monkeypatch.setattr(kv_options, "read_memory", lambda: memory)
    wanted = PrefillDecodeOptions(role="prefill", store=str(tmp_path), buffer_gib=4)
    assert check_machine(KvOffloadOptions(host_gib="4"), wanted, "0.32.0", WEIGHTS) == []
    with pytest.raises(InvalidOption, match="--kv-host-gib plus --kv-buffer-gib is 9; expected at most"):
        check_machine(KvOffloadOptions(host_gib="5"), wanted, "0.32.0", WEIGHTS)


# -- memory ----------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    ("member", "groups", "expected"),
    [
        ("0::/", {}, (1000, 800, False)),
        ("0::/a/b", {"/a/b": (500, 300, 100)}, (500, 300, True)),
        ("0::/a/b", {"/a/b": (500, 100, 0), "/a": (600, 550, 0)}, (500, 50, True)),
        ("0::/a/b", {"/a/b": ("max", 100, 0), "/a": (300, 0, 0)}, (300, 300, True)),
        ("0::/a", {"/a": (2000, 100, 0)}, (1000, 800, False)),
        ("0::/a", {"/a": (100, 200, 0)}, (100, 0, True)),
        ("0::/on/the/host", {"": (400, 100, 0)}, (400, 300, True)),
    ],
    ids=["no groups", "cached", "parent is full", "the parent's", "above machine's", "all used", "container"],
)  # fmt: skip
def test_memory_is_the_machines_or_its_control_groups(
    tmp_path: Path, member: str, groups: dict[str, Any], expected: tuple[int, int, bool]
) -> None:
    """On a machine of 1000 MiB, 800 of them available. ``groups``: folder → limit, use and cached files in
    MiB. ``expected``: MiB in all and available, and whether a control group has set the total."""
    files = {
        "proc/meminfo": "MemTotal: 1024000 kB\nMemFree: 1 kB\nMemAvailable: 819200 kB\n",
        "proc/self/cgroup": f"{member}\n",
    }
    for name, (limit, used, cached) in groups.items():
        folder = f"sys/fs/cgroup{name}"
        files[f"{folder}/memory.max"] = f"{limit if isinstance(limit, str) else limit * MIB}\n"
        files[f"{folder}/memory.current"] = f"{used * MIB}\n"
        files[f"{folder}/memory.stat"] = f"inactive_anon 5\ninactive_file {cached * MIB}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    memory = read_memory(tmp_path)
    found = memory.total_bytes // MIB, memory.available_bytes // MIB, "control group" in memory.owner
    assert found == expected


@pytest.mark.parametrize(
    ("name", "text", "shared"),
    [
        ("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 1\n", False),
        ("proc/driver/nvidia/gpus/000f:01:00.0/information", "Model: \t\t NVIDIA GB10\n", True),
        ("proc/device-tree/compatible", "nvidia,p3737\0nvidia,tegra234\0", True),
        ("proc/device-tree/compatible", "raspberrypi\0", False),
    ],
)
def test_whether_the_gpu_has_memory_of_its_own(tmp_path: Path, name: str, text: str, shared: bool) -> None:
    assert not shares_memory_with_gpu(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert shares_memory_with_gpu(tmp_path) is shared
