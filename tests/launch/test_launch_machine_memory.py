"""How much memory there is, read from files laid out as Linux lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest
from sojourn_server.launch.machine_memory import MachineMemory, read_memory

MIB = 1 << 20
UNLIMITED_1 = 9223372036854771712
"""What version 1 says where there is no limit."""

MOUNT_1 = "35 31 0:32 {shown} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
MOUNT_2 = "41 31 0:38 {shown} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
OTHERS = ["23 1 8:1 / / rw - ext4 /dev/sda1 rw", "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"]
TOP_1, TOP_2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


class Machine:
    """A root with ``proc`` of a machine of 1000 MiB, 800 of them available, and its control groups."""

    def __init__(self, root: Path, *, member: list[str], mounts: list[str]) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 1024000 kB\nMemFree: 1 kB\nMemAvailable: 819200 kB\nHuge: 0\n")
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in member))
        self.write("proc/self/mountinfo", "".join(f"{line}\n" for line in [*OTHERS, *mounts]))

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group_1(self, name: str, limit: int, used: int = 0, cache: int = 0) -> None:
        self.write(f"{name}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{name}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{name}/memory.stat", f"cache 7\ninactive_file 1\ntotal_inactive_file {cache}\n")

    def group_2(self, name: str, limit: int | str, used: int = 0, cache: int = 0) -> None:
        self.write(f"{name}/memory.max", f"{limit}\n")
        self.write(f"{name}/memory.current", f"{used}\n")
        self.write(f"{name}/memory.stat", f"anon 5\ninactive_file {cache}\nworkingset 3\n")

    def read(self) -> tuple[int, int, bool]:
        """MiB in all and available, and whether a control group has set the total."""
        memory = read_memory(self.root)
        return memory.total_bytes // MIB, memory.available_bytes // MIB, "control group" in memory.owner


def version_1(root: Path, member: str = "/a/b", shown: str = "/") -> Machine:
    return Machine(root, member=["9:cpu:/a", f"4:memory:{member}"], mounts=[MOUNT_1.format(shown=shown)])


def version_2(root: Path, member: str = "/a/b", shown: str = "/") -> Machine:
    return Machine(root, member=[f"0::{member}"], mounts=[MOUNT_2.format(shown=shown)])


def test_without_groups_it_is_the_machines(tmp_path):
    assert Machine(tmp_path, member=[], mounts=[]).read() == (1000, 800, False)
    assert read_memory(tmp_path).owner == "this machine"


def test_a_limit_of_version_1_counts_the_files_it_caches_as_available(tmp_path):
    machine = version_1(tmp_path)
    machine.group_1(TOP_1, UNLIMITED_1, 900 * MIB)
    machine.group_1(f"{TOP_1}/a", UNLIMITED_1, 900 * MIB)
    machine.group_1(f"{TOP_1}/a/b", 500 * MIB, 300 * MIB, 100 * MIB)
    assert machine.read() == (500, 300, True)


def test_a_limit_of_version_2_and_one_above_that_others_use_up(tmp_path):
    machine = version_2(tmp_path)
    machine.group_2(f"{TOP_2}/a", 600 * MIB, 550 * MIB, 10 * MIB)
    machine.group_2(f"{TOP_2}/a/b", 500 * MIB, 100 * MIB)
    assert machine.read() == (500, 60, True)


def test_the_lowest_limit_above_counts(tmp_path):
    machine = version_2(tmp_path)
    machine.group_2(f"{TOP_2}/a", 300 * MIB)
    machine.group_2(f"{TOP_2}/a/b", "max", 100 * MIB)
    assert machine.read() == (300, 300, True)


@pytest.mark.parametrize("version", [version_1, version_2])
def test_a_container_that_sees_its_own_group_only(tmp_path, version):
    for shown, member in (("/docker/x", "/docker/x"), ("/docker/x", "/elsewhere"), ("/", "/../../other")):
        machine = version(tmp_path / shown.strip("/").replace("/", "-") / member.strip("/"), member, shown)
        machine.group_1(TOP_1, 400 * MIB) if version is version_1 else machine.group_2(TOP_2, 400 * MIB)
        assert machine.read() == (400, 400, True), (shown, member)


def test_a_group_below_the_one_a_container_sees(tmp_path):
    machine = version_2(tmp_path, member="/docker/x/job", shown="/docker/x")
    machine.group_2(f"{TOP_2}/job", 200 * MIB)
    machine.group_2(f"{TOP_2}/docker/x/job", 100 * MIB)  # where it is not
    assert machine.read() == (200, 200, True)


def test_a_machine_with_both_has_its_limits_in_version_1(tmp_path):
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
    mounts = [MOUNT_1.format(shown="/"), unified]
    machine = Machine(tmp_path, member=["4:memory:/a", "0::/"], mounts=mounts)
    machine.group_1(f"{TOP_1}/a", 500 * MIB)
    (tmp_path / "sys/fs/cgroup/unified").mkdir()
    assert machine.read() == (500, 500, True)


def test_a_limit_above_the_machines_is_none(tmp_path):
    machine = version_2(tmp_path)
    machine.group_2(f"{TOP_2}/a/b", 2000 * MIB, 1999 * MIB)
    assert machine.read() == (1000, 800, False)


def test_more_used_than_allowed_leaves_nothing_and_not_less(tmp_path):
    machine = version_2(tmp_path)
    machine.group_2(f"{TOP_2}/a/b", 500 * MIB, 501 * MIB)
    assert machine.read() == (500, 0, True)


def test_mount_points_with_spaces(tmp_path):
    mount = r"41 31 0:38 / /my\040groups rw - cgroup2 cgroup2 rw"
    machine = Machine(tmp_path, member=["0::/a"], mounts=[mount])
    machine.group_2("my groups/a", 500 * MIB)
    assert machine.read() == (500, 500, True)


def test_without_control_group_files_the_machines_memory_counts(tmp_path):
    memory = read_memory(tmp_path)
    assert memory.total_bytes == memory.available_bytes > 0


def test_this_machine():
    memory = read_memory()
    assert isinstance(memory, MachineMemory)
    assert 0 < memory.available_bytes <= memory.total_bytes
