"""CPU cost of the gateway's routing core: per decision, per event, and per scan of 10,000 waiting requests.

    python benchmarks/routing_core_cost.py --out benchmarks/results

Programs run in a closed loop of requests and answers, 500 programs per replica. The core knows the results of
earlier programs of the same types. A decision accepts and dispatches a request. A newcomer is the first
request of a program, one in 17. A fact is any event, such as the end of an answer. For pairs, a decision
selects a prefill engine, a decode engine and the reading side, with as many engines as DualPath's 48P96D.
Times are CPU times of one thread: medians over rounds of 500 requests, and the maximum of 100 single scans.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from result_pages import FIRST_WORDS, made_by, marked, write_page
from rich.console import Console
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.policies.fairness.fair_share import AgentFairShare, FcfsSharing
from sojourn_server.policies.fairness.tenant_preemption import UrgencyPreemption
from sojourn_server.policies.routing.baseline_routing import PrefixAffinityRouting, RoundRobinRouting
from sojourn_server.policies.routing.capacity_routing import CapacityRouting
from sojourn_server.policies.routing.least_delay_routing import LeastDelayRouting
from sojourn_server.policies.routing.session_affinity_routing import SessionAffinityRouting
from sojourn_server.policies.routing.work_stealing import WorkStealing
from sojourn_server.routing import routing_events
from sojourn_server.routing.affinity_core import AffinityCore
from sojourn_server.routing.pair_core import PairCore
from sojourn_server.routing.routing_events import PairEngineRegistered, PairRole, SendRequestToPair
from sojourn_server.routing.routing_limits import RoutingLimits
from sojourn_server.simulator.report.results_file import made_with

ROUTINGS: dict[str, Callable[[], Any]] = {
    "least-delay": LeastDelayRouting,
    "session-affinity": SessionAffinityRouting,
    "room-for-all": CapacityRouting,
    "prefix-affinity": PrefixAffinityRouting,
    "round-robin": RoundRobinRouting,
}
REPLICAS = (2, 8, 64)
PROGRAMS = 500
"""Number of programs per replica."""
ROUND = 500
"""Number of requests that are timed together."""
TENANTS = 10
PIECES = 32
"""Number of prefix hashes of a prompt, for policies that use them."""
ENDED = 600
"""Number of programs, of three agent types, that ended before the measurement."""
WAITING = 10_000
LOOKS = 100
NODES = ((2, 4), (48, 96))
"""(Prefill nodes, decode nodes) of each measured cluster."""
ENGINES = 8
"""Number of engines per node."""
PAIR_PROGRAMS = 8
"""Number of programs per engine."""
TURNS = 16
"""Number of other requests between two new programs."""
NEWCOMERS = 100


class Loop:
    """Programs in a closed loop of requests and answers."""

    def __init__(self, routing: Any, replicas: int, seed: int, sharing: Any = None) -> None:
        self.random = random.Random(seed)
        self.core = AffinityCore(
            routing,
            WorkStealing(),
            sharing or AgentFairShare(),
            RoutingLimits(lease_s=1e9),
            yielding=UrgencyPreemption(),
        )
        self.now = 0.0
        self.number = 0
        self.contexts = [0] * (PROGRAMS * replicas)
        for replica in range(replicas):
            self.core.take(
                routing_events.ReplicaRegistered(f"e{replica}", "1", PROGRAMS * 80_000, PROGRAMS * 80_000),
                0.0,
            )
        for number in range(ENDED if replicas else 0):
            name, tenant, at = f"ended {number}", f"t{number % TENANTS}", float(number)
            for turn in range(self.random.randint(2, 30)):
                ask = routing_events.RequestReceived(
                    name, tenant, 1_000 + 2_000 * turn, name, agent_type=f"kind {number % 3}"
                )
                self.core.take(ask, at)
                self.core.take(routing_events.RequestFinished(name, 200), at + 1.0)
            self.core.take(routing_events.ProgramEnded(name, tenant), at + 60.0)
        self.now = float(ENDED)

    def round(self) -> tuple[float, float]:
        """Run one round. Return the mean CPU seconds of a decision, and of a fact that follows it."""
        asks = []
        for program in self.random.choices(range(len(self.contexts)), k=ROUND):
            self.contexts[program] = min(60_000, self.contexts[program] + self.random.randint(200, 4_000))
            prefix = tuple(range(program * PIECES, program * PIECES + PIECES))
            asks.append(
                routing_events.RequestReceived(
                    f"r{self.number}",
                    f"t{program % TENANTS}",
                    self.contexts[program] or 1,
                    f"p{program}",
                    agent_type=f"kind {program % 3}",
                    prefix=prefix,
                )
            )
            self.number += 1
        self.now += 1.0
        take, now = self.core.take, self.now
        begin = time.thread_time()
        answers = [take(ask, now) for ask in asks]
        deciding = time.thread_time() - begin
        sent = [
            action
            for actions in answers
            for action in actions
            if isinstance(action, routing_events.SendRequest)
        ]
        after: list[Any] = [routing_events.FirstByteSent(one.request_id, one.replica_id) for one in sent]
        after += [routing_events.RequestFinished(one.request_id, 200, one.replica_id) for one in sent]
        begin = time.thread_time()
        for fact in after:
            take(fact, now)
        following = time.thread_time() - begin
        take(routing_events.Tick(), now)
        if len(sent) < ROUND:
            raise RuntimeError(
                f"{ROUND - len(sent)} of {ROUND} requests were not sent: there is room for all"
            )
        return deciding / ROUND, following / len(after)

    def newcomer(self, number: int) -> float:
        """Return the CPU seconds of placing a new program after ``TURNS`` other requests. The new program
        ends at once."""
        take, now = self.core.take, self.now
        for program in self.random.choices(range(len(self.contexts)), k=TURNS):
            name, tenant = f"turn {self.number}", f"t{program % TENANTS}"
            self.number += 1
            tokens = self.contexts[program] or 1
            ask = routing_events.RequestReceived(
                name, tenant, tokens, f"p{program}", agent_type=f"kind {program % 3}"
            )
            for action in take(ask, now):
                if isinstance(action, routing_events.SendRequest):
                    take(routing_events.RequestFinished(name, 200, action.replica_id), now)
        name, tenant = f"new {number}", f"t{number % TENANTS}"
        ask = routing_events.RequestReceived(name, tenant, 2_000, name, agent_type=f"kind {number % 3}")
        begin = time.thread_time()
        actions = take(ask, now)
        placing = time.thread_time() - begin
        sent = [action for action in actions if isinstance(action, routing_events.SendRequest)]
        take(routing_events.RequestFinished(name, 200, sent[0].replica_id if sent else None), now)
        take(routing_events.ProgramEnded(name, tenant), now)
        return placing


def decisions(rounds: int, seed: int) -> list[dict[str, Any]]:
    """Return the results by routing policy and number of replicas."""
    rows = []
    for name, routing in ROUTINGS.items():
        for replicas in REPLICAS:
            loop = Loop(routing(), replicas, seed)
            for _ in range(3 * replicas):  # until most programs are known and have a replica
                loop.round()
            gc.collect()
            gc.disable()
            timed = [loop.round() for _ in range(rounds)]
            newcomers = [loop.newcomer(number) for number in range(NEWCOMERS)]
            gc.enable()
            decide_s = statistics.median(decide for decide, _ in timed)
            rows.append(
                {
                    "routing": name,
                    "replicas": replicas,
                    "programs": len(loop.core.programs),
                    "us_per_decision": decide_s * 1e6,
                    "decisions_per_s": 1 / decide_s,
                    "us_per_newcomer": statistics.median(newcomers) * 1e6,
                    "us_per_other_fact": statistics.median(follow for _, follow in timed) * 1e6,
                }
            )
    return rows


def pair_decisions(prefill: int, decode: int, rounds: int, seed: int) -> dict[str, Any]:
    """Return the CPU microseconds of selecting two engines and the reading side, and of each fact that
    follows."""
    core, drawn = PairCore(), random.Random(seed)
    for role, nodes in ((PairRole.PREFILL, prefill), (PairRole.DECODE, decode)):
        for number in range(nodes * ENGINES):
            name, node = f"{role.value}{number}", f"{role.value} node {number // ENGINES}"
            core.take(PairEngineRegistered(name, name, role, node, 1_300_000, 1e-4, name), 0.0)
    programs = [0] * ((prefill + decode) * ENGINES * PAIR_PROGRAMS)
    number = 0
    on_their_way: list[SendRequestToPair] = []

    def one_round(now: float) -> tuple[float, float]:
        nonlocal number
        asks = []
        for program in drawn.choices(range(len(programs)), k=ROUND):
            programs[program] = programs[program] % 60_000 + drawn.randint(200, 4_000)
            asks.append(routing_events.RequestReceived(f"r{number}", "t", programs[program], f"p{program}"))
            number += 1
        take = core.take
        begin = time.thread_time()
        answers = [take(ask, now) for ask in asks]
        deciding = time.thread_time() - begin
        on_their_way.extend(a for actions in answers for a in actions if isinstance(a, SendRequestToPair))
        # Half of the requests stay, so that engines are loaded in the next round.
        ended = [on_their_way.pop(drawn.randrange(len(on_their_way))) for _ in range(len(on_their_way) // 2)]
        after: list[Any] = [routing_events.PrefillFinished(one.request_id, one.prefill_id) for one in ended]
        after += [routing_events.FirstByteSent(one.request_id, one.replica_id) for one in ended]
        after += [
            routing_events.RequestFinished(one.request_id, 200, one.replica_id, answered=True)
            for one in ended
        ]
        begin = time.thread_time()
        for fact in after:
            take(fact, now)
        return deciding / ROUND, (time.thread_time() - begin) / len(after)

    for now in range(10):
        one_round(float(now))
    gc.collect()
    gc.disable()
    timed = [one_round(10.0 + now) for now in range(rounds)]
    gc.enable()
    return {
        "prefill_nodes": prefill,
        "decode_nodes": decode,
        "engines": (prefill + decode) * ENGINES,
        "us_per_decision": statistics.median(decide for decide, _ in timed) * 1e6,
        "us_per_other_fact": statistics.median(follow for _, follow in timed) * 1e6,
    }


def pump(sharing: Any, seed: int) -> dict[str, Any]:
    """Return the CPU milliseconds of a scan of 10,000 requests that wait for capacity: median and maximum for
    each kind of event."""
    drawn = random.Random(seed)
    loop = Loop(CapacityRouting(), 0, seed, sharing)
    take = loop.core.take
    for replica in range(REPLICAS[-1]):
        take(routing_events.ReplicaRegistered(f"e{replica}", "1", 1_000_000), 0.0)
    sent: list[routing_events.SendRequest] = []
    number = 0
    while loop.core.waiting < WAITING:
        ask = routing_events.RequestReceived(
            f"r{number}",
            f"t{number % TENANTS}",
            drawn.randint(2_000, 120_000),
            f"p{number % TENANTS}/{number}",
        )
        sent += [action for action in take(ask, 0.0) if isinstance(action, routing_events.SendRequest)]
        number += 1
    timed: dict[str, list[float]] = {}
    went = 0

    def look(name: str, fact: routing_events.AnyRoutingEvent, now: float) -> None:
        nonlocal went
        begin = time.thread_time()
        actions = take(fact, now)
        timed.setdefault(name, []).append((time.thread_time() - begin) * 1e3)
        fresh = [action for action in actions if isinstance(action, routing_events.SendRequest)]
        if name == "a program ends":
            went += len(fresh)
        sent.extend(fresh)

    gc.collect()
    gc.disable()
    for at in range(LOOKS):
        now = 1.0 + at / 10
        one = sent.pop(drawn.randrange(len(sent)))
        waiting = loop.core.requests.by_id[one.request_id]
        assert waiting.program is not None
        tenant, program_id = waiting.program.key
        look("a first byte", routing_events.FirstByteSent(one.request_id, one.replica_id), now)
        look("an answer ends", routing_events.RequestFinished(one.request_id, 200, one.replica_id), now)
        look("a program ends", routing_events.ProgramEnded(program_id, tenant), now)
        look("a heartbeat", routing_events.ReplicaRegistered("e0", "1", 1_000_000), now)
        look("a tick", routing_events.Tick(), now)
    look("a replica comes", routing_events.ReplicaRegistered("new", "1", 1_000_000), 20.0)
    look("a replica is gone", routing_events.ReplicaGone("e1", "1"), 20.0)
    gc.enable()
    return {
        "waiting": WAITING,
        "tenants": TENANTS,
        "replicas": REPLICAS[-1],
        "sent_per_program_ended": went / LOOKS,
        "ms": {
            name: {"median": statistics.median(found), "worst": max(found), "looks": len(found)}
            for name, found in timed.items()
        },
    }


def page(result: dict[str, Any], made: Any, wall_s: float) -> str:
    """Return the result as Markdown."""
    decided = marked(
        (
            "routing",
            "replicas",
            "programs",
            "µs a decision",
            "decisions/s",
            "µs a newcomer",
            "µs any other fact",
        ),
        [
            (
                row["routing"],
                f"{row['replicas']}",
                f"{row['programs']:,}",
                f"{row['us_per_decision']:.1f}",
                f"{row['decisions_per_s']:,.0f}",
                f"{row['us_per_newcomer']:.0f}",
                f"{row['us_per_other_fact']:.1f}",
            )
            for row in result["decisions"]
        ],
    )
    looks = marked(
        ("what happens", *(f"{name}, {kind}" for name in result["pumps"] for kind in ("median", "worst"))),
        [
            (
                what,
                *(
                    f"{p['ms'][what][kind]:.2f}"
                    for p in result["pumps"].values()
                    for kind in ("median", "worst")
                ),
            )
            for what in result["pumps"]["in-order"]["ms"]
        ],
    )
    pairs = marked(
        ("nodes", "engines", "µs a decision", "µs any other fact"),
        [
            (
                f"{row['prefill_nodes']}P{row['decode_nodes']}D",
                f"{row['engines']:,}",
                f"{row['us_per_decision']:.1f}",
                f"{row['us_per_other_fact']:.1f}",
            )
            for row in result["pairs"]
        ],
    )
    return (
        "# The routing core\n\nGenerated by the command below, but for what is between the marks.\n\n"
        f"{made_by(made, wall_s)}\n\n"
        f"{PROGRAMS} programs to a replica, {TENANTS} tenants, shares by `agent-fair-share`, "
        f"seed {result['seed']}. CPU time of one thread, medians of {result['rounds']} rounds of {ROUND} "
        "requests.\n\n"
        f"{decided}\n\n"
        f"Prefill and decode engines, {ENGINES} to a node; half of {ROUND} requests stay from round to "
        "round. A decision is both engines and who reads.\n\n"
        f"{pairs}\n\n"
        f"{WAITING:,} requests wait for room at {REPLICAS[-1]} replicas (`room-for-all`), of as many "
        f"programs of {TENANTS} tenants. Milliseconds of CPU time that one fact takes, of {LOOKS}; a replica "
        "comes and goes once.\n\n"
        f"{looks}\n\n{{by hand}}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="write routing_core_cost.json and routing_core_cost.md into this folder"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    made = made_with(sys.argv)
    result: dict[str, Any] = {
        "command": f"python benchmarks/{made.command}",
        "machine": made.machine,
        "versions": made.versions,
        "seed": options.seed,
        "rounds": options.rounds,
        "decisions": decisions(options.rounds, options.seed),
        "pairs": [pair_decisions(*nodes, options.rounds, options.seed) for nodes in NODES],
        "pumps": {
            "in-order": pump(FcfsSharing(), options.seed),
            "agent-fair-share": pump(AgentFairShare(), options.seed),
        },
    }
    console = Console()
    table = Table("routing", "replicas", "µs a decision", "decisions/s", "µs a newcomer", "µs other fact")
    for row in result["decisions"]:
        table.add_row(
            row["routing"],
            f"{row['replicas']}",
            f"{row['us_per_decision']:.1f}",
            f"{row['decisions_per_s']:,.0f}",
            f"{row['us_per_newcomer']:.0f}",
            f"{row['us_per_other_fact']:.1f}",
        )
    console.print(table)
    table = Table("nodes", "engines", "µs a decision", "µs other fact")
    for row in result["pairs"]:
        table.add_row(
            f"{row['prefill_nodes']}P{row['decode_nodes']}D",
            f"{row['engines']:,}",
            f"{row['us_per_decision']:.1f}",
            f"{row['us_per_other_fact']:.1f}",
        )
    console.print(table)
    for name, found in result["pumps"].items():
        table = Table(f"{WAITING:,} wait, {name}", "median ms", "worst ms")
        for what, ms in found["ms"].items():
            table.add_row(what, f"{ms['median']:.3f}", f"{ms['worst']:.3f}")
        console.print(table)
    if options.out is not None:
        write_json(result, options.out / "routing_core_cost.json")
        write_page(
            options.out / "routing_core_cost.md", page(result, made, time.monotonic() - begin), FIRST_WORDS
        )


if __name__ == "__main__":
    main()
