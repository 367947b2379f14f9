"""The routes under ``/sojourn/v1``: events in; capabilities, programs, graphs, stats and decisions out; and
one that has a program's KV written to disk.

Nothing here knows vLLM: an engine is whatever answers ``EngineCalls``. Answers
are the engine's own JSON; they hold ids, names, numbers and reasons, never the
text of a prompt, a tool's arguments or its output. What is polled may be up to
half a second old.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire import MAX_BATCH_BYTES, WIRE_VERSION, WireError, decode_batch
from starlette.requests import Request
from starlette.responses import Response

from . import answers
from .asker import PERSIST, Asker
from .body import read_body
from .calls import EngineCalls
from .failure import Failure
from .guarded import guarded
from .keys import ApiKeys

PREFIX = "/sojourn/v1"
EVENTS_TIMEOUT_S = 5.0
QUERY_TIMEOUT_S = 15.0
MAX_PROGRAMS = 1000
MAX_DECISIONS = 5000
NDJSON = "application/x-ndjson"

Status = Literal["reasoning", "acting", "gated", "ended", "expired"]


def build_router(engine: EngineCalls, keys: ApiKeys) -> APIRouter:
    """All routes, each behind the same key check."""
    router = APIRouter(prefix=PREFIX, route_class=guarded(keys), tags=["sojourn"])
    ask = Asker(engine)

    async def about(op: str, program_id: str) -> list[Any]:
        if not 0 < len(program_id.encode("utf-8", "replace")) <= MAX_ID_BYTES:
            return []
        found = await ask(op, answers.write({"program_id": program_id}), QUERY_TIMEOUT_S)
        return [answers.read(answer) for answer in found]

    @router.post("/events")
    async def post_events(request: Request) -> Response:
        """Report what programs and their tools did; answers an outcome for each event."""
        body = await read_body(request, MAX_BATCH_BYTES)
        try:
            decode_batch(body)
            text = body.decode("utf-8")
        except (WireError, UnicodeDecodeError) as error:
            reason = str(error) if isinstance(error, WireError) else "not UTF-8"
            raise Failure(
                400,
                reason,
                f'send {{"v": {WIRE_VERSION}, "emitter": ID, "events": [...]}}; '
                f"{PREFIX}/capabilities lists what is understood",
            ) from None
        outcomes = await ask("events", text, EVENTS_TIMEOUT_S)
        return Response(answers.merge_outcomes(outcomes), media_type="application/json")

    @router.get("/capabilities")
    async def get_capabilities() -> JSONResponse:
        """What this server understands and how much of it: wire versions, events, policy, limits, tiers."""
        found = [answers.read(answer) for answer in await ask("capabilities", "{}", QUERY_TIMEOUT_S)]
        return JSONResponse({**answers.merge_capabilities(found), "engines": len(engine.engine_ids())})

    @router.get("/programs")
    async def get_programs(
        limit: int = Query(100, ge=1, le=MAX_PROGRAMS), status: Status | None = None
    ) -> JSONResponse:
        """Programs the engine knows; ``shown`` of ``total``."""
        payload = answers.write({"limit": limit, "status": status})
        found = [answers.read(answer) for answer in await ask("programs", payload, QUERY_TIMEOUT_S)]
        return JSONResponse(answers.merge_programs(found, limit))

    @router.get("/programs/{program_id:path}")
    async def get_program(program_id: str) -> JSONResponse:
        """One program: status, turns, lease, blocks, running tools, and its turn ledger."""
        return JSONResponse(_known(answers.merge_program(await about("program", program_id))))

    # POST alone: an id may itself end in /persist, and is then still to be looked up by GET.
    @router.post("/programs/{program_id:path}/persist")
    async def post_persist(program_id: str) -> JSONResponse:
        """Have what an engine holds of a program's last turn written to its disk; tells how far that is."""
        return JSONResponse(_known(answers.merge_persisted(await about(PERSIST, program_id))))

    @router.get("/graphs")
    async def get_graphs() -> JSONResponse:
        """Graphs that agents declared, the one used last first: hash, agent types and size of each."""
        found = [answers.read(answer) for answer in await ask("graphs", "{}", QUERY_TIMEOUT_S)]
        return JSONResponse(answers.merge_graphs(found))

    @router.get("/graphs/{graph_hash}")
    async def get_graph(graph_hash: str) -> JSONResponse:
        """One graph with its nodes and edges; ``graph_hash`` as ``/programs/{id}`` names it."""
        graph = None
        if 0 < len(graph_hash.encode("utf-8", "replace")) <= MAX_ID_BYTES:
            found = await ask("graph", answers.write({"graph_hash": graph_hash}), QUERY_TIMEOUT_S)
            graph = next((known for answer in found if (known := answers.read(answer)) is not None), None)
        if graph is None:
            raise Failure(
                404,
                "no graph of this hash is known",
                f"GET {PREFIX}/graphs lists those that are; the ones used least recently are forgotten in "
                "time, and a restarted server starts without any",
            )
        return JSONResponse(graph)

    @router.get("/stats")
    async def get_stats() -> JSONResponse:
        """Counters and gauges as the engine has them; for history scrape ``/metrics``."""
        found = [answers.read(answer) for answer in await ask("stats", "{}", QUERY_TIMEOUT_S)]
        return JSONResponse(answers.merge_stats(found, engine.engine_ids()))

    @router.get("/decisions")
    async def get_decisions(
        request: Request,
        since: int = Query(0, ge=0, le=2**63 - 1),
        limit: int = Query(1000, ge=1, le=MAX_DECISIONS),
        engine_id: str | None = Query(None, alias="engine"),
        form: Literal["json", "ndjson"] | None = Query(None, alias="format"),
    ) -> Response:
        """The decision log of one engine from number ``since`` on; ``next`` is where to go on.

        ``format=ndjson``, or ``Accept: application/x-ndjson``, gives one decision a line
        and ``next`` in the header ``X-Sojourn-Next``.
        """
        # Each engine numbers its own decisions, so one cursor cannot walk several logs.
        ids = list(engine.engine_ids())
        index = _engine_index(engine_id, ids)
        payload = answers.write({"since": since, "limit": limit})
        document = answers.read((await ask("decisions", payload, QUERY_TIMEOUT_S))[index])
        if form == "ndjson" or (form is None and NDJSON in request.headers.get("accept", "")):
            lines = "".join(f"{answers.write(decision)}\n" for decision in document["decisions"])
            return Response(lines, media_type=NDJSON, headers={"X-Sojourn-Next": str(document["next"])})
        return JSONResponse({**document, "engine": ids[index], "engines": ids})

    return router


def _known(program: dict[str, Any] | None) -> dict[str, Any]:
    if program is None:
        raise Failure(
            404,
            "no program of this id is known",
            f"GET {PREFIX}/programs lists those that are; ended ones are forgotten in time, "
            "and a restarted server starts without any",
        )
    return program


def _engine_index(engine_id: str | None, ids: list[str]) -> int:
    if engine_id is None:
        return 0
    if engine_id not in ids:
        raise Failure(404, "no such engine here", f"engine is one of {', '.join(ids)}")
    return ids.index(engine_id)
