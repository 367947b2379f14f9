"""Makes ``tests/support`` importable: fakes that several rooms share."""

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

os.environ["SOJOURN_HISTORY"] = "off"  # no test writes what it learned into the home of whoever runs it
# At its first logprobs, an engine compiles a function of vLLM, which takes three seconds. The servers of
# tests/engine/test_engine_server.py and test_engine_several_workers.py compile, as a user's server does.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Engines of several test processes share the cores: with a thread for every core each, they would
    # wait for one another most of the time.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    forked = Path(__file__).parent / "support" / "forked_processes"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(forked))))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it starts in the background ignore Ctrl-C, and a process has its children do the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent / "support"))
from gc_tools import imports, old_objects_passed_over
from warm_python import fork_for_multiprocessing, forks_simulations, start_engines_warm

if "PYTEST_XDIST_WORKER" in os.environ and sys.platform == "linux":
    start_engines_warm()
    fork_for_multiprocessing(pytest.MonkeyPatch(), forks_simulations)

try:
    from hypothesis import settings
except ModuleNotFoundError:  # the frameworks' environments do without
    pass
else:
    # How long an example takes says more of what else the machine does; a test that hangs has its timeout.
    usual = settings.get_profile("ci" if os.environ.get("CI") else "default")
    settings.register_profile("no deadline", usual, deadline=None)
    settings.load_profile("no deadline")
    # pytest --hypothesis-profile=long: an hour for all of tests/fuzz.
    settings.register_profile("long", settings.get_profile("default"), deadline=None, max_examples=20_000)


LONG = (
    "test_engine_gateway_ray.py",
    "test_engine_prefill_decode_ray.py",
    "test_engine_models.py",
    "test_engine_kv_transfer.py",
    "test_engine_restarts.py",
    "test_engine_async_scheduling.py",
    "test_engine_tokens.py",
    "test_engine_routes.py",
    "engine",
    "ray",
    "test_simulator_validation.py",
    "test_simulator_parity_engine.py",
    "demo",
)
"""Files and folders whose tests take minutes, the longest first: begun last, they would leave a core idle."""


ONE_ENGINE = {
    "tests/frameworks/test_frameworks_examples.py": "tests/frameworks/test_frameworks_engine.py",
    "tests/gateway/ray/test_pairs_on_ray.py": "tests/gateway/ray/test_on_ray.py",
}
"""Files whose tests go to the process that has another file's: both want one engine or cluster, which starts
once."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay in one process, as usual with ``--dist loadfile``, and some files' with others'."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByEngine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return ONE_ENGINE.get(file, file)

        def _assign_work_unit(self, node: Any) -> None:
            # The long files keep two cores busy. Further processes begin at the other end: most of those
            # tests wait for a clock or a socket.
            if self.nodes.index(node) >= 2:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return ByEngine(config, log)


def starts_processes(item: pytest.Item) -> bool:
    """It starts a real engine, a Ray cluster or a browser, whose pace is the machine's."""
    return bool(
        item.get_closest_marker("engine")
        or item.get_closest_marker("ray")
        or "browser" in getattr(item, "fixturenames", ())
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first; a file's tests stay together, in their order. What starts processes may fail once.

    What was too slow is not begun again: ``pytest-timeout`` counts once for both runs of a test.
    """
    for item in items:
        if starts_processes(item):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except="Timeout .* from pytest-timeout"))
    items.sort(key=lambda item: (how_long(item.path), item.path.parts))


@cache
def how_long(file: Path) -> int:
    """Place of a test file's tests among the longest ones."""
    return next((i for i, name in enumerate(LONG) if name in file.parts), len(LONG))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Generator[None]:
    """No garbage is collected while tests are: each collection would scan torch and vLLM once more."""
    with imports():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtestloop() -> Generator[None]:
    """What the imports of all tests made is not scanned again by every collection of the tests."""
    with old_objects_passed_over():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any]:
    """Each of several processes begins to collect with another folder. One that comes to a file after another
    process finds its byte code, with the asserts rewritten, on disk; in lockstep each would make it anew."""
    outcome = yield
    workers = getattr(collector.config, "workerinput", None)
    if workers and collector.path == Path(__file__).parent and not isinstance(collector, pytest.Session):
        found = outcome.get_result().result
        number, count = int(workers["workerid"].removeprefix("gw")), workers["workercount"]
        first = len(found) * number // count
        found[:] = found[first:] + found[:first]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect each folder's garbage under its own filters: what an engine leaves is no finding elsewhere. Nor
    is the level of the root logger, which an import of vLLM's server raises."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        gc.collect()
        logging.getLogger().setLevel(logging.WARNING)
