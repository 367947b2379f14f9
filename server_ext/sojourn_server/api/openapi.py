"""Builds the OpenAPI 3.1 document of the routes that a server has, with schemas from the msgspec types.

A route's description is its handler's docstring. A field's description is the string below the field in its
class.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta
from sojourn.wire_events import AnyEvent
from starlette.routing import Route

from .api_errors import ErrorAnswer

PREFIX = "/sojourn/v1"
"""Path of all routes of sojourn."""
JSON = "application/json"
_TYPES = "types"
_REF = "#/components/schemas/{name}"
_ERROR = {
    "description": "An error. `next` says what to do.",
    "content": {JSON: {"schema": {"$ref": _REF.format(name="ErrorAnswer")}}},
}
_PATH_PARAMETERS = {
    "program_id": "Id of the program, percent-encoded.",
    "graph_hash": "Hash of the graph.",
    "replica": "Name of the replica, percent-encoded.",
}


def either(*types: type | None) -> Meta:
    """Return an annotation for a field of type ``Any`` whose value is one of the structs ``types``. ``None``
    among ``types`` stands for null. msgspec does not support such unions of structs."""
    schemas = [{"type": "null"} if one is None else {"$ref": _REF.format(name=one.__name__)} for one in types]
    return Meta(extra_json_schema={"anyOf": schemas}, extra={_TYPES: [one for one in types if one]})


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
        parameter = {"name": name, "in": "query", "required": False, "schema": own}
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
            left += (one.extra or {}).get(_TYPES, ())
        if isinstance(one, type) and one not in seen and one.__module__.startswith("sojourn"):
            seen.add(one)
            left += get_type_hints(one, include_extras=True).values()
            yield one


def _field_texts(cls: type) -> dict[str, str]:
    """Return the texts below the fields of a class and of its bases, by the field's name in JSON."""
    encoded: Sequence[str] = getattr(cls, "__struct_encode_fields__", ())
    names = dict(zip(getattr(cls, "__struct_fields__", ()), encoded, strict=True))
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        if not one.__module__.startswith("sojourn"):
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
