"""Write docs/metrics.md from the catalogue; a test fails where the two differ.

python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path

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
