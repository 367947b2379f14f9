"""Writes the OpenAPI 3.1 documents of an engine and a gateway, with schemas from the msgspec types.

A route's description is its handler's docstring. A field's description is the string below the field in its
class. ``docs/generate.py`` writes the files, and a server answers them at ``/sojourn/v1/openapi.json``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType
from sojourn.wire_codec import EventBatch, OutcomeBatch
from sojourn.wire_events import AnyEvent
from sojourn_server.api.api_errors import ErrorAnswer
from sojourn_server.api.live_stream import MAX_DELTA_S
from sojourn_server.api.openapi import PREFIX, TYPES, either
from sojourn_server.api.routes import MAX_DECISIONS, MAX_PROGRAMS, NDJSON, build_router
from sojourn_server.core import engine_answers
from sojourn_server.core.engine_answers import Capabilities, ProgramDetail
from sojourn_server.gateway.http.status_routes import (
    MAX_LISTED_PROGRAMS,
    GatewayStats,
    MoveList,
    PolicyStates,
    ReplicaList,
    RoutedProgramList,
)
from sojourn_server.metrics.live_frame import LiveFrame
from sojourn_server.metrics.turn_explanation import Explanation
from sojourn_server.programs.program_status import ProgramStatus
from sojourn_server.routing.routing_records import PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from starlette.routing import Route

JSON = "application/json"
_OURS = ("sojourn", __name__)
"""Beginnings of the names of modules whose classes are described."""
_REF = "#/components/schemas/{name}"
_ERROR = {
    "description": "An error. `next` says what to do.",
    "content": {JSON: {"schema": {"$ref": _REF.format(name="ErrorAnswer")}}},
}
_PATH_PARAMETERS = {
    "program_id": "Id of the program, percent-encoded.",
    "replica": "Name of the replica, percent-encoded.",
}


class Operation(NamedTuple):
    """What one route takes and answers."""

    answer: Any
    """Type of the JSON answer with status 200."""
    query: type[msgspec.Struct] | None = None
    """Type whose fields are the query parameters."""
    body: Any = None
    """Type of the JSON body of a request."""
    media: Mapping[str, str] = {}
    """Other media type of the answer → description."""


def openapi_document(
    title: str, routes: Iterable[Any], operations: Mapping[tuple[str, str], Operation]
) -> dict[str, Any]:
    """Return the OpenAPI document of the ``routes`` whose paths begin with ``PREFIX``.

    ``operations`` maps (method, path without ``PREFIX``) to the operation of the route. Raises ``KeyError``
    for a route without an operation, and ``ValueError`` for an operation without a route.
    """
    served = [
        (route, method)
        for route in routes
        if isinstance(route, Route) and route.path.startswith(f"{PREFIX}/")
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    found = {(method, _path(route.path.removeprefix(PREFIX))): route for route, method in served}
    if unknown := operations.keys() - found.keys():
        raise ValueError(f"no route serves {sorted(unknown)}")
    types = [AnyEvent, ErrorAnswer]
    for operation in operations.values():
        types += [one for one in (operation.answer, operation.query, operation.body) if one is not None]
    classes = list(_classes(types))
    types += [one for one in classes if issubclass(one, msgspec.Struct)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    queries = {op.query.__name__ for op in operations.values() if op.query is not None}
    _describe(classes, components)
    # The type leaves events undecoded, so that one bad event does not fail its batch.
    components["EventBatch"]["properties"]["events"]["items"] = schemas[0]
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for (method, path), route in found.items():
        operation = operations[method, path]
        parameters = components[operation.query.__name__] if operation.query is not None else {}
        paths.setdefault(PREFIX + path, {})[method.lower()] = _operation(
            method, path, inspect.getdoc(route.endpoint) or "", operation, parameters, schema_of
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": version("sojourn"),
            "description": "Fields that end in `_s` are seconds; `at_s` and `now_s` are on an engine's "
            "monotonic clock. Fields may be added. docs/wire.md specifies hints, events and outcomes.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {name: one for name, one in sorted(components.items()) if name not in queries},
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key of the server. Without keys the server checks none.",
                }
            },
        },
    }


def _path(path: str) -> str:
    """Return a route's path without the types of its parameters."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


def _operation(
    method: str,
    path: str,
    documented: str,
    operation: Operation,
    parameters: Mapping[str, Any],
    schema_of: Mapping[str, Any],
) -> dict[str, Any]:
    summary, _, more = _markdown(documented).partition("\n\n")
    words = [word.strip("{}").replace(".", "_") for word in path.strip("/").split("/")]
    document: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *words]),
        "summary": " ".join(summary.split()),
    }
    if more:
        document["description"] = " ".join(more.split())
    named = re.findall(r"{(\w+)}", path)
    document["parameters"] = [
        {
            "name": name, "in": "path", "required": True, "description": _PATH_PARAMETERS[name],
            "schema": {"type": "string"},
        }
        for name in named
    ]  # fmt: skip
    for name, schema in parameters.get("properties", {}).items():
        own = _without_null({key: value for key, value in schema.items() if key != "description"})
        parameter = {"name": name, "in": "query", "required": "default" not in schema, "schema": own}
        if "description" in schema:
            parameter["description"] = schema["description"]
        document["parameters"].append(parameter)
    if operation.body is not None:
        content = {JSON: {"schema": schema_of[repr(operation.body)]}}
        document["requestBody"] = {"required": True, "content": content}
    content = {JSON: {"schema": schema_of[repr(operation.answer)]}}
    for media, text in operation.media.items():
        content[media] = {"schema": {"type": "string", "description": text}}
    answer = {"description": "The answer.", "content": content}
    document["responses"] = {"200": answer, "4XX": _ERROR, "5XX": _ERROR}
    return document


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a query parameter's schema without ``null``: a client omits the parameter instead."""
    kept = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if schema.get("default") is not None:
        rest["default"] = schema["default"]
    return {**rest, **(kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else {})}


def _describe(classes: Iterable[type], components: Mapping[str, Any]) -> None:
    """Write the descriptions of classes and fields into the schemas, as Markdown. Mark the fields that every
    answer has as required."""
    for cls in classes:
        schema = components.get(cls.__name__)
        if schema is None:
            continue
        if "description" in schema:
            schema["description"] = _markdown(inspect.cleandoc(schema["description"]))
        struct = cls if issubclass(cls, msgspec.Struct) else None
        if struct is not None and "properties" in schema and not struct.__struct_config__.omit_defaults:
            # Decoding does not require a field with a default, but every answer has the field.
            own = msgspec.structs.fields(struct)
            schema["required"] = [field.encode_name for field in own if field.default is not UNSET]
        texts = _field_texts(cls)
        fields = dict(schema.get("properties", {}))
        if struct is not None and "prefixItems" in schema:  # an array in the order of the fields
            fields = dict(zip(struct.__struct_fields__, schema["prefixItems"], strict=True))
        for name, field in fields.items():
            if "prefixItems" in schema:
                field["title"] = name
            if name in texts:
                field.setdefault("description", texts[name])


def _classes(types: Iterable[Any]) -> Iterable[type]:
    """Yield each class of this project among the types and the types of their fields."""
    left, seen = list(types), set()
    while left:
        one = left.pop()
        left += get_args(one)
        if isinstance(one, Meta):
            left += (one.extra or {}).get(TYPES, ())
        if isinstance(one, type) and one not in seen and one.__module__.startswith(_OURS):
            seen.add(one)
            left += get_type_hints(one, include_extras=True).values()
            yield one


def _field_texts(cls: type) -> dict[str, str]:
    """Return the texts below the fields of a class and of its bases, by the field's name in JSON."""
    encoded: Sequence[str] = getattr(cls, "__struct_encode_fields__", ())
    names = dict(zip(getattr(cls, "__struct_fields__", ()), encoded, strict=True))
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        if not one.__module__.startswith(_OURS):
            continue
        [node] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(value))):
                    found[names.get(name, name)] = _markdown(" ".join(value.split()))
    return found


def _markdown(text: str) -> str:
    """Return a docstring as Markdown. Python's ``None`` is JSON's ``null``."""
    return text.replace("``None``", "`null`").replace("``", "`")


# ---- what an engine takes and answers


class ServerCapabilities(Capabilities, frozen=True, kw_only=True):
    """What a server understands, and how it is configured."""

    engines: int
    """Number of engines behind the server."""


class StatsByEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of each of several engines."""

    engines: dict[str, engine_answers.EngineStats]


class DecisionsAnswer(engine_answers.DecisionPage, frozen=True, kw_only=True):
    """One page of the decision log of one engine."""

    engine: str
    engines: list[str]
    """Names of all engines."""


class ProgramsQuery(msgspec.Struct):
    """Query parameters of ``GET /programs``."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PROGRAMS)] = 100
    """Maximum number of programs in the answer."""
    status: ProgramStatus | None = None
    """Only programs with this status."""


class LoadByRank(msgspec.Struct, frozen=True):
    """Load and programs with KV of each data-parallel rank."""

    engines: list[engine_answers.EngineLoad]


class PolicyQuery(msgspec.Struct):
    """Query parameters of ``POST /policy``."""

    on: bool
    """False: the engine decides as stock vLLM."""


class ExplainQuery(msgspec.Struct):
    """Query parameters of ``GET /programs/{program_id}/explain``."""

    turn: Annotated[int, Meta(ge=1)] | None = None
    """Number of the turn; by default the newest."""


class StreamQuery(msgspec.Struct):
    """Query parameters of ``GET /stream``."""

    once: bool = False
    """Answer with one frame as JSON."""
    changed_within_s: Annotated[float, Meta(ge=0, le=MAX_DELTA_S)] | None = None
    """With ``once``: return only programs that have a request or a lease, or that changed within this many
    seconds."""


class DecisionsQuery(msgspec.Struct):
    """Query parameters of ``GET /decisions``."""

    since: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Number of the first decision to return."""
    limit: Annotated[int, Meta(ge=1, le=MAX_DECISIONS)] = 1000
    engine: str | None = None
    """Name of the engine; by default the first."""
    format: Literal["json", "ndjson"] | None = None
    """Overrides the ``Accept`` header."""


DECISION_LINES = {NDJSON: "One decision per line. `next` is in the header `X-Sojourn-Next`."}
EVENT_STREAM = {"text/event-stream": "Server-sent events; the data of each is a `LiveFrame` as JSON."}

ENGINE_OPERATIONS = {
    ("POST", "/events"): Operation(OutcomeBatch, body=EventBatch),
    ("GET", "/capabilities"): Operation(ServerCapabilities),
    ("POST", "/policy"): Operation(engine_answers.PolicyState, PolicyQuery),
    ("GET", "/programs"): Operation(engine_answers.ProgramList, ProgramsQuery),
    ("GET", "/load"): Operation(LoadByRank),
    ("GET", "/programs/{program_id}"): Operation(engine_answers.ProgramDetail),
    ("GET", "/programs/{program_id}/explain"): Operation(Explanation, ExplainQuery),
    ("POST", "/programs/{program_id}/persist"): Operation(engine_answers.PersistProgress),
    ("GET", "/stats"): Operation(Annotated[Any, either(engine_answers.EngineStats, StatsByEngine)]),
    ("GET", "/stream"): Operation(LiveFrame, StreamQuery, media=EVENT_STREAM),
    ("GET", "/decisions"): Operation(DecisionsAnswer, DecisionsQuery, media=DECISION_LINES),
    ("GET", "/openapi.json"): Operation(dict[str, Any]),
}
"""Operations by method and path below ``/sojourn/v1``."""


# ---- what a gateway takes and answers


class GatewayCapabilities(Capabilities, frozen=True, kw_only=True):
    """Capabilities of all engines behind a gateway, merged."""

    engines: int
    pairs: dict[str, int] | UnsetType = UNSET
    """Number of engines by role, ``prefill`` or ``decode``; absent if the engines have no roles."""
    gateway: Literal[True]
    stock: list[str]
    """URLs of engines that run without sojourn."""
    silent: list[str]
    """URLs of engines that did not answer."""
    cluster_policy: str


class RoutedProgram(ProgramRouteStatus, frozen=True, kw_only=True):
    """One program: what the gateway knows about it, and its engine's answer."""

    engine: ProgramDetail | None
    """Answer of the program's engine. ``None``: no engine answers, or no engine has had a request of the
    program."""


class RoutedProgramsQuery(msgspec.Struct):
    """Query of the list of programs."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_PROGRAMS)] = 100
    """Maximum number of programs in the answer."""


class ReplicaDecisionsQuery(DecisionsQuery):
    """Query of the decision log of one replica's engine."""

    replica: str | None = None
    """Name of the replica. Needed if there are several."""


_REPLICA = Operation(Annotated[Any, either(ReplicaStatus, PairEngineStatus, None)])
_SAME = (
    ("POST", "/events"),
    ("GET", "/programs/{program_id}/explain"),
    ("GET", "/stream"),
    ("GET", "/openapi.json"),
)
GATEWAY_OPERATIONS = {
    **{key: ENGINE_OPERATIONS[key] for key in _SAME},
    ("GET", "/capabilities"): Operation(GatewayCapabilities),
    ("GET", "/programs"): Operation(RoutedProgramList, RoutedProgramsQuery),
    ("GET", "/programs/{program_id}"): Operation(RoutedProgram),
    ("GET", "/stats"): Operation(GatewayStats),
    ("GET", "/decisions"): Operation(DecisionsAnswer, ReplicaDecisionsQuery, media=DECISION_LINES),
    ("POST", "/policy"): Operation(PolicyStates, PolicyQuery),
    ("GET", "/moves"): Operation(MoveList),
    ("GET", "/replicas"): Operation(ReplicaList),
    ("POST", "/replicas/{replica}/drain"): _REPLICA,
    ("POST", "/replicas/{replica}/stay"): _REPLICA,
}
"""Operations by method and path below ``/sojourn/v1``."""


# ---- the documents


def engine_api() -> dict[str, Any]:
    """Return the OpenAPI document of an engine."""
    from sojourn_server.api.api_keys import ApiKeys

    no_engine: Any = None  # no route is called
    return openapi_document("sojourn engine", build_router(no_engine, ApiKeys()).routes, ENGINE_OPERATIONS)


def gateway_api() -> dict[str, Any]:
    """Return the OpenAPI document of a gateway."""
    from sojourn_server.gateway.http.gateway_app import GatewayOptions, build_gateway
    from sojourn_server.gateway.http.tenant_keys import TenantKeys
    from sojourn_server.policies.cluster_preset import load_cluster_preset

    preset = load_cluster_preset("sojourn")
    gateway, _ = build_gateway([], preset, TenantKeys(None), GatewayOptions())
    return openapi_document("sojourn gateway", gateway._routes(), GATEWAY_OPERATIONS)


def pages() -> dict[str, str]:
    """Return the text of each document, by the name of its file in the package ``api``."""
    documents = {"openapi_engine.json": engine_api(), "openapi_gateway.json": gateway_api()}
    return {name: json.dumps(one, indent=1, ensure_ascii=False) + "\n" for name, one in documents.items()}
