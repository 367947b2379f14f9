"""Why DualPath's simulated latencies are below the paper's, by simulating one difference at a time.

    python benchmarks/prefill_decode_latency.py --cache pd-latency-cache

Each row changes one constant or rule of the cluster simulation to what the paper's system may have. The last
rows change several. Runs use 2P4D, the 660B model and the 64K workload, with Poisson arrivals for a virtual
hour, and its second half is measured. ``all at once`` means 2,000 agents from the start. Writes
prefill_decode_latency.json and .md into ``--out``. Finished runs are kept in ``--cache``.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from result_pages import made_by, marked, write_result
from sojourn_server.simulator.prefill_decode.prefill_decode_outcome import PdOutcome
from sojourn_server.simulator.prefill_decode.prefill_decode_run import PdSpec, run_prefill_decode
from sojourn_server.simulator.report.results_file import made_with

NAME = "prefill_decode_latency"
RATE_PER_S = 0.4
"""The rate of the paper's Table 3."""
LOW_PER_S, HIGH_PER_S = 0.1, 0.45
"""The rates of the working sets in §8.2."""
PUBLISHED = ["the paper", "1.739 s", "", "0.228 s", "39 ms", "2.8 s", "6.2 s", "3,167 s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One row: what is changed, and at which rates it runs."""

    name: str
    model: tuple[tuple[str, float], ...] = ()
    machine: tuple[tuple[str, float], ...] = ()
    fetch: bool = False
    system: str = "scheduling"
    seed: int = 0
    rates: tuple[float, ...] = (RATE_PER_S,)
    at_once: bool = False

    def run(self, rate_per_s: float | None) -> PdOutcome:
        """Run at the rate, or with all agents at once (``None``)."""
        load: dict[str, Any] = {"agents": 2000}
        if rate_per_s is not None:
            load = {"agents": 10**9, "rate_per_s": rate_per_s, "until_s": 3600.0, "warm_up_s": 1800.0}
        spec = PdSpec(system=self.system, seed=self.seed, **load)
        cluster = spec.cluster
        changes: dict[str, Any] = {
            "model": replace(cluster.model, **dict(self.model)),  # type: ignore[arg-type]
            "machine": replace(cluster.machine, **dict(self.machine)),
            "fetch_between_steps": self.fetch,
        }
        return run_prefill_decode(spec, cluster=replace(cluster, **changes))


LONG_STEP = (("prefill_step_s", 0.1),)
STEEP_DECODE = (("decode_step_s", 0.018), ("decode_request_s", 0.0026))
ALL: dict[str, Any] = {"fetch": True, "model": (*LONG_STEP, *STEEP_DECODE)}
BOTH_ENDS = (LOW_PER_S, RATE_PER_S, HIGH_PER_S)
DIFFERENCES = (
    Difference(name="as simulated", rates=BOTH_ENDS, at_once=True),
    Difference(name="another seed", seed=1),
    Difference(name="engines fetch requests between steps (§6.1)", fetch=True, rates=BOTH_ENDS),
    Difference(name="a prefill step takes 100 ms at least, not 20", model=LONG_STEP),
    Difference(name="a decode step takes 18 ms + 2.6 ms a request", model=STEEP_DECODE, rates=BOTH_ENDS),
    Difference(name="storage NICs give 60 %", machine=(("storage_nic_bytes_per_s", 30e9),)),
    Difference(name="each prefill node computes by itself", model=(("group_nodes", 1),)),
    Difference(name="the router knows the outputs' lengths", system="oracle-lengths"),
    Difference(name="reads and copies are free (Oracle)", system="oracle"),
    Difference(name="prefill at 0.20 of the peak, not 0.31", machine=(("efficiency", 0.2),), at_once=True),
    Difference(
        name="fetching, long steps, prefill at 0.38",
        fetch=True,
        model=LONG_STEP,
        machine=(("efficiency", 0.38),),
        at_once=True,
    ),
    Difference(name="fetching, long steps, steep decode", rates=(*BOTH_ENDS, 0.5), at_once=True, **ALL),
    Difference(
        name="the same, prefill at 0.5",
        machine=(("efficiency", 0.5),),
        at_once=True,
        rates=(RATE_PER_S,),
        **ALL,
    ),
    Difference(name="with prefill at 0.31, Basic", system="basic", rates=(0.2, 0.3, 0.4), **ALL),
)
LEVELS = (DIFFERENCES[0], DIFFERENCES[-3], DIFFERENCES[-1])
"""Rows that the second table shows at all their rates."""


class Runs:
    """Runs differences, and keeps results in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.done: list[dict[str, Any]] = []

    def run(self, what: Difference, rate_per_s: float | None) -> PdOutcome:
        label = f"{what.name}, {'all at once' if rate_per_s is None else f'{rate_per_s:g} a second'}"
        file = (
            None if self.folder is None else self.folder / f"{label.replace(' ', '_').replace('/', '')}.json"
        )
        if file is not None and file.exists():
            outcome = msgspec.json.decode(file.read_bytes(), type=PdOutcome)
        else:
            outcome = what.run(rate_per_s)
            print(
                label,
                outcome.seen or outcome.virtual_s,
                f"{outcome.cpu_s:.0f} s of CPU",
                file=sys.stderr,
                flush=True,
            )
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(msgspec.json.encode(outcome))
        self.done.append({"difference": what.name, **msgspec.to_builtins(outcome)})
        return outcome


def turn_s(outcome: PdOutcome) -> float | None:
    """Mean seconds of a turn, of the run's mean output."""
    seen = outcome.seen
    if seen is None:
        return None
    later = outcome.output_tokens / outcome.turns - 2
    return seen.ttft_mean + seen.ttst_mean + later * seen.tpot_mean


def row(runs: Runs, what: Difference) -> list[str]:
    cells = [what.name]
    online = {rate: runs.run(what, rate) for rate in what.rates}
    seen = online[RATE_PER_S].seen
    assert seen is not None
    cells += [f"{s:.3f} s" for s in (seen.ttft_mean, seen.ttft_p95, seen.ttst_mean)]
    cells.append(f"{1000 * seen.tpot_mean:.0f} ms")
    for rate in (LOW_PER_S, HIGH_PER_S):
        cells.append(f"{turn_s(online[rate]):.1f} s" if rate in online else "")
    cells.append(f"{runs.run(what, None).virtual_s:,.0f} s" if what.at_once else "")
    return cells


def levels_row(runs: Runs, what: Difference, rate: float) -> list[str]:
    seen = runs.run(what, rate).seen
    assert seen is not None
    kept = "yes" if seen.within_slo else "no"
    return [what.system, f"{rate:g}", f"{seen.ttft_mean:.2f} s", f"{1000 * seen.tpot_mean:.0f} ms", kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder of finished runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder to write into")
    options = parser.parse_args()
    began, runs = time.monotonic(), Runs(options.cache)
    lines = [row(runs, what) for what in DIFFERENCES]
    head = [
        "2P4D, 0.4 agents/s", "TTFT, mean", "TTFT, P95", "TTST", "TPOT", "a turn at 0.1/s", "at 0.45/s",
        "2,000 agents at once",
    ]  # fmt: skip
    levels = [levels_row(runs, what, rate) for what in LEVELS for rate in what.rates]
    made = made_with(sys.argv)
    page = "\n".join(
        [
            "# DualPath's latencies, one difference at a time",
            "",
            "Generated by the command below, but for what is between the marks.",
            "",
            made_by(made, time.monotonic() - began)
            + " Seed 0. DualPath (`scheduling`) unless the row says otherwise.",
            "",
            marked(head, [PUBLISHED, *lines]),
            "",
            "*A turn* is TTFT + TTST + TPOT for the rest of the mean output; the summary has the paper's.",
            "",
            "## Within the service levels (mean TTFT ≤ 4 s, mean TPOT ≤ 50 ms)",
            "",
            "`scheduling` first as simulated, then with fetching, long steps and steep decode; `basic` with "
            "these.",
            "",
            marked(["system", "agents/s", "TTFT", "TPOT", "kept"], levels),
            "",
            "## Summary",
            "",
            "{by hand}",
            "",
        ]
    )
    write_result(options.out, NAME, made, {"runs": runs.done}, page)


if __name__ == "__main__":
    main()
