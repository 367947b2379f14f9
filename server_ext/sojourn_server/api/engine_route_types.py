"""Types of the queries, bodies and answers of an engine's routes, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from sojourn.wire_codec import EventBatch, OutcomeBatch

from ..core import engine_answers
from ..metrics.live_frame import LiveFrame
from ..metrics.turn_explanation import Explanation
from ..programs.program_status import ProgramStatus
from .openapi import Operation, either

MAX_PROGRAMS = 1000
MAX_DECISIONS = 5000
MAX_DELTA_S = 86_400
NDJSON = "application/x-ndjson"


class ServerCapabilities(engine_answers.EngineCapabilities, frozen=True, kw_only=True):
    """What a server understands, and how it is configured."""

    engines: int
    """Number of engines behind the server."""


class StockServerCapabilities(engine_answers.StockCapabilities, frozen=True, kw_only=True):
    """Capabilities of a server whose engines run vLLM's own scheduler."""

    engines: int


AnyStats = Annotated[Any, either(engine_answers.EngineStats, engine_answers.StockStats)]


class StatsByEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of each of several engines."""

    engines: dict[str, AnyStats]


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
    ("GET", "/capabilities"): Operation(Annotated[Any, either(ServerCapabilities, StockServerCapabilities)]),
    ("GET", "/programs"): Operation(engine_answers.ProgramList, ProgramsQuery),
    ("GET", "/load"): Operation(LoadByRank),
    ("GET", "/programs/{program_id}"): Operation(engine_answers.ProgramDetail),
    ("GET", "/programs/{program_id}/explain"): Operation(Explanation, ExplainQuery),
    ("POST", "/programs/{program_id}/persist"): Operation(engine_answers.PersistProgress),
    ("GET", "/graphs"): Operation(engine_answers.GraphList),
    ("GET", "/graphs/{graph_hash}"): Operation(engine_answers.GraphDetail),
    ("GET", "/stats"): Operation(
        Annotated[Any, either(engine_answers.EngineStats, engine_answers.StockStats, StatsByEngine)]
    ),
    ("GET", "/stream"): Operation(LiveFrame, StreamQuery, media=EVENT_STREAM),
    ("GET", "/decisions"): Operation(DecisionsAnswer, DecisionsQuery, media=DECISION_LINES),
    ("GET", "/openapi.json"): Operation(dict[str, Any]),
}
"""Operations by method and path below ``/sojourn/v1``."""
