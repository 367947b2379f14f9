"""Check the structure of the source: line budgets, import order, import cycles and duplicate basenames.

Prints the modules and lines of each package beside its budget, and counts promises, modules that import vLLM,
modules with a single importer, import cycles and duplicate basenames. ``make check`` runs it.

    python scripts/house.py [--json]
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "sojourn": ROOT / "sdk" / "sojourn",
    "sojourn_integrations": ROOT / "integrations" / "sojourn_integrations",
    "sojourn_server": ROOT / "server_ext" / "sojourn_server",
}
TASKS = SOURCES["sojourn_server"] / "demo" / "tasks"
"""Repositories that the demo's agents repair. They are data, not source."""
PACKAGE_ORDER = (
    "sojourn",
    "sojourn_integrations",
    "traces",
    "programs",
    "policies",
    "metrics",
    "predictors",
    "kv_offload",
    "kv_transfer",
    "core",
    "recording",
    "routing",
    "api",
    "launch",
    "vllm",
    "gateway",
    "simulator",
    "replay",
    "profiling",
    "models",
    "demo",
    "cli",
)
"""Packages from left to right. Each imports only packages to its left."""
BUDGETS = {
    "sojourn": 7_944,
    "sojourn_integrations": 4_997,
    "traces": 1_900,
    "programs": 1_749,
    "policies": 5_297,
    "metrics": 1_580,
    "predictors": 522,
    "kv_offload": 2_726,
    "kv_transfer": 2_979,
    "core": 4_180,
    "recording": 350,
    "routing": 2_803,
    "api": 1_732,
    "launch": 1_665,
    "vllm": 6_557,
    "gateway": 5_657,
    "simulator": 5_830,
    "replay": 686,
    "profiling": 593,
    "models": 374,
    "demo": 942,
    "cli": 4_546,
    "sojourn_server": 4,
    "tests": 61_999,
    "benchmarks": 10_314,
}
"""Maximum lines of each package. A change that exceeds one merges or drops something, or lowers another by as
much and says why. The commit that reaches a lower number lowers the budget."""
MAX_PROMISES = 40
PROMISES = ROOT / "docs" / "promises.md"
COMPAT = "sojourn_server.vllm.compat"
"""The only module that imports vLLM. It imports nothing of ours, so every package may import it."""


def python_files(folder: Path) -> Iterator[Path]:
    """Yield every Python file below ``folder``, except those of the demo's task repositories."""
    for path in sorted(folder.rglob("*.py")):
        if TASKS not in path.parents:
            yield path


def count_lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return path.read_text(encoding="utf-8").count("\n")


def package_of(module: str) -> str:
    """Return the package of a module: a package below ``sojourn_server``, or the module's top package."""
    parts = module.split(".")
    return parts[1] if parts[0] == "sojourn_server" and len(parts) > 1 else parts[0]


class ImportGraph:
    """The imports between modules of the source, including imports inside functions."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        for package, folder in SOURCES.items():
            for path in python_files(folder):
                parts = [package, *path.relative_to(folder).with_suffix("").parts]
                self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.edges: dict[str, set[str]] = {module: set() for module in self.paths}
        self.vllm_importers: set[str] = set()
        for module, path in self.paths.items():
            for target in self._imported(module, path):
                if (known := self._known(target)) is not None:
                    if known != module:
                        self.edges[module].add(known)
                elif target.split(".")[0] == "vllm":
                    self.vllm_importers.add(module)

    def _imported(self, module: str, path: Path) -> Iterator[str]:
        """Yield the dotted name of everything that a module imports."""
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                yield from (f"{source}.{alias.name}" for alias in node.names)

    def _known(self, target: str) -> str | None:
        """Return the module of this project that a dotted name belongs to; ``None`` for third-party names."""
        while target:
            if target in self.paths:
                return target
            target = target.rpartition(".")[0]
        return None

    def cycles(self) -> list[list[str]]:
        """Return the groups of modules that import each other in a loop (Tarjan's algorithm)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found: list[list[str]] = []

        def visit(module: str) -> None:
            index[module] = low[module] = len(index)
            stack.append(module)
            for target in sorted(self.edges[module]):
                if target not in index:
                    visit(target)
                    low[module] = min(low[module], low[target])
                elif target in stack:
                    low[module] = min(low[module], index[target])
            if low[module] == index[module]:
                group = stack[stack.index(module) :]
                del stack[stack.index(module) :]
                if len(group) > 1:
                    found.append(sorted(group))

        for module in sorted(self.edges):
            if module not in index:
                visit(module)
        return sorted(found)

    def package_imports(self) -> dict[str, set[str]]:
        """Return which of this project's packages each package imports."""
        found: dict[str, set[str]] = defaultdict(set)
        for module, targets in self.edges.items():
            package = package_of(module)
            found[package] |= {package_of(target) for target in targets - {COMPAT}} - {package}
        found.pop("sojourn_server", None)
        return found

    def single_importers(self) -> dict[str, str]:
        """Return module → importer for modules with exactly one importer. ``__init__`` files are left out."""
        importers: dict[str, set[str]] = defaultdict(set)
        for module, targets in self.edges.items():
            for target in targets:
                importers[target].add(module)
        return {
            module: next(iter(found))
            for module, found in sorted(importers.items())
            if len(found) == 1 and self.paths[module].name != "__init__.py"
        }


def duplicate_basenames(graph: ImportGraph) -> dict[str, list[str]]:
    """Return basename → modules for each basename that several modules of the server share."""
    named: dict[str, list[str]] = defaultdict(list)
    for module, path in graph.paths.items():
        if module.startswith("sojourn_server") and not path.name.startswith("__"):
            named[path.stem].append(module)
    return {stem: modules for stem, modules in sorted(named.items()) if len(modules) > 1}


def order_faults(graph: ImportGraph) -> list[str]:
    """Return one line for each import to the right in ``PACKAGE_ORDER``, and each package missing there."""
    broken = []
    for package, ours in sorted(graph.package_imports().items()):
        if package not in PACKAGE_ORDER:
            broken.append(f"package {package} is not in PACKAGE_ORDER")
            continue
        left = PACKAGE_ORDER[: PACKAGE_ORDER.index(package)]
        for target in sorted(ours - set(left) - {"sojourn_server"}):
            broken.append(f"{package} imports {target}, which is not to its left in PACKAGE_ORDER")
    return broken


def measure() -> dict[str, object]:
    """Return a dict of all counts, and of the modules and faults behind them, as plain JSON values."""
    graph = ImportGraph()
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for module, path in graph.paths.items():
        parts = module.split(".")
        is_top = len(parts) == 1 or (len(parts) == 2 and path.name != "__init__.py")
        package = parts[0] if is_top or parts[0] != "sojourn_server" else parts[1]
        lines[package] += count_lines(path)
        modules[package] += 1
    for package, folder in (("tests", ROOT / "tests"), ("benchmarks", ROOT / "benchmarks")):
        for path in python_files(folder):
            lines[package] += count_lines(path)
            modules[package] += 1
    server = set(lines) - {"sojourn", "sojourn_integrations", "tests", "benchmarks"}
    return {
        "packages": {name: {"modules": modules[name], "lines": lines[name]} for name in sorted(lines)},
        "server_lines": sum(lines[name] for name in server),
        "server_modules": sum(modules[name] for name in server),
        "promises": len(re.findall(r"(?m)^\| (?!promise \|)", PROMISES.read_text(encoding="utf-8"))),
        "vllm_importers": sorted(graph.vllm_importers),
        "single_importers": graph.single_importers(),
        "cycles": graph.cycles(),
        "duplicate_basenames": duplicate_basenames(graph),
        "order_faults": order_faults(graph),
    }


def faults(counts: dict[str, object]) -> list[str]:
    """Return one line for each rule that the source breaks."""
    broken = []
    extra = sorted(set(counts["vllm_importers"]) - {COMPAT})  # type: ignore[call-overload]
    if extra:
        broken.append(f"vLLM is imported outside vllm/compat.py: {', '.join(extra)}")
    for group in counts["cycles"]:  # type: ignore[attr-defined]
        broken.append(f"modules import each other in a loop: {', '.join(group)}")
    for stem, modules in counts["duplicate_basenames"].items():  # type: ignore[attr-defined]
        broken.append(f"several modules are called {stem}.py: {', '.join(modules)}")
    broken += counts["order_faults"]  # type: ignore[operator]
    broken += [
        f"{name} has {row['lines']} lines; its budget is {BUDGETS.get(name, 0)}. "
        "Merge or drop as much as the change adds"
        for name, row in counts["packages"].items()  # type: ignore[attr-defined]
        if row["lines"] > BUDGETS.get(name, 0)
    ]
    if counts["promises"] > MAX_PROMISES:  # type: ignore[operator]
        broken.append(
            f"{counts['promises']} promises; the budget is {MAX_PROMISES}. A new promise replaces an old one"
        )
    return broken


def main() -> int:
    """Print the counts and broken rules. Return the exit status: 1 if a rule is broken, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON, single-importer modules named")
    arguments = parser.parse_args()
    counts = measure()
    if arguments.json:
        print(json.dumps(counts, indent=2))
    else:
        print(f"{'package':<32}{'modules':>8}{'lines':>8}{'budget':>8}")
        for name, row in counts["packages"].items():  # type: ignore[attr-defined]
            print(f"{name:<32}{row['modules']:>8}{row['lines']:>8}{BUDGETS.get(name, 0):>8}")
        print()
        for title, key in (
            ("server lines", "server_lines"),
            ("server modules", "server_modules"),
            ("promises", "promises"),
        ):
            print(f"{title:<32}{counts[key]:>8}")
        for title, key in (
            ("modules that import vLLM", "vllm_importers"),
            ("modules with one importer", "single_importers"),
            ("import cycles", "cycles"),
            ("duplicate basenames", "duplicate_basenames"),
        ):
            print(f"{title:<32}{len(counts[key]):>8}")  # type: ignore[arg-type]
    broken = faults(counts)
    for line in broken:
        print(f"house: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
