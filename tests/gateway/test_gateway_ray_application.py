"""The application on Ray Serve, without a cluster: progress, its end, and what gateways read of the
directory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.gateway.http.replica_addresses import rank_addresses
from sojourn_server.gateway.ray.ray_config import RayConfig, parse_config
from sojourn_server.routing.routing_events import PairRole, ReplicaRegistered
from sojourn_server.routing.routing_from_preset import PrefillDecodeRules

pytest.importorskip("ray.serve")

from ray.exceptions import RayError
from sojourn_server.gateway.ray import deployments, ray_application
from sojourn_server.gateway.ray.deployments import SILENT_S, Announcement, FleetDirectory


def config(**engines: Any) -> RayConfig:
    return parse_config({"model": "tiny", "engines": engines}, source="f.yaml")


# -- starting and stopping ------------------------------------------------------------------


def deployment(message: str = "", **states: int) -> Any:
    return SimpleNamespace(message=message, replica_states=states)


TROUBLE = (
    "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
    "Traceback (most recent call last):\n  many lines\n"
    f"EngineFailed: the engine ended with code 1 while starting:\nValueError: {'x' * 10_000}\n\n"
)


class StartingServe:
    """Ray Serve whose application has these statuses, one after the other."""

    RunTarget = staticmethod(lambda target, **options: target)

    def __init__(self, *statuses: Any) -> None:
        self._statuses = list(statuses)

    def start(self, **_: Any) -> None:
        pass

    def run_many(self, targets: Any, **_: Any) -> None:
        pass

    def status(self) -> Any:
        status = self._statuses.pop(0)
        if isinstance(status, Exception):
            raise status
        return SimpleNamespace(applications={"sojourn": status} if status is not None else {})


def deploy(monkeypatch: pytest.MonkeyPatch, *statuses: Any) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(ray_application, "serve", StartingServe(*statuses))
    monkeypatch.setattr(ray_application, "application", lambda _: None)
    monkeypatch.setattr(ray_application, "STATUS_POLL_S", 0.001)
    ray_application.deploy_application(config(min=2), threading.Event(), said.append)
    return said


def status(state: str, message: str = "", **deployments: Any) -> Any:
    return SimpleNamespace(status=state, message=message, deployments=deployments)


def test_each_change_of_a_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "1 replicas have taken more than 30s to initialize.\nThis may be caused by a slow __init__ or so."
    first = status("DEPLOYING", Engine=deployment(slow, STARTING=2), Gateway=deployment(RUNNING=2))
    failing = status("DEPLOYING", Engine=deployment(TROUBLE, RUNNING=1), Gateway=deployment(RUNNING=2))
    said = deploy(monkeypatch, None, first, first, RayError("gone"), failing, failing, status("RUNNING"))
    assert said[:3] == [
        "Ray does not answer after 0 s",
        "0 of 2 engines and 2 of 2 gateways are up after 0 s",
        "Ray does not answer after 0 s",
    ]
    assert said[3].startswith(
        "1 of 2 engines and 2 of 2 gateways are up after 0 s; A replica failed to start with exception. "
        "Retrying 2 more time(s). ValueError: xxx"
    )
    assert len(said) == 4
    assert len(said[3]) < 500


def test_a_failed_start_names_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = status("DEPLOY_FAILED", "Deploying failed", Engine=deployment(TROUBLE), Gateway=deployment())
    with pytest.raises(RuntimeError, match=r"exception\. Retrying 2 more time\(s\)\. ValueError: xxx"):
        deploy(monkeypatch, failed)


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


def test_what_was_not_begun_is_not_taken_off(shutdowns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster that runs, somebody else may have an application of this name."""

    def connect(config: RayConfig, **options: Any) -> None:
        raise RuntimeError("the cluster has 1 CPUs")

    fake = FakeServe(ends_after=1)
    monkeypatch.setattr(ray_application, "serve", fake)
    monkeypatch.setattr(ray_application, "connect", connect)
    monkeypatch.setattr(ray_application, "_handle_signals", lambda handler: None)
    said: list[str] = []
    with contextlib.suppress(RuntimeError):
        ray_application.serve_until_stopped(config(), said.append)
    assert fake.calls == []
    assert shutdowns == ["shutdown"]
    assert said == []


# -- engines and gateways ---------------------------------------------------------------------


def test_the_directory_lists_those_that_announced_themselves_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(deployments, "time", SimpleNamespace(monotonic=lambda: now_s))
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
        "pairs": {"store": "/kv", "read_side": "prefill"},
    }
    pairs = parse_config(given, source="f.yaml")
    gateway, _ = deployments.build_ray_gateway(pairs, "http://g:1")
    assert gateway.rules == PrefillDecodeRules(read_side="prefill")
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
    gateway.replicas[address.replica_id] = address
    gateway.routing_backend.tell(ReplicaRegistered(address.replica_id, "1", 1000))

    async def announce(one: Announcement) -> list[Announcement]:
        return [Announcement("http://a:1", "Engine", is_draining=True)]

    monkeypatch.setattr(deployments, "announce", announce)
    await deployments.read_directory(gateway, config(), "http://g:1")
    assert [one.health for one in gateway.routing_backend.replicas()] == ["draining"]


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
