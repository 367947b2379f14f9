"""What is committed about vLLM's releases is true, and the source of a new one shows what would break."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from script_modules import load_script
from sojourn_server.vllm import compat

ROOT = Path(__file__).parents[2]
release_surface = load_script("scripts/release_surface.py")
CALLED, OVERRIDDEN, READ = release_surface.CALLED, release_surface.OVERRIDDEN, release_surface.READ
differences, known_surfaces = release_surface.differences, release_surface.known_surfaces
directory_source, read_surface = release_surface.directory_source, release_surface.read_surface
SINCE = {
    "vllm.v1.core.sched.scheduler.Scheduler._set_kv_fetch_stage": "0.32.0",
    "vllm.v1.outputs.AsyncModelRunnerOutput.get_kv_connector_output": "0.33.0",
}
"""Names that not every known release has."""


def used() -> set[str]:
    members = {
        ".".join((*compat.UPSTREAM[name], member))
        for table in (OVERRIDDEN, CALLED, READ)
        for name, members in table.items()
        for member in members
    }
    return members | {".".join(source) for source in compat.UPSTREAM.values()}


def test_the_surfaces_are_those_of_the_tested_releases():
    assert tuple(known_surfaces()) == compat.TESTED_VLLM


@pytest.mark.parametrize("version", compat.TESTED_VLLM)
def test_every_tested_release_has_what_sojourn_uses(version):
    missing = used() - set(known_surfaces()[version])
    assert missing == {name for name, since in SINCE.items() if since > version}


def test_the_installed_release_is_as_committed():
    pytest.importorskip("vllm")
    package, version = compat.package_directory(), compat.installed_vllm()
    found = read_surface(directory_source(package.parent))
    assert differences(found, known_surfaces()[version.split("+")[0]]) == []


def test_every_override_of_the_adapter_is_listed():
    """A method that is overridden and not listed could change without a word."""
    pytest.importorskip("vllm")
    from sojourn_server.vllm import free_block_queue, kv_connector, scheduler, waiting_queue
    from sojourn_server.vllm.kv_offload_connector import SojournConnector
    from sojourn_server.vllm.kv_transfer_connector import PathsConnector

    for own, name in (
        (scheduler.SojournMixin, "Scheduler"),
        (waiting_queue.PolicyRequestQueue, "RequestQueue"),
        (free_block_queue.ProgramFreeBlockQueue, "FreeKVCacheBlockQueue"),
        (kv_connector.KVConnector, "KVConnectorBase_V1"),
        (SojournConnector, "KVConnectorBase_V1"),
        (PathsConnector, "KVConnectorBase_V1"),
    ):
        listed, upstream = OVERRIDDEN[name], getattr(compat, name)
        overridden = {
            method
            for method in vars(own)
            if method in vars(upstream)
            and (callable(vars(own)[method]) or isinstance(vars(own)[method], classmethod))
        }
        assert overridden <= set(listed), own


HELD_AS = {
    "scheduler": "Scheduler", "_scheduler": "Scheduler", "manager": "KVCacheManager",
    "kv_cache_manager": "KVCacheManager", "block_pool": "BlockPool", "block": "KVCacheBlock",
    "request": "Request", "_coordinator": "KVCacheCoordinator",
}  # fmt: skip
"""Upstream class by the name under which the adapter's modules hold an object of it."""
OURS = {"offload_manager.py": {"request", "live_requests"}}
"""What modules ask our own scheduler, which they call by the same name."""


def test_every_attribute_that_the_adapter_uses_is_listed():
    """An attribute that is used and not listed could be renamed without a word."""
    listed = {name: set() for name in HELD_AS.values()}
    for table in (OVERRIDDEN, CALLED, READ):
        for name in listed:
            listed[name] |= set(table.get(name, ()))
    used_somewhere = 0
    for path in sorted(Path(compat.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                held = getattr(node.value, "attr", getattr(node.value, "id", None))
                if held in HELD_AS and node.attr not in OURS.get(path.name, ()):
                    assert node.attr in listed[HELD_AS[held]], f"{path.name}:{node.lineno}"
                    used_somewhere += 1
    assert used_somewhere > 100


SOURCE = """
class Base:
    def inherited(self, a): ...

class Thing(Base):
    shown: int = 3

    def __init__(self, a: int, *, b: str = "x") -> None:
        "Docs."
        self.kept = a

    @property
    def told(self): return 1
"""


def surface_of(source: str, monkeypatch) -> dict[str, str]:
    upstream = {"Thing": ("vllm.thing", "Thing"), "gone": ("vllm.thing", "gone")}
    monkeypatch.setattr(release_surface, "UPSTREAM", upstream)
    monkeypatch.setattr(release_surface, "OVERRIDDEN", {"Thing": ("__init__", "inherited")})
    monkeypatch.setattr(release_surface, "CALLED", {})
    monkeypatch.setattr(release_surface, "READ", {"Thing": ("shown", "kept", "told", "missing")})
    return read_surface({"vllm/thing.py": source}.get)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("self.kept = a", "self.kept = a + 1", "vllm.thing.Thing.__init__ has another body"),
        ('"Docs."', '"Other docs."', None),
        ("a: int, *,", "a, *,", None),
        ("a: int, *,", "a, c, *,", "vllm.thing.Thing.__init__ is (self, a, c, *, b='x'); expected (self, a"),
        ("shown: int = 3", "", "vllm.thing.Thing.shown is gone"),
        ("class Thing", "class Other", "vllm.thing.Thing is gone"),
        ("told(self)", "untold(self)", "vllm.thing.Thing.told is gone"),
        ("inherited(self, a)", "inherited(self)", "vllm.thing.Thing.inherited is (self); expected (self, a)"),
        ("self.kept = a", "self.kept = a; self.missing = 1", "vllm.thing.Thing.missing is new: attribute"),
    ],
)
def test_what_differs_is_named(old, new, line, monkeypatch):
    lines = differences(surface_of(SOURCE.replace(old, new), monkeypatch), surface_of(SOURCE, monkeypatch))
    if line is None:
        assert lines == []
    else:
        assert any(each.startswith(line) for each in lines), lines


def test_a_wheel_is_read_without_installing_it(tmp_path):
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    package = compat.package_directory()
    if package is None:
        pytest.skip("vLLM is not installed")
    with ZipFile(wheel, "w") as archive:
        for module in {module for module, _ in compat.UPSTREAM.values()}:
            path = Path(*module.split("."))
            for name in (path.with_suffix(".py"), path / "__init__.py"):
                broken = name.stem == "request_queue"
                if (package.parent / name).exists() and not broken:
                    archive.write(package.parent / name, name.as_posix())
        archive.writestr("vllm/v1/core/sched/request_queue.py", "class RequestQueue: ...\n")
    command = [sys.executable, str(ROOT / "scripts" / "vllm_release.py")]
    done = subprocess.run([*command, "check", str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"from {compat.TESTED_VLLM[-1]}, the newest known release" in done.stdout
    assert "vllm.v1.core.sched.request_queue.RequestQueue.pop_request is gone" in done.stdout


def test_the_committed_file_is_sorted_and_of_known_shape():
    path = ROOT / "scripts/release_surfaces.json"
    document = json.loads(path.read_text())
    assert all(list(surface) == sorted(surface) for surface in document.values())
