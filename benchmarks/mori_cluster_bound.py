"""What bounds MORI on three replicas: ceilings computed from the committed hour of cluster_simulation.py.

    python benchmarks/mori_cluster_bound.py --out benchmarks/results

Runs nothing. Reads hour/cluster_simulation.json below ``--out``: tokens, steps and busy seconds of each run.
The roofline latency model of the same device then gives the time of a mean step, once as it was (to see
whether the model explains the run), and once for what a better policy could change:

kept    nothing is computed twice, and the device is always busy; as many requests decode in a step as did
full    the same, and as many requests decode in each step as the device's KV pool holds

Writes mori_cluster_bound.json and .md. Text between the marks of the .md is kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from result_pages import less, made_by, marked, write_result
from sojourn_server.simulator.latency.latency_profiles import load_hardware_profile, load_model_shape
from sojourn_server.simulator.latency.latency_protocol import StepWork
from sojourn_server.simulator.latency.roofline_latency import RooflineLatency
from sojourn_server.simulator.report.results_file import made_with

NAME = "mori_cluster_bound"
CHUNK_TOKENS = 8192
MORI, BASELINE = "mori/mori", "thunderagent/thunderagent-offload"
STEP_HEAD = [
    "a replica", "policy", "busy", "decoding", "context", "computed, again", "a step, run", "modelled",
    "of it decoding", "of it again",
]  # fmt: skip
PUBLISHED_GAIN = 1.54
"""Gain in MORI §6.2.2, at least +54 % over ThunderAgent with offloading at 80 programs per replica."""


@dataclass(frozen=True, slots=True)
class MeanStep:
    """Means of a run, over its replicas."""

    replicas: int
    busy: float
    """Busy share of the replicas."""
    step_s: float
    """Busy seconds of a step."""
    decoding: float
    """Output tokens of a step, equal to the requests that decode in it."""
    computed: float
    """Prompt tokens that a step computes."""
    again: float
    """Prompt tokens that a step computes and that were computed before."""
    context: float
    """Prompt tokens of a turn."""
    pool: int
    """Tokens of a replica's KV pool."""

    @staticmethod
    def of(row: Mapping[str, Any]) -> MeanStep:
        steps, virtual_s, replicas = row["steps"], row["virtual_s"], row["replicas"]
        return MeanStep(
            replicas,
            row["device_busy_fraction"],
            row["device_busy_fraction"] * virtual_s * replicas / steps,
            row["output_tok_per_s"] * virtual_s / steps,
            row["computed_tokens"] / steps,
            row["regenerated_tokens"] / steps,
            row["prompt_tokens"] / row["turns_finished"],
            row["pool_blocks"] * row["block_size"],
        )

    def modelled_s(self, latency: RooflineLatency, decoding: float, computed: float) -> float:
        """Seconds of a step with ``decoding`` requests at the mean context, and ``computed`` prompt tokens.
        Prompts are computed in whole chunks after half of the context."""
        read = decoding * self.context
        decode_s = latency.step_s(StepWork(*map(round, (decoding, decoding, read, read, decoding))))
        before = self.context / 2
        pairs = CHUNK_TOKENS * (before + CHUNK_TOKENS / 2)
        chunk = (1, CHUNK_TOKENS, pairs, before + CHUNK_TOKENS, 0)
        return decode_s + computed * latency.step_s(StepWork(*map(round, chunk))) / CHUNK_TOKENS

    def ceiling(self, latency: RooflineLatency, decoding: float) -> float:
        """Output tokens per second if nothing is computed twice and every step has ``decoding`` requests."""
        new = (self.computed - self.again) / self.decoding  # prompt tokens per output token
        took_s = self.modelled_s(latency, decoding, new * decoding)
        return self.replicas * decoding / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder to write into")
    options = parser.parse_args()
    began = time.monotonic()
    rows = msgspec.json.decode((options.out / "hour" / "cluster_simulation.json").read_bytes())["mori"]
    first = rows[0]
    latency = RooflineLatency(load_hardware_profile(first["hardware"]), load_model_shape(first["model"]), 1)
    at = {(row["policy"], row["programs"] // row["replicas"]): row for row in rows}
    explained, ceilings, found = [], [], []
    for each in sorted({each for _, each in at}):
        base = at[BASELINE, each]["output_tok_per_s"]
        for policy in (MORI, BASELINE):
            row = at[policy, each]
            step = MeanStep.of(row)
            modelled_s = step.modelled_s(latency, step.decoding, step.computed)
            decode_s = step.modelled_s(latency, step.decoding, 0)
            again_s = modelled_s - step.modelled_s(latency, step.decoding, step.computed - step.again)
            explained.append(
                [
                    f"{each}",
                    f"`{policy}`",
                    f"{step.busy:.1%}",
                    f"{step.decoding:.1f}",
                    f"{step.context:,.0f}",
                    f"{step.computed:.0f}, {step.again:.0f}",
                    f"{1000 * step.step_s:.1f} ms",
                    f"{1000 * modelled_s:.1f} ms",
                    f"{1000 * decode_s:.1f} ms",
                    f"{1000 * again_s:.1f} ms",
                ]
            )
            found.append({"policy": policy, "each": each, "modelled_s": modelled_s, **asdict(step)})
        row = at[MORI, each]
        step = MeanStep.of(row)
        scale = step.modelled_s(latency, step.decoding, step.computed) / step.step_s
        kept = scale * step.ceiling(latency, step.decoding)
        full = scale * step.ceiling(latency, step.pool / step.context)
        found.append({"each": each, "kept": kept, "full": full})
        ceilings.append(
            [
                f"{each}",
                f"{base:,.0f}",
                f"{row['output_tok_per_s']:,.0f} ({less(row['output_tok_per_s'], base)})",
                f"{kept:,.0f} ({less(kept, base)})",
                f"{full:,.0f} ({less(full, base)})",
                f"{PUBLISHED_GAIN * base:,.0f}",
            ]
        )
    made = made_with(sys.argv)
    text = "\n".join(
        [
            "# What bounds MORI on three replicas",
            "",
            "Generated by the command below, but for what is between the marks. Computed from "
            "[an hour](hour/cluster_simulation.md) of three replicas; nothing is run.",
            "",
            made_by(made, time.monotonic() - began),
            "",
            "## The mean step",
            "",
            marked(STEP_HEAD, explained),
            "",
            "## Output tokens a second, and against the baseline",
            "",
            "*Kept*: nothing is computed twice, replicas are always busy, as many requests decode in a step "
            "as did. *Full*: the same, with as many as the KV pool holds. Both times modelled over run.",
            "",
            marked(["a replica", f"`{BASELINE}`", f"`{MORI}`", "kept", "full", "asked: +54 %"], ceilings),
            "",
            "## Summary",
            "",
            "{by hand}",
            "",
        ]
    )
    write_result(options.out, NAME, made, {"rows": found}, text)
    print(text)


if __name__ == "__main__":
    main()
