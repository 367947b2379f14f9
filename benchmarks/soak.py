"""Soak test: hours of agents, floods, hostile clients, kills and restarts, with checks for leaks.

    python benchmarks/soak.py --hours 2 --out benchmarks/results

Two engines (model ``tiny``, host memory and disk) run behind two gateways with tenants. Engine *a* and
gateway *a* run throughout. Engine *b* and gateway *b* are killed and restarted at random, under load. A round
begins with ``--load`` seconds of agents, floods of events and hostile clients; some clients are killed. In
the silence after the load, the servers must release all blocks, leases, requests, copies and connections
within ``--silence`` seconds. The final memory of a process is compared with its memory at minute ``--settle``
of its life. ``--seed`` and the round's number determine all choices. The page is written after every round.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress
from soak_report import Record, problems, write
from soak_stack import TENANT_KEYS, Engine, Gateway, Server, ServerState
from sojourn_server.simulator.report.results_file import made_with

CLIENTS = Path(__file__).with_name("soak_clients.py")
CLIENTS_END_S = 150.0
"""Maximum seconds for clients to end after the load; a client waits up to two minutes for a byte."""
MOST_FAILED_ROUNDS = 5
"""Number of failed rounds in a row after which the run stops."""
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
    """A process of ``soak_clients.py``, and counts of the words that the process reported."""

    def __init__(self, kind: str, url: str, tenant: str, seed: str, seconds: float) -> None:
        self.words: Counter[str] = Counter()
        command = [
            sys.executable, str(CLIENTS), kind, url, "--key", TENANT_KEYS[tenant], "--seed", seed,
            "--seconds", f"{max(1.0, seconds):.1f}",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.words[line.strip()] += 1

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self._process.kill()
        self._process.wait()
        self._reader.join(10)

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the process to end. Return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
            self._reader.join(10)
            return True
        return False

    def report(self) -> Counter[str]:
        """Return the number of reports of each word, without the marks ``+`` and ``-``."""
        return Counter({word: count for word, count in self.words.items() if word[:1] not in "+-"})

    def inside(self, what: str) -> int:
        """Return how many of the client's programs are now in a tool call (``what`` is ``tool``), or read a
        stream (``stream``)."""
        return self.words[f"+{what}"] - self.words[f"-{what}"]


# -- the run ----------------------------------------------------------------------------------------


class Soak:
    """The servers, and rounds of load and silence."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self.options = options
        self.record = Record(options.seed, options.settle)
        self.engines = {name: Engine(name, options.policy, folder) for name in "ab"}
        engines = list(self.engines.values())
        self.gateways = {name: Gateway(name, engines, folder) for name in "ab"}
        self.first: dict[str, ServerState] = {}
        self._console = console
        self._failed_rounds = 0

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
                server.stop("SIGKILL")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.start(), away))

    def stop(self) -> None:
        """End all servers."""
        for server in reversed(self.servers):
            try:
                server.stop()
            except (RuntimeError, psutil.Error) as error:
                self.record.failed(len(self.record.rounds), f"at the end: {error}")

    def round(self, number: int) -> bool:
        """Run one round of load and silence, and record it. Return False if the run must stop, because too
        many rounds in a row failed."""
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
            self._console.print(traceback.format_exc(), markup=False, highlight=False)
        row["wall_s"] = round(time.monotonic() - began, 1)
        row["load_average"] = round(os.getloadavg()[0], 2)
        self.record.rounds.append(row)
        failed = len(self.record.failures) > failures
        self._failed_rounds = self._failed_rounds + 1 if failed else 0
        self._tell(row, failures)
        return self._failed_rounds < MOST_FAILED_ROUNDS

    def _tell(self, row: Mapping[str, Any], failures: int) -> None:
        did = row["did"]
        sizes = " ".join(f"{life.rss_mib[-1]:.0f}" for life in self.record.lives.values() if life.number == 1)
        self._console.print(
            f"round {row['round']}: {did.get('turns', 0)} turns, {did.get('hostile acts', 0)} hostile acts, "
            f"silent after {row.get('silence_s', 0)} s, RSS {sizes} MiB, load {row['load_average']}",
            highlight=False,
            soft_wrap=True,
        )
        for failure in self.record.failures[failures:]:
            self._console.print(f"[red]failed:[/] {failure}", highlight=False, soft_wrap=True)

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

    def _act(self, number: int, did: Counter[str], agents: dict[str, Client], others: list[Client]) -> None:
        load_s, seed = self.options.load, f"{self.options.seed}/{number}"
        actions = plan_round(self.options.seed, number, load_s)
        began, started = time.monotonic(), 0
        others += [
            Client("hostile", gateway.url, "hostile", f"{seed}/{name}", load_s)
            for name, gateway in self.gateways.items()
        ]
        restarts: list[Future[None]] = []
        with ThreadPoolExecutor(2) as pool:
            while (passed := time.monotonic() - began) < load_s:
                for name, gateway in self.gateways.items():
                    if name not in agents or agents[name].ended:
                        if name in agents:
                            did.update(self._reported(number, agents.pop(name)))
                        started += 1
                        agents[name] = Client(
                            "agents", gateway.url, "agents", f"{seed}/{started}", load_s - passed
                        )
                while actions and actions[0].at_s <= passed:
                    action = actions.pop(0)
                    if action.what == "kill agents" and action.how in agents:
                        did.update(self._killed(agents.pop(action.how)))
                    elif action.what == "flood":
                        url = next(one.url for one in self.servers if one.name == action.how)
                        others.append(Client("flood", url, "hostile", seed, 0.1 * load_s))
                        did["floods of events"] += 1
                    elif action.what.startswith("restart"):
                        server = self.engines["b"] if action.what == "restart engine" else self.gateways["b"]
                        restarts.append(pool.submit(self._restart, server, action.how))
                        did[f"{server.name} ended by {action.how}"] += 1
                time.sleep(0.1)
        for restart in restarts:
            restart.result()
        end = time.monotonic() + CLIENTS_END_S
        for name, client in [*agents.items()]:
            if client.wait(end - time.monotonic()):
                did.update(self._reported(number, agents.pop(name)))
            else:
                self.record.failed(number, f"agents did not end within {CLIENTS_END_S:.0f} s")

    def _reported(self, number: int, client: Client) -> Counter[str]:
        """Return the reports of agents that ended by themselves. Record a failure if their exit code is not
        0."""
        client.wait(10)
        if client.code:
            self.record.failed(number, f"agents ended with code {client.code}")
        return client.report()

    @staticmethod
    def _killed(client: Client) -> Counter[str]:
        client.kill()
        inside = {what: client.inside(what) for what in ("tool", "stream")}
        return client.report() + Counter(
            {
                "agents' processes killed": 1,
                "programs killed in a tool call": inside["tool"],
                "programs killed in a stream": inside["stream"],
            }
        )

    @staticmethod
    def _restart(server: Server, how: str) -> None:
        try:
            server.stop(how)
        finally:
            server.start()

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
                waited_s = told - began
                text = f"  not back after {waited_s:.0f} s: {'; '.join(left)}"
                self._console.print(text, highlight=False, soft_wrap=True)
            time.sleep(1.0)


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
    parser.add_argument("--out", type=Path, help="folder to write soak.json, .md and .svg into")
    options = parser.parse_args(arguments)
    for name in ("hours", "load", "silence"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} is {getattr(options, name):g}; expected a number above 0")
    return options


def run(options: argparse.Namespace, console: Console) -> Record:
    """Run all rounds and return their record."""
    made, began = made_with(sys.argv), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(options, folder, console)

        def report() -> None:
            if options.out is not None:
                write(soak.record, options.out, made, time.monotonic() - began, options.policy)

        try:
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task("starting the servers", total=3600 * options.hours)
                soak.start(0)
                number, longest_s = 0, options.load + 30.0
                while (
                    number < max(1, options.rounds)
                    or time.monotonic() - began + longest_s < 3600 * options.hours
                ):
                    progress.update(task, description=f"round {number}", completed=time.monotonic() - began)
                    going_on = soak.round(number)
                    report()
                    number += 1
                    if not going_on:
                        console.print("too many rounds failed in a row")
                        break
        finally:
            soak.stop()
            report()
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
