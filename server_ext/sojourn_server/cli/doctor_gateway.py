"""Checks of ``sojourn doctor`` for a gateway: its replicas and its prefill/decode pairs."""

from __future__ import annotations

from typing import Any

import httpx

from .doctor_report import (
    Check,
    as_list,
    as_text_list,
    as_text_mapping,
    count_roles,
    error_summary,
    get,
    is_gateway_answer,
    json_object,
)

REPLICAS_PATH = "/sojourn/v1/replicas"


def gateway_checks(client: httpx.Client, *, goes_on: bool = True) -> list[Check]:
    """Return the checks of a gateway, its replicas and its prefill/decode pairs; empty for other servers.

    ``goes_on``: True if checks of a single server follow in the report. The result then says that replicas
    answer those checks, because the gateway forwards the requests.
    """
    from sojourn.wire_codec import CAPABILITIES_PATH

    answer = get(client, REPLICAS_PATH)
    if not is_gateway_answer(answer):
        return []
    assert isinstance(answer, httpx.Response)
    if answer.status_code != 200:
        return [Check("gateway", None, f"a gateway that does not list its replicas: {error_summary(answer)}")]
    document = json_object(answer)
    states = [state for state in as_list(document.get("replicas")) if isinstance(state, dict)]
    missing = as_text_list(document.get("missing"))
    health = {str(state.get("replica")): str(state.get("health")) for state in states}
    unanswered = [name for name, how in health.items() if how == "suspect"]
    leaving = [name for name, how in health.items() if how == "draining"]
    refused = as_text_mapping(document.get("refused"))
    known, up = len(states) + len(missing) + len(refused), len(states) - len(unanswered)
    capabilities = get(client, CAPABILITIES_PATH)
    known_capabilities = {} if isinstance(capabilities, str) else json_object(capabilities)
    # Capabilities need an engine that answers; the gateway knows its policy without one.
    policy = known_capabilities.get("cluster_policy") or document.get("policy") or "unknown"
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
) -> list[Check]:
    """Check whether a gateway for prefill and decode engines has engines of both roles. Returns a list of
    this one check; the list is empty for other gateways."""
    roles = document.get("pairs")
    if not isinstance(roles, dict):
        return []
    detail = count_roles(roles)
    if nodes := sorted({str(state["node"]) for state in states if state.get("node")}):
        detail += f"; nodes {', '.join(nodes)}"
    if read_side := document.get("read_side"):
        detail += f"; read side {read_side}"
    for url, why in refused.items():
        detail += f"; {url} is rejected: {why}"
    absent = [name for name, number in roles.items() if not number]
    if refused:
        advice = "start them like the other engines, or remove them from --prefill and --decode"
    else:
        missing = " and a ".join(absent)
        advice = f"start a {missing} engine, or see its log; until one is up, requests are rejected"
    if absent or refused:
        return [Check("pairs", False, detail, advice)]
    return [Check("pairs", True, detail)]
