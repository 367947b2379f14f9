"""Checks of this machine's memory and paths before an engine starts. ``tests/cli`` has those of stores."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
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


def test_more_host_memory_than_there_is_is_refused_and_too_little_is_noted() -> None:
    memory = MachineMemory(8 * GIB, 2 * GIB, "this machine")
    assert check_host_memory(1, memory, "--kv-host-gib") == []
    (note,) = check_host_memory(4, memory, "--kv-host-gib")
    assert "--kv-host-gib is 4, but 2.00 GiB of the 8.00 GiB of this machine are available now" in note
    with pytest.raises(InvalidOption, match=r"expected at most the 8\.00 GiB of this machine"):
        check_host_memory(9, memory, "--kv-host-gib")


def test_host_memory_and_buffers_of_a_pair_are_checked_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MachineMemory(8 * GIB, 8 * GIB, "this machine")
    monkeypatch.setattr(kv_options, "read_memory", lambda: memory)
    wanted = PrefillDecodeOptions(role="prefill", store=str(tmp_path), buffer_gib=4)
    assert check_machine(KvOffloadOptions(host_gib="4"), wanted, {}, "0.32.0", "m") == []
    with pytest.raises(InvalidOption, match="--kv-host-gib plus --kv-buffer-gib is 9; expected at most"):
        check_machine(KvOffloadOptions(host_gib="5"), wanted, {}, "0.32.0", "m")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "is a directory; expected a file"),
        ("file/new/h", "file/new cannot be used: Not a directory"),
        ("/proc/new/h", "/proc/new cannot be used"),
        ("new/folder/h", ""),
    ],
)
def test_a_path_at_which_nothing_can_be_written_is_refused(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    files = {"--sojourn-history": str(tmp_path / path), "--sojourn-network": None}
    with pytest.raises(InvalidOption, match=why) if why else nullcontext():
        check_machine(KvOffloadOptions(), PrefillDecodeOptions(), files, None, "m")
    with pytest.raises(InvalidOption, match="/proc/kv cannot be used"):
        check_machine(KvOffloadOptions(disk="/proc/kv"), PrefillDecodeOptions(), {}, None, "m")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


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
