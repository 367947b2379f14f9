"""Handles proxied requests. Each is submitted to the routing core, sent to an engine, or to a prefill and a
decode engine, and its answer passed to the client. After a failure before the answer's first byte, it is sent
to another engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from ...api.body_reader import utf8_json
from ...api.client_identity import (
    AGENT_TYPE_HEADER,
    PARENT_HEADER,
    ROOT_HEADER,
    SESSION_HEADER,
    ClientIdentity,
    wire_id,
)
from ...programs.program_status import ProgramOutcome
from ...routing import routing_events
from ...routing.routing_events import SendRequest
from .client_apis import (
    GATEWAY_FAILED,
    GATEWAY_STOPPING,
    INVALID_KEY,
    REPLICA_LOST,
    ClientApi,
    RequestRejected,
    error_event,
    send_rejection,
)
from .engine_client import (
    PASSED,
    REPLICA,
    EngineAnswer,
    EngineClient,
    ReplicaRequestError,
    ResponseMeter,
    bearer,
    end_to_end_headers,
    engine_request_headers,
)
from .gateway_metrics import GatewayMetrics
from .generation_request import (
    BodyReader,
    ClientDisconnected,
    GenerationRequest,
    InvalidGenerationRequest,
    PromptSizeEstimator,
    decode_body,
    decode_only_body,
    parse_generation_request,
    parse_transfer_params,
    prefill_body,
    without_events,
)
from .multi_engine_queries import EngineQueries
from .peers import UNREAD_TIMEOUT_S, Peers
from .program_events import AttachedEvents, ProgramEvents
from .routing_backend import RequestDecisions, RoutingBackend
from .tenant_keys import TenantKeys

logger = logging.getLogger(__name__)

SILENT_ENGINE_S = 5.0
"""Seconds without bytes after which the gateway gives up the answer of a replica that counts as dead."""
WATCH_DELAY_S = 0.02
"""Seconds after a request's start from which a disconnect of the client is noticed."""
STOPPING = "the gateway stops; send the request again"
STOPPING_RETRY_S = 5.0
"""``Retry-After``, in seconds, in answers of a gateway that stops. A restart takes a few seconds."""
MAX_RESPONSE_IDS = 20_000
"""Maximum number of remembered answer ids of the responses API. The engines are asked for others."""


class StoredResponse(NamedTuple):
    """An answer of the responses API that an engine may have stored."""

    replica_id: str
    program_id: str | None
    """The program that the answer belongs to; ``None``: it gets one when a request continues it."""


@dataclass(eq=False, kw_only=True)
class GenerationProxy:
    """ASGI application that serves the generation routes of a gateway. For use in one event loop."""

    routing_backend: RoutingBackend
    client: EngineClient
    events: ProgramEvents
    metrics: GatewayMetrics
    tenants: TenantKeys
    bodies: BodyReader
    peers: Peers
    queries: EngineQueries
    reads_prefixes: bool
    """Whether the routing policy needs the hashes of a prompt's prefixes."""
    session_header: str | None
    """That of ``GatewayOptions``."""
    dropped: frozenset[bytes]
    """Names of clients' headers that engines do not get."""
    sizes: PromptSizeEstimator = field(default_factory=PromptSizeEstimator)
    responses: dict[str, StoredResponse] = field(default_factory=dict)
    """Answers of the responses API by id, the oldest first."""
    open_requests: int = 0
    """Number of requests whose answers are not complete."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one generation request; its path ends with that of its API."""
        path: str = scope["path"]
        api, size = ClientApi(path[path.rindex("/v1/") :]), 0
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed([*scope["headers"]])
        }
        request: ProxyRequest | None = None
        self.open_requests += 1
        try:
            authorization = headers.get("authorization")
            tenant = self.tenants.tenant_of(authorization, headers.get("x-api-key"))
            if tenant is None:
                message = "missing or unknown API key; expected one of the gateway's"
                raise RequestRejected(401, INVALID_KEY, message)
            body = await self.bodies.read(headers, receive)
            size = len(body)
            body = utf8_json(body)
            question = parse_generation_request(
                api, body, headers, self.session_header, reads_prefixes=self.reads_prefixes
            )
            if self.peers.others and PASSED not in headers:
                program_id = question.program.program_id if question.program is not None else None
                owner = self.peers.owner(tenant, program_id)
                if owner and await self.peers.pass_on(owner, api, scope, body, receive, send):
                    return
            stored: StoredResponse | None = None
            previous = question.previous_response_id if api is ClientApi.RESPONSES else None
            if previous is not None and not self.peers.in_pairs:
                stored = await self.stored_response(tenant, previous, authorization)
            request = ProxyRequest(self, api, scope, authorization, send, tenant, body, question, stored)
            del body  # replaced by one with the engines' names of programs
            await request.run(receive)
        except RequestRejected as refused:
            await self._refuse(send, api, refused)
        except (InvalidGenerationRequest, UnicodeDecodeError) as error:
            await self._refuse(send, api, RequestRejected(400, "bad_request", str(error)))
        except (ClientDisconnected, OSError):  # the server raises OSError on a write to a client that left
            self.metrics.disconnects.inc()
        except Exception:
            if request is not None and request.meter is not None:
                raise  # the server closes the connection, so that the answer does not look complete
            logger.exception("the gateway failed at a request; please report this")
            failed = RequestRejected(500, GATEWAY_FAILED, "the gateway failed; see its log")
            await self._refuse(send, api, failed)
        finally:
            self.bodies.free(size)
            self.open_requests -= 1

    async def stored_response(
        self, tenant: str | None, response_id: str, authorization: str | None
    ) -> StoredResponse | None:
        """Return the replica that stores an answer of the responses API, if any. All engines are asked unless
        this gateway has passed the answer on; only those with ``VLLM_ENABLE_RESPONSES_API_STORE=1`` store
        some. Raises ``RequestRejected`` if it is not ``tenant``'s; ``None``: any tenant."""
        if tenant is not None and not response_id.startswith(self.events.names.response_prefix(tenant)):
            raise RequestRejected(404, "not_found", f"Response with id {response_id!r} not found")
        if (found := self.responses.get(response_id)) is not None:
            return found
        path = f"/v1/responses/{quote(response_id, safe='')}"
        replies = await self.queries.every(path, authorization, others_s=0.0)
        urls = {url for url, reply in replies.items() if reply is not None and reply.status == 200}
        loads = {one.replica: one.load for one in self.routing_backend.replicas()}
        ranks = [one.replica_id for one in self.queries.replicas.values() if one.url in urls]
        at = min(ranks, key=lambda one: loads.get(one, math.inf), default=None)
        return StoredResponse(at, None) if at is not None else None

    async def _refuse(self, send: Send, api: ClientApi, refused: RequestRejected) -> None:
        self.metrics.refused(refused.code)
        await send_rejection(send, api, refused)


class ProxyRequest:
    """One client request, from its submission to the routing core to the end of its answer. The constructor
    submits the request. ``run`` does the rest."""

    def __init__(
        self,
        proxy: GenerationProxy,
        api: ClientApi,
        scope: Scope,
        authorization: str | None,
        send: Send,
        tenant: str,
        body: bytes,
        question: GenerationRequest,
        stored: StoredResponse | None,
    ) -> None:
        """``stored``: the answer that the request continues; ``None``: none, or it is at no engine."""
        self._proxy = proxy
        self._api = api
        self._scope = scope
        self._authorization = authorization
        self._to_client = send
        self._tenant = tenant
        self._question = question
        names = proxy.events.names
        are_several = names.only_tenant is None
        program = question.program
        if program is None and stored is not None and not proxy.peers.others:
            # Of several gateways none sees all turns, so each would name it after another answer.
            named = stored.program_id or wire_id(f"conversation-{question.previous_response_id}")
            program = ClientIdentity(named) if named is not None else None
        self._program_id = program_id = program.program_id if program is not None else None
        self._identity: dict[str, str] = {}
        """Headers that name the program to an engine."""
        if program is not None:
            own_id = program.program_id
            self._identity[SESSION_HEADER] = names.engine_name(tenant, own_id) if are_several else own_id
            if question.context is None:  # a hint names the parent itself
                for header, one in ((PARENT_HEADER, program.parent_id), (ROOT_HEADER, program.root_id)):
                    if one is not None:
                        self._identity[header] = names.engine_name(tenant, one)
                if program.agent_type is not None:
                    self._identity[AGENT_TYPE_HEADER] = program.agent_type
        rewrites = question.has_identity or question.is_stored
        self._body = names.request(tenant, body, question) if are_several and rewrites else body
        query = scope.get("query_string", b"").decode("latin-1")
        self._path = f"{api.value}{'?' if query else ''}{query}"
        self._asked_s = time.monotonic()
        hint = question.context
        self._attached: AttachedEvents | None = None
        """The events in the hint of ``_body``; ``None``: there are none."""
        if hint is not None and hint.sojourn is not None and hint.sojourn.events:
            self._attached = AttachedEvents(program_id, hint, self._authorization)
        self.meter: ResponseMeter | None = None
        """Reads the engine's answer; ``None``: none has begun to reach the client."""
        self._is_given_answer = False
        """Whether a successful answer has begun. It may have ended early."""
        self._is_answered = False
        """Whether a successful answer was passed on completely."""
        self._sent_to: str | None = None
        """The replica to which the request was last sent; ``None``: none, or a prefill engine rejected it."""
        self._prefilled_tokens: int | None = None
        """Prompt tokens that the prefill engine counted, which a stream may not report."""
        deadline_s = hint.deadline_seconds if hint is not None else None
        # This comes last, because it submits the request. ``run`` reads the core's decision.
        self.decisions: RequestDecisions = proxy.routing_backend.open(
            routing_events.RequestReceived(
                secrets.token_hex(12),  # not the client's own id, since two clients may use the same
                tenant,
                proxy.sizes.tokens(question),
                program_id=program_id,
                parent_id=program.parent_id if program is not None else None,
                agent_type=program.agent_type if program is not None else None,
                output_tokens=question.output_tokens,
                deadline_s=self._asked_s + deadline_s if deadline_s is not None else None,
                prefix=question.prefix,
                exact=question.is_exact,
                only_replica_id=stored.replica_id if stored is not None else None,
            )
        )

    async def run(self, receive: Receive) -> None:
        """Handle the request until its answer ends, complete or not. Raises ``RequestRejected``,
        ``InvalidGenerationRequest``, ``ClientDisconnected``, or ``OSError`` if the client has left."""
        routing_backend, loop = self._proxy.routing_backend, asyncio.get_running_loop()
        watching: list[asyncio.Task[None]] = []
        # Begin later, so that this does not delay sending the request to its engine.
        later = loop.call_later(
            WATCH_DELAY_S, lambda: watching.append(loop.create_task(self._until_client_leaves(receive)))
        )
        try:
            await self._until_answered()
        except asyncio.CancelledError:
            # The server stops, and the time that it grants running requests has passed. The task ends here.
            if self.meter is None:
                raise RequestRejected(503, GATEWAY_STOPPING, STOPPING, STOPPING_RETRY_S) from None
        finally:
            later.cancel()
            for task in watching:
                task.cancel()
            # After a newer decision, the core has assigned the request to another replica. ``None`` ends the
            # request wherever the core has it.
            where = None if self.decisions.superseded or self.decisions.has_decision else self._sent_to
            counted, output_tokens = self.meter.counts() if self.meter is not None else (None, 0)
            counted = counted or self._prefilled_tokens
            routing_backend.close(
                routing_events.RequestFinished(
                    self.decisions.request_id, output_tokens, where, self._is_given_answer, counted or 0
                ),
            )
            if self._is_answered and counted is not None:
                self._proxy.sizes.learn(self._question, counted)
            if self._is_answered and self._question.is_stored:
                name = self.meter.response_id if self.meter is not None else None
                if name is not None and self._sent_to is not None:
                    responses = self._proxy.responses
                    responses[name] = StoredResponse(self._sent_to, self._program_id)
                    if len(responses) > MAX_RESPONSE_IDS:
                        del responses[next(iter(responses))]
        if self._program_id is not None and self._question.is_last and self._is_answered:
            self._proxy.events.end((self._tenant, self._program_id), ProgramOutcome.FINAL.value)

    async def _until_client_leaves(self, receive: Receive) -> None:
        with contextlib.suppress(Exception):  # no other event will follow an error
            while (await receive())["type"] != "http.disconnect":
                pass
        self.decisions.mark_client_disconnected()

    async def _until_answered(self) -> None:
        """Carry out the core's decisions until the client has an answer."""
        while True:
            decision = self.decisions.take()
            if decision is None:
                await self.decisions.unless_decided(asyncio.Event().wait())
            elif isinstance(decision, routing_events.RejectRequest):
                raise RequestRejected(
                    decision.status, decision.code, decision.message, decision.retry_after_s
                )
            elif isinstance(decision, routing_events.AbortStream):
                raise RequestRejected(502, REPLICA_LOST, "the replica that was answering is gone", 1.0)
            elif isinstance(decision, SendRequest) and await self._send_to_replica(decision):
                return

    async def _send_to_replica(self, decision: SendRequest) -> bool:
        """Send the request to the chosen replica, and pass the answer to the client. Return False if there is
        none, or if a new decision came first; the caller then carries out the next decision."""
        proxy, replica_id = self._proxy, decision.replica_id
        self._sent_to = replica_id
        waited_s = time.monotonic() - self._asked_s
        attached = self._attached
        if attached is not None and (
            not proxy.events.may_attach(attached, self._tenant, decision.home_id)
            or (decision.prefill_id and decode_only_body(self._api, self._body) is not None)
        ):
            self._body, self._attached = without_events(self._body), None
            of_client = (self._tenant, self._authorization, self._scope["headers"], self._program_id)
            await proxy.events.wait_for(proxy.peers.forward(proxy.events, attached.batch, *of_client))
        key = (self._tenant, self._program_id or "")
        if decision.moved_from is not None or key in proxy.events.leaving or key in proxy.events.programs:
            await proxy.events.prepare(key, decision, bearer(proxy.queries.engine_key, self._authorization))
        try:
            asking = self._ask_pair(decision) if decision.prefill_id else self._ask(replica_id, self._body)
            answer = await self.decisions.unless_decided(asking)
        except ReplicaRequestError as error:
            self._report_failure(replica_id, error)
            return False
        if answer is None:
            return False
        try:
            await self._pass_back(answer, decision, waited_s)
        finally:
            answer.close()
        return True

    async def _ask(self, replica_id: str, body: bytes) -> EngineAnswer:
        """Send a body to a replica, and wait for the first part of the answer. Raises
        ``ReplicaRequestError``."""
        address = self._proxy.queries.replicas.get(replica_id)
        if address is None:
            raise ReplicaRequestError("its address is not known", computing=False)
        headers = engine_request_headers(
            self._scope["headers"],
            dropped=self._proxy.dropped,
            key=self._proxy.queries.engine_key,
            rank=address.rank,
            identity=self._identity,
        )
        return await self._proxy.client.send(address.url + self._path, headers, body)

    async def _ask_pair(self, decision: SendRequest) -> EngineAnswer | None:
        """Send the request to its pair of engines. Return the answer once its first part has arrived;
        ``None``: the prefill engine failed. Raises what ``_ask`` raises for the decode engine,
        ``RequestRejected`` or ``InvalidGenerationRequest``."""
        if self._question.previous_response_id is not None:
            message = (
                "previous_response_id: engines keep only their own answers, and each request goes to another "
                "engine; expected the whole conversation in input"
            )
            raise RequestRejected(400, "bad_request", message)
        body = decode_only_body(self._api, self._body)
        if body is not None:
            self._report_prefilled(decision, computed=False)
        else:
            try:
                prefilled = await self._prefill(decision)
            except ReplicaRequestError as error:
                self._report_failure(decision.prefill_id, error)
                return None
            if isinstance(prefilled, EngineAnswer):
                # The prefill engine rejected the request, so the client gets its answer.
                self._sent_to = None
                return prefilled
            # The prefill engine has the events.
            own = self._body if self._attached is None else without_events(self._body)
            body = decode_body(own, prefilled)
        answer = await self._ask(decision.replica_id, body)
        answer.raise_for_failure()  # another pair may succeed
        return answer

    async def _prefill(self, pair: SendRequest) -> EngineAnswer | dict[str, Any]:
        """Run the prefill stage. Return the ``kv_transfer_params`` that say where the KV is. If the engine
        rejects the request, return its answer. Raises ``ReplicaRequestError``."""
        # An engine accepts a transfer's name once, and may still hold the name of an earlier attempt.
        transfer = secrets.token_hex(12)
        body = prefill_body(self._api, self._body, transfer, pair.peer, pair.decode_reads)
        answer = await self._ask(pair.prefill_id, body)
        answer.raise_for_failure()
        if answer.status != 200:
            return answer
        try:
            document = answer.first
            while part := await answer.next_part():
                document += part
        finally:
            answer.close()
        prefilled = parse_transfer_params(document)
        if prefilled is None:
            raise ReplicaRequestError("it computed a prompt and reports no KV")
        meter = ResponseMeter(is_stream=False)
        meter.push(document)
        self._prefilled_tokens, _ = meter.counts()
        self._report_prefilled(pair)
        return prefilled

    def _report_prefilled(self, pair: SendRequest, *, computed: bool = True) -> None:
        request_id = self.decisions.request_id
        event = routing_events.PrefillFinished(request_id, pair.prefill_id, computed)
        self._proxy.routing_backend.tell(event)

    def _report_failure(self, replica_id: str, error: ReplicaRequestError) -> None:
        """Log that a replica did not answer, and report this to the core."""
        logger.warning("replica %s did not answer a request: %s", replica_id, error)
        request_id = self.decisions.request_id
        self._proxy.routing_backend.tell(
            routing_events.RequestFailed(request_id, replica_id, computing=error.computing)
        )

    async def _pass_back(self, answer: EngineAnswer, decision: SendRequest, waited_s: float) -> None:
        """Pass an engine's answer to the client, and record it. The request can no longer go elsewhere.
        ``waited_s``: seconds that it waited at the gateway before."""
        proxy, replica_id = self._proxy, decision.replica_id
        self.decisions.mark_answered()
        self.meter = meter = ResponseMeter(is_stream=answer.is_stream)
        self._is_given_answer = answer.status == 200 and answer.error is None
        if self._attached is not None and self._is_given_answer:
            proxy.events.record_attached(self._attached, self._tenant, decision.home_id)
        # The engine's list of headers, with multiple cookies and such, as it came.
        headers = end_to_end_headers(answer.response.raw_headers)
        headers.append((REPLICA.lower().encode(), replica_id.encode("latin-1", "replace")))
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        is_complete = answer.is_complete
        try:
            if is_complete:  # it goes to its client before it is recorded
                await self._to_client(start)
                await self._to_client({"type": "http.response.body", "body": answer.first})
        finally:
            proxy.metrics.sent(decision.reason, waited_s)
            first = meter.push(answer.first)
        if not is_complete:
            proxy.routing_backend.tell(routing_events.FirstByteSent(self.decisions.request_id, replica_id))
            await self._to_client(start)
            is_complete = await self._pass_parts(answer, first, meter, replica_id)
        self._is_answered = self._is_given_answer and is_complete

    async def _pass_parts(
        self, answer: EngineAnswer, whole: bytes, meter: ResponseMeter, replica_id: str
    ) -> bool:
        """Pass a stream or a long answer on to the client. Return whether the answer ended regularly.
        ``whole``: what may be passed on of the first part.

        If a stream breaks off, or the gateway stops, the client gets an error event. If another answer breaks
        off, it stays incomplete, so the server closes the connection. Raises ``ClientDisconnected``, or
        ``OSError`` if the client has left.
        """
        decisions, now = self.decisions, asyncio.get_running_loop().time
        chunk, is_writing = answer.first, False
        failure: tuple[str, str] | None
        failure = REPLICA_LOST, "the replica that was answering is gone; send the request again"
        try:
            # A replica that counts as dead may finish an answer that it still writes.
            async with decisions.interruptible(SILENT_ENGINE_S) as limit:
                while chunk:
                    if whole:
                        is_writing = True
                        limit.reschedule(now() + UNREAD_TIMEOUT_S)
                        await self._to_client(
                            {"type": "http.response.body", "body": whole, "more_body": True}
                        )
                        is_writing = False
                    if decisions.client_gone:
                        raise ClientDisconnected
                    limit.reschedule(now() + SILENT_ENGINE_S if decisions.has_decision else None)
                    chunk = await answer.next_part()
                    whole = meter.push(chunk)
                failure = None
        except TimeoutError:
            if is_writing or decisions.client_gone:
                raise ClientDisconnected from None
        except ReplicaRequestError as error:
            logger.debug("replica %s broke off: %s", replica_id, error)
        except asyncio.CancelledError:
            failure = GATEWAY_STOPPING, STOPPING
        if failure is None:
            await self._to_client({"type": "http.response.body", "body": meter.rest()})
            return True
        self._proxy.metrics.cut_streams.inc()
        if failure[0] == REPLICA_LOST:
            logger.warning("replica %s broke off an answer after its first byte", replica_id)
            self._proxy.routing_backend.tell(
                routing_events.RequestFailed(self.decisions.request_id, replica_id)
            )
        if answer.is_stream:
            event = error_event(self._api, *failure)
            await self._to_client({"type": "http.response.body", "body": event})
        return False
