"""``sojourn doctor``: checks of this environment, and of a running engine, or gateway with its replicas and
pairs, with the next step for each fault."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import typer
from rich.console import Console
from sojourn.errors import install_command
from sojourn.wire_codec import (
    CAPABILITIES_PATH,
    EVENTS_PATH,
    WIRE_VERSION,
    EventBatch,
    decode_outcomes,
    encode,
)

from ..launch.launch_environment import installed_versions, read_memory
from ..metrics.live_frame import PROBE_ID, LiveFrame
from ..vllm import compat
from .console import (
    PASS_KEY,
    CliError,
    api_key_option,
    console,
    json_option,
    key_source,
    url_option,
    write_json,
)
from .live_client import connection_advice, error_of, http_client, json_object
from .top_view import age_s, age_text, printable, untracked_text

_TIMEOUT_S = 20.0
_IMPORT_TIMEOUT_S = 120.0
_ROCM_DEVICE = Path("/dev/kfd")
_IMPORT_ENGINE = "from transformers import LlamaConfig; import torch; print(torch.cuda.device_count())"
_COMPANIONS = ("torch", "openai", "mini-swe-agent", "matplotlib")

STREAM_PATH = "/sojourn/v1/stream?once=1"
REPLICAS_PATH = "/sojourn/v1/replicas"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``ok``: True for a passed check, False for a fault, ``None`` for information or
    an undecided check. A passed check has no next step."""

    name: str
    ok: bool | None
    detail: str
    next_step: str = ""

    def __post_init__(self) -> None:
        if self.ok:
            object.__setattr__(self, "next_step", "")


def doctor(
    context: typer.Context,
    url: str | None = url_option("A server to check, for example http://127.0.0.1:8000", None),
    api_key: str | None = api_key_option("The server's API key, or a gateway's"),
    json_output: str | None = json_option("the report"),
) -> None:
    """Check this environment and, with --url, a running server."""
    # The report is the result, so it goes to stdout, unless the JSON goes to stdout.
    report = console if json_output == "-" else Console()
    checks: list[Check] = []
    for check in _checks(url, api_key, key_source(context)):
        checks.append(check)
        _print(check, report)
    failed = [check for check in checks if check.ok is False]
    if url is None:
        report.print("[dim]no server was checked; pass --url to check one[/]")
    report.print(f"[bold red]{len(failed)} to fix[/]" if failed else "[bold green]nothing to fix[/]")
    if json_output is not None:
        write_json({"ok": not failed, "checks": [asdict(check) for check in checks]}, json_output)
    raise typer.Exit(1 if failed else 0)


def _checks(url: str | None, api_key: str | None, key_source: str) -> Iterator[Check]:
    if url is not None:
        yield from _url_checks(url, api_key, key_source)
    # With a URL the report is about that server, which has imported its engine already.
    yield from environment_checks(import_engine=url is None)


def _url_checks(url: str, api_key: str | None, key_source: str) -> Iterator[Check]:
    try:
        client = http_client(url, api_key, _TIMEOUT_S)
    except CliError as error:
        yield Check("server", False, error.message, error.next_step)
        return
    with client:
        _announce(f"asking {url}, up to {_TIMEOUT_S:g} s for each answer")
        yield from server_checks(client, key_source)


def _print(check: Check, report: Console) -> None:
    ok, wrong, neither = ("ok", "x", "-") if report.options.ascii_only else ("✓", "✗", "–")
    mark = {True: f"[green]{ok}[/]", False: f"[red]{wrong}[/]", None: f"[dim]{neither}[/]"}[check.ok]
    report.print(mark, end=" ")
    report.print(f"{check.name}: {check.detail}", highlight=False, markup=False, soft_wrap=True)
    if check.next_step:
        report.print(f"    next: {check.next_step}", highlight=False, markup=False, soft_wrap=True)


def _announce(what: str) -> None:
    if console.is_terminal:
        console.print(f"[dim]… {what}[/]", highlight=False, soft_wrap=True)


# --- this environment ---------------------------------------------------------------------------


def environment_checks(*, import_engine: bool = True) -> Iterator[Check]:
    """Yield the checks of this environment: Python, packages, vLLM, memory and entry points.

    ``import_engine``: also import the engine's model library, which takes seconds."""
    yield Check("python", True, f"{platform.python_version()} at {sys.executable}")
    versions = installed_versions("sojourn", *_COMPANIONS)
    install = install_command("server")
    said = versions.get("sojourn", "not installed as a distribution, so vLLM cannot find the plugin")
    yield Check("sojourn", "sojourn" in versions, said, f"run {install}")
    yield from _engine_checks(import_engine)
    memory, gib = read_memory(), 1 << 30
    said = f"{memory.available_bytes / gib:.2f} GiB available of {memory.total_bytes / gib:.2f} GiB of "
    yield Check("memory", True, f"{said}{memory.owner}, for model, KV cache and --kv-host-gib")
    for name in _COMPANIONS:
        said = versions.get(name, "not installed; only some commands need it")
        yield Check(name, True if name in versions else None, said)
    for group in (compat.GENERAL_PLUGINS, compat.ENDPOINT_PLUGINS):
        found = [entry.value for entry in metadata.entry_points(group=group, name="sojourn")]
        said = found[0] if found else "not visible to this interpreter"
        step = f"in the environment that runs vLLM: {install}"
        yield Check(f"entry point {group}", bool(found), said, step)


def _engine_checks(import_engine: bool) -> Iterator[Check]:
    version = compat.installed_vllm()
    if version is None:
        cpu_engine = "make setup" if _is_checkout() else install_command("cpu")
        step = f"to serve from here: {cpu_engine}, or on a CUDA machine {install_command('vllm')}"
        yield Check("vllm", None, "not installed; serve, demo and the engine tests need it", step)
        return
    tested = f"; tested with this sojourn: {', '.join(compat.TESTED_VLLM)}"
    if compat.is_tested(version):
        without = version.split("+", 1)[0] in compat.TESTED_WITHOUT_ENGINE
        how = ", its scheduler only: it has no CPU build to run whole engines" if without else ""
        tested = f", tested with this sojourn{how}"
    build = "CPU build" if compat.is_cpu_build() else "not a CPU build"
    step = "install a tested release, or serve with --policy stock"
    yield Check("vllm", compat.is_tested(version), f"{version}, {build}{tested}", step)
    if import_engine:
        _announce(f"importing the engine's models, up to {_IMPORT_TIMEOUT_S:g} s")
        yield from _import_checks(needs_gpu=not compat.is_cpu_build() and not _ROCM_DEVICE.exists())


def _import_checks(*, needs_gpu: bool) -> Iterator[Check]:
    """Yield a check that the engine's model library can be imported, in a process of its own. A slow import
    is no fault, because the first import reads hundreds of files. With ``needs_gpu``, the same process counts
    the devices that torch finds."""
    name = "engine imports"
    again = "run make setup again" if _is_checkout() else f"run {install_command('vllm')} again"
    if util.find_spec("transformers") is None:
        yield Check(name, False, "transformers is not installed", again)
        return
    try:
        run = subprocess.run(
            [sys.executable, "-c", _IMPORT_ENGINE], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        why = "first import, slow disk or busy machine"
        yield Check(name, None, f"not finished after {_IMPORT_TIMEOUT_S:g} s ({why})", "run doctor again")
        return
    if run.returncode:
        said = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        step = "the usual cause is a torchvision built for another torch, which text models do not need: "
        yield Check(name, False, said, f"{again}; {step}pip uninstall torchvision")
        return
    yield Check(name, True, "transformers loads its models")
    if needs_gpu:
        devices = int(run.stdout.split()[-1])
        none = "torch finds none; vLLM's build for CUDA cannot start an engine here"
        said = f"{devices} for CUDA" if devices else none
        step = "give the container its GPUs, install the driver, or use vLLM's CPU build"
        # No fault: vLLM's scheduler, and so sojourn simulate, runs without a GPU.
        yield Check("gpu", True if devices else None, said, step)


def _is_checkout() -> bool:
    """Return whether this package lies in a checkout, where ``make setup`` works."""
    return (Path(__file__).parents[3] / "Makefile").is_file()


# --- a server -----------------------------------------------------------------------------------


def server_checks(client: httpx.Client, key_source: str = "--api-key") -> Iterator[Check]:
    """Yield the checks of the server behind ``client``. Stops after a fault that makes more checks
    impossible. The server generates one token.

    ``key_source``: the option or environment variable that holds the client's API key.
    """
    base = _base_url(client)
    try:
        health = client.get("/health")
    except httpx.HTTPError as error:
        yield Check("server", False, *connection_advice(error, base))
        return
    is_up = health.status_code == 200
    gateway = gateway_checks(client, goes_on=is_up)
    if not is_up and all(check.ok is not False for check in gateway):
        step = "wait until it has loaded; if it does not, see its log"
        yield Check("server", False, f"{base}/health answers {health.status_code}", step)
        return
    yield Check("server", True, f"{base} is up")
    yield from gateway
    if not is_up:
        return

    models = _ask(client, "GET", "/v1/models")
    with_key = "Authorization" in client.headers
    if models.status_code in (401, 403):
        said, step = "the server needs one", PASS_KEY
        if with_key:
            said = f"the key of {key_source} is not the server's key"
            step = "compare it with the server's --api-key, or a gateway's --tenants"
        yield Check("API key", False, said, step)
        return
    served = [str(entry["id"]) for entry in json_object(models).get("data") or ()]
    if not served:
        step = "see the replicas' logs" if gateway else "is this an OpenAI-compatible server?"
        yield Check("models", False, f"/v1/models: {_error_summary(models)}", step)
        return
    yield Check("API key", True, f"accepted, or none needed ({key_source})" if with_key else "none needed")
    yield Check("models", True, ", ".join(served))
    yield from _plugin_checks(client)
    yield _cached_tokens_check(client, served[0])


def _plugin_checks(client: httpx.Client) -> Iterator[Check]:
    answer = _ask(client, "GET", CAPABILITIES_PATH)
    if answer.status_code != 200:
        step = error_of(answer).get("next") or "see the server's log"
        if answer.status_code == 404:
            step = "not loaded; start the server with sojourn serve MODEL, or set VLLM_PLUGINS=sojourn"
        yield Check("plugin", False, f"{CAPABILITIES_PATH}: {_error_summary(answer)}", step)
        return
    document = json_object(answer)
    wires, policy = document.get("wire", []), document.get("policy", "?")
    ok, step = (
        None if policy == "off" else True,
        f"to switch it on: sojourn policy on --url {_base_url(client)}",
    )
    if WIRE_VERSION not in (wires if isinstance(wires, list) else [wires]):
        ok = False
        step = f"this client speaks wire {WIRE_VERSION}; use the same release on both sides"
    said = f"sojourn {document.get('version', '?')}, policy {policy}, wire {wires}"
    yield Check("plugin", ok, said, step)
    if paths := document.get("paths"):  # of one engine; a gateway has none
        step = f"to use it: sojourn gateway --prefill URL --decode URL, with this one as {paths['role']}"
        yield Check("role", None, f"a {paths['role']} engine, which serves behind a gateway", step)
    if stock := document.get("stock"):  # engines behind a gateway
        step = "start them with sojourn serve; until then they keep no KV"
        yield Check("plugin of each replica", False, f"{', '.join(stock)}: without the plugin", step)
    if silent := document.get("silent"):
        said = f"{', '.join(silent)}: no answer, or not an answer of sojourn"
        yield Check("answer of each replica", False, said, "see their logs")
    if "tiers" in document:
        yield _tiers_check(document)
    if isinstance(missing := document.get("missing"), dict):
        names = ", ".join(missing["mechanisms"])
        yield Check("mechanisms", None, f"off: {names}, because {missing['because']}")
    yield _events_check(client)
    yield from _programs_checks(client)


def _events_check(client: httpx.Client) -> Check:
    batch = encode(EventBatch(v=WIRE_VERSION, emitter="doctor", events=[]))
    answer = _ask(client, "POST", EVENTS_PATH, content=batch)
    wrong = "" if answer.status_code == 200 else _error_summary(answer)
    try:
        decode_outcomes(answer.content)
    except ValueError as error:
        wrong = wrong or f"{type(error).__name__}: {error}"
    return Check("events", not wrong, wrong or "accepted", "see the server's log")


def _programs_checks(client: httpx.Client) -> Iterator[Check]:
    """Yield one check: whether agents' programs arrive. Yields nothing for a server without live frames."""
    answer = _ask(client, "GET", STREAM_PATH)
    if answer.status_code == 404:
        return
    if answer.status_code != 200:
        yield Check("programs", None, f"not known: {_error_summary(answer)}")
        return
    try:
        frame = msgspec.json.decode(answer.content, type=LiveFrame)
    except msgspec.DecodeError as error:
        yield Check("programs", None, f"not a live frame: {error}")
        return
    untracked = untracked_text(frame)
    said = "none yet"
    step = f"sojourn run --url {_base_url(client)} -- python agent.py, or open sojourn.program() in the agent"
    if frame.programs:
        newest = min(frame.programs, key=lambda row: age_s(row, frame))
        name = printable(newest.name or newest.program_id)
        said = f"{frame.total} seen, newest {name} {age_text(newest, frame)}"
        step = f"if an agent sent the requests without a program: {step}"
    ok = True if frame.programs and not untracked else None
    yield Check("programs", ok, "; ".join(filter(None, (said, untracked))), step)


def _tiers_check(document: dict[str, Any]) -> Check:
    """Return the check of the tiers below the device. ``document``: the capabilities of an engine or a
    gateway."""
    tiers, paths, pairs = (document.get(name) for name in ("tiers", "paths", "pairs"))
    if tiers is None and pairs is not None:  # the answer of a gateway
        return Check("tiers", True, f"engines of pairs store and read KV: {_count_roles(pairs)}")
    if tiers is None and paths is not None:
        where = f"{paths['role']} engine of a pair at node {paths['node']}"
        return Check("tiers", True, f"a {where} stores and reads KV; its address is {paths['peer']}")
    if tiers is None:
        return Check("tiers", None, "none below the device: evicted KV is computed again")
    names = {"host": "host memory", "disk": "disk"}
    sizes = [f"{name} for {_size(tiers[field])}" for field, name in names.items() if tiers.get(field)]
    said, is_on = ", ".join([str(tiers.get("connector")), *sizes]), tiers.get("on", True)
    if not is_on:
        said += f"; turned off: {tiers.get('off_because') or 'for an unknown reason'}"
    return Check("tiers", is_on, said, "see the server's log; until a restart, evicted KV is computed again")


def _size(tier: dict[str, Any]) -> str:
    blocks, size = tier.get("blocks"), tier.get("bytes") or 0
    gib = f"{size / (1 << 30):,.3f}".rstrip("0").rstrip(".") + " GiB"
    return gib if blocks is None else f"{gib} or {blocks:,} blocks"


def _cached_tokens_check(client: httpx.Client, model: str) -> Check:
    name = "cached tokens"
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    # vLLM makes this header part of the request's id.
    headers = {"X-Request-Id": f"{PROBE_ID}-{uuid4().hex}"}
    answer = _ask(client, "POST", "/v1/completions", json=body, headers=headers)
    if answer.status_code == _NO_ANSWER:
        return Check(name, False, _error_summary(answer), "is the engine busy or stuck?")
    if answer.status_code == 401 and _is_gateway_answer(answer):
        # The same key was accepted for the list of models.
        said = "not checked: the gateway's admin key may see everything and generate nothing"
        return Check(name, None, said, "pass a tenant's key to generate a token")
    if answer.status_code != 200:
        step = "the server generates nothing: see its log; for a gateway also its engines' logs"
        if answer.status_code < 500:
            return Check(name, None, f"/v1/completions: {_error_summary(answer)}")
        return Check(name, False, f"/v1/completions: {_error_summary(answer)}", step)
    details = (json_object(answer).get("usage") or {}).get("prompt_tokens_details")
    reported = isinstance(details, dict) and details.get("cached_tokens") is not None
    said = "reported with each answer" if reported else "not reported"
    return Check(name, reported, said, "start the server with --enable-prompt-tokens-details")


def gateway_checks(client: httpx.Client, *, goes_on: bool = True) -> list[Check]:
    """Return the checks of a gateway, its replicas and its prefill/decode pairs; empty for other servers.

    ``goes_on``: True if checks of a single server follow in the report. The result then says that replicas
    answer those checks, because the gateway forwards the requests.
    """
    answer = _ask(client, "GET", REPLICAS_PATH)
    if not _is_gateway_answer(answer):
        return []
    if answer.status_code != 200:
        said = f"a gateway that does not list its replicas: {_error_summary(answer)}"
        return [Check("gateway", None, said)]
    document = json_object(answer)
    states: list[dict[str, Any]] = document.get("replicas") or []
    refused: dict[str, str] = document.get("refused") or {}
    unanswered = [state["replica"] for state in states if state["health"] == "suspect"]
    silent = [*unanswered, *(document.get("missing") or [])]
    leaving = sum(state["health"] == "draining" for state in states)
    up = len(states) - len(unanswered)
    capabilities = json_object(_ask(client, "GET", CAPABILITIES_PATH))
    # Capabilities need an engine that answers; the gateway's policy is known without an engine.
    policy = capabilities.get("cluster_policy") or document.get("policy") or "unknown"
    parts = {
        f"policy {policy}, {up} of {up + len(silent) + len(refused)} replicas up": True,
        f", {leaving} of them draining": leaving,
        f"; no answer from: {', '.join(silent)}": silent,
        f"; {len(refused)} rejected": refused,
        "; its replicas answer the following checks": up and goes_on,
    }
    detail = "".join(text for text, applies in parts.items() if applies)
    # The line of the pairs has the next step for rejected replicas.
    ok = not silent and bool(up or refused)
    step = "wait until they have loaded, start them, or see their logs"
    return [Check("gateway", ok, detail, step), *_pairs_check(document, states, refused)]


def _pairs_check(
    document: dict[str, Any], states: list[dict[str, Any]], refused: dict[str, str]
) -> Iterator[Check]:
    """Yield one check: whether a gateway for prefill and decode engines has engines of both roles, and has
    refused none. ``refused``: URL of a refused engine → reason. Yields nothing for other gateways."""
    roles = document.get("pairs")
    if roles is None:
        return
    detail = _count_roles(roles)
    if nodes := sorted({str(state["node"]) for state in states if state.get("node")}):
        detail += f"; nodes {', '.join(nodes)}"
    if read_side := document.get("read_side"):
        detail += f"; read side {read_side}"
    for url, why in refused.items():
        detail += f"; {url} is rejected: {why}"
    absent = " and a ".join(name for name, number in roles.items() if not number)
    step = f"start a {absent} engine, or see its log; until one is up, requests wait (--wait-s)"
    if refused:
        step = "start them like the other engines, or remove them from --prefill and --decode"
    yield Check("pairs", not (refused or absent), detail, step)


# --- answers of the server ----------------------------------------------------------------------


_NO_ANSWER = 599


def _ask(client: httpx.Client, method: str, path: str, **more: Any) -> httpx.Response:
    """Return the server's response; one with the status ``_NO_ANSWER`` after a transport error."""
    try:
        return client.request(method, path, **more)
    except httpx.HTTPError as error:
        return httpx.Response(_NO_ANSWER, json={"error": f"{type(error).__name__}: {error}"})


def _base_url(client: httpx.Client) -> str:
    return str(client.base_url).rstrip("/")


def _error_summary(answer: httpx.Response) -> str:
    """Return status and message of an error response as text."""
    message = error_of(answer).get("message") or answer.reason_phrase
    return str(message) if answer.status_code == _NO_ANSWER else f"{answer.status_code} {message}"


def _is_gateway_answer(answer: httpx.Response) -> bool:
    """Return whether the gateway created this response itself, instead of forwarding an engine's response."""
    from ..gateway.http.client_apis import GATEWAY

    return GATEWAY in answer.headers


def _count_roles(counts: dict[str, Any]) -> str:
    """Return the number of engines per role as text, prefill first."""
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts, reverse=True)) or "none"
