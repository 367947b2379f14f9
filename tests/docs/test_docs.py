"""What the documents say against the code: names, numbers, tables, commands, links."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from docs_tools import PACKAGES, ROOT, SERVER, block, code_words, documents, rows, top_level_names
from script_modules import load_script
from sojourn.wire_codec import Outcome, decode_batch, decode_context, decode_event
from sojourn.wire_events import ToolStart
from sojourn_server.cli import COMMANDS, build_app
from sojourn_server.launch.serve_command import LaunchEnvironment, ServeOptions, build_command
from sojourn_server.metrics.turn_ledger import LossCause
from sojourn_server.policies.policy_protocols import DecisionReason
from sojourn_server.policies.preset import preset_names
from sojourn_server.policies.preset_store import DEFAULT_PRESET
from sojourn_server.simulator.simulator_policies import policy_names
from sojourn_server.vllm.plugin_settings import PluginSettings

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
MECHANISMS = (DOCS / "mechanisms.md").read_text(encoding="utf-8")
PROMISES = (DOCS / "promises.md").read_text(encoding="utf-8")
RELEASES = (DOCS / "vllm-releases.md").read_text(encoding="utf-8")
RULES = (DOCS / "policy-rules.md").read_text(encoding="utf-8")
OPERATE = (DOCS / "operate.md").read_text(encoding="utf-8")
FRAMEWORKS = (DOCS / "frameworks.md").read_text(encoding="utf-8")


def generator() -> Any:
    """Return docs/generate.py as a module."""
    return load_script("docs/generate.py")


def words_of(document: str, name: str, column: int = 0) -> list[set[str]]:
    return [code_words(row[column]) for row in rows(block(document, name))]


# -- README --------------------------------------------------------------------------


def test_the_readme_is_short_and_has_both_commands() -> None:
    assert len(README.splitlines()) <= 100, "two screens"
    assert re.search(r"^make demo\b", README, re.MULTILINE)
    assert re.search(r"^sojourn serve MODEL\b", README, re.MULTILINE)
    assert block(README, "demo-table").strip()


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        word for document in documents() for word in re.findall(r"\bmake ([a-z]+)\b", read_code(document))
    }
    assert named >= {"setup", "demo", "test", "fast", "check"}
    assert named <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


def test_the_guide_names_every_package() -> None:
    layout = (ROOT / "AGENTS.md").read_text(encoding="utf-8").split("## Layout")[1]
    for package in PACKAGES.keys() - {"sojourn", "sojourn_integrations"}:
        assert re.search(rf"\b{package}\b", layout), package


# -- commands --------------------------------------------------------------------------


def read_code(path: Path) -> str:
    """What a document sets as code."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))])


COMMAND_LINES = sorted(
    {
        line.strip()
        for path in documents()
        for line in read_code(path).replace("\\\n", " ").splitlines()
        if re.match(r"\s*sojourn (?!--help)[a-z]", line)
    }
)


VLLM_FLAGS = {"--host", "--port", "--enable-auto-tool-choice", "--tool-call-parser"}
"""Flags of vLLM's own that the documents give to `sojourn serve`."""


def test_there_are_commands_to_check() -> None:
    assert {line.split()[1] for line in COMMAND_LINES} == set(COMMANDS)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_and_their_options_exist(line: str) -> None:
    words = shlex.split(line.replace("…", "X"), comments=True)
    command: Any = typer.main.get_command(build_app()).commands[words[1]]  # type: ignore[attr-defined]
    command = getattr(command, "commands", {}).get("".join(words[2:3]), command)  # sojourn trace is a group
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= VLLM_FLAGS if words[1] == "serve" else set()
    mine = words[2 : words.index("--")] if "--" in words else words[2:]
    given = {word.partition("=")[0] for word in mine if word.startswith("-")}
    assert given <= known


def test_the_raw_command_is_what_sojourn_serve_runs() -> None:
    text = block(OPERATE, "raw-serve").removeprefix("```sh\n").replace("```", "").replace("\\\n", " ")
    words = shlex.split(text)
    facts = LaunchEnvironment(python="python", cpu_build=False, has_vllm_cli=True)
    built = build_command(ServeOptions(model="MODEL", model_path="MODEL", policy=DEFAULT_PRESET), facts, {})
    assert words[0] == f"VLLM_PLUGINS={built.env['VLLM_PLUGINS']}"
    assert words[1:3] == ["vllm", "serve"]
    flags = list(built.argv[built.argv.index("serve") + 1 :])
    assert words[3:] == flags


def test_the_cpu_defaults_are_those_of_sojourn_serve() -> None:
    facts = LaunchEnvironment(python="python", cpu_build=True, has_vllm_cli=True)
    built = build_command(ServeOptions(model="MODEL", model_path="MODEL", policy="continuum"), facts, {})
    stated = re.search(r"also\s+adds\s+`([^`]+)`", OPERATE)
    assert stated
    assert stated.group(1) in shlex.join(built.argv)


def test_the_settings_are_all_there_with_their_defaults_and_flags() -> None:
    table = rows(block(OPERATE, "settings"))
    defaults = {field.name: field.default for field in dataclasses.fields(PluginSettings)}
    stated = {row[0].strip("`"): None if row[2] == "none" else row[2].strip("`") for row in table}
    assert stated == {name: None if value is None else str(value) for name, value in defaults.items()}
    serve: Any = typer.main.get_command(build_app()).commands["serve"]  # type: ignore[attr-defined]
    flags = {option for parameter in serve.params for option in parameter.opts}
    assert {row[1].strip("`") for row in table if row[1]} <= flags


def test_the_example_of_the_ratio_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "prefill-decode.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "prefill-decode.md", "exec"), {})
    assert capsys.readouterr().out.startswith("PdRatioRange(least=")


def test_the_curl_examples_are_understood() -> None:
    bodies = [json.loads(body) for body in re.findall(r"-d '(\{.*?\})'\n", FRAMEWORKS, re.DOTALL)]
    request, batch = bodies
    assert decode_context(request["vllm_xargs"]["agentic_context"]).program_id == "run-17"
    events = [decode_event(raw) for raw in decode_batch(json.dumps(batch).encode()).events]
    assert [(type(event), event.program_id) for event in events] == [(ToolStart, "run-17")]


def test_policies_reasons_and_routes_are_named_as_the_code_has_them() -> None:
    words = code_words(OPERATE)
    assert {"stock", *preset_names()} <= words
    excuses = {"no_tool_call", "not_worth_it", "over_budget", "nothing_cached", "policy_off"}
    assert excuses <= {reason.value for reason in DecisionReason} & words
    routes = (SERVER / "api" / "routes.py").read_text(encoding="utf-8")
    offered = set(re.findall(r'@router\.(?:get|post)\("/(\w+)', routes))
    assert set(re.findall(r"/sojourn/v1/(\w+)", OPERATE)) == offered


def test_the_wire_has_every_outcome() -> None:
    wire = (DOCS / "wire.md").read_text(encoding="utf-8")
    assert {outcome.value for outcome in Outcome} <= code_words(wire)


# -- architecture ------------------------------------------------------------------------


def test_the_structure_keeps_its_rules() -> None:
    """vLLM is imported in one place, nothing imports in a loop, basenames are unique, the order holds."""
    house = load_script("scripts/house.py")
    assert house.faults(house.measure()) == []


@pytest.mark.parametrize("row", rows(block(RULES, "numbers")), ids=lambda row: row[0].strip("`"))
def test_numbers_are_those_of_the_code(row: list[str]) -> None:
    place, _, name = row[0].strip("`").partition(":")
    module = import_module("sojourn_server." + place.removesuffix(".py").replace("/", "."))
    owner, _, attribute = name.rpartition(".")
    if owner:
        fields = {field.name: field.default for field in dataclasses.fields(getattr(module, owner))}
        value = fields[attribute]
    else:
        value = getattr(module, name)
    assert str(value) == row[1]


def test_everything_overridden_is_listed() -> None:
    tree = ast.parse((SERVER / "vllm" / "scheduler.py").read_text(encoding="utf-8"))
    mixin = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SojournMixin")
    methods = {node.name for node in mixin.body if isinstance(node, ast.FunctionDef)}
    listed = set().union(*words_of(RELEASES, "touched"))
    assert methods <= listed


def test_everything_replaced_is_listed() -> None:
    """Assignments of the vLLM adapter to objects that are not its own."""
    found = set()
    for path in (SERVER / "vllm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                text = ast.unparse(target)
                if re.match(r"(scheduler(\.kv_cache_manager)?|manager|self\._pool|victim)\.\w+$", text):
                    found.add(text.rpartition(".")[2])
    replaced = {"waiting", "kv_holding_waiting", "policy", "allocate_slots", "free_block_queue", "priority"}
    assert found == {*replaced, "_reserve_prefill_lookahead", "get_num_common_prefix_blocks"}
    listed = {word.rpartition(".")[2] for words in words_of(RELEASES, "touched") for word in words}
    assert found <= listed


def test_the_causes_are_the_ledgers() -> None:
    stated = [next(iter(words)) for words in words_of(OPERATE, "causes")]
    assert stated == [cause.value for cause in LossCause]


def test_files_named_in_the_text_exist() -> None:
    words = code_words((DOCS / "architecture.md").read_text(encoding="utf-8"))
    named = {word for word in words if re.fullmatch(r"[\w/]+\.py", word)}
    assert named
    for word in named:
        assert (SERVER / word).is_file() or (ROOT / word).is_file(), word


def test_methods_named_in_the_life_of_a_turn_exist() -> None:
    known = set().union(
        *(top_level_names(path) for folder in PACKAGES.values() for path in folder.rglob("*.py"))
    )
    life = ARCHITECTURE.split("## Life of one turn")[1].split("\n## ")[0]
    named = {word for word in code_words(life) if re.fullmatch(r"[A-Z]\w+\.\w+", word)}
    assert len(named) >= 3
    assert named <= known


# -- mechanisms --------------------------------------------------------------------------

MECHANISM_ROWS = rows(block(MECHANISMS, "mechanisms"))
BASELINE_ROWS = rows(block(MECHANISMS, "baselines"))


def test_all_mechanisms_have_a_row() -> None:
    assert [row[0] for row in MECHANISM_ROWS] == [
        *(f"C{number}" for number in range(1, 10)),
        *(f"S{number}" for number in range(1, 12)),
        *(f"M{number}" for number in range(1, 10)),
        *(f"T{number}" for number in range(1, 7)),
        *(f"D{number}" for number in range(1, 9)),  # D9 is not built
    ]


def test_a_mechanism_says_whether_the_default_uses_it() -> None:
    assert {len(row) for row in MECHANISM_ROWS} == {6}
    assert all(row[5] for row in MECHANISM_ROWS)


def test_baselines_of_our_own_making_have_a_row() -> None:
    ours = {row[0] for row in BASELINE_ROWS}
    assert ours == {"admit", "autellix", "infercept", "thunderagent", "static-ttl"}
    assert ours <= set(policy_names())


@pytest.mark.parametrize("row", [*MECHANISM_ROWS, *BASELINE_ROWS], ids=lambda row: row[0])
def test_a_mechanism_names_code_and_tests_that_exist(row: list[str]) -> None:
    objects, tests = code_words(row[2]), code_words(row[3])
    assert objects
    assert tests
    for place in objects:
        path, _, name = place.partition(":")
        file = SERVER / path if (SERVER / path).is_file() else ROOT / path
        assert name in top_level_names(file), place
    for place in tests:
        path, _, name = place.partition("::")
        assert name in top_level_names(ROOT / path), place


# -- promises ----------------------------------------------------------------------------

PROMISE_ROWS = [
    row for part in ("engine", "gateway", "client", "formats") for row in rows(block(PROMISES, part))
]


def test_every_promise_has_all_its_cells() -> None:
    assert {len(row) for row in PROMISE_ROWS} == {2}
    assert len(PROMISE_ROWS) == sum(line.startswith("| ") for line in PROMISES.splitlines()) - 4


@pytest.mark.parametrize("row", PROMISE_ROWS, ids=lambda row: row[0][:40])
def test_a_promise_names_tests_that_exist(row: list[str]) -> None:
    tests = code_words(row[1])
    assert tests
    for place in tests:
        path, _, name = place.partition("::")
        assert name.lower().startswith("test"), place
        assert name in top_level_names(ROOT / path), place


# -- the rest ------------------------------------------------------------------------------


def test_the_metrics_page_is_the_catalogue() -> None:
    generate = generator()
    written = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert written == generate.document(), "run: python docs/generate.py"


def headings(path: Path) -> set[str]:
    """Anchors of a document as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        place, _, anchor = target.partition("#")
        linked = (path.parent / place).resolve() if place else path
        assert linked.exists(), target
        if anchor:
            assert anchor in headings(linked), target


def test_the_link_check_would_notice() -> None:
    assert "what-of-vllm-is-touched" in headings(DOCS / "vllm-releases.md")
    assert "nothing" not in headings(DOCS / "architecture.md")
    assert len(documents()) >= 12


def test_the_readmes_numbers_are_the_committed_results() -> None:
    generate = generator()
    if not generate.RESULT.exists():
        assert "No result has been committed yet." in README
        return
    result = json.loads(generate.RESULT.read_text(encoding="utf-8"))
    table = generate.demo_table(result)
    assert generate.placed(README, "demo-table", table) == README, "run: python docs/generate.py"
    judged = generate.judge_table(json.loads(generate.JUDGE.read_text(encoding="utf-8")))
    concepts = (DOCS / "concepts.md").read_text(encoding="utf-8")
    assert generate.placed(concepts, "judge-table", judged) == concepts, "run: python docs/generate.py"
    assert generate.PICTURE.read_text(encoding="utf-8") == generate.demo_picture(result)
    ratio = f"{result['median']['ratio']['completion_mean']:.1f} times"
    assert ratio in README.split("## ")[0], f"the first screen says another number than {ratio}"


def test_the_overhead_is_the_committed_result() -> None:
    generate = generator()
    text = (DOCS / "frameworks.md").read_text(encoding="utf-8")
    reports = generate.instructions_reports()
    assert len(reports) == 2
    table = generate.instructions_table(reports)
    assert generate.placed(text, "framework-instructions", table) == text, "run: python docs/generate.py"
    assert table in text


def test_the_differences_are_those_of_the_examples() -> None:
    generate = generator()
    pages = generate.framework_pages()
    for path, page in pages.items():
        assert path.read_text(encoding="utf-8") == page, "run: python docs/generate.py"
        assert f"](frameworks/{path.name})" in (DOCS / "frameworks.md").read_text(encoding="utf-8")
    text = "".join(pages.values())
    for path in (ROOT / "examples").glob("*.py"):
        added = [line for line in generate.example_diff(path).splitlines() if line.startswith("+ ")]
        assert generate.example_diff(path) in text, f"{path.name} has no difference in docs/frameworks/"
        assert len(added) <= 3
