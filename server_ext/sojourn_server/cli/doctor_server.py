"""``sojourn doctor --url``: what a server answers, an engine's or a gateway's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from .doctor_check import Check, document_of, get, is_gateways, roles_told, said, texts
from .doctor_gateway import gateway_checks

KEY_VARIABLES = ("VLLM_API_KEY", "SOJOURN_API_KEY")
"""An engine's own first, then what the SDK shows and a gateway asks for."""


def server_checks(client: httpx.Client, key_source: str = "--api-key") -> Iterator[Check]:
    """What the server behind ``client`` answers; stops where nothing further can be asked.

    ``key_source``: where the key that ``client`` shows was found.
    """
    base = str(client.base_url).rstrip("/")
    health = get(client, "/health")
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

    models = get(client, "/v1/models")
    found = gateway_checks(client) if is_gateways(models) else []
    yield from found
    served = _model_ids(models)
    if not isinstance(models, str) and models.status_code in (401, 403):
        yield _key_check(client, key_source)
        return
    if not served:
        what = "see the replicas' logs" if found else "is this an OpenAI-compatible server?"
        yield Check("models", False, f"/v1/models: {said(models)}", what)
        return
    with_key = "Authorization" in client.headers
    yield Check("API key", True, f"accepted, or none needed ({key_source})" if with_key else "none needed")
    yield Check("models", True, ", ".join(served))
    yield from _plugin_checks(client)
    yield _cached_tokens_check(client, served[0])


def _plugin_checks(client: httpx.Client) -> Iterator[Check]:
    from sojourn.wire import CAPABILITIES_PATH, EVENTS_PATH, WIRE_VERSION, EventBatch, decode_outcomes, encode

    answer = get(client, CAPABILITIES_PATH)
    if isinstance(answer, str) or answer.status_code != 200:
        yield Check("plugin", False, f"{CAPABILITIES_PATH}: {said(answer)}", _plugin_advice(answer))
        return
    document = document_of(answer)
    wires = document.get("wire", [])
    understood = WIRE_VERSION in (wires if isinstance(wires, list) else [wires])
    yield Check(
        "plugin",
        understood,
        f"sojourn {document.get('version', '?')}, policy {document.get('policy', '?')}, wire {wires}",
        "" if understood else f"this client speaks wire {WIRE_VERSION}; use one release on both ends",
    )
    if stock := texts(document.get("stock")):  # a gateway's engines
        yield Check(
            "plugin of each replica",
            False,
            f"{', '.join(stock)}: without the plugin",
            "start these with sojourn serve; until then no KV is kept there",
        )
    if silent := texts(document.get("silent")):
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
        yield Check("events", False, said(error.response), "look into the server's log")
    except (httpx.HTTPError, ValueError) as error:
        yield Check("events", False, f"{type(error).__name__}: {error}", "look into the server's log")
    else:
        yield Check("events", True, "accepted")


def _tiers_check(told: Any, paths: Any, pairs: Any) -> Check:
    if told is None and isinstance(pairs, dict):  # a gateway's
        return Check("tiers", True, f"KV is stored and read by engines of pairs: {roles_told(pairs)}")
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
        advice = document_of(answer).get("error", {})
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
    variables = ", or else ".join(KEY_VARIABLES)
    return Check("API key", False, "the server wants one", f"pass --api-key, or set {variables}")


def _cached_tokens_check(client: httpx.Client, model: str) -> Check:
    try:
        answer = client.post("/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 1})
    except httpx.HTTPError as error:
        return Check(
            "cached tokens", False, f"{type(error).__name__}: {error}", "is the engine busy or stuck?"
        )
    if answer.status_code == 401 and is_gateways(answer):
        # It let the same key see its models.
        return Check(
            "cached tokens",
            None,
            "not looked at: this is the gateway's admin key, which sees everything and generates nothing",
            "pass a tenant's key to have a token generated",
        )
    if answer.status_code >= 500:
        advice = "nothing is generated: look into the server's log, a gateway's or its engines'"
        return Check("cached tokens", False, f"/v1/completions: {said(answer)}", advice)
    if answer.status_code != 200:
        return Check("cached tokens", None, f"/v1/completions: {said(answer)}")
    details = (document_of(answer).get("usage") or {}).get("prompt_tokens_details")
    if isinstance(details, dict) and details.get("cached_tokens") is not None:
        return Check("cached tokens", True, "reported with each answer")
    return Check(
        "cached tokens", False, "not reported", "start the server with --enable-prompt-tokens-details"
    )


def _model_ids(answer: httpx.Response | str) -> list[str]:
    if isinstance(answer, str) or answer.status_code != 200:
        return []
    entries = document_of(answer).get("data")
    if not isinstance(entries, list):
        return []
    return [str(entry.get("id")) for entry in entries if isinstance(entry, dict)]
