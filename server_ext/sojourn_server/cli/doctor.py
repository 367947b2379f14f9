"""``sojourn doctor``: what is installed, what a server answers, and what to do about each fault."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import Any

import httpx
import typer
from rich.console import Console

from .console import console, write_json

_TIMEOUT_S = 20.0
_IMPORT_TIMEOUT_S = 120.0
_ENTRY_POINTS = (("vllm.general_plugins", "sojourn"), ("vllm.endpoint_plugins", "sojourn"))
_GATEWAY = "X-Sojourn-Gateway"
"""In what a gateway says itself, its list of models too (docs/gateway.md)."""
_REPLICAS_PATH = "/sojourn/v1/replicas"
_KEY_VARIABLES = ("VLLM_API_KEY", "SOJOURN_API_KEY")
"""An engine's own first, then what the SDK shows and a gateway asks for."""
_COMPANIONS = ("torch", "openai", "mini-swe-agent", "matplotlib")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``ok`` is ``None`` where nothing is wrong and nothing is proven."""

    name: str
    ok: bool | None
    detail: str
    next_step: str = ""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("doctor", help="Check this environment and, with --url, a running server.")(doctor)


def doctor(
    context: typer.Context,
    url: str | None = typer.Option(None, help="A server to check, for example http://127.0.0.1:8000"),
    api_key: str | None = typer.Option(
        None, envvar=list(_KEY_VARIABLES), help="The server's API key, or a gateway's"
    ),
    json_output: str | None = typer.Option(None, "--json", help="Write the report to this file; - is stdout"),
    fabric: bool = typer.Option(
        False, "--fabric", help="Only print settings that keep KV apart on InfiniBand or RoCE; not verified"
    ),
) -> None:
    """Report; exit 0 where nothing is wrong, 1 otherwise. With --url one token is generated."""
    if fabric:
        from ..paths.fabric import infiniband, roce

        typer.echo(f"{infiniband()}\n\n{roce()}")
        return
    # The report is the result, so it goes to stdout, unless its JSON does.
    report = console if json_output == "-" else Console()
    checks: list[Check] = []
    for check in _all(url, api_key, _key_source(context)):
        checks.append(check)
        _print(check, report)
    failed = [check for check in checks if check.ok is False]
    if url is None:
        report.print("[dim]no server was checked; pass --url to check one[/]")
    report.print(f"[bold red]{len(failed)} to fix[/]" if failed else "[bold green]nothing to fix[/]")
    if json_output is not None:
        write_json({"ok": not failed, "checks": [asdict(check) for check in checks]}, json_output)
    raise typer.Exit(1 if failed else 0)


def _key_source(context: typer.Context) -> str:
    """Where the key was found."""
    source = context.get_parameter_source("api_key")
    if source is None or source.name != "ENVIRONMENT":
        return "--api-key"
    return next(name for name in _KEY_VARIABLES if os.environ.get(name))


def _all(url: str | None, api_key: str | None, key_source: str) -> Iterator[Check]:
    yield from environment_checks()
    if url is not None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        base = url.rstrip("/").removesuffix("/v1")
        try:
            client = httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT_S)
        except (httpx.InvalidURL, ValueError) as error:
            yield Check("server", False, f"{url}: {error}", "give a URL like http://127.0.0.1:8000")
            return
        with client:
            yield from server_checks(client, key_source)


def _print(check: Check, report: Console) -> None:
    mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]–[/]"}[check.ok]
    report.print(mark, end=" ")
    report.print(f"{check.name}: {check.detail}", highlight=False, markup=False, soft_wrap=True)
    if check.next_step:
        report.print(f"    next: {check.next_step}", highlight=False, markup=False, soft_wrap=True)


# --- this environment ---------------------------------------------------------------------------


def environment_checks() -> Iterator[Check]:
    """What is installed here, one check at a time."""
    yield Check("python", True, f"{platform.python_version()} at {sys.executable}")
    version = _version("sojourn")
    yield Check(
        "sojourn",
        version is not None,
        version or "not installed as a distribution, so vLLM cannot find the plugin",
        "" if version else "pip install -e . in the repository",
    )
    yield from _engine_checks()
    yield _memory_check()
    for name in _COMPANIONS:
        version = _version(name)
        yield Check(name, True if version else None, version or "not installed; only some commands need it")
    for group, name in _ENTRY_POINTS:
        found = [entry for entry in metadata.entry_points(group=group) if entry.name == name]
        yield Check(
            f"entry point {group}",
            bool(found),
            found[0].value if found else "not visible to this interpreter",
            "" if found else "install sojourn into the environment that runs vLLM: pip install -e .",
        )
    yield from _model_checks()


def _engine_checks() -> Iterator[Check]:
    from sojourn_server.launch.versions import TESTED_VLLM, installed_vllm, is_cpu_build, is_tested

    tested = ", ".join(TESTED_VLLM)
    version = installed_vllm()
    if version is None:
        yield Check(
            "vllm",
            None,
            "not installed; only serve, demo and the engine tests need it",
            "to serve from here: make setup, or pip install '.[vllm]' in a checkout on a CUDA machine",
        )
        return
    build = "CPU build" if is_cpu_build() else "not a CPU build"
    if is_tested(version):
        yield Check("vllm", True, f"{version}, {build}, tested with this sojourn")
    else:
        yield Check(
            "vllm",
            False,
            f"{version}, {build}; tested with this sojourn: {tested}",
            "install a tested release, or serve with --policy stock",
        )
    error = _import_error("from transformers import LlamaConfig")
    yield Check(
        "engine imports",
        error is None,
        error or "transformers loads its models",
        ""
        if error is None
        else "run make setup again; a torchvision built for another torch is the usual "
        "cause, and text models do not need it: pip uninstall torchvision",
    )


def _memory_check() -> Check:
    from sojourn_server.launch.machine_memory import read_memory

    memory = read_memory()
    gib = 1 << 30
    return Check(
        "memory",
        True,
        f"{memory.available_bytes / gib:.2f} GiB available of the {memory.total_bytes / gib:.2f} GiB that "
        f"{memory.owner} has, for model, KV cache and --kv-host-gib",
    )


def _model_checks() -> Iterator[Check]:
    from sojourn_server.models import LOCAL_MODELS, ModelError, is_cached, model_directory
    from sojourn_server.models.gguf_source import find_gguf

    for name in LOCAL_MODELS:
        if is_cached(name):
            yield Check(f"model {name}", True, f"made, in {model_directory(name)}")
            continue
        try:
            find_gguf()
        except ModelError as error:
            yield Check(f"model {name}", None, f"cannot be made: {error.message}", error.next_step)
        else:
            yield Check(f"model {name}", True, "will be made on first use")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _import_error(statement: str) -> str | None:
    """The last line of what importing says, in a process of its own: an import can take it down."""
    if util.find_spec("transformers") is None:
        return "transformers is not installed"
    try:
        run = subprocess.run(
            [sys.executable, "-c", statement], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"importing took more than {_IMPORT_TIMEOUT_S:.0f} s"
    if run.returncode == 0:
        return None
    lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    return lines[-1]


# --- a running server ---------------------------------------------------------------------------


def server_checks(client: httpx.Client, key_source: str = "--api-key") -> Iterator[Check]:
    """What the server behind ``client`` answers; stops where nothing further can be asked.

    ``key_source``: where the key that ``client`` shows was found.
    """
    base = str(client.base_url).rstrip("/")
    health = _get(client, "/health")
    if isinstance(health, str):
        yield Check("server", False, f"{base} does not answer: {health}", "start one: sojourn serve tiny")
        return
    if health.status_code != 200:
        found = gateway_checks(client, goes_on=False)
        if any(check.ok is False for check in found):
            yield Check("server", True, f"{base} is up")
            yield from found
            return
        yield Check(
            "server",
            False,
            f"{base}/health answers {health.status_code}",
            "wait until it has loaded; look into its log where that does not help",
        )
        return
    yield Check("server", True, f"{base} is up")

    models = _get(client, "/v1/models")
    found = gateway_checks(client) if _is_gateways(models) else []
    yield from found
    served = _model_ids(models)
    if not isinstance(models, str) and models.status_code in (401, 403):
        yield _key_check(client, key_source)
        return
    if not served:
        what = "see the replicas' logs" if found else "is this an OpenAI-compatible server?"
        yield Check("models", False, f"/v1/models: {_said(models)}", what)
        return
    with_key = "Authorization" in client.headers
    yield Check("API key", True, f"accepted, or none needed ({key_source})" if with_key else "none needed")
    yield Check("models", True, ", ".join(served))
    yield from _plugin_checks(client)
    yield _cached_tokens_check(client, served[0])


def gateway_checks(client: httpx.Client, *, goes_on: bool = True) -> list[Check]:
    """What a gateway says of itself, its replicas and their pairs; empty: this is none, or an older one.

    ``goes_on``: more is asked afterwards, which replicas answer.
    """
    from sojourn.wire import CAPABILITIES_PATH

    answer = _get(client, _REPLICAS_PATH)
    if not _is_gateways(answer):
        return []
    assert isinstance(answer, httpx.Response)
    if answer.status_code != 200:
        return [Check("gateway", None, f"it is one, and says nothing of its replicas: {_said(answer)}")]
    document = _json(answer)
    states = [state for state in _list(document.get("replicas")) if isinstance(state, dict)]
    missing = _texts(document.get("missing"))
    health = {str(state.get("replica")): str(state.get("health")) for state in states}
    doubted = [name for name, how in health.items() if how == "suspect"]
    leaving = [name for name, how in health.items() if how == "draining"]
    refused = _texts_of(document.get("refused"))
    known, up = len(states) + len(missing) + len(refused), len(states) - len(doubted)
    capabilities = _get(client, CAPABILITIES_PATH)
    told = {} if isinstance(capabilities, str) else _json(capabilities)
    # Without an engine that answers there are no capabilities; the gateway knows what it runs all the same.
    policy = told.get("cluster_policy") or document.get("policy") or "unknown"
    detail = f"policy {policy}, {up} of {known} replicas up"
    if leaving:
        detail += f", {len(leaving)} of them draining"
    if missing or doubted:
        detail += f"; without an answer: {', '.join([*doubted, *missing])}"
    if refused:
        detail += f"; {len(refused)} {'is' if len(refused) == 1 else 'are'} refused"
    if up and goes_on:
        detail += "; what follows is said by its replicas"
    pairs = _pairs_check(document, states, refused)
    # Of those that are refused the pairs' line says what to do.
    if known and up + len(refused) == known:
        return [Check("gateway", True, detail), *pairs]
    advice = "wait until they have loaded, start them, or look into their logs"
    return [Check("gateway", False, detail, advice), *pairs]


def _pairs_check(
    document: dict[str, Any], states: list[dict[str, Any]], refused: dict[str, str]
) -> list[Check]:
    """Of a gateway for pairs, whether requests can be served, where, and who is left out; else none."""
    roles = document.get("pairs")
    if not isinstance(roles, dict):
        return []
    detail = _roles(roles)
    if nodes := sorted({str(state["node"]) for state in states if state.get("node")}):
        detail += f"; nodes {', '.join(nodes)}"
    if read_side := document.get("read_side"):
        detail += f"; read side {read_side}"
    for url, why in refused.items():
        detail += f"; {url} is refused: {why}"
    absent = [name for name, number in roles.items() if not number]
    if refused:
        advice = "start these as the others are started, or take them out of --prefill and --decode"
    else:
        missing = " and a ".join(absent)
        advice = f"start a {missing} engine, or look into its log: until one is up requests are refused"
    if absent or refused:
        return [Check("pairs", False, detail, advice)]
    return [Check("pairs", True, detail)]


def _roles(told: dict[str, Any]) -> str:
    """How many engines there are of each role, those that prefill first."""
    return ", ".join(f"{told[name]} {name}" for name in sorted(told, reverse=True)) or "none"


def _is_gateways(answer: httpx.Response | str) -> bool:
    """Whether it is a gateway's own word."""
    return not isinstance(answer, str) and _GATEWAY in answer.headers


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts_of(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def _texts(value: object) -> list[str]:
    return [str(one) for one in _list(value)]


def _plugin_checks(client: httpx.Client) -> Iterator[Check]:
    from sojourn.wire import CAPABILITIES_PATH, EVENTS_PATH, WIRE_VERSION, EventBatch, decode_outcomes, encode

    answer = _get(client, CAPABILITIES_PATH)
    if isinstance(answer, str) or answer.status_code != 200:
        yield Check("plugin", False, f"{CAPABILITIES_PATH}: {_said(answer)}", _plugin_advice(answer))
        return
    document = _json(answer)
    wires = document.get("wire", [])
    understood = WIRE_VERSION in (wires if isinstance(wires, list) else [wires])
    yield Check(
        "plugin",
        understood,
        f"sojourn {document.get('version', '?')}, policy {document.get('policy', '?')}, wire {wires}",
        "" if understood else f"this client speaks wire {WIRE_VERSION}; use one release on both ends",
    )
    if stock := _texts(document.get("stock")):  # a gateway's engines
        yield Check(
            "plugin of each replica",
            False,
            f"{', '.join(stock)}: without the plugin",
            "start these with sojourn serve; until then no KV is kept there",
        )
    if silent := _texts(document.get("silent")):
        yield Check(
            "answer of each replica",
            False,
            f"{', '.join(silent)}: no answer, or not sojourn's",
            "look into their logs",
        )
    if "tiers" in document:  # an older server does not say
        yield _tiers_check(document["tiers"], document.get("paths"), document.get("pairs"))
    try:
        answer = client.post(
            EVENTS_PATH, content=encode(EventBatch(v=WIRE_VERSION, emitter="doctor", events=[]))
        )
        answer.raise_for_status()
        decode_outcomes(answer.content)
    except httpx.HTTPStatusError as error:
        yield Check("events", False, _said(error.response), "look into the server's log")
    except (httpx.HTTPError, ValueError) as error:
        yield Check("events", False, f"{type(error).__name__}: {error}", "look into the server's log")
    else:
        yield Check("events", True, "accepted")


def _tiers_check(told: Any, paths: Any, pairs: Any) -> Check:
    if told is None and isinstance(pairs, dict):  # a gateway's
        return Check("tiers", True, f"KV is stored and read by engines of pairs: {_roles(pairs)}")
    if told is None and isinstance(paths, dict):
        where = f"{paths.get('role', '?')} engine of a pair at node {paths.get('node', '?')}"
        return Check(
            "tiers", True, f"KV is stored and read by a {where}, reached at {paths.get('peer', '?')}"
        )
    if not isinstance(told, dict):
        nothing = "nothing below the device: KV that it loses is computed again"
        return Check("tiers", None, nothing if told is None else f"not understood: {told!r}")
    sizes = ", ".join(
        f"{name} {_size(told[field])}"
        for field, name in (("host", "host memory"), ("disk", "disk"))
        if isinstance(told.get(field), dict)
    )
    what = f"{told.get('connector', '?')}, {sizes or 'of unknown size'}"
    if told.get("on", True):
        return Check("tiers", True, what)
    return Check(
        "tiers",
        False,
        f"{what}; turned off: {told.get('off_because') or 'it is not said why'}",
        "the server's log says more; KV that the device loses is computed again until it is restarted",
    )


def _size(told: dict[str, Any]) -> str:
    blocks, size = told.get("blocks"), told.get("bytes")
    parts = [f"{size / (1 << 30):,.3f}".rstrip("0").rstrip(".") + " GiB"] if isinstance(size, int) else []
    parts += [f"{blocks:,} blocks"] if isinstance(blocks, int) else []
    return f"for {' or '.join(parts)}" if parts else "of unknown size"


def _plugin_advice(answer: httpx.Response | str) -> str:
    if not isinstance(answer, str):
        if answer.status_code == 404:
            return "it is not loaded; start the server with sojourn serve MODEL, or set VLLM_PLUGINS=sojourn"
        if answer.status_code in (401, 403):
            return "the plugin wants the server's API key; pass --api-key"
        advice = _json(answer).get("error", {})
        if isinstance(advice, dict) and advice.get("next"):
            return str(advice["next"])
    return "look into the server's log"


def _key_check(client: httpx.Client, key_source: str) -> Check:
    if "Authorization" in client.headers:
        return Check(
            "API key",
            False,
            f"that of {key_source} is not the one the server was started with",
            "compare it with the server's --api-key, or a gateway's --tenants",
        )
    variables = ", or else ".join(_KEY_VARIABLES)
    return Check("API key", False, "the server wants one", f"pass --api-key, or set {variables}")


def _cached_tokens_check(client: httpx.Client, model: str) -> Check:
    try:
        answer = client.post("/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 1})
    except httpx.HTTPError as error:
        return Check(
            "cached tokens", False, f"{type(error).__name__}: {error}", "is the engine busy or stuck?"
        )
    if answer.status_code == 401 and _is_gateways(answer):
        # It let the same key see its models.
        return Check(
            "cached tokens",
            None,
            "not looked at: this is the gateway's admin key, which sees everything and generates nothing",
            "pass a tenant's key to have a token generated",
        )
    if answer.status_code >= 500:
        advice = "nothing is generated: look into the server's log, a gateway's or its engines'"
        return Check("cached tokens", False, f"/v1/completions: {_said(answer)}", advice)
    if answer.status_code != 200:
        return Check("cached tokens", None, f"/v1/completions: {_said(answer)}")
    details = (_json(answer).get("usage") or {}).get("prompt_tokens_details")
    if isinstance(details, dict) and details.get("cached_tokens") is not None:
        return Check("cached tokens", True, "reported with each answer")
    return Check(
        "cached tokens", False, "not reported", "start the server with --enable-prompt-tokens-details"
    )


def _get(client: httpx.Client, path: str) -> httpx.Response | str:
    try:
        return client.get(path)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _model_ids(answer: httpx.Response | str) -> list[str]:
    if isinstance(answer, str) or answer.status_code != 200:
        return []
    entries = _json(answer).get("data")
    if not isinstance(entries, list):
        return []
    return [str(entry.get("id")) for entry in entries if isinstance(entry, dict)]


def _said(answer: httpx.Response | str) -> str:
    if isinstance(answer, str):
        return answer
    error = _json(answer).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return f"{answer.status_code} {message or answer.reason_phrase}"
