"""The command on Ray, without a cluster: what it says while engines start, how long it waits at its end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import threading
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import httpx
import pytest
from gateway_harness import no_more_files, until
from sojourn_server.gateway.http.engine_client import open_session
from sojourn_server.gateway.http.gateway_metrics import GatewayMetrics
from sojourn_server.gateway.ray.ray_application import (
    REPEAT_INTERVAL_S,
    RunningReplicas,
    StartupProgress,
    report_progress,
    summarize_error,
)
from sojourn_server.gateway.ray.ray_config import RayConfig, parse_config
from sojourn_server.routing.routing_events import ProbeReplica

DEADLINE_S = 60.0


def config(**engines: Any) -> RayConfig:
    return parse_config({"model": "tiny", "engines": engines}, source="f.yaml")


def test_each_change_is_reported_once_and_repeated_after_a_while() -> None:
    lines = StartupProgress(2, 2, began_s=100.0)
    assert lines.line(RunningReplicas(0, 0), 101.0) is None
    assert lines.line(RunningReplicas(0, 2), 104.0) == "0 of 2 engines and 2 of 2 gateways are up after 4 s"
    assert lines.line(RunningReplicas(0, 2), 104.0 + REPEAT_INTERVAL_S - 0.1) is None
    assert (
        lines.line(RunningReplicas(0, 2), 104.0 + REPEAT_INTERVAL_S)
        == "0 of 2 engines and 2 of 2 gateways are up after 19 s"
    )
    assert lines.line(RunningReplicas(0, 2), 105.0 + REPEAT_INTERVAL_S) is None
    assert (
        lines.line(RunningReplicas(1, 2), 106.0 + REPEAT_INTERVAL_S)
        == "1 of 2 engines and 2 of 2 gateways are up after 21 s"
    )


def test_the_first_line_comes_even_if_nothing_changes() -> None:
    lines = StartupProgress(1, 2, began_s=0.0)
    assert (
        lines.line(RunningReplicas(0, 0), REPEAT_INTERVAL_S)
        == "0 of 1 engines and 0 of 2 gateways are up after 15 s"
    )


def test_an_engine_that_does_not_start_is_reported_in_one_line() -> None:
    trouble = (
        "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
        "Traceback (most recent call last):\n  many lines\n"
        "EngineFailed: the engine ended with code 1 while starting:\nValueError: no such model\n\n"
    )
    line = StartupProgress(1, 2, began_s=0.0).line(RunningReplicas(0, 2, trouble), 3.0)
    assert line == (
        "0 of 1 engines and 2 of 2 gateways are up after 3 s; A replica failed to start with exception. "
        "Retrying 2 more time(s). ValueError: no such model"
    )


@pytest.mark.parametrize(
    "trouble", ["x" * 10_000, "x" * 10_000 + "\n" + "y" * 10_000, "one", "Error:\n", "a\n", "\n"]
)
def test_an_error_summary_is_one_short_line(trouble: str) -> None:
    assert "\n" not in summarize_error(trouble)
    assert len(summarize_error(trouble)) < 500


def test_a_cluster_that_does_not_answer_any_more_hides_nothing() -> None:
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


def test_lines_come_beside_what_waits_and_end_with_it() -> None:
    said: list[str] = []
    came = threading.Event()
    looks = 0

    def look() -> RunningReplicas:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise RuntimeError("the controller is not there yet")
        return RunningReplicas(looks, 2)

    def say(text: str) -> None:
        said.append(text)
        came.set()

    with report_progress(StartupProgress(9, 2, 0.0), look, say, clock=lambda: 5.0, poll_s=0.001):
        assert came.wait(DEADLINE_S)
    assert said[0] == "3 of 9 engines and 2 of 2 gateways are up after 5 s"
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
def on_ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``serving``, over a Ray that is not there; a minute goes by whenever somebody looks at the clock."""
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.ray import ray_application

    class FakeRay:
        calls: ClassVar[list[str]] = []

        @staticmethod
        def get_actor(name: str, namespace: str) -> None:
            raise ValueError(name)

        @staticmethod
        def kill(actor: None) -> None:
            raise AssertionError("there is none")

        @classmethod
        def shutdown(cls) -> None:
            cls.calls.append("shutdown")

    class FakeTime:
        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            cls.now += 60.0
            return cls.now

    monkeypatch.setattr(ray_application, "ray", FakeRay)
    monkeypatch.setattr(ray_application, "time", FakeTime)
    return ray_application


def test_engines_get_their_time_to_be_left_by_all(on_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServe(ends_after=4)
    monkeypatch.setattr(on_ray, "serve", fake)
    on_ray.stop_application(config(drain_s=600))
    assert fake.calls == ["delete sojourn"] * 4
    assert on_ray.ray.calls == ["shutdown"]


def test_it_does_not_wait_for_ever(on_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServe(ends_after=1_000)
    monkeypatch.setattr(on_ray, "serve", fake)
    on_ray.stop_application(config(drain_s=120))
    assert 2 <= fake.calls.count("delete sojourn") <= 4
    assert on_ray.ray.calls == ["shutdown"]


@pytest.mark.parametrize("error", [RuntimeError("the cluster has 1 CPUs"), KeyboardInterrupt()])
def test_what_was_not_begun_is_not_taken_off(
    on_ray: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """On a cluster that runs, somebody else may have an application of this name."""

    def connect(config: RayConfig, **options: Any) -> None:
        raise error

    fake = FakeServe(ends_after=1)
    monkeypatch.setattr(on_ray, "serve", fake)
    monkeypatch.setattr(on_ray, "connect", connect)
    monkeypatch.setattr(on_ray, "_handle_signals", lambda handler: None)
    said: list[str] = []
    with contextlib.suppress(RuntimeError):
        on_ray.serve_until_stopped(config(), said.append)
    assert fake.calls == []
    assert on_ray.ray.calls == ["shutdown"]
    assert said == ([] if isinstance(error, RuntimeError) else ["stopped while engines were starting"])


def test_running_replicas_are_those_that_serve_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    schema: Any = pytest.importorskip("ray.serve.schema")
    from sojourn_server.gateway.ray import ray_application

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
    now = status(Engine=deployment("A replica failed to start", STARTING=2), Gateway=deployment(""))
    assert ray_application.running_replicas(config(min=2)) == RunningReplicas(
        0, 0, "A replica failed to start"
    )
    # A cluster of our own neither grows nor installs anything: what is reserved is what matters.
    waits = "Deployment 'Engine' has 1 replicas that wait. "
    hint = f"{waits}{ray_application.CLUSTER_SCALING_HINT}Resources required: 9 CPUs."
    now = status(Engine=deployment(hint, STARTING=2))
    assert ray_application.running_replicas(config(min=2)).trouble == f"{waits}Resources required: 9 CPUs."
    elsewhere = parse_config({"model": "tiny", "address": "auto"}, source="f.yaml")
    assert ray_application.running_replicas(elsewhere).trouble == hint


def test_serve_still_writes_the_text_that_is_removed() -> None:
    pytest.importorskip("ray.serve")
    from ray.serve._private import deployment_state
    from sojourn_server.gateway.ray import ray_application

    source = re.sub(r'"\s+f?"', "", inspect.getsource(deployment_state))
    assert ray_application.CLUSTER_SCALING_HINT in source


def test_a_failed_start_names_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.ray import ray_application

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "Deploying application sojourn failed: Failed to update the deployments ['Engine']."
        )

    trouble = "A replica failed to start with exception. Error:\nTraceback\nValueError: no such model\n"
    monkeypatch.setattr(ray_application, "serve", SimpleNamespace(start=lambda **_: None, run=run))
    monkeypatch.setattr(ray_application, "application", lambda _: None)
    monkeypatch.setattr(ray_application, "running_replicas", lambda _: RunningReplicas(0, 2, trouble))
    with pytest.raises(RuntimeError) as raised:
        ray_application.deploy_application(config())
    assert str(raised.value).endswith(
        "the deployments ['Engine']. A replica failed to start with exception. ValueError: no such model"
    )
    assert "\n" not in str(raised.value)


def test_both_ports_are_announced() -> None:
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.ray import ray_application

    assert ray_application.listen_addresses(config()) == "http://127.0.0.1:8100 answers"
    direct = parse_config({"model": "tiny", "direct_port": 8101}, source="f.yaml")
    assert ray_application.listen_addresses(direct) == (
        "http://127.0.0.1:8100 answers, and http://127.0.0.1:8101 without Serve's proxy"
    )


def test_an_engine_that_ray_should_run_and_nobody_knows_is_missing() -> None:
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.http.engine_descriptions import EngineDescription
    from sojourn_server.gateway.ray.coordinator_messages import ReplicaInfo
    from sojourn_server.gateway.ray.deployments import build_gateway

    gateway, routing_backend, _ = build_gateway(config(min=2))
    assert gateway.monitor is not None
    assert gateway.monitor.missing() == ["Engine", "Engine"]
    described = EngineDescription(2, "1", 10_000, 0, 0, 0, False, True)
    ranks = [ReplicaInfo(f"a:1/{n}", "http://a:1", n, described, "up", True, True) for n in range(2)]
    routing_backend.places.update(ranks, 1)
    assert gateway.monitor.missing() == ["Engine"]


async def test_a_gateway_of_pairs_says_which_engine_reads_stored_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.ray import deployments
    from sojourn_server.gateway.ray.coordinator_messages import CoordinatorUnavailable

    class NoCoordinator:
        def __init__(self, config: RayConfig) -> None:
            pass

        async def state(self) -> NoReturn:
            raise CoordinatorUnavailable

    monkeypatch.setattr(deployments, "CoordinatorActorClient", NoCoordinator)
    given = {"model": "m", "prefill": {}, "decode": {}, "pairs": {"store": "/kv", "read_side": "split"}}
    for document, shown in ((given, "split"), ({"model": "tiny"}, None)):
        _, _, app = deployments.build_gateway(parse_config(document, source="f.yaml"))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://gateway"
        ) as client:
            answer = await client.get("/sojourn/v1/replicas")
        assert answer.json().get("read_side") == shown


async def test_a_probe_that_fails_in_the_gateway_itself_is_no_vote() -> None:
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.http.engine_descriptions import EngineDescription
    from sojourn_server.gateway.ray.coordinator_messages import ReplicaInfo
    from sojourn_server.gateway.ray.deployments import RayEngineMonitor

    described = EngineDescription(1, "1", 10_000, 0, 0, 0, False, True)
    votes: list[tuple[str, str, bool]] = []
    backend: Any = SimpleNamespace(
        places={"a": ReplicaInfo("a", "http://127.0.0.1:1", None, described, "up", True, True)},
        probed=lambda *vote: votes.append(vote),
    )
    session = open_session()
    monitor = RayEngineMonitor(backend, lambda: session, None)
    with no_more_files():
        await monitor._probe(ProbeReplica("a", "1"))
    assert votes == []
    await monitor._probe(ProbeReplica("a", "1"))
    assert votes == [("a", "1", False)], "the connection was refused"
    await session.close()


async def test_each_gateway_of_a_node_tells_what_it_counts_at_a_port_of_its_own(caplog: Any) -> None:
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.ray import deployments

    caplog.set_level("INFO")
    with deployments.bound_socket("127.0.0.1", 0) as direct:
        taken = direct.getsockname()[1]
        direct.listen()
        told = parse_config({"model": "tiny", "metrics_port": taken}, source="f.yaml")
        serving = []
        for number in (1, 2):
            metrics = GatewayMetrics(["home"], shares_address=True)
            for _ in range(number):
                metrics.sent("home", 0.1)
            serving.append(asyncio.ensure_future(deployments.serve_metrics(metrics, told)))

        def ports() -> list[int]:
            return [int(one) for one in re.findall(r"metrics of this gateway are at port (\d+)", caplog.text)]

        await until(lambda: len(ports()) == 2)
        first, second = ports()
        assert taken < first < second
        async with httpx.AsyncClient() as http:
            for number, port in enumerate((first, second), 1):
                page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
                assert f'sojourn_gateway_requests_total{{reason="home"}} {number}.0' in page
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
