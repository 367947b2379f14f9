"""A coordinator whose clients have other settings says so, and gives way if that costs nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.gateway.ray import coordinator_messages as m
from sojourn_server.gateway.ray.coordinator_actor import routing_rules
from sojourn_server.gateway.ray.coordinator_settings import (
    OWN_CLIENT_TIMEOUT_S,
    CoordinatorSettings,
    checkpoint_digest,
    settings_digest,
)
from sojourn_server.gateway.ray.ray_config import RayConfig, parse_config
from sojourn_server.routing.routing_from_preset import PrefillDecodeRules
from test_gateway_ray_components import described


def config(**more: Any) -> RayConfig:
    return parse_config({"model": "tiny", **more}, source="f.yaml")


def test_the_digest_is_of_the_settings_that_the_coordinator_has() -> None:
    base = settings_digest(config())
    assert settings_digest(config(engines={"num_cpus": 3, "args": ["--x"]}, gateways=5, port=9000)) == base
    assert settings_digest(parse_config(config().plain(), source="again")) == base
    changed = [
        config(engines={"max": 8}),
        config(engines={"target_use": 0.7}),
        config(engines={"shrink_after_s": 1.0}),
        config(max_waiting=5),
        config(wait_s=5.0),
        config(silent_program_s=5.0),
        config(checkpoint="/c"),
        config(policy="round-robin"),
        config(prefill={}, decode={}, pairs={"store": "/kv"}),
        config(prefill={}, decode={}, pairs={"store": "/kv", "short_queue_s": 9}),
    ]
    digests = {settings_digest(one) for one in changed}
    assert len(digests | {base}) == len(changed) + 1


def test_the_limits_of_pairs_reach_the_rules() -> None:
    pairs = {"read_side": "split", "short_queue_s": 1, "most_prefill_s": 2, "high_tokens_ratio": 1.5}
    given = config(prefill={}, decode={}, pairs={"store": "/kv", **pairs})
    assert routing_rules(given) == PrefillDecodeRules("split", 1.0, 2.0, 1.5)
    assert routing_rules(config(prefill={}, decode={}, pairs={"store": "/kv"})) == PrefillDecodeRules()


class Watched:
    """Settings of a coordinator, with a clock that stands still."""

    def __init__(self, **more: Any) -> None:
        self.now_s = 0.0
        self.it = CoordinatorSettings(config(**more), clock=lambda: self.now_s)
        self.own = settings_digest(config(**more))
        self.checkpoint = checkpoint_digest(config(**more))

    def is_outdated_by(self, **more: Any) -> bool:
        """Whether the coordinator has to end after a message of a client with this configuration."""
        other = config(**more)
        return self.it.is_outdated(settings_digest(other), checkpoint_digest(other))


def test_a_coordinator_with_a_checkpoint_gives_way_once_no_client_has_its_settings(caplog: Any) -> None:
    one = Watched(checkpoint="/c")
    for _ in range(100):  # while replicas are replaced one by one
        one.now_s += OWN_CLIENT_TIMEOUT_S / 2
        assert not one.it.is_outdated("other", one.checkpoint)
        assert not one.it.is_outdated(one.own, one.checkpoint)
    one.now_s += OWN_CLIENT_TIMEOUT_S - 0.1
    assert not one.it.is_outdated("other", one.checkpoint)
    one.now_s += 0.1
    assert one.it.is_outdated("other", one.checkpoint)
    assert "other" in caplog.text
    assert one.own in caplog.text


def test_clients_of_an_earlier_version_are_not_outrun() -> None:
    one = Watched(checkpoint="/c")
    one.now_s += 2 * OWN_CLIENT_TIMEOUT_S
    assert not one.it.is_outdated("", "")
    assert not one.it.is_outdated("other", one.checkpoint)


@pytest.mark.parametrize(
    "given", [{}, {"checkpoint": "/c", "prefill": {}, "decode": {}, "pairs": {"store": "/kv"}}]
)
def test_one_that_would_lose_its_state_says_once_what_to_do(given: dict[str, Any], caplog: Any) -> None:
    one = Watched(**given)
    for _ in range(100):
        one.now_s += 1.0
        assert not one.it.is_outdated("other", one.checkpoint)
    assert caplog.text.count("ray.kill(ray.get_actor('coordinator', namespace='sojourn-gateway'))") == 1
    assert not [record for record in caplog.records if record.levelname not in ("WARNING", "INFO")]


@pytest.mark.parametrize("changed", [{"checkpoint": "/d"}, {}, {"checkpoint": "/d", "max_waiting": 5}])
def test_a_client_with_another_checkpoint_does_not_end_the_coordinator(
    changed: dict[str, Any], caplog: Any
) -> None:
    one = Watched(checkpoint="/c")
    for _ in range(100):
        one.now_s += 1.0
        assert not one.is_outdated_by(**changed)
        assert not one.is_outdated_by(checkpoint="/c", max_waiting=5), "the other one may start the next"
    assert caplog.text.count("ray.kill(ray.get_actor('coordinator', namespace='sojourn-gateway'))") == 1
    one.now_s += OWN_CLIENT_TIMEOUT_S
    assert one.is_outdated_by(checkpoint="/c", max_waiting=5)


def test_a_client_that_does_not_name_its_checkpoint_does_not_end_the_coordinator() -> None:
    one = Watched(checkpoint="/c")
    one.now_s += 2 * OWN_CLIENT_TIMEOUT_S
    assert not one.it.is_outdated("other", "")


class Exited(BaseException):
    """The actor has exited."""


async def test_the_actor_exits_for_the_new_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from sojourn_server.gateway.ray import coordinator_actor, coordinator_settings
    from sojourn_server.gateway.ray.coordinator_actor import CoordinatorActor, CoordinatorActorClient

    def exit_actor() -> None:
        raise Exited

    before = config(checkpoint=str(tmp_path / "c"))
    after = config(checkpoint=str(tmp_path / "c"), engines={"max": 8})
    actor = CoordinatorActor(before)
    monkeypatch.setattr(coordinator_actor.ray.actor, "exit_actor", exit_actor)
    handle = SimpleNamespace(call=SimpleNamespace(remote=actor.call))
    monkeypatch.setattr(coordinator_actor, "get_coordinator_handle", lambda _: handle)
    old, new = CoordinatorActorClient(before), CoordinatorActorClient(after)
    engine = m.EngineRegistration("e", "http://e:1", described())
    assert (await new.register(engine)).wanted_engines == 1
    joined = await old.join(m.JoinRequest("g", 0))
    monkeypatch.setattr(coordinator_settings, "OWN_CLIENT_TIMEOUT_S", 0.0)
    poll = m.PollRequest("g", joined.epoch, 0, -1, -1)
    assert (await old.poll(poll)).status is m.ResponseStatus.OK
    moved = CoordinatorActorClient(config(checkpoint=str(tmp_path / "d")))
    with monkeypatch.context() as patch:
        patch.setattr(coordinator_settings, "OWN_CLIENT_TIMEOUT_S", 1e-9)
        for _ in range(3):
            assert (await moved.poll(poll)).status is m.ResponseStatus.OK
            await moved.register(engine)
    with pytest.raises(Exited):
        await new.poll(poll)
    with pytest.raises(Exited):
        await new.register(engine)
    assert actor._running is not None
    actor._running.cancel()
