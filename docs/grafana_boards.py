"""Grafana boards of an engine and of a gateway, made from the metrics' definitions.

A panel names its metrics; expression, unit and description follow from each metric's kind, name and help. A
metric that does not exist raises ``KeyError``. ``docs/generate.py`` writes ``docs/boards/``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sojourn_server.gateway.http.gateway_metrics import GatewayMetrics
from sojourn_server.metrics.metric_catalog import METRIC_CATALOG, MetricKind, MetricSpec

SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH = 24
"""Columns of a Grafana board."""
HEIGHT = 8
UNITS = (
    (r"_tokens_total$", "suffix: tok/s"),
    (r"_bytes_total$", "Bps"),
    (r"_seconds_total$", "percentunit"),
    (r"_total$", "cps"),
    (r"_bytes$", "bytes"),
    (r"_seconds$", "s"),
    (r"(_ratio|_load|_spread)$", "percentunit"),
    (r"", "short"),
)
"""Ending of a metric's name → Grafana's unit. A counter is shown as a rate, and seconds in a second are a
share."""


def _vllm(name: str, kind: MetricKind, help: str) -> MetricSpec:
    return MetricSpec(name=f"vllm:{name}", kind=kind, help=help)


VLLM_METRICS = {
    spec.name: spec
    for spec in (
        _vllm("num_requests_running", MetricKind.GAUGE, "Requests that the engine computes."),
        _vllm("num_requests_waiting", MetricKind.GAUGE, "Requests in the engine's queue."),
        _vllm("time_to_first_token_seconds", MetricKind.HISTOGRAM, "Time to the first token of a request."),
        _vllm("inter_token_latency_seconds", MetricKind.HISTOGRAM, "Time between two output tokens."),
        _vllm("request_queue_time_seconds", MetricKind.HISTOGRAM, "Time of a request in the queue."),
        _vllm("prompt_tokens_total", MetricKind.COUNTER, "Prompt tokens of all requests."),
        _vllm("generation_tokens_total", MetricKind.COUNTER, "Output tokens of all requests."),
        _vllm("prefix_cache_queries_total", MetricKind.COUNTER, "Tokens looked up in the prefix cache."),
        _vllm("prefix_cache_hits_total", MetricKind.COUNTER, "Tokens found in the prefix cache."),
    )
}
"""Metrics of vLLM that the engine's board shows."""


def gateway_specs() -> dict[str, MetricSpec]:
    """The gateway's metrics by their name on the ``/metrics`` page."""
    found = {}
    metrics = GatewayMetrics()
    for family in metrics.registry.collect():
        kind = MetricKind(family.type)
        name = family.name + ("_total" if kind is MetricKind.COUNTER else "")
        found[name] = MetricSpec(name=name, kind=kind, help=family.documentation)
    return found


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel, and the label text of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: a graph, or a single number if ``stat``."""

    title: str
    queries: Sequence[Query]
    unit: str
    description: str
    stacked: bool = False
    stat: bool = False


class PanelMaker:
    """Makes panels over the metrics ``specs``. ``where``: label matchers of every expression."""

    def __init__(self, specs: Mapping[str, MetricSpec], where: str) -> None:
        self._specs = specs
        self._where = where

    def graph(
        self,
        title: str,
        *names: str,
        by: str = "",
        note: str = "",
        pick: str = "",
        stacked: bool = False,
        stat: bool = False,
    ) -> Panel:
        """A panel of one or more metrics: rates of counters, values of gauges, quantiles of histograms.

        ``by``: the label whose values are separate series. ``pick``: one more label matcher."""
        queries = [query for name in names for query in self._queries(name, by, pick, len(names) > 1)]
        unit = _unit(names[0])
        return Panel(title, queries, unit, self._describe(names, note), stacked, stat)

    def share(
        self,
        title: str,
        part: str,
        whole: str,
        *,
        by: str = "",
        pick: str = "",
        note: str = "",
        stat: bool = False,
    ) -> Panel:
        """A panel of the rate of ``part`` (with the matcher ``pick``) divided by that of ``whole``. Without
        traffic it is empty, not 0."""
        above = self._sum(part, by, pick)
        below = f"(sum({self._value(whole, '')}) > 0)"
        expr = f"{above} / on () group_left () {below}" if by else f"{above} / {below}"
        note = f"{note} A share of `{whole}`.".strip()
        return Panel(
            title,
            [Query(expr, f"{{{{{by}}}}}" if by else "share")],
            "percentunit",
            self._describe((part,), note),
            stat=stat,
        )

    def _queries(self, name: str, by: str, pick: str, named: bool) -> list[Query]:
        spec = self._specs[name]
        short = re.sub(r"^(sojourn_gateway_|sojourn_|vllm:)|_total$|_seconds$", "", name).replace("_", " ")
        label = f"{{{{{by}}}}}" if by else short
        if named and by:
            label = f"{short} {label}"
        if spec.kind is not MetricKind.HISTOGRAM:
            return [Query(self._sum(name, by, pick), label)]
        inner = f"sum by ({', '.join(filter(None, ('le', by)))}) ({self._value(name, pick)})"
        return [
            Query(f"histogram_quantile({q}, {inner})", f"{label} p{round(q * 100)}")
            for q in ((0.95,) if by else (0.5, 0.95, 0.99))
        ]

    def _sum(self, name: str, by: str, pick: str) -> str:
        return f"sum{f' by ({by})' if by else ''} ({self._value(name, pick)})"

    def _value(self, name: str, pick: str) -> str:
        spec = self._specs[name]
        matchers = ", ".join(filter(None, (pick, self._where)))
        if spec.kind is MetricKind.GAUGE:
            return f"{name}{{{matchers}}}"
        suffix = "_bucket" if spec.kind is MetricKind.HISTOGRAM else ""
        return f"rate({name}{suffix}{{{matchers}}}[$__rate_interval])"

    def _describe(self, names: Sequence[str], note: str) -> str:
        lines = [f"`{name}`: {self._specs[name].help}" for name in names]
        return "\n\n".join([*([note] if note else []), *lines])


def _unit(name: str) -> str:
    return next(unit for ending, unit in UNITS if re.search(ending, name))


def engine_board() -> dict[str, Any]:
    """The board of engines."""
    make = PanelMaker({**METRIC_CATALOG, **VLLM_METRICS}, 'instance=~"$instance", engine=~"$engine"')
    graph, share = make.graph, make.share
    prompt = "sojourn_prompt_tokens_total"
    kept = "In use is not the same as resident: cached blocks are free to take and still useful."
    rows = {
        "At a glance": [
            share("Prompt tokens reused", prompt, prompt, pick='result=~"device|host"', stat=True),
            share("Prompt tokens computed again", prompt, prompt, pick='result="lost"', stat=True),
            graph("Leases", "sojourn_leases", stat=True),
            graph("Errors of sojourn", "sojourn_internal_errors_total", stat=True),
            graph("Versions", "sojourn_build_info", by="version, vllm, preset", stat=True),
            graph("Programs by state", "sojourn_programs", by="state", stacked=True),
            graph(
                "KV memory on the device", "sojourn_kv_bytes", by="state", stacked=True, note=kept
            ),
            graph("Time to first token", "vllm:time_to_first_token_seconds"),
        ],
        "Why tokens were computed": [
            graph("Prompt tokens by origin", prompt, by="result", stacked=True),
            graph("Tokens computed again, by cause", "sojourn_lost_tokens_total", by="cause", stacked=True),
            share(
                "Share computed again, by cause", "sojourn_lost_tokens_total", prompt, by="cause",
                note="evicted, pressure: memory. expired: leases too short. silent: the client. "
                "changed: the agent rewrites its prompt.",
            ),
            graph("Evicted, by why it was free", "sojourn_evicted_bytes_total", by="cause", stacked=True),
            share(
                "Evictions regretted", "sojourn_evictions_regretted_total", "sojourn_evictions_total",
                note="Low: few evicted blocks were needed again.",
            ),
            share("Prefix cache hits", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        ],
        "Leases and tools": [
            graph("Leases that ended, by reason", "sojourn_lease_ends_total", by="reason", stacked=True),
            graph(
                "Lease granted, by tool", "sojourn_lease_ttl_seconds", by="tool",
                note="Compare with the durations of the tools: leases below them expire.",
            ),
            graph("Time between turns, by tool", "sojourn_tool_gap_seconds", by="tool"),
            graph("Gaps reported or inferred", "sojourn_tool_gap_source_total", by="source", stacked=True),
        ],
        "Queue and preemption": [
            graph("Running and waiting", "vllm:num_requests_running", "vllm:num_requests_waiting"),
            graph("Time in the queue", "vllm:request_queue_time_seconds"),
            graph("Preemptions, by recovery", "sojourn_preemptions_total", by="mode", stacked=True),
            graph("Prompts cut by the compute quota", "sojourn_quota_cuts_total"),
            graph("Attention time of a step", "sojourn_step_attention_seconds"),
            graph("Attention time of a full step ÷ quota", "sojourn_step_quota_ratio"),
            graph(
                "Predicted output length", "sojourn_output_length_ratio", note="Above 1: longer."
            ),
            graph("Time between output tokens", "vllm:inter_token_latency_seconds"),
        ],
        "Host memory and disk": [
            graph("Blocks below the device", "sojourn_tier_blocks", by="tier, state"),
            graph("Copied, by direction", "sojourn_tier_bytes_total", by="lane"),
            graph("Share of time copying", "sojourn_tier_seconds_total", by="lane"),
            graph("Share of time steps waited for copies", "sojourn_tier_wait_seconds_total"),
            graph("Copy jobs", "sojourn_tier_jobs"),
            graph("Blocks moved or lost", "sojourn_tier_moves_total", by="what"),
            graph("Programs by tier of placement", "sojourn_placed_programs", by="tier", stacked=True),
            graph("Placements", "sojourn_placements_total", by="to, reason"),
            graph("Prefetches", "sojourn_prefetches_total", by="outcome", stacked=True),
        ],
        "Links between engines": [
            graph("Moved over links", "sojourn_link_bytes_total", by="link, direction"),
            graph("Queue of links, seconds", "sojourn_link_queued_seconds", by="link, direction"),
            graph("Queue of links, bytes", "sojourn_link_queued_bytes", by="link, direction"),
            graph("Buffers", "sojourn_path_slots", by="state", stacked=True),
            graph("Results of transfers", "sojourn_path_outcomes_total", by="what"),
        ],
        "Programs and clients": [
            graph("Turns finished, by outcome", "sojourn_program_turns_total", by="outcome", stacked=True),
            graph("Programs ended", "sojourn_programs_finished_total", by="outcome", stacked=True),
            graph("Duration of programs", "sojourn_program_duration_seconds"),
            graph("Events, by outcome", "sojourn_events_total", by="outcome", stacked=True),
            graph("Hints, by outcome", "sojourn_hints_total", by="outcome", stacked=True),
            graph("Clients gone silent", "sojourn_client_silent_total"),
        ],
        "Cost of sojourn": [
            graph("CPU time of a policy call", "sojourn_policy_seconds", by="hook"),
            graph("Measurements dropped", "sojourn_metrics_dropped_total", by="reason"),
            graph("KV blocks", "sojourn_kv_blocks", by="state", stacked=True),
            graph("Tokens in and out", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        ],
    }  # fmt: skip
    variables = [_variable("instance", "sojourn_programs"), _variable("engine", "sojourn_programs")]
    return _board("sojourn engine", "sojourn-engine", rows, variables)


def gateway_board() -> dict[str, Any]:
    """The board of a gateway."""
    make = PanelMaker(gateway_specs(), 'instance=~"$instance"')
    graph = make.graph
    rows = {
        "At a glance": [
            graph("Waiting", "sojourn_gateway_waiting", stat=True),
            graph("Replicas up", "sojourn_gateway_replicas", pick='health="up"', stat=True),
            graph("Refused", "sojourn_gateway_refused_total", stat=True),
            graph("Answers broken off", "sojourn_gateway_cut_streams_total", stat=True),
            graph("Load, most less least", "sojourn_gateway_load_spread", stat=True),
            graph(
                "Load of each replica", "sojourn_gateway_replica_load", by="replica",
                note="Above 1 requests queue in the engine.",
            ),
            graph("Wait at the gateway", "sojourn_gateway_wait_seconds"),
            graph("Replicas by health", "sojourn_gateway_replicas", by="health", stacked=True),
        ],
        "Routing": [
            graph(
                "Requests, by reason", "sojourn_gateway_requests_total", by="reason", stacked=True,
                note="home: where the program's KV is.",
            ),
            graph("Programs that moved, by reason", "sojourn_gateway_moves_total", by="reason", stacked=True),
            graph("Recalled for a more urgent request", "sojourn_gateway_recalls_total"),
            graph(
                "Programs ended, as reported", "sojourn_gateway_programs_finished_total", by="outcome",
                stacked=True,
            ),
            graph("Clients that left before the answer's end", "sojourn_gateway_client_disconnects_total"),
            graph("Refused, by error", "sojourn_gateway_refused_total", by="code", stacked=True),
        ],
        "Replicas": [
            graph("Programs at home", "sojourn_gateway_replica_programs", by="replica"),
            graph("In flight", "sojourn_gateway_replica_in_flight", by="replica"),
            graph("Waiting for a replica", "sojourn_gateway_replica_queued", by="replica"),
            graph(
                "KV capacity left, device and host", "sojourn_gateway_replica_room_tokens", by="replica",
                note="Negative: the programs outgrow the replica.",
            ),
            graph(
                "Draining or suspect", "sojourn_gateway_replica_health", by="replica, health",
                pick='health=~"draining|suspect"',
            ),
            graph("Prefill and decode engines", "sojourn_gateway_replica_role", by="role"),
            graph("Prefill and decode engines up", "sojourn_gateway_role_replicas", by="role"),
            graph("Queue of links", "sojourn_gateway_link_queued_seconds", by="replica, link"),
        ],
        "Tenants": [
            graph(
                "Use of their share", "sojourn_gateway_tenant_use_ratio", by="tenant",
                note="1: what Agent Fair Share gives the tenant.",
            ),
        ],
    }  # fmt: skip
    return _board(
        "sojourn gateway",
        "sojourn-gateway",
        rows,
        [_variable("instance", '{__name__=~"sojourn_gateway_(waiting|replicas)"}')],
    )


def _variable(label: str, metric: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({metric}, {label})",
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _board(
    title: str, uid: str, rows: Mapping[str, Sequence[Panel]], variables: list[dict[str, Any]]
) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, members in rows.items():
        panels.append(_row(len(panels) + 1, heading, top))
        top += 1
        for stat, height in ((True, 4), (False, HEIGHT)):
            shown = [panel for panel in members if panel.stat is stat]
            across = len(shown) if stat else 3
            for place, panel in enumerate(shown):
                width = WIDTH // across
                at = {
                    "x": place % across * width,
                    "y": top + place // across * height,
                    "w": width,
                    "h": height,
                }
                panels.append(_panel(len(panels) + 1, panel, at))
            top += -(-len(shown) // across) * height if shown else 0
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "title": title,
        "uid": uid,
        "description": "Generated by docs/generate.py from sojourn's metrics.",
        "tags": ["sojourn", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "templating": {"list": [source, *variables]},
        "links": [
            {
                "title": "sojourn",
                "type": "dashboards",
                "icon": "external link",
                "tooltip": "",
                "url": "",
                "tags": ["sojourn"],
                "asDropdown": True,
                "targetBlank": False,
                "includeVars": False,
                "keepTime": True,
            }
        ],
        "panels": panels,
    }


def _row(number: int, title: str, top: int) -> dict[str, Any]:
    at = {"x": 0, "y": top, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": at, "panels": []}


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "noValue": "none"}
    if not panel.stat:
        fill = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}} if panel.stacked else {}
        defaults["custom"] = {"lineWidth": 1, **fill}
    options: dict[str, Any] = (
        {"colorMode": "none", "graphMode": "area"}
        if panel.stat
        else {
            "tooltip": {"mode": "multi", "sort": "desc"},
            "legend": {"displayMode": "list", "placement": "bottom"},
        }
    )
    if panel.stat and "version" in panel.queries[0].legend:
        options |= {"textMode": "name", "graphMode": "none"}
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": re.sub(
                    r"\{\{([a-z_, ]+)\}\}",
                    lambda found: " ".join(f"{{{{{name}}}}}" for name in found.group(1).split(", ")),
                    query.legend,
                ),
            }
            for place, query in enumerate(panel.queries)
        ],
    }


BOARDS = {"engine.json": engine_board, "gateway.json": gateway_board}
"""File in ``docs/boards/`` → what makes it."""
