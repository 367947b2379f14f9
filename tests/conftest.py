"""Settings and hooks of all tests. Makes ``tests/support`` importable, which has shared helpers."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# At its import mini-swe-agent makes this folder, and reads settings in it.
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "mini-swe-agent")
# At its first logprobs, an engine compiles a function of vLLM, which takes three seconds. The servers of
# tests/engine/test_engine_server.py and test_engine_several_workers.py compile, as a user's server does.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Engines of several test processes share the cores. With one thread per core in each process, they would
    # wait for one another most of the time.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Processes that a shell starts in the background ignore Ctrl-C, and so do their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent / "support"))
from gc_tools import imports, old_objects_passed_over

# A user's settings of the terminal, the proxy and Python change what the tested commands print and reach. A
# test sets the ones that it needs.
SETTINGS_OF_A_USER = {
    "CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PYTHONSAFEPATH", "PYTHONWARNINGS",
}  # fmt: skip
for name in list(os.environ):
    if name in SETTINGS_OF_A_USER or name.lower().endswith("_proxy"):
        del os.environ[name]

try:
    from hypothesis import settings
except ModuleNotFoundError:  # the frameworks' environments lack it
    pass
else:
    # The duration of an example depends mostly on the machine's other load. A test that hangs has its own
    # timeout.
    usual = settings.get_profile("ci" if os.environ.get("CI") else "default")
    settings.register_profile("no deadline", usual, deadline=None)
    settings.load_profile("no deadline")
    # With pytest --hypothesis-profile=long, tests/fuzz takes an hour.
    settings.register_profile("long", settings.get_profile("default"), deadline=None, max_examples=20_000)


LONG = (
    "test_engine_models.py",
    "test_engine_kv_transfer.py",
    "test_engine_restarts.py",
    "test_engine_tokens.py",
    "test_engine_routes.py",
    "engine",
    "ray",
    "test_simulator_validation.py",
    "demo",
)
"""Files and folders whose tests take minutes, the longest first. If they began last, other cores would be
idle."""


ONE_ENGINE = {
    "tests/frameworks/test_frameworks_examples.py": "tests/frameworks/test_frameworks_engine.py",
}
"""File → another file whose tests run in the same process, because both files share an engine."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run a file's tests in one process, like ``--dist loadfile``. Files in ``ONE_ENGINE`` share a
    process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByEngine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return ONE_ENGINE.get(file, file)

        def _assign_work_unit(self, node: Any) -> None:
            # The long files keep two cores busy. Further processes begin at the other end of the queue, where
            # most tests wait for a clock or a socket.
            if self.nodes.index(node) >= 2:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return ByEngine(config, log)


def starts_processes(item: pytest.Item) -> bool:
    """Whether the test starts a real engine, a Ray cluster or a browser, whose speed depends on the
    machine."""
    return bool(
        item.get_closest_marker("engine")
        or item.get_closest_marker("ray")
        or "browser" in getattr(item, "fixturenames", ())
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out nightly tests unless ``-m`` names them. Run the long tests first. A file's tests stay
    together, in order. Tests that start processes may fail once.

    A test that timed out is not repeated, because ``pytest-timeout`` counts both runs of a test together.
    """
    if "nightly" not in config.option.markexpr:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    for item in items:
        if starts_processes(item):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except="Timeout .* from pytest-timeout"))
    items.sort(key=lambda item: (how_long(item.path), item.path.parts))


@cache
def how_long(file: Path) -> int:
    """Index of the first entry of ``LONG`` that is part of the path; ``len(LONG)`` if there is none."""
    parts = file.relative_to(Path(__file__).parent).parts  # a folder above may have such a name: /home/ray
    return next((i for i, name in enumerate(LONG) if name in parts), len(LONG))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Generator[None]:
    """Collect no garbage while pytest collects tests, because each collection would scan torch and vLLM
    again."""
    with imports():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtestloop() -> Generator[None]:
    """Exclude the objects that imports made from the garbage collections during tests."""
    with old_objects_passed_over():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any]:
    """Let each test process begin to collect with another folder. A process then finds byte code with
    rewritten asserts on disk if another process collected the file before. In lockstep each would compile it
    again."""
    outcome = yield
    workers = getattr(collector.config, "workerinput", None)
    if workers and collector.path == Path(__file__).parent and not isinstance(collector, pytest.Session):
        found = outcome.get_result().result
        number, count = int(workers["workerid"].removeprefix("gw")), workers["workercount"]
        first = len(found) * number // count
        found[:] = found[first:] + found[:first]


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test that has no ``ray`` marker and starts a cluster. Ray starts one at the first call of an
    actor. A minute after the cluster has stopped, Ray ends the process without a word."""
    runs_before = _ray_runs()
    yield
    if not runs_before and _ray_runs() and not item.get_closest_marker("ray"):
        sys.modules["ray"].shutdown()
        pytest.fail("this test started a Ray cluster; expected the marker ray, or no call of an actor")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect a folder's garbage at its end, so that its own warning filters apply. Reset the root logger's
    level, which an import of vLLM's server raises."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        gc.collect()
        logging.getLogger().setLevel(logging.WARNING)
