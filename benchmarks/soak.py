"""Soak test: hours of agents, floods, kills and restarts, with checks for leaks.

    python benchmarks/soak.py --hours 2 --out benchmarks/results

Two engines (model ``tiny``, host memory and disk) run behind two gateways with tenants. Engine *a* and
gateway *a* run throughout. Engine *b* and gateway *b* are killed and restarted at random, under load. A round
begins with ``--load`` seconds of agents and floods of events; some agents are killed. In the silence after
the load, the servers must release all blocks, leases, requests, copies and connections within ``--silence``
seconds. The final memory of a process is compared with its memory at minute ``--settle`` of its life.
``--seed`` and the round's number determine all choices.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from result_pages import Result
from rich.console import Console
from soak_report import Record, problems, write
from soak_stack import TENANT_KEYS, Engine, Gateway, Server, ServerState

CLIENTS = Path(__file__).with_name("soak_clients.py")
CLIENTS_END_S = 150.0
"""Maximum seconds for clients to end after the load; a client waits up to two minutes for a byte."""
REST_S = 7.0
"""Seconds from the release of everything to the reading of memory. A gateway returns free memory to the
system 5 s after a large body; a reading before that is by chance up to 2 MiB higher."""
BAD_WORDS = ("clients silent for two minutes", "streams without an end")
"""Reports of clients that always count as failures."""
ENGINE_ENDS = ("SIGTERM", "SIGKILL", "core")
GATEWAY_ENDS = ("SIGTERM", "SIGKILL")


class Action(NamedTuple):
    """Something that happens to servers or clients during a round."""

    at_s: float
    what: str
    """``kill agents``, ``flood``, ``restart engine`` or ``restart gateway``."""
    how: str = ""
    """The affected server or client (``a`` or ``b``), or the way in which a restarted server ends."""


def plan_round(seed: int, number: int, load_s: float) -> list[Action]:
    """Return the actions of a round, ordered by time. Equal seeds and numbers give equal actions."""
    draw = random.Random(f"{seed}/{number}")
    actions = [
        Action(draw.uniform(0.15, 0.95) * load_s, "kill agents", draw.choice("ab"))
        for _ in range(draw.randint(2, 5))
    ]
    actions += [
        Action(draw.uniform(0.0, 0.8) * load_s, "flood", draw.choice(("engine a", "gateway a", "gateway b")))
        for _ in range(draw.randint(1, 3))
    ]
    # A restart takes half a minute, so it comes early enough to have load before and after it. The first
    # round has no restart, because its silence is the reference for later ones.
    if number and draw.random() < 0.5:
        actions.append(Action(draw.uniform(0.1, 0.5) * load_s, "restart engine", draw.choice(ENGINE_ENDS)))
    if number and draw.random() < 0.6:
        actions.append(Action(draw.uniform(0.1, 0.7) * load_s, "restart gateway", draw.choice(GATEWAY_ENDS)))
    return sorted(actions)


# -- clients ----------------------------------------------------------------------------------------


class Client:
    """A process of ``soak_clients.py``, whose reports go to the file ``log``."""

    def __init__(self, kind: str, server: Server, tenant: str, seed: str, seconds: float, log: Path) -> None:
        command = [
            sys.executable, str(CLIENTS), kind, server.url, "--key", TENANT_KEYS[tenant], "--seed", seed,
            "--seconds", f"{max(1.0, seconds):.1f}",
        ]  # fmt: skip
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output)

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self.process.kill()
        self.process.wait()

    def report(self) -> Counter[str]:
        """Return how often the process has reported each word."""
        return Counter(self._log.read_text(encoding="utf-8").splitlines())


# -- the run ----------------------------------------------------------------------------------------


class Soak:
    """The servers, and rounds of load and silence."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self.options = options
        self.folder = folder
        self.record = Record(options.seed, options.settle)
        self.engines = {name: Engine(name, options.policy, folder) for name in "ab"}
        engines = list(self.engines.values())
        self.gateways = {name: Gateway(name, engines, folder) for name in "ab"}
        self.first: dict[str, ServerState] = {}
        self._console = console

    @property
    def servers(self) -> list[Server]:
        return [*self.engines.values(), *self.gateways.values()]

    def start(self, number: int) -> None:
        """Start the servers that do not run. After the first round, also record each of them as a failure,
        because it ended by itself."""
        away = [server for server in self.servers if not server.alive]
        for server in away if self.record.rounds else ():
            self.record.failed(number, f"{server.name} was found dead and is started anew")
            with suppress(RuntimeError):
                server.end_by("SIGKILL")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.start(), away))

    def stop(self) -> None:
        """End all servers."""
        for server in reversed(self.servers):
            try:
                server.stop()
            except (RuntimeError, psutil.Error) as error:
                self.record.failed(len(self.record.rounds), f"at the end: {error}")

    def round(self, number: int) -> None:
        """Run one round of load and silence, and record it."""
        began, failures = time.monotonic(), len(self.record.failures)
        row: dict[str, Any] = {"round": number, "did": {}, "left": []}
        try:
            self.start(number)
            did = Counter[str]()
            try:
                self._load(number, did)
            finally:
                row["did"] = dict(sorted(did.items()))
                self.record.totals += did
            for word in BAD_WORDS:
                if did[word]:
                    self.record.failed(number, f"{did[word]} {word}")
            loaded = time.monotonic()
            states, row["left"] = self._silence()
            row["silence_s"] = round(time.monotonic() - loaded, 1)
            row["states"] = [asdict(state) for state in states]
            self.first = self.first or {state.name: state for state in states}
            self.record.remember(states)
            for left in row["left"]:
                self.record.failed(number, f"not back after {self.options.silence:g} s: {left}")
        except Exception as error:  # the run continues, because later rounds show how bad the failure is
            self.record.failed(number, f"{type(error).__name__}: {error}")
            self._tell(traceback.format_exc())
        row["wall_s"] = round(time.monotonic() - began, 1)
        row["load_average"] = round(os.getloadavg()[0], 2)
        self.record.rounds.append(row)
        silence_s = row.get("silence_s", 0)
        self._tell(f"round {number}: {row['did']}, silent after {silence_s} s, load {row['load_average']}")
        for failure in self.record.failures[failures:]:
            self._tell(f"failed: {failure}")

    def _tell(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _load(self, number: int, did: Counter[str]) -> None:
        """Run a round's clients and actions, and count them in ``did``."""
        agents: dict[str, Client] = {}
        others: list[Client] = []
        try:
            self._act(number, did, agents, others)
        finally:  # also when interrupted
            for client in (*agents.values(), *others):
                client.kill()
                did.update(client.report())
            for mark in [word for word in did if word[0] in "+-"]:
                del did[mark]

    def _act(self, number: int, did: Counter[str], agents: dict[str, Client], others: list[Client]) -> None:
        load_s, seed = self.options.load, f"{self.options.seed}/{number}"
        actions = plan_round(self.options.seed, number, load_s)
        began, started = time.monotonic(), 0
        restarts: list[Future[None]] = []
        by_name = {server.name: server for server in self.servers}
        with ThreadPoolExecutor(2) as pool:
            while (passed := time.monotonic() - began) < load_s:
                for name, gateway in self.gateways.items():
                    if name in agents and agents[name].process.poll() is not None:
                        self._ended(number, did, agents.pop(name))
                    if name not in agents:
                        started += 1
                        agents[name] = Client(
                            "agents", gateway, "agents", f"{seed}/{started}", load_s - passed,
                            self.folder / f"agents-{number}-{started}.log",
                        )  # fmt: skip
                while actions and actions[0].at_s <= passed:
                    action = actions.pop(0)
                    if action.what == "kill agents" and action.how in agents:
                        did.update(killed(agents.pop(action.how)))
                    elif action.what == "flood":
                        log = self.folder / f"flood-{number}-{len(others)}.log"
                        server = by_name[action.how]
                        others.append(Client("flood", server, "floods", seed, 0.1 * load_s, log))
                        did["floods of events"] += 1
                    elif action.what.startswith("restart"):
                        server = by_name[f"{action.what.removeprefix('restart ')} b"]
                        restarts.append(pool.submit(restart, server, action.how))
                        did[f"{server.name} ended by {action.how}"] += 1
                time.sleep(0.1)
        for each in restarts:
            each.result()
        end = time.monotonic() + CLIENTS_END_S
        for name, client in [*agents.items()]:
            try:
                client.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.record.failed(number, f"agents did not end within {CLIENTS_END_S:.0f} s")
            else:
                self._ended(number, did, agents.pop(name))

    def _ended(self, number: int, did: Counter[str], client: Client) -> None:
        """Count the reports of agents that ended by themselves. An exit code other than 0 is a failure."""
        if code := client.process.returncode:
            self.record.failed(number, f"agents ended with code {code}")
        did.update(client.report())

    def _silence(self) -> tuple[list[ServerState], list[str]]:
        """Wait until everything is released, at most ``--silence`` seconds. Return the servers' states, and
        what is not released."""
        began = told = time.monotonic()
        end = began + self.options.silence
        while True:
            try:
                for engine in self.engines.values():
                    engine.step()
                states = [server.state() for server in self.servers]
                left = problems(states, self.first)
                if not left:
                    time.sleep(REST_S)
                    states = [server.state() for server in self.servers]
            except (httpx.HTTPError, psutil.Error, KeyError) as error:
                states, left = [], [f"a server does not answer: {type(error).__name__}: {error}"]
            if not left or time.monotonic() > end:
                return states, left
            if time.monotonic() > told + 30.0:
                told = time.monotonic()
                self._tell(f"  not back after {told - began:.0f} s: {'; '.join(left)}")
            time.sleep(1.0)


def killed(client: Client) -> Counter[str]:
    """Kill agents. Return their reports, and where their programs were then."""
    client.kill()
    found = client.report()
    found["agents' processes killed"] = 1
    found["programs killed in a tool call"] = found["+tool"] - found["-tool"]
    found["programs killed in a stream"] = found["+stream"] - found["-stream"]
    return found


def restart(server: Server, how: str) -> None:
    try:
        server.end_by(how)
    finally:
        server.start()


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=2.0, help="no round begins that would end after these")
    parser.add_argument("--rounds", type=int, default=1, help="least rounds, however long they take")
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--policy", default="saga")
    parser.add_argument("--load", type=float, default=120.0, help="seconds of load in a round")
    parser.add_argument("--silence", type=float, default=330.0, help="most seconds until all is back")
    parser.add_argument("--settle", type=float, default=10.0, help="minutes of a life that do not count")
    parser.add_argument("--logs", type=Path, help="folder that keeps the servers' logs")
    parser.add_argument("--out", type=Path, help="folder to write soak.json and .md into")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> Record:
    """Run all rounds and return their record."""
    result = Result("soak", "Soak: agents, floods, kills and restarts")
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(options, folder, console)

        try:
            soak.start(0)
            number, longest_s = 0, options.load + 30.0
            while number < max(1, options.rounds) or result.wall_s + longest_s < 3600 * options.hours:
                soak.round(number)
                number += 1
        finally:
            soak.stop()
            if options.out is not None:
                write(soak.record, options.out, result, options.policy)
    return soak.record


def main() -> None:
    """Run the rounds and print the verdict. Exits with code 1 if the verdict does not hold."""
    options, console = read_options(), Console()
    # SIGTERM, which ``timeout`` and supervisors send, acts like Ctrl-C: servers stop and the page is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = run(options, console)
    verdict = record.verdict()
    console.print(verdict, highlight=False)
    sys.exit(not verdict["holds"])


if __name__ == "__main__":
    main()
