"""Handles one proxied request. It submits the request to the routing core, sends it to an engine, and passes
the answer to the client. After a failure, it sends the request to another engine.

A request has one stage. If it goes to a prefill and a decode engine, it has two.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from ...routing import routing_events
from ...routing.routing_events import SendRequestToPair
from . import proxy_headers
from .client_apis import (
    GATEWAY_FULL,
    GATEWAY_STOPPING,
    REPLICA_LOST,
    AsgiSend,
    ClientApi,
    RequestRejected,
    error_event,
)
from .client_json import InvalidGenerationRequest
from .engine_client import EngineAnswer, ReplicaRequestError, is_engine_failure, send_to_engine
from .engine_connection import EngineConnectionError, GatewayConnectError
from .generation_request import GenerationRequest
from .piggybacked_events import PiggybackedEvents
from .prefill_decode_bodies import decode_body, decode_only_body, parse_transfer_params, prefill_body
from .proxy_context import ProxyContext
from .proxy_headers import RawHeaders
from .replica_addresses import ReplicaAddress
from .request_bodies import RequestBody, process_body
from .response_meter import ResponseMeter, SseEventBuffer, parse_prompt_tokens
from .routing_backend import ClientDisconnected, RequestDecisionQueue

logger = logging.getLogger(__name__)

AsgiScope = MutableMapping[str, Any]

SILENT_ENGINE_S = 5.0
"""Seconds without bytes from a replica that counts as dead, after which the gateway gives up the rest of its
answer."""
FULL_RETRY_S = 2.0
"""``Retry-After``, in seconds, if the gateway cannot open a connection."""
STOPPING_RETRY_S = 5.0
"""``Retry-After``, in seconds, in answers of a gateway that stops. A restart takes a few seconds."""


class ParsedRequest(NamedTuple):
    """A client's request after parsing, as it is passed on to an engine."""

    body: bytes
    """The request's body. The ids that engines use replace the client's program ids (``ProgramIdMapper``)."""
    question: GenerationRequest
    """The parsed request, without its prompt."""
    prefix: tuple[int, ...]
    """The prompt's prefix hashes (``GenerationRequest.prefix``). Empty if the routing policy does not read
    them."""
    events_fit: bool
    """Whether the hint in the body still has its events. They are removed if the engines' longer program ids
    make the hint too long."""


class ProxyRequest:
    """One client request, from its submission to the routing core to the end of its answer. The constructor
    submits the request. ``run`` does the rest."""

    def __init__(
        self,
        shared: ProxyContext,
        api: ClientApi,
        scope: AsgiScope,
        send: AsgiSend,
        tenant: str,
        read: ParsedRequest,
        held: RequestBody,
    ) -> None:
        self._shared = shared
        self._api = api
        self._scope = scope
        self._to_client = send
        self._tenant = tenant
        self._body = read.body
        self._held = held
        question = read.question
        raw: RawHeaders = scope["headers"]
        session = proxy_headers.first_value(raw, proxy_headers.SESSION)
        program_id = question.program_id
        if program_id is None and api is ClientApi.RESPONSES:
            # A conversation without a program id is a program too: only one engine has its earlier turns.
            known = shared.conversations.get((tenant, question.previous_response_id or ""))
            program_id = known or f"conversation-{secrets.token_hex(8)}"
        self._question = question
        self._program_id = program_id
        self._session_header = (
            shared.forwarder.names.engine_name(tenant, session) if session is not None else None
        )
        self._asked_s = time.monotonic()
        hint = question.context
        deadline_s = hint.deadline_seconds if hint is not None else None
        self._piggybacked: PiggybackedEvents | None = None
        if hint is not None and hint.sojourn is not None:
            shown = proxy_headers.first_value(raw, b"authorization")
            self._piggybacked = PiggybackedEvents(
                shared.forwarder, tenant, program_id, hint, shown, fits=read.events_fit
            )
        self._meter = ResponseMeter(stream=question.stream)
        self._is_given_answer = False
        """Whether a successful answer has begun. It may have ended early."""
        self._is_answered = False
        """Whether a successful answer was passed on completely."""
        self.has_begun = False
        """Whether the gateway has begun to pass an engine's answer to the client."""
        self._is_streaming = False
        """Whether the client is receiving a stream that has not ended."""
        self._sent_to: str | None = None
        """Id of the replica to which the request was last sent. ``None``: it was not sent, or a prefill
        engine rejected it."""
        self._prefill_attempts = 0
        """Number of attempts of the prefill stage."""
        self._prefilled_tokens: int | None = None
        """Number of prompt tokens that the prefill engine counted; ``None``: unknown."""
        # This comes last, because it submits the request. ``run`` reads the core's decision.
        self.decisions: RequestDecisionQueue = shared.routing_backend.open(
            routing_events.RequestReceived(
                # Not the client's own id, since two clients may use the same.
                secrets.token_hex(12),
                tenant,
                shared.sizes.tokens(question, tenant),
                program_id=program_id,
                parent_id=question.parent_id,
                agent_type=question.agent_type,
                output_tokens=question.output_tokens,
                deadline_s=self._asked_s + deadline_s if deadline_s is not None else None,
                prefix=read.prefix,
                exact=question.is_exact,
            )
        )

    async def run(self) -> None:
        """Handle the request until its answer ends, complete or not."""
        routing_backend = self._shared.routing_backend
        try:
            await self._until_answered()
        except RequestRejected as refused:
            await self._shared.refuse(self._to_client, self._api, refused)
        except InvalidGenerationRequest as error:
            await self._shared.refuse(
                self._to_client, self._api, RequestRejected(400, "bad_request", str(error))
            )
        except (ClientDisconnected, OSError):  # the server raises OSError on a write to a client that left
            self._shared.metrics.count_disconnect()
        except asyncio.CancelledError:
            # The server stops, and the time that it grants running requests has passed. The task ends here.
            await self._end_with_gateway()
        finally:
            # After a newer decision, the core has assigned the request to another replica. ``None`` ends the
            # request wherever the core has it.
            where = None if self.decisions.superseded or self.decisions.has_decision else self._sent_to
            routing_backend.tell(self._finished_event(where))
            routing_backend.close(self.decisions)
        if self._program_id is not None and self._question.is_last and self._is_answered:
            self._shared.forwarder.forget((self._tenant, self._program_id))
            routing_backend.tell(routing_events.ProgramEnded(self._program_id, self._tenant))

    async def _end_with_gateway(self) -> None:
        """Tell the client that the gateway stops: by a rejection, or by an error event in an open stream."""
        message = "the gateway stops; send the request again"
        if not self.has_begun:
            refused = RequestRejected(503, GATEWAY_STOPPING, message, STOPPING_RETRY_S)
            await self._shared.refuse(self._to_client, self._api, refused)
        elif self._is_streaming:
            self._shared.metrics.count_broken_answer()
            event = error_event(self._api, GATEWAY_STOPPING, message)
            with contextlib.suppress(OSError):
                await self._to_client({"type": "http.response.body", "body": event})

    def _finished_event(self, where: str | None) -> routing_events.RequestFinished:
        """Return the event that reports the request's end. ``where``: id of the replica at which it ended;
        ``None``: the replica to which the core has assigned it, if any."""
        return routing_events.RequestFinished(
            self.decisions.request_id,
            self._meter.output_tokens,
            where,
            self._is_given_answer,
            self._prompt_tokens or 0,
        )

    @property
    def _prompt_tokens(self) -> int | None:
        """Number of prompt tokens that an engine counted; ``None``: unknown. A prefill engine always reports
        it. A stream reports it only if the client asked for it."""
        return self._meter.prompt_tokens or self._prefilled_tokens

    async def _until_answered(self) -> None:
        """Carry out the core's decisions until the client has an answer. Raises ``RequestRejected``,
        ``InvalidGenerationRequest`` or ``ClientDisconnected``."""
        while True:
            if self.decisions.has_decision:
                decision = await self.decisions.next()
            else:
                with self._shared.metrics.count_waiting(), self._while_waiting():
                    decision = await self.decisions.next()
            if isinstance(decision, routing_events.RejectRequest):
                answer = (decision.status, decision.code, decision.message, decision.retry_after_s)
                raise RequestRejected(*answer, is_counted=True)
            if isinstance(decision, routing_events.AbortStream):
                raise RequestRejected(502, REPLICA_LOST, "the replica that was answering is gone", 1.0)
            if isinstance(decision, routing_events.RecallRequest):
                continue  # the next decision follows
            if await self._send_to_replica(decision):
                return

    def _while_waiting(self) -> contextlib.AbstractContextManager[None]:
        """Return ``ProgramMigrator.while_waiting`` for the request's program. Without a program, return a
        context manager that does nothing."""
        if self._program_id is None:
            return contextlib.nullcontext()
        return self._shared.migrator.while_waiting((self._tenant, self._program_id))

    async def _send_to_replica(self, decision: routing_events.SendRequest) -> bool:
        """Send the request to the chosen replica, and pass the answer to the client. Return False if there is
        no answer, or if a new decision came first. The caller must then carry out the next decision."""
        shared = self._shared
        self._sent_to = decision.replica_id
        address = shared.replicas.get(decision.replica_id)
        if address is None:
            self._report_replica_failure(decision.replica_id, "its address is not known", computing=False)
            return False
        waited_s = time.monotonic() - self._asked_s
        passed = proxy_headers.engine_request_headers(
            self._scope["headers"], key=shared.engine_key, rank=address.rank, session=self._session_header
        )
        if self._program_id is not None:
            await shared.migrator.prepare(
                (self._tenant, self._program_id),
                decision.replica_id,
                decision.moved_from,
                decision.reason,
                proxy_headers.first_value(passed, b"authorization"),
                self._piggybacked.kept if self._piggybacked is not None else (),
                left_because=decision.left_because,
            )
            if self.decisions.has_decision:
                return False
        if self._piggybacked is not None:
            self._body = await self._piggybacked.prepare_body(decision.replica_id, self._body)
            self._held.set_size(len(self._body))
        try:
            answer = await self.decisions.run_unless_decided(self._ask(decision, address, passed))
        except ReplicaRequestError as error:
            lost_id = error.replica_id or decision.replica_id
            self._report_replica_failure(lost_id, str(error), computing=error.computing)
            return False
        except GatewayConnectError as error:
            # The core learns only that the request has ended, so it suspects no engine.
            raise RequestRejected(503, GATEWAY_FULL, f"{error}; try again", FULL_RETRY_S) from None
        if answer is None:
            return False
        await self._pass_back(answer, decision, waited_s)
        return True

    async def _ask(
        self, decision: routing_events.SendRequest, address: ReplicaAddress, passed: RawHeaders
    ) -> EngineAnswer:
        """Send the request to its replica or pair. Return the answer once its first part has arrived.
        ``passed``: headers for the engine.

        Raises ``ReplicaRequestError``, ``GatewayConnectError``, ``RequestRejected`` or
        ``InvalidGenerationRequest``.
        """
        if not isinstance(decision, SendRequestToPair):
            return await self._post(address, passed, self._body)
        if self._question.previous_response_id is not None:
            message = (
                "previous_response_id: engines keep only their own answers, and each request goes to another "
                "engine; expected the whole conversation in input"
            )
            raise RequestRejected(400, "bad_request", message)
        body = await process_body(self._body, lambda: decode_only_body(self._api, self._body))
        if body is not None:
            self._shared.routing_backend.tell(
                routing_events.PrefillFinished(self.decisions.request_id, decision.prefill_id)
            )
        else:
            prefilled = await self._prefill(decision)
            if isinstance(prefilled, EngineAnswer):
                # The prefill engine rejected the request, so the client gets its answer.
                self._sent_to = None
                return prefilled
            body = await process_body(self._body, lambda: decode_body(self._body, prefilled))
        answer = await self._post(address, passed, body)
        if is_engine_failure(answer):
            # Another pair may succeed.
            answer.response.close()
            raise ReplicaRequestError(f"it failed, status {answer.response.status}", computing=True)
        return answer

    async def _prefill(self, pair: SendRequestToPair) -> EngineAnswer | dict[str, Any]:
        """Run the prefill stage. Return the ``kv_transfer_params`` that say where the KV is. If the engine
        rejects the request, return its answer. Raises ``ReplicaRequestError`` with the prefill engine's
        id."""
        shared, prefill_id = self._shared, pair.prefill_id
        address = shared.replicas.get(prefill_id)
        passed = proxy_headers.engine_request_headers(
            self._scope["headers"],
            key=shared.engine_key,
            rank=address.rank if address is not None else None,
            session=None,
        )
        self._prefill_attempts += 1
        # An engine accepts a transfer's name once, and may still hold the name of an earlier attempt.
        transfer = f"{self.decisions.request_id}-{self._prefill_attempts}"
        to = (transfer, pair.peer, pair.decode_share, pair.epoch)
        body = await process_body(self._body, lambda: prefill_body(self._api, self._body, *to))
        try:
            if address is None:
                raise ReplicaRequestError("its address is not known", computing=False)
            answer = await self._post(address, passed, body)
            status = answer.response.status
            if status != 200 and not is_engine_failure(answer):
                return answer
            if status != 200:
                answer.response.close()
                raise ReplicaRequestError(f"it failed, status {status}", computing=True)
            try:
                document = answer.first + await answer.response.read()
            except EngineConnectionError as error:
                raise ReplicaRequestError(str(error), computing=True) from None
            finally:
                answer.response.close()
            prefilled = parse_transfer_params(document)
            if prefilled is None:
                raise ReplicaRequestError("it computed a prompt and reports no KV", computing=True)
        except ReplicaRequestError as error:
            error.replica_id = prefill_id
            raise
        self._prefilled_tokens = parse_prompt_tokens(document)
        shared.routing_backend.tell(routing_events.PrefillFinished(self.decisions.request_id, prefill_id))
        return prefilled

    async def _post(self, address: ReplicaAddress, passed: RawHeaders, body: bytes) -> EngineAnswer:
        """Send a body to one engine, with the client's query string. Raises what ``send_to_engine``
        raises."""
        query = self._scope.get("query_string", b"")
        target = self._api.value.encode() + (b"?" + query if query else b"")
        if body is self._body:
            return await send_to_engine(self._shared.connections, address, target, passed, body)
        with self._held.counting_copy(len(body)):
            return await send_to_engine(self._shared.connections, address, target, passed, body)

    def _report_replica_failure(self, replica_id: str, why: str, *, computing: bool) -> None:
        """Log that a replica did not answer, and report this to the core. ``computing``: whether the replica
        had accepted the request."""
        logger.warning("replica %s did not answer a request: %s", replica_id, why)
        self._shared.routing_backend.tell(
            routing_events.RequestFailed(self.decisions.request_id, replica_id, computing=computing)
        )

    async def _pass_back(
        self, answer: EngineAnswer, decision: routing_events.SendRequest, waited_s: float
    ) -> None:
        """Pass an engine's answer to the client, and record it. From now on the request cannot go to another
        replica. ``waited_s``: seconds that the request waited at the gateway before."""
        response, replica_id = answer.response, decision.replica_id
        self.decisions.mark_answered()
        self.has_begun = True
        self._is_given_answer = response.status == 200 and not is_engine_failure(answer)

        def note() -> None:
            self._shared.routing_backend.tell(
                routing_events.FirstByteSent(self.decisions.request_id, replica_id)
            )
            self._shared.metrics.sent(decision.reason, waited_s)
            self._meter.add_chunk(answer.first)

        # A complete answer goes to its client before it is recorded.
        is_complete = answer.is_complete
        if not is_complete:
            note()
        try:
            passed_back = proxy_headers.client_response_headers(response.raw_headers, replica_id)
            await self._to_client(
                {"type": "http.response.start", "status": response.status, "headers": passed_back}
            )
            is_whole = True
            if not is_complete:
                self._is_streaming = answer.is_stream
                is_whole = await self._pass_parts(answer, replica_id)
                self._is_streaming = False
            else:
                await self._to_client({"type": "http.response.body", "body": answer.first})
            self._is_answered = self._is_given_answer and is_whole
        finally:
            if is_complete:
                note()
            # A partly read answer makes the connection useless. The engine sees the connection close and
            # stops computing.
            response.close()
        self._record_answer(response.status)

    async def _pass_parts(self, answer: EngineAnswer, replica_id: str) -> bool:
        """Pass a stream or a long answer on to the client. Return whether the answer ended regularly.

        If a stream breaks off, the client gets an error event. If another answer breaks off, it stays
        incomplete, so the server closes the connection. Raises ``ClientDisconnected``, or ``OSError`` if the
        client has left.
        """
        events = SseEventBuffer() if answer.is_stream else None
        decisions, response = self.decisions, answer.response
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        is_writing = False

        def look_again() -> None:
            # A replica that counts as dead may finish an answer that it still writes. While the client reads
            # nothing, no bytes are expected.
            if decisions.client_gone or (not is_writing and loop.time() - heard_s >= SILENT_ENGINE_S):
                response.close()  # reading fails then, as if the replica had closed the connection
            else:
                loop.call_later(SILENT_ENGINE_S, look_again)

        decisions.on_change = look_again
        if decisions.client_gone:
            raise ClientDisconnected  # before ``on_change`` was set
        if decisions.has_decision:
            look_again()  # decided before ``on_change`` was set
        chunk = answer.first
        ended_well = False
        with contextlib.suppress(EngineConnectionError):
            while chunk:
                whole = events.push(chunk) if events is not None else chunk
                if whole:
                    is_writing = True
                    try:
                        await self._to_client(
                            {"type": "http.response.body", "body": whole, "more_body": True}
                        )
                    finally:
                        is_writing, heard_s = False, loop.time()
                chunk = await response.read_some()
                heard_s = loop.time()
                self._meter.add_chunk(chunk)
            ended_well = True
        if decisions.client_gone:
            raise ClientDisconnected
        if ended_well:
            rest = events.rest() if events is not None else b""
            await self._to_client({"type": "http.response.body", "body": rest})
            return True
        logger.warning("replica %s broke off an answer after its first byte", replica_id)
        self._shared.metrics.count_broken_answer()
        self._shared.routing_backend.tell(routing_events.RequestFailed(self.decisions.request_id, replica_id))
        if events is None:
            return False
        message = "the replica that was answering is gone; send the request again"
        await self._to_client(
            {"type": "http.response.body", "body": error_event(self._api, "replica_lost", message)}
        )
        return False

    def _record_answer(self, status: int) -> None:
        """Record the engine's count of prompt tokens, and the answer's id (responses API). ``status``: HTTP
        status of the answer. Only answers with status 200 are recorded."""
        if status != 200:
            return
        counted = self._prompt_tokens
        if counted is not None:
            self._shared.sizes.learn(self._question, counted, self._tenant)
        if self._api is ClientApi.RESPONSES and self._program_id is not None:
            name = self._meter.response_id
            if name is not None:
                self._shared.conversations.put((self._tenant, name), self._program_id, 1)
