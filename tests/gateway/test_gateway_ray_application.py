"""The application on Ray Serve, without a cluster: progress, its end, and what gateways read of the
directory."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.gateway.http.replica_addresses import rank_addresses
from sojourn_server.gateway.ray.ray_config import RayConfig, parse_config
from sojourn_server.routing.routing_events import PairRole, ReplicaRegistered

pytest.importorskip("ray.serve")

from sojourn_server.gateway.ray import deployments, fleet_directory, ray_application
from sojourn_server.gateway.ray.fleet_directory import SILENT_S, Announcement, FleetDirectory
from sojourn_server.gateway.ray.ray_application import (
    REPEAT_INTERVAL_S,
    RunningReplicas,
    StartupProgress,
    report_progress,
)

DEADLINE_S = 60.0


def config(**engines: Any) -> RayConfig:
    return parse_config({"model": "tiny", "engines": engines}, source="f.yaml")


# -- starting and stopping ------------------------------------------------------------------


def test_each_change_is_reported_once_and_repeated_after_a_while() -> None:
    lines = StartupProgress(2, 2, began_s=100.0)
    assert lines.line(RunningReplicas(0, 0), 101.0) is None
    assert lines.line(RunningReplicas(0, 2), 104.0) == "0 of 2 engines and 2 of 2 gateways are up after 4 s"
    assert lines.line(RunningReplicas(0, 2), 104.0 + REPEAT_INTERVAL_S - 0.1) is None
    assert (
        lines.line(RunningReplicas(0, 2), 104.0 + REPEAT_INTERVAL_S)
        == "0 of 2 engines and 2 of 2 gateways are up after 19 s"
    )
    trouble = (
        "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
        "Traceback (most recent call last):\n  many lines\n"
        f"EngineFailed: the engine ended with code 1 while starting:\nValueError: {'x' * 10_000}\n\n"
    )
    line = lines.line(RunningReplicas(1, 2, trouble), 130.0)
    assert line is not None
    assert line.startswith(
        "1 of 2 engines and 2 of 2 gateways are up after 30 s; A replica failed to start with exception. "
        "Retrying 2 more time(s). ValueError: xxx"
    )
    assert len(line) < 500


def test_lines_come_beside_what_waits_and_tell_that_ray_does_not_answer() -> None:
    said: list[str] = []
    came = threading.Event()
    answers = [RunningReplicas(1, 2)]
    now_s = 0.0

    def look() -> RunningReplicas:
        nonlocal now_s
        now_s += 1.0
        if answers:
            return answers.pop()
        raise RuntimeError("the controller is gone")

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            came.set()

    with report_progress(StartupProgress(2, 2, 0.0), look, say, clock=lambda: now_s, poll_s=0.001):
        assert came.wait(DEADLINE_S)
    assert said[:2] == [
        "1 of 2 engines and 2 of 2 gateways are up after 1 s",
        "1 of 2 engines and 2 of 2 gateways are up after 16 s; Ray does not answer",
    ]
    assert not any(thread.name == "start-progress" for thread in threading.enumerate())


class FakeServe:
    """Ray Serve of a cluster whose engines take ``ends_after`` calls to be left by all."""

    def __init__(self, ends_after: int) -> None:
        self.calls: list[str] = []
        self._left = ends_after

    def delete(self, name: str) -> None:
        self.calls.append(f"delete {name}")
        self._left -= 1
        if self._left > 0:
            raise TimeoutError("Some of these applications weren't deleted after 60s")


@pytest.fixture
def shutdowns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of Ray, which is not there; a minute goes by at each look at the clock."""
    calls: list[str] = []
    minutes = iter(range(10**6))
    monkeypatch.setattr(ray_application, "ray", SimpleNamespace(shutdown=lambda: calls.append("shutdown")))
    monkeypatch.setattr(ray_application, "time", SimpleNamespace(monotonic=lambda: 60.0 * next(minutes)))
    return calls


@pytest.mark.parametrize(("drain_s", "ends_after", "calls"), [(600, 4, {4}), (120, 1000, {2, 3, 4})])
def test_engines_get_their_time_to_be_left_by_all_and_no_more(
    shutdowns: list[str], monkeypatch: pytest.MonkeyPatch, drain_s: int, ends_after: int, calls: set[int]
) -> None:
    fake = FakeServe(ends_after)
    monkeypatch.setattr(ray_application, "serve", fake)
    ray_application.stop_application(config(drain_s=drain_s))
    assert len(fake.calls) in calls
    assert shutdowns == ["shutdown"]


@pytest.mark.parametrize("error", [RuntimeError("the cluster has 1 CPUs"), KeyboardInterrupt()])
def test_what_was_not_begun_is_not_taken_off(
    shutdowns: list[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """On a cluster that runs, somebody else may have an application of this name."""

    def connect(config: RayConfig, **options: Any) -> None:
        raise error

    fake = FakeServe(ends_after=1)
    monkeypatch.setattr(ray_application, "serve", fake)
    monkeypatch.setattr(ray_application, "connect", connect)
    monkeypatch.setattr(ray_application, "_handle_signals", lambda handler: None)
    said: list[str] = []
    with contextlib.suppress(RuntimeError):
        ray_application.serve_until_stopped(config(), said.append)
    assert fake.calls == []
    assert shutdowns == ["shutdown"]
    assert said == ([] if isinstance(error, RuntimeError) else ["stopped while engines were starting"])


def test_running_replicas_are_those_that_serve_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    schema: Any = pytest.importorskip("ray.serve.schema")

    def deployment(message: str, **states: int) -> Any:
        trigger = schema.DeploymentStatusTrigger.UNSPECIFIED
        return schema.DeploymentStatusOverview(schema.DeploymentStatus.UPDATING, trigger, states, message)

    def status(**deployments: Any) -> Any:
        of = schema.ApplicationStatusOverview(schema.ApplicationStatus.DEPLOYING, "", 0.0, deployments)
        return schema.ServeStatus(applications={"sojourn": of})

    now = schema.ServeStatus()
    monkeypatch.setattr(ray_application, "serve", SimpleNamespace(status=lambda: now))
    assert ray_application.running_replicas(config(min=2)) == RunningReplicas(0, 0)
    slow = "1 replicas have taken more than 30s to initialize.\nThis may be caused by a slow __init__ or so."
    now = status(Engine=deployment(slow, STARTING=1, RUNNING=1), Gateway=deployment("", RUNNING=2))
    assert ray_application.running_replicas(config(min=2)) == RunningReplicas(1, 2)
    # A cluster of our own neither grows nor installs anything: what is reserved is what matters.
    waits = "Deployment 'Engine' has 1 replicas that wait. "
    hint = f"{waits}{ray_application.CLUSTER_SCALING_HINT}Resources required: 9 CPUs."
    now = status(Engine=deployment(hint, STARTING=2))
    assert ray_application.running_replicas(config(min=2)).trouble == f"{waits}Resources required: 9 CPUs."
    elsewhere = parse_config({"model": "tiny", "address": "auto"}, source="f.yaml")
    assert ray_application.running_replicas(elsewhere).trouble == hint


def test_serve_still_writes_the_text_that_is_removed() -> None:
    from ray.serve._private import deployment_state

    source = re.sub(r'"\s+f?"', "", inspect.getsource(deployment_state))
    assert ray_application.CLUSTER_SCALING_HINT in source


def test_a_failed_start_names_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("Deploying application sojourn failed: Failed to update ['Engine'].")

    trouble = "A replica failed to start with exception. Error:\nTraceback\nValueError: no such model\n"
    monkeypatch.setattr(ray_application, "serve", SimpleNamespace(start=lambda **_: None, run=run))
    monkeypatch.setattr(ray_application, "application", lambda _: None)
    monkeypatch.setattr(ray_application, "running_replicas", lambda _: RunningReplicas(0, 2, trouble))
    with pytest.raises(RuntimeError) as raised:
        ray_application.deploy_application(config())
    assert str(raised.value).endswith(
        "['Engine']. A replica failed to start with exception. ValueError: no such model"
    )
    assert "\n" not in str(raised.value)


# -- engines and gateways ---------------------------------------------------------------------


def test_the_directory_lists_those_that_announced_themselves_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(fleet_directory, "time", SimpleNamespace(monotonic=lambda: now_s))
    it = FleetDirectory(on_loopback=False)
    old, new = Announcement("http://a:1", "Engine"), Announcement("http://b:1", "Engine")
    assert it.announce(old) == [old]
    now_s = SILENT_S / 2
    leaving = new._replace(is_draining=True)
    assert it.announce(new) == [old, new]
    assert it.announce(leaving) == [old, leaving]
    now_s = SILENT_S
    assert it.announce(leaving) == [leaving]


async def test_a_gateway_follows_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "model": "m",
        "prefill": {},
        "decode": {"min": 2},
        "pairs": {"store": "/kv", "read_side": "split"},
    }
    pairs = parse_config(given, source="f.yaml")
    gateway, _ = deployments.build_ray_gateway(pairs, "http://g:1")
    assert gateway.options.read_side == "split"
    assert gateway.monitor is not None
    rounds = 0

    async def announce(one: Announcement) -> list[Announcement]:
        nonlocal rounds
        rounds += 1
        assert one == Announcement("http://g:1", "Gateway")
        if rounds == 1:
            raise RuntimeError("the directory is being replaced")
        return [one, Announcement("http://d:1", "Decode"), Announcement("http://p:1", "Prefill")]

    watched: list[Any] = []
    monkeypatch.setattr(deployments, "announce", announce)
    monkeypatch.setattr(deployments, "ANNOUNCE_S", 0.001)
    monkeypatch.setattr(gateway.monitor, "watch", lambda *told: watched.append(told))
    following = asyncio.ensure_future(deployments.follow_directory(gateway, pairs, "http://g:1"))
    while not watched:
        await asyncio.sleep(0.001)
    following.cancel()
    roles = {"http://d:1": PairRole.DECODE, "http://p:1": PairRole.PREFILL}
    assert watched[0] == (roles, ["Decode"]), "one decode engine of two is absent"


async def test_an_engine_that_is_about_to_stop_gets_no_new_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, _ = deployments.build_ray_gateway(config(), "http://g:1")
    [address] = rank_addresses("http://a:1", 1)
    gateway.replicas.add(address)
    gateway.routing_backend.tell(ReplicaRegistered(address.replica_id, "1", 1000))

    async def announce(one: Announcement) -> list[Announcement]:
        return [Announcement("http://a:1", "Engine", is_draining=True)]

    monkeypatch.setattr(deployments, "announce", announce)
    monkeypatch.setattr(deployments, "ANNOUNCE_S", 0.001)
    following = asyncio.ensure_future(deployments.follow_directory(gateway, config(), "http://g:1"))
    while [one.health for one in await gateway.routing_backend.replicas()] != ["draining"]:
        await asyncio.sleep(0.001)
    following.cancel()


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        ({}, 5),
        ({"a": 0.0}, 1),
        ({"a": 1.0, "b": 1.0}, 2),
        ({"a": 1.19, "b": 1.19}, 3),
        ({"a": 0.3, "b": 0.3}, 1),
    ],
)
def test_there_are_as_many_engines_as_carry_the_load_at_the_target_use(
    reported: dict[str, float], wanted: int
) -> None:
    metrics = {deployments.ENGINES_METRIC: reported} if reported else None
    context: Any = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=5)
    assert deployments.autoscaling_policy(context) == (wanted, {})


def test_each_gateway_of_a_node_takes_the_next_port() -> None:
    with deployments.own_socket("127.0.0.1", None) as first:
        port = first.getsockname()[1]
        with deployments.own_socket("127.0.0.1", port) as second:
            assert port < second.getsockname()[1]


def test_both_ports_are_announced() -> None:
    assert ray_application.listen_addresses(config()) == "http://127.0.0.1:8100 answers"
    direct = parse_config({"model": "tiny", "direct_port": 8101}, source="f.yaml")
    assert ray_application.listen_addresses(direct) == (
        "http://127.0.0.1:8100 answers, and http://127.0.0.1:8101 without Serve's proxy"
    )
