"""HTTP routes under ``/sojourn/v1``: they receive events, and return the state of programs and the engine.

An engine is any ``EngineRpc``. Answers are the engine's JSON. They contain ids, names, numbers and reasons,
but no text of prompts, tool arguments or tool outputs. Answers of polled routes may be half a second old.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sojourn.ids import id_problem
from sojourn.wire_codec import MAX_BATCH_BYTES, WIRE_VERSION, WireError, decode_batch, encode
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..metrics.turn_explanation import explain
from ..programs.program_status import ProgramStatus
from .api_errors import RETRY_AFTER_S, ApiError
from .api_keys import ApiKeys
from .body_reader import read_body
from .engine_rpc import (
    PERSIST_OPERATION,
    EngineQueryLimiter,
    EngineRpc,
    EngineUnavailableError,
    StockEngineError,
)
from .event_intake import EventIntake
from .live_stream import MAX_DELTA_S, Audience, EngineLiveSource, LiveHub
from .openapi import PREFIX, openapi_response
from .response_merging import merge_capabilities, merge_program, merge_programs, merge_stats
from .web_page import page_routes

logger = logging.getLogger(__name__)

EVENTS_TIMEOUT_S = 5.0
MAX_PROGRAMS = 1000
MAX_DECISIONS = 5000
NDJSON = "application/x-ndjson"
QUERY_TIMEOUT_S = 15.0


def build_router(engine: EngineRpc, keys: ApiKeys, events: EventIntake | None = None) -> APIRouter:
    """Return a router with all routes. Each route under ``/sojourn/v1`` checks the API key. ``events``: the
    server's intake; ``None``: a new one."""
    router = APIRouter(prefix=PREFIX, route_class=_authenticated_route_class(keys), tags=["sojourn"])
    router.routes.extend(page_routes())
    ask = EngineQueryLimiter(engine)
    intake = events or EventIntake(engine)
    live = LiveHub(EngineLiveSource(engine, ask))

    async def query(op: str, **parameters: Any) -> list[Any]:
        found = await ask(op, msgspec.json.encode(parameters).decode(), QUERY_TIMEOUT_S)
        return [msgspec.json.decode(answer) for answer in found]

    async def query_program(op: str, program_id: str) -> dict[str, Any]:
        """Query the engines for one program. Raises ``ApiError`` 404 for an unknown or invalid id."""
        answers = await query(op, program_id=program_id) if id_problem(program_id) is None else []
        program = merge_program(answers)
        if program is None:
            raise ApiError(
                404,
                "no program has this id",
                f"GET {PREFIX}/programs lists the known ones; ended programs are forgotten later, and a "
                "restart forgets all",
            )
        return program

    @router.post("/events")
    async def post_events(request: Request) -> Response:
        """Receive events of programs and their tools. The answer has one outcome per event."""
        body = await read_body(request, MAX_BATCH_BYTES)
        try:
            batch = decode_batch(body)
        except WireError as error:
            raise ApiError(
                400,
                str(error),
                f'send {{"v": {WIRE_VERSION}, "emitter": ID, "events": [...]}}; '
                f"{PREFIX}/capabilities lists what is understood",
            ) from None
        outcomes = await intake.submit(batch, EVENTS_TIMEOUT_S)
        return Response(encode(outcomes), media_type="application/json")

    @router.get("/capabilities")
    async def get_capabilities() -> JSONResponse:
        """Return the wire versions, events, policy and tiers of this server."""
        found = await query("capabilities")
        return JSONResponse({**merge_capabilities(found), "engines": len(engine.engine_ids())})

    @router.post("/policy")
    async def post_policy(on: bool) -> JSONResponse:
        """Switch the policy off, so that requests are scheduled as by stock vLLM, or on again. Requests in
        the engine go on. A restarted engine has its policy on."""
        return JSONResponse((await query("policy", on=on))[0])

    @router.get("/programs")
    async def get_programs(
        limit: int = Query(100, ge=1, le=MAX_PROGRAMS), status: ProgramStatus | None = None
    ) -> JSONResponse:
        """List the newest programs that the engine knows. In the answer, ``shown`` is the number of listed
        programs and ``total`` is the number of all."""
        found = await query("programs", limit=limit, status=None if status is None else status.value)
        return JSONResponse(merge_programs(found, limit))

    @router.get("/load")
    async def get_load() -> JSONResponse:
        """Return the load of each data-parallel rank, and its programs with KV."""
        return JSONResponse({"engines": await query("load")})

    @router.get("/programs/{program_id:path}/explain")
    async def get_explanation(program_id: str, turn: int | None = Query(None, ge=1)) -> Response:
        """Explain a turn of a program, the newest one by default: seconds, tokens, losses and decisions."""
        try:
            facts = await query_program("program", program_id)
        except ApiError as error:
            if error.status != 404:
                raise
            # An id may itself end in /explain.
            return JSONResponse(await query_program("program", f"{program_id}/explain"))
        found = explain(facts, turn)
        if found is None:
            kept = ", ".join(str(record["turn"]) for record in [*facts["ledger"], *facts["unfinished"]][-10:])
            raise ApiError(
                404,
                "the ledger does not have this turn" if turn is not None else "the program has no turn yet",
                f"ask for one that it has; the newest are: {kept}"
                if kept
                else "a turn is a request inside program(), or in a process under sojourn run",
            )
        return Response(msgspec.json.encode(found), media_type="application/json")

    @router.get("/programs/{program_id:path}")
    async def get_program(program_id: str) -> JSONResponse:
        """Return one program: status, turns, lease, blocks, and the ledger of its turns."""
        return JSONResponse(await query_program("program", program_id))

    # POST only, because an id may itself end in /persist, and GET must still find that program.
    @router.post("/programs/{program_id:path}/persist")
    async def post_persist(program_id: str) -> JSONResponse:
        """Write the KV of a program's last turn to the engine's disk. The answer shows the progress."""
        return JSONResponse(await query_program(PERSIST_OPERATION, program_id))

    @router.get("/stats")
    async def get_stats() -> JSONResponse:
        """Return the engine's current counters and gauges. ``/metrics`` exports them to Prometheus."""
        return JSONResponse(merge_stats(await query("stats"), engine.engine_ids()))

    @router.get("/stream")
    async def get_stream(
        request: Request,
        once: bool = False,
        changed_within_s: float | None = Query(None, ge=0, le=MAX_DELTA_S),
    ) -> Response:
        """Stream live frames as server-sent events: memory, totals and programs.

        The first frame is full. Later frames are deltas, except for an occasional full frame. ``once=1``
        returns one frame as JSON: full, or a delta with ``changed_within_s``. At most eight streams are
        open."""
        if once:
            return await live.once(Audience(), changed_within_s)
        return live.stream(Audience(), request.app.state)

    @router.get("/decisions")
    async def get_decisions(
        request: Request,
        since: int = Query(0, ge=0, le=2**63 - 1),
        limit: int = Query(1000, ge=1, le=MAX_DECISIONS),
        engine_id: str | None = Query(None, alias="engine"),
        form: Literal["json", "ndjson"] | None = Query(None, alias="format"),
    ) -> Response:
        """Return the decision log of one engine, from decision number ``since`` on. Use ``next`` of the
        answer as ``since`` of the next request.

        ``format=ndjson`` or ``Accept: application/x-ndjson`` gives one decision per line. ``next`` is then in
        the header ``X-Sojourn-Next``.
        """
        # Each engine numbers its own decisions, so a cursor belongs to one log.
        ids = list(engine.engine_ids())
        if engine_id is not None and engine_id not in ids:
            raise ApiError(404, f"no engine {engine_id[:40]!r}", f"use one of {', '.join(ids)}")
        index = ids.index(engine_id) if engine_id is not None else 0
        document = (await query("decisions", since=since, limit=limit))[index]
        if form == "ndjson" or (form is None and NDJSON in request.headers.get("accept", "")):
            lines = b"".join(msgspec.json.encode(decision) + b"\n" for decision in document["decisions"])
            return Response(lines, media_type=NDJSON, headers={"X-Sojourn-Next": str(document["next"])})
        return JSONResponse({**document, "engine": ids[index], "engines": ids})

    @router.get("/openapi.json")
    async def get_openapi() -> Response:
        """Return this document: OpenAPI 3.1 with the schemas of all answers."""
        return openapi_response("engine")

    return router


def _authenticated_route_class(keys: ApiKeys) -> type[APIRoute]:
    """Return a route class that checks the API key before reading a request. Errors become JSON answers."""

    class AuthenticatedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_authenticated(request: Request) -> Response:
                if not keys.allow(request.headers.get("authorization")):
                    return unauthorised().response()
                try:
                    return await handle(request)
                except HTTPException:
                    raise
                except Exception as error:
                    return _to_api_error(error).response()

            return handle_authenticated

    return AuthenticatedRoute


def _to_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        # Position and problem without the rejected input, which FastAPI's own answer would repeat.
        problems = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
        return ApiError(400, problems, "correct the query parameters; they are described under /docs")
    if isinstance(error, EngineUnavailableError):
        logger.warning("engine unavailable: %s", error)
        return ApiError(
            503,
            "the engine did not answer",
            "try again; requests work without events, but less KV is kept",
            {"Retry-After": str(RETRY_AFTER_S)},
        )
    if isinstance(error, StockEngineError):
        return ApiError(
            501,
            "this server runs vLLM's own scheduler, so it has no program state",
            "start it with `sojourn serve MODEL --policy continuum`; "
            "until then it ignores events, and clients lose nothing by sending them",
        )
    logger.error("route failed", exc_info=error)
    return ApiError(500, "the server failed to answer", "see the server's log, and report it as a bug")


def unauthorised() -> ApiError:
    """Return the error 401 for a request without a valid key."""
    return ApiError(
        401,
        "missing or wrong API key",
        "send `Authorization: Bearer KEY` with a key the server was started with",
        {"WWW-Authenticate": "Bearer"},
    )
