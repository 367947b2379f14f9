"""``sojourn doctor --url``: checks of a running engine, or of a gateway with its replicas and pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import msgspec

from .console import PASS_KEY
from .live_client import connection_advice

STREAM_PATH = "/sojourn/v1/stream?once=1"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``ok``: True for a passed check, False for a fault, ``None`` for information or
    an undecided check."""

    name: str
    ok: bool | None
    detail: str
    next_step: str = ""


def server_checks(client: httpx.Client, key_source: str = "--api-key") -> Iterator[Check]:
    """Yield the checks of the server behind ``client``. Stops after a fault that makes more checks
    impossible. The server generates one token.

    ``key_source``: the option or environment variable that holds the client's API key.
    """
    base = str(client.base_url).rstrip("/")
    try:
        health = client.get("/health")
    except httpx.HTTPError as error:
        yield Check("server", False, *connection_advice(error, base))
        return
    if health.status_code != 200:
        found = gateway_checks(client, goes_on=False)
        if any(check.ok is False for check in found):
            yield from (Check("server", True, f"{base} is up"), *found)
            return
        step = "wait until it has loaded; if it does not, see its log"
        yield Check("server", False, f"{base}/health answers {health.status_code}", step)
        return
    yield Check("server", True, f"{base} is up")

    models = _get(client, "/v1/models")
    found = gateway_checks(client) if _is_gateway_answer(models) else []
    yield from found
    served = [str(entry["id"]) for entry in _json_object(models).get("data") or ()]
    with_key = "Authorization" in client.headers
    if models.status_code in (401, 403):
        said, step = "the server needs one", PASS_KEY
        if with_key:
            said = f"the key of {key_source} is not the server's key"
            step = "compare it with the server's --api-key, or a gateway's --tenants"
        yield Check("API key", False, said, step)
        return
    if not served:
        what = "see the replicas' logs" if found else "is this an OpenAI-compatible server?"
        yield Check("models", False, f"/v1/models: {_error_summary(models)}", what)
        return
    yield Check("API key", True, f"accepted, or none needed ({key_source})" if with_key else "none needed")
    yield Check("models", True, ", ".join(served))
    yield from _plugin_checks(client)
    yield _cached_tokens_check(client, served[0])


def _plugin_checks(client: httpx.Client) -> Iterator[Check]:
    from sojourn.wire_codec import (
        CAPABILITIES_PATH,
        EVENTS_PATH,
        WIRE_VERSION,
        EventBatch,
        decode_outcomes,
        encode,
    )

    answer = _get(client, CAPABILITIES_PATH)
    if answer.status_code != 200:
        step = _error(answer).get("next") or "see the server's log"
        if answer.status_code == 404:
            step = "not loaded; start the server with sojourn serve MODEL, or set VLLM_PLUGINS=sojourn"
        yield Check("plugin", False, f"{CAPABILITIES_PATH}: {_error_summary(answer)}", step)
        return
    document = _json_object(answer)
    wires = document.get("wire", [])
    understood = WIRE_VERSION in (wires if isinstance(wires, list) else [wires])
    yield Check(
        "plugin",
        understood,
        f"sojourn {document.get('version', '?')}, policy {document.get('policy', '?')}, wire {wires}",
        "" if understood else f"this client speaks wire {WIRE_VERSION}; use the same release on both sides",
    )
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
    batch = encode(EventBatch(v=WIRE_VERSION, emitter="doctor", events=[]))
    answer = _ask(client, "POST", EVENTS_PATH, content=batch)
    wrong = "" if answer.status_code == 200 else _error_summary(answer)
    try:
        decode_outcomes(answer.content)
    except ValueError as error:
        wrong = wrong or f"{type(error).__name__}: {error}"
    yield Check("events", not wrong, wrong or "accepted", "see the server's log" if wrong else "")
    yield from _programs_checks(client)


def _programs_checks(client: httpx.Client) -> Iterator[Check]:
    """Yield one check: whether agents' programs arrive. Yields nothing for a server without live frames."""
    from ..metrics.live_frame import LiveFrame
    from .top_view import age_s, age_text, printable, untracked_text

    answer = _get(client, STREAM_PATH)
    if answer.status_code != 200:
        if answer.status_code != 404:
            yield Check("programs", None, f"not known: {_error_summary(answer)}")
        return
    try:
        frame = msgspec.json.decode(answer.content, type=LiveFrame)
    except msgspec.DecodeError as error:
        yield Check("programs", None, f"not a live frame: {error}")
        return
    untracked = untracked_text(frame)
    base = str(client.base_url).rstrip("/")
    run = f"sojourn run --url {base} -- python agent.py, or open sojourn.program() in the agent"
    if not frame.programs:
        yield Check("programs", None, "; ".join(filter(None, ("none yet", untracked))), run)
        return
    newest = min(frame.programs, key=lambda row: age_s(row, frame))
    detail = (
        f"{frame.total} seen, newest {printable(newest.name or newest.program_id)} {age_text(newest, frame)}"
    )
    if untracked:
        step = f"if an agent sent the requests without a program: {run}"
        yield Check("programs", None, f"{detail}; {untracked}", step)
    else:
        yield Check("programs", True, detail)


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
    sizes = [
        f"{name} for {_size(tiers[field])}"
        for field, name in (("host", "host memory"), ("disk", "disk"))
        if tiers.get(field)
    ]
    what = ", ".join([str(tiers.get("connector")), *sizes])
    if tiers.get("on", True):
        return Check("tiers", True, what)
    return Check(
        "tiers",
        False,
        f"{what}; turned off: {tiers.get('off_because') or 'for an unknown reason'}",
        "see the server's log; until a restart, evicted KV is computed again",
    )


def _size(tier: dict[str, Any]) -> str:
    blocks, size = tier.get("blocks"), tier.get("bytes") or 0
    gib = f"{size / (1 << 30):,.3f}".rstrip("0").rstrip(".") + " GiB"
    return gib if blocks is None else f"{gib} or {blocks:,} blocks"


def _cached_tokens_check(client: httpx.Client, model: str) -> Check:
    from ..metrics.live_frame import PROBE_ID

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
        advice = "the server generates nothing: see its log; for a gateway also its engines' logs"
        fault = answer.status_code >= 500
        said = f"/v1/completions: {_error_summary(answer)}"
        return Check(name, False if fault else None, said, advice if fault else "")
    details = (_json_object(answer).get("usage") or {}).get("prompt_tokens_details")
    if isinstance(details, dict) and details.get("cached_tokens") is not None:
        return Check(name, True, "reported with each answer")
    return Check(name, False, "not reported", "start the server with --enable-prompt-tokens-details")


REPLICAS_PATH = "/sojourn/v1/replicas"


def gateway_checks(client: httpx.Client, *, goes_on: bool = True) -> list[Check]:
    """Return the checks of a gateway, its replicas and its prefill/decode pairs; empty for other servers.

    ``goes_on``: True if checks of a single server follow in the report. The result then says that replicas
    answer those checks, because the gateway forwards the requests.
    """
    from sojourn.wire_codec import CAPABILITIES_PATH

    answer = _get(client, REPLICAS_PATH)
    if not _is_gateway_answer(answer):
        return []
    if answer.status_code != 200:
        said = f"a gateway that does not list its replicas: {_error_summary(answer)}"
        return [Check("gateway", None, said)]
    document = _json_object(answer)
    states: list[dict[str, Any]] = document.get("replicas") or []
    missing: list[str] = document.get("missing") or []
    health = {state["replica"]: state["health"] for state in states}
    unanswered = [name for name, how in health.items() if how == "suspect"]
    leaving = [name for name, how in health.items() if how == "draining"]
    refused: dict[str, str] = document.get("refused") or {}
    known, up = len(states) + len(missing) + len(refused), len(states) - len(unanswered)
    capabilities = _json_object(_get(client, CAPABILITIES_PATH))
    # Capabilities need an engine that answers; the gateway's policy is known without an engine.
    policy = capabilities.get("cluster_policy") or document.get("policy") or "unknown"
    detail = f"policy {policy}, {up} of {known} replicas up"
    if leaving:
        detail += f", {len(leaving)} of them draining"
    if missing or unanswered:
        detail += f"; no answer from: {', '.join([*unanswered, *missing])}"
    if refused:
        detail += f"; {len(refused)} rejected"
    if up and goes_on:
        detail += "; its replicas answer the following checks"
    pairs = _pairs_check(document, states, refused)
    # The line of the pairs has the next step for rejected replicas.
    if known and up + len(refused) == known:
        return [Check("gateway", True, detail), *pairs]
    advice = "wait until they have loaded, start them, or see their logs"
    return [Check("gateway", False, detail, advice), *pairs]


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
    advice = ""
    if refused:
        advice = "start them like the other engines, or remove them from --prefill and --decode"
    elif absent:
        advice = f"start a {absent} engine, or see its log; until one is up, requests are rejected"
    yield Check("pairs", not advice, detail, advice)


# --- answers of the server ----------------------------------------------------------------------


_NO_ANSWER = 599


def _ask(client: httpx.Client, method: str, path: str, **more: Any) -> httpx.Response:
    """Return the server's response; one with the status ``_NO_ANSWER`` after a transport error."""
    try:
        return client.request(method, path, **more)
    except httpx.HTTPError as error:
        return httpx.Response(_NO_ANSWER, json={"error": f"{type(error).__name__}: {error}"})


def _get(client: httpx.Client, path: str) -> httpx.Response:
    return _ask(client, "GET", path)


def _json_object(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in a response body; empty if the body is anything else."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _error(answer: httpx.Response) -> dict[str, Any]:
    """Return the error in a response body: message and next step, as far as the server gives them."""
    error = _json_object(answer).get("error")
    return error if isinstance(error, dict) else {"message": error}


def _error_summary(answer: httpx.Response) -> str:
    """Return status and message of an error response as text."""
    message = _error(answer).get("message") or answer.reason_phrase
    return str(message) if answer.status_code == _NO_ANSWER else f"{answer.status_code} {message}"


def _is_gateway_answer(answer: httpx.Response) -> bool:
    """Return whether the gateway created this response itself, instead of forwarding an engine's response."""
    from ..gateway.http.client_apis import GATEWAY

    return GATEWAY in answer.headers


def _count_roles(counts: dict[str, Any]) -> str:
    """Return the number of engines per role as text, prefill first."""
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts, reverse=True)) or "none"
