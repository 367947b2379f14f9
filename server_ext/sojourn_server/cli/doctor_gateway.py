"""``sojourn doctor`` of a gateway: its replicas, and the pairs that can be made of them."""

from __future__ import annotations

from typing import Any

import httpx

from .doctor_check import Check, document_of, get, is_gateways, list_of, roles_told, said, texts, texts_of

REPLICAS_PATH = "/sojourn/v1/replicas"


def gateway_checks(client: httpx.Client, *, goes_on: bool = True) -> list[Check]:
    """What a gateway says of itself, its replicas and their pairs; empty: this is none, or an older one.

    ``goes_on``: more is asked afterwards, which replicas answer.
    """
    from sojourn.wire import CAPABILITIES_PATH

    answer = get(client, REPLICAS_PATH)
    if not is_gateways(answer):
        return []
    assert isinstance(answer, httpx.Response)
    if answer.status_code != 200:
        return [Check("gateway", None, f"it is one, and says nothing of its replicas: {said(answer)}")]
    document = document_of(answer)
    states = [state for state in list_of(document.get("replicas")) if isinstance(state, dict)]
    missing = texts(document.get("missing"))
    health = {str(state.get("replica")): str(state.get("health")) for state in states}
    doubted = [name for name, how in health.items() if how == "suspect"]
    leaving = [name for name, how in health.items() if how == "draining"]
    refused = texts_of(document.get("refused"))
    known, up = len(states) + len(missing) + len(refused), len(states) - len(doubted)
    capabilities = get(client, CAPABILITIES_PATH)
    told = {} if isinstance(capabilities, str) else document_of(capabilities)
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
    detail = roles_told(roles)
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
