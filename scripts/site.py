"""Build the documents as a site of static pages.

python scripts/site.py [FOLDER]     # default: out/site; `make site` runs it

The site's source has the layout of the repository, so that links between files need no change. It holds the
pages of mkdocs.yml, every file that they link to, and three pages that are written here from the code: the
command line, the SDK and the HTTP API. Any warning fails the build, for example a link or an anchor that
leads nowhere, or a missing page of the navigation.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^\s*```")
LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def cli_page() -> str:
    """Return the reference of the command line, one part for each command."""
    import typer
    from sojourn_server.cli import COMMANDS, build_app

    app: Any = typer.main.get_command(build_app())
    parts = ["# Command line", "Written from the code. `sojourn COMMAND --help` says the same."]
    for name in COMMANDS:
        command = app.commands[name]
        parts += _command(f"sojourn {name}", command)
        for inner, sub in getattr(command, "commands", {}).items():
            parts += _command(f"sojourn {name} {inner}", sub)
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> list[str]:
    # Typer's marks for bold text.
    told = re.sub(r"\[b\](.*?)\[/(?:b)?\]", r"`\1`", inspect.cleandoc(command.help or "").replace("\b\n", ""))
    lines = [f"## {name}", told]
    rows = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            called = f"`{(parameter.name or name).upper()}`"
        else:
            called = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        default = parameter.default
        shown = "" if default is None or default is ... or callable(default) else f"`{default}`"
        meaning = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
        rows.append(f"| {called} | {shown if shown not in ('`[]`', '``') else ''} | {meaning} |")
    if rows:
        lines.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]))
    return lines


def sdk_page() -> str:
    """Return the reference of the SDK: every public name of ``sojourn`` with its signature and docstring."""
    import sojourn

    parts = ["# SDK", "Written from the docstrings of the package `sojourn`.", inspect.getdoc(sojourn) or ""]
    for name in sorted(sojourn.__all__, key=str.lower):
        value = getattr(sojourn, name)
        if not callable(value):
            continue
        parts += [f"## {name}", *_documented(name, value)]
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for inner, method in vars(value).items():
                if not inner.startswith("_") and inspect.isfunction(method) and method.__doc__:
                    parts += [f"### {name}.{inner}", *_documented(inner, method)]
    return "\n\n".join(parts) + "\n"


def _documented(name: str, value: Any) -> list[str]:
    try:
        # Types would double the length; they are in the package, which is typed.
        given = inspect.signature(value).parameters.values()
        shown = ", ".join(str(one.replace(annotation=inspect.Parameter.empty)) for one in given)
        head = [f"```python\n{name}({shown})\n```"]
    except (TypeError, ValueError):
        head = []
    return [*head, inspect.getdoc(value) or ""]


def api_page() -> str:
    """Return the reference of the HTTP API: the routes of an engine and of a gateway, and all types."""
    parts = [
        "# HTTP API",
        "Written from the code. Engine and gateway answer the same as OpenAPI 3.1 at "
        "`GET /sojourn/v1/openapi.json`. [Wire](wire.md) specifies hints, events and outcomes. Routes with "
        "keys take `Authorization: Bearer KEY`. Any other status than 200 has an "
        "[ErrorAnswer](#erroranswer).",
    ]
    schemas: dict[str, Any] = {}
    for title, document in (("Engine", server_api("engine")), ("Gateway", server_api("gateway"))):
        parts.append(f"## {title}")
        schemas |= document["components"]["schemas"]
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                parts += [f"### {method.upper()} {path}", *_operation(operation)]
    parts.append("## Types")
    for name, schema in sorted(schemas.items()):
        parts += [f"### {name}", *_schema(schema)]
    return "\n\n".join(parts) + "\n"


def server_api(server: str) -> dict[str, Any]:
    """Return the OpenAPI document of ``server``, which is ``engine`` or ``gateway``."""
    from sojourn_server.api.openapi import openapi_response

    document: dict[str, Any] = json.loads(openapi_response(server).body)
    return document


def _operation(operation: dict[str, Any]) -> list[str]:
    lines = [operation["summary"], operation.get("description", "")]
    rows = [
        f"| `{one['name']}` | {_type(one['schema'])} | {_default(one['schema'])} | {_cell(one)} |"
        for one in operation["parameters"]
        if one["in"] == "query"
    ]
    if rows:
        lines.append("\n".join(["| query | type | default | meaning |", "|---|---|---|---|", *rows]))
    if "requestBody" in operation:
        lines.append("Body: " + _content(operation["requestBody"]) + ".")
    lines.append("Answer: " + _content(operation["responses"]["200"]) + ".")
    return [line for line in lines if line]


def _content(message: dict[str, Any]) -> str:
    return "; ".join(
        _type(one["schema"]) if media == "application/json" else f"`{media}`: {_cell(one['schema'])}"
        for media, one in message["content"].items()
    ).rstrip(".")


def _schema(schema: dict[str, Any]) -> list[str]:
    lines = [schema.get("description", "")]
    fields = schema.get("properties") or {one["title"]: one for one in schema.get("prefixItems", ())}
    rows = [
        f"| `{name}` | {_type(field)} | {_cell(field)}"
        f"{' May be absent.' if name not in schema.get('required', fields) else ''} |"
        for name, field in fields.items()
    ]
    if rows:
        lines.append("\n".join(["| field | type | meaning |", "|---|---|---|", *rows]))
    else:
        lines.append(_type(schema))
    return [line for line in lines if line]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items') or {})}"
    if "properties" in schema:
        return "object with " + ", ".join(f"`{name}`" for name in schema["properties"])
    more = schema.get("additionalProperties")
    if kind == "object" and isinstance(more, dict):
        return f"object of {_type(more)}"
    return str(kind) if isinstance(kind, str) else " or ".join(kind)


def _default(schema: dict[str, Any]) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _cell(schema: dict[str, Any]) -> str:
    return " ".join(schema.get("description", "").split()).replace("|", "\\|")


WRITTEN = {"docs/cli.md": cli_page, "docs/sdk.md": sdk_page, "docs/api.md": api_page}


def as_markdown(text: str) -> str:
    """Return GitHub's Markdown as Python-Markdown reads it: without the marks of generated parts, and with an
    empty line before each list and table."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        if FENCE.match(line):
            fenced = not fenced
        before = lines[-1] if lines else ""
        if not fenced and re.fullmatch(r"<!-- .*-->", line):
            if not before.startswith("|"):
                lines.append("")
            continue
        starts = line.startswith("|") and not before.startswith("|")
        starts |= bool(LIST_ITEM.match(line)) and not LIST_ITEM.match(before) and not before.startswith(" ")
        if not fenced and starts and before:
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def linked(text: str) -> set[str]:
    """Return the targets of a page's links and pictures within the repository, without their anchors."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return {target.partition("#")[0] for target in targets if "://" not in target} - {""}


def collect(into: Path) -> None:
    """Write the site's source into an empty folder."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    todo = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            text = WRITTEN[name]() if name in WRITTEN else (ROOT / name).read_text(encoding="utf-8")
            folder = Path(name).parent
            found = (os.path.normpath(folder / link) for link in linked(text))
            todo += [path for path in found if (ROOT / path).is_file()]
            target.write_text(as_markdown(text), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / name, target)


def build(site: Path) -> None:
    """Build the site into ``site``. Raises ``subprocess.CalledProcessError`` for any warning."""
    with tempfile.TemporaryDirectory() as source:
        collect(Path(source))
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", site],
            env={**os.environ, "SOJOURN_SITE_SOURCE": source, "NO_MKDOCS_2_WARNING": "1"}, check=True,
        )  # fmt: skip


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "out" / "site").resolve()
    build(folder)
    print(f"open {folder / 'index.html'}")
