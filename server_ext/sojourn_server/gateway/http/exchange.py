"""A request on its way: asked for, sent, repeated elsewhere if need be, and its answer passed back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, TypeVar

import aiohttp
from multidict import CIMultiDict

from ..core import facts
from ..pd.facts import EndedCounted, SendPair
from . import headers
from .answer_meter import AnswerMeter, WholeEvents, prompt_tokens_of
from .apis import Api, error_event
from .bodies import Body
from .books import Books
from .decider import Decider
from .engines import Answer, ReplicaLost, ask_engine, failed
from .headers import Raw
from .legs import decode_body, prefill_body, read_prefilled, whole_body
from .moving import Mover
from .news import ProgramNews
from .question import BadQuestion, Question
from .refusing import GATEWAY_FAILED, REPLICA_LOST, Refused, Send, refuse, say_failed
from .replicas import Address, Replicas
from .riding import Riding
from .sizes import PromptSizes
from .ticket import ClientGone, Ticket

logger = logging.getLogger(__name__)
Made = TypeVar("Made")

Scope = MutableMapping[str, Any]

LARGE_BODY_BYTES = 1 << 20
"""Read in a thread: other clients' answers go on meanwhile."""
SILENT_S = 5.0
"""After so long without a byte an answer of a replica that is taken for dead is given up."""
MOST_RESPONSES = 100_000
"""Answers remembered whose conversation may be gone on with by their id."""
SESSION = headers.SESSION.lower().encode()


class Means:
    """What all requests of one gateway share."""

    def __init__(
        self,
        decider: Decider,
        replicas: Replicas,
        session: Callable[[], aiohttp.ClientSession],
        news: ProgramNews,
        mover: Mover,
        books: Books,
        *,
        engine_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine_key``: shown to engines in place of the client's own."""
        self.decider = decider
        self.replicas = replicas
        self.session = session
        self.news = news
        self.mover = mover
        self.books = books
        self.engine_key = engine_key
        self.clock = clock
        self.sizes = PromptSizes()
        self.conversations: OrderedDict[tuple[str, str], str] = OrderedDict()
        """Program that an answer of the responses API belongs to, by its tenant and the answer's id."""

    async def refuse(self, send: Send, api: Api, refused: Refused) -> None:
        """Answer in the gateway's own words, and count it."""
        if not refused.is_counted:
            self.books.refused(refused.code)
        await refuse(send, api, refused)

    async def say_failed(self, send: Send, api: Api) -> None:
        """In an ``except``: an error of ours, before anything was answered."""
        self.books.refused(GATEWAY_FAILED)
        await say_failed(send, api)


class Request(NamedTuple):
    """What a client asks for."""

    body: bytes
    """As engines get it."""
    question: Question
    prefix: tuple[int, ...]
    events_fit: bool
    """The events in its hint are in the body too."""


class Exchange:
    """One request and its answer."""

    def __init__(
        self,
        means: Means,
        api: Api,
        scope: Scope,
        send: Send,
        tenant: str,
        read: Request,
        held: Body,
    ) -> None:
        self._means = means
        self._api = api
        self._scope = scope
        self._to_client = send
        self._tenant = tenant
        self._body = read.body
        self._held = held
        question = read.question
        raw: Raw = scope["headers"]
        session = headers.one(raw, SESSION)
        program_id = question.program_id
        if program_id is None and api is Api.RESPONSES:
            # A conversation that its client does not name is one all the same: its engine has what was said.
            known = means.conversations.get((tenant, question.previous_response_id or ""))
            program_id = known or f"conversation-{secrets.token_hex(8)}"
        self.question: Question = question
        self._program_id = program_id
        self._session_header = means.news.names.of(tenant, session) if session is not None else None
        self._asked_s = means.clock()
        context = question.context
        deadline_s = context.deadline_seconds if context is not None else None
        self._riding: Riding | None = None
        if context is not None and context.sojourn is not None:
            shown = headers.one(raw, b"authorization")
            self._riding = Riding(means.news, tenant, program_id, context, shown, fits=read.events_fit)
        self._meter = AnswerMeter(stream=question.stream)
        self._is_given_answer = False
        """With a status of 200, whole or begun."""
        self._is_answered = False
        """All of it."""
        self.has_begun = False
        """The client has been answered something."""
        self._sent_to: str | None = None
        self._is_of_pair = False
        """It was sent to engines that prefill and decode."""
        self._legs = 0
        """Prefill engines that it was sent to."""
        self._prefilled_tokens: int | None = None
        """Of its prompt, as a prefill engine counted them."""
        # Last: whoever is decided on is waited for by ``run``.
        self.ticket: Ticket = means.decider.open(
            facts.Asked(
                # Not the client's own name for it: two clients may use the same.
                secrets.token_hex(12),
                tenant,
                means.sizes.tokens(question),
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
        """Until the answer is over, whatever became of it."""
        decider = self._means.decider
        try:
            await self._until_answered()
        except Refused as refused:
            await self._means.refuse(self._to_client, self._api, refused)
        except BadQuestion as error:
            await self._means.refuse(self._to_client, self._api, Refused(400, "bad_request", str(error)))
        except ClientGone:
            pass
        except OSError:
            pass  # the client is gone, and the server says so when written to
        finally:
            # Whoever was decided on anew meanwhile is not who answered: then it is over wherever it is.
            where = None if self.ticket.superseded or self.ticket.has_news else self._sent_to
            decider.tell(self._ended(where))
            decider.close(self.ticket)
        if self._program_id is not None and self.question.is_last and self._is_answered:
            self._means.news.forget((self._tenant, self._program_id))
            decider.tell(facts.ProgramEnded(self._program_id, self._tenant))

    def _ended(self, where: str | None) -> facts.Ended:
        name, written, answered = self.ticket.request_id, self._meter.output_tokens, self._is_given_answer
        counted = self._prompt_tokens if self._is_of_pair else None
        if not counted:
            return facts.Ended(name, written, where, answered)
        return EndedCounted(name, written, where, answered, counted)

    @property
    def _prompt_tokens(self) -> int | None:
        """As an engine counted them; a stream tells only who asks for it, and a prefill engine always."""
        return self._meter.prompt_tokens or self._prefilled_tokens

    async def _until_answered(self) -> None:
        while True:
            with self._means.books.waits(), self._waits():
                decision = await self.ticket.next()
            if isinstance(decision, facts.Refuse):
                told = (decision.status, decision.code, decision.message, decision.retry_after_s)
                raise Refused(*told, is_counted=True)
            if isinstance(decision, facts.Cut):
                raise Refused(502, REPLICA_LOST, "the replica that was answering is gone", 1.0)
            if isinstance(decision, facts.Recall):
                continue  # where it goes next is still to come
            if await self._at(decision):
                return

    def _waits(self) -> contextlib.AbstractContextManager[None]:
        if self._program_id is None:
            return contextlib.nullcontext()
        return self._means.mover.waits((self._tenant, self._program_id))

    async def _at(self, decision: facts.Send) -> bool:
        """Be answered by the replica that was decided on; False: it will be another one."""
        means = self._means
        self._sent_to = decision.replica_id
        address = means.replicas.get(decision.replica_id)
        if address is None:
            self._lost(decision.replica_id, "its address is not known", computing=False)
            return False
        waited_s = means.clock() - self._asked_s
        passed = headers.onwards(
            self._scope["headers"], key=means.engine_key, rank=address.rank, session=self._session_header
        )
        if self._program_id is not None:
            await means.mover.goes(
                (self._tenant, self._program_id),
                decision.replica_id,
                decision.moved_from,
                decision.reason,
                passed.get("Authorization"),
                self._riding,
                left_because=decision.left_because,
            )
            if self.ticket.has_news:
                return False
        if self._riding is not None:
            body = self._riding.towards(decision.replica_id, self._body)
            if body is not self._body:
                self._body, self.question = body, self.question.of(body)
                self._held.becomes(len(body))
        try:
            answer = await self.ticket.unless_news(self._ask(decision, address, passed))
        except ReplicaLost as error:
            lost_id = error.replica_id or decision.replica_id
            self._lost(lost_id, str(error), computing=error.computing)
            return False
        if answer is None:
            return False
        await self._pass_back(answer, decision, waited_s)
        return True

    async def _ask(self, decision: facts.Send, address: Address, passed: CIMultiDict[str]) -> Answer:
        if not isinstance(decision, SendPair):
            return await self._post(address, passed, self._body)
        self._is_of_pair = True
        if self.question.previous_response_id is not None:
            message = (
                "previous_response_id: engines keep their own answers, and each request goes to others; "
                "expected the whole conversation in input"
            )
            raise Refused(400, "bad_request", message)
        body = await self._aside(lambda: whole_body(self._api, self._body))
        if body is not None:
            self._means.decider.tell(facts.Prefilled(self.ticket.request_id, decision.prefill_id))
        else:
            told = await self._prefill(decision)
            if isinstance(told, Answer):
                # What is wrong with a request its client hears from whoever saw it first; nothing is stored.
                self._sent_to = None
                return told
            body = await self._aside(lambda: decode_body(self._body, told))
        answer = await self._post(address, passed, body)
        if failed(answer):
            # Another pair may do it.
            answer.response.close()
            raise ReplicaLost(f"it failed, status {answer.response.status}", computing=True)
        return answer

    async def _prefill(self, pair: SendPair) -> Answer | dict[str, Any]:
        """The first leg: where the KV is, or why there is none. Raises ``ReplicaLost``, which says whose
        answer did not come."""
        means, prefill_id = self._means, pair.prefill_id
        address = means.replicas.get(prefill_id)
        passed = headers.onwards(
            self._scope["headers"],
            key=means.engine_key,
            rank=address.rank if address is not None else None,
            session=None,
        )
        self._legs += 1
        # An engine takes a transfer's name once, and may still have that of a leg before.
        transfer = f"{self.ticket.request_id}-{self._legs}"
        to = (transfer, pair.peer, pair.decode_share, pair.epoch)
        body = await self._aside(lambda: prefill_body(self._api, self._body, *to))
        try:
            if address is None:
                raise ReplicaLost("its address is not known", computing=False)
            answer = await self._post(address, passed, body)
            status = answer.response.status
            if status != 200 and not failed(answer):
                return answer
            answer.response.close()
            if status != 200:
                raise ReplicaLost(f"it failed, status {status}", computing=True)
            told = read_prefilled(answer.first)
            if told is None:
                raise ReplicaLost("it computed a prompt and says nothing of its KV", computing=True)
        except ReplicaLost as error:
            error.replica_id = prefill_id
            raise
        self._prefilled_tokens = prompt_tokens_of(answer.first)
        means.decider.tell(facts.Prefilled(self.ticket.request_id, prefill_id))
        return told

    async def _aside(self, make: Callable[[], Made]) -> Made:
        """A body of the size of this request's: a large one in a thread."""
        return make() if len(self._body) < LARGE_BODY_BYTES else await asyncio.to_thread(make)

    async def _post(self, address: Address, passed: CIMultiDict[str], body: bytes) -> Answer:
        query = self._scope.get("query_string", b"")
        target = self._api.value + (f"?{query.decode('latin-1')}" if query else "")
        with self._held.beside(0 if body is self._body else len(body)):
            return await ask_engine(self._means.session(), address, "POST", target, passed, body)

    def _lost(self, replica_id: str, why: str, *, computing: bool) -> None:
        logger.warning("replica %s did not answer a request: %s", replica_id, why)
        self._means.decider.tell(facts.Failed(self.ticket.request_id, replica_id, computing=computing))

    async def _pass_back(self, answer: Answer, decision: facts.Send, waited_s: float) -> None:
        """From the first byte on there is no other replica for this request."""
        response, replica_id = answer.response, decision.replica_id
        self.ticket.answered()
        self.has_begun = True
        self._is_given_answer = response.status == 200 and not failed(answer)

        def note() -> None:
            self._means.decider.tell(facts.Began(self.ticket.request_id, replica_id))
            self._means.books.sent(decision.reason, waited_s)
            self._meter.saw(answer.first)

        # Where all of an answer is here already, it reaches its client before it is written into any book.
        if answer.is_stream:
            note()
        try:
            passed_back = headers.back(response.raw_headers, replica_id)
            await self._to_client(
                {"type": "http.response.start", "status": response.status, "headers": passed_back}
            )
            is_whole = True
            if answer.is_stream:
                is_whole = await self._pass_stream(answer, replica_id)
            else:
                await self._to_client({"type": "http.response.body", "body": answer.first})
            self._is_answered = self._is_given_answer and is_whole
        finally:
            if not answer.is_stream:
                note()
            # Of an answer that was not read to its end the connection is of no more use; the engine sees it
            # close and stops computing.
            response.close()
        self._learn(response.status)

    async def _pass_stream(self, answer: Answer, replica_id: str) -> bool:
        """Whether it came to its own end."""
        events = WholeEvents()
        ticket, response = self.ticket, answer.response
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        is_writing = False

        def look_again() -> None:
            # A replica that is taken for dead while it still answers may end what it has begun. While its
            # client takes nothing it is not asked for more.
            if ticket.client_gone or (not is_writing and loop.time() - heard_s >= SILENT_S):
                response.close()  # then reading fails, as if the replica had closed it
            else:
                loop.call_later(SILENT_S, look_again)

        ticket.on_change = look_again
        if ticket.client_gone:
            raise ClientGone  # it left when nobody was called
        if ticket.has_news:
            look_again()  # and so was this decided
        chunk = answer.first
        ended_well = False
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, ConnectionError):
            while chunk:
                whole = events.through(chunk)
                if whole:
                    is_writing = True
                    await self._write(whole)
                    is_writing, heard_s = False, loop.time()
                chunk = await response.content.readany()
                heard_s = loop.time()
                self._meter.saw(chunk)
            ended_well = response.content.at_eof() and response.content.exception() is None
        if ticket.client_gone:
            raise ClientGone
        if ended_well:
            await self._to_client({"type": "http.response.body", "body": events.rest()})
            return True
        logger.warning("replica %s broke off an answer after its first byte", replica_id)
        self._means.books.cut()
        self._means.decider.tell(facts.Failed(self.ticket.request_id, replica_id))
        message = "the replica that was answering is gone; send the request again"
        await self._to_client(
            {"type": "http.response.body", "body": error_event(self._api, "replica_lost", message)}
        )
        return False

    async def _write(self, chunk: bytes) -> None:
        try:
            await self._to_client({"type": "http.response.body", "body": chunk, "more_body": True})
        except ConnectionError:
            raise ClientGone from None

    def _learn(self, status: int) -> None:
        """What the engine told of the request's size, and of the answer's id."""
        if status != 200:
            return
        told = self._prompt_tokens
        if told is not None:
            self._means.sizes.told(self.question, told)
        if self._api is Api.RESPONSES and self._program_id is not None:
            name = self._meter.response_id
            if name is not None:
                conversations = self._means.conversations
                conversations[self._tenant, name] = self._program_id
                if len(conversations) > MOST_RESPONSES:
                    conversations.popitem(last=False)
