"""Cores, replicas and requests for tests of routing."""

from __future__ import annotations

from typing import Any

from sojourn_server.policies.fairness_policies import SharePolicy
from sojourn_server.policies.routing_policies import SessionAffinityRouting, StealingPolicy
from sojourn_server.routing import routing_events
from sojourn_server.routing.affinity_strategy import AffinityStrategy
from sojourn_server.routing.program_estimates import MIN_FINISHED_PROGRAMS, ProgramEstimator
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_limits import RoutingLimits
from sojourn_server.routing.routing_records import RoutedProgram

CAPACITY = 1000


def build_core(
    routing: Any = None,
    stealing: Any = None,
    sharing: Any = None,
    *,
    preemption: Any = None,
    order: Any = None,
    estimator: Any = None,
    **limits: Any,
) -> RoutingCore:
    """A core without replicas, which keeps programs at their home."""
    strategy = AffinityStrategy(
        routing or SessionAffinityRouting(),
        stealing or StealingPolicy(),
        sharing or SharePolicy(),
        preemption=preemption,
        order=order,
    )
    return RoutingCore(strategy, RoutingLimits(**limits), estimator)


def with_replicas(of: RoutingCore, *names: str) -> RoutingCore:
    """Register replicas with these names, and return the core."""
    for name in names:
        of.take(seen(name), 0.0)
    return of


def seen(
    name: str = "a", instance: str = "1", capacity_tokens: int = CAPACITY, **more: Any
) -> routing_events.ReplicaRegistered:
    """The event that a replica registers."""
    return routing_events.ReplicaRegistered(name, instance, capacity_tokens, **more)


def asked(name: str, tokens: int = 100, tenant: str = "t", **more: Any) -> routing_events.RequestReceived:
    """A request of a program of the same name."""
    return routing_events.RequestReceived(name, tenant, tokens, **{"program_id": name, **more})


def only(actions: list[Any]) -> Any:
    """Return the only action. Fails if there are several or none."""
    [action] = actions
    return action


def sends(actions: list[Any]) -> list[str]:
    """Ids of the requests that the actions send, in order."""
    return [action.request_id for action in actions if isinstance(action, routing_events.SendRequest)]


def kv_lost(core: Any, program_id: str, tenant: str, at: str) -> routing_events.KvReported:
    """The report of a replica that has the KV of all its programs but this one."""
    kept = [p for p in core.programs.values() if p.home == at and p.key != (tenant, program_id)]
    replica = core.fleet.get(at)
    return routing_events.KvReported(
        replica_id=at,
        instance=replica.instance if replica is not None else "",
        programs=tuple(routing_events.ResidentKv(*program.key, 1, 1) for program in kept),
        waiting=((tenant, program_id),),
    )


def expectations() -> ProgramEstimator:
    """Enough have ended of enough tenants: coders after ten turns at 900 tokens, clerks after two at 20."""
    expected = ProgramEstimator()
    for tenant in ("t", "t2", "t3"):
        for kind, turns, tokens in (("coder", 10, 900), ("clerk", 2, 20)) * MIN_FINISHED_PROGRAMS:
            ended = RoutedProgram((tenant, "p"), kind, None, 0.0, 1.0, context_tokens=tokens, turns=turns)
            expected.ended(ended, 10.0)
    return expected
