"""HTTP client of the commands that look at a running engine or gateway, and why one cannot be reached."""

from __future__ import annotations

import socket
import ssl
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from sojourn.config import with_scheme

from ..launch.redaction import without_userinfo
from ..metrics.live_frame import LiveFrame
from ..metrics.turn_explanation import Explanation
from .console import DEFAULT_URL, PASS_KEY, CliError

API = "/sojourn/v1"
TIMEOUT_S = 35.0
"""Timeout of a request. It is longer than the server's own wait for its engine."""

_START = 'start one: sojourn serve tiny; if it is starting, wait for its line "sojourn: ready at"'
_Answer = TypeVar("_Answer", LiveFrame, Explanation)


class AnswerError(CliError):
    """The server answered with an error. ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str, next_step: str) -> None:
        super().__init__(message, next_step)
        self.status = status


def http_client(url: str, api_key: str | None, timeout_s: float) -> httpx.Client:
    """Return a client for the server at ``url``, with or without ``http://`` and ``/v1``. Raises ``CliError``
    for an invalid URL."""
    try:
        return httpx.Client(
            base_url=with_scheme(url).rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            trust_env=False,  # a proxy would see the key, and answer for a server on this machine
            verify=httpx.create_ssl_context(),  # still reads SSL_CERT_FILE of the environment
        )
    except httpx.InvalidURL as error:
        raise CliError(f"{url}: {error}", f"give a URL like {DEFAULT_URL}") from None


def connection_advice(error: httpx.HTTPError, url: str) -> tuple[str, str]:
    """Return why a request to the server at ``url`` got no answer, and the next step for the user."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return f"{url} is no URL of a server", "give http://HOST:PORT, e.g. http://127.0.0.1:8000"
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    at = url.partition("://")[2]
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    certificate = "set SSL_CERT_FILE to the certificate of its authority, or use the name in its certificate"
    faults = {
        socket.gaierror: (
            f"the name {at.partition(':')[0]} is unknown ({text})", "check the name of the host in the URL",
        ),
        ssl.SSLCertVerificationError: (f"its certificate is not accepted ({text})", certificate),
        ssl.SSLError: (f"it does not answer in TLS ({text})", f"use http://{at}"),
        ConnectionRefusedError: (f"no server listens there ({text})", _START),
        httpx.RemoteProtocolError: (text, f"check the port; if the server there uses TLS, give https://{at}"),
        httpx.ReadTimeout: (text, "wait if it is loading; otherwise see its log"),
    }  # fmt: skip
    found = (advice for kind, advice in faults.items() if any(isinstance(one, kind) for one in causes))
    fallback = (
        _START
        if isinstance(error, httpx.ConnectError) and len(causes) == 1
        else ("check the host and the port, and whether this machine may reach them")
    )
    reason, next_step = next(found, (text, fallback))
    return f"{url} does not answer: {reason}", next_step


class LiveClient:
    """Asks one server. Every method raises ``CliError`` with the next step if the server does not answer."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """``url``: the server's address, with or without ``http://`` and ``/v1``."""
        self._client = http_client(url, api_key, TIMEOUT_S)
        self.url = str(self._client.base_url).rstrip("/")

    @property
    def shown_url(self) -> str:
        """URL of the server without name and password, for files and messages."""
        return without_userinfo(self.url)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def frame(self) -> LiveFrame:
        """Return the current live frame: the state of the programs, as ``sojourn top`` shows it."""
        return self._typed(LiveFrame, "a live frame", f"{API}/stream", once=1)

    def explanation(self, program_id: str, turn: int | None = None) -> Explanation:
        """Return the explanation of the turn with number ``turn``, or of the newest turn if ``turn`` is
        ``None``."""
        path = f"{API}/programs/{quote(program_id, safe='')}/explain"
        return self._typed(Explanation, "an explanation", path, **({} if turn is None else {"turn": turn}))

    def find_program(self, program_id: str) -> dict[str, Any] | None:
        """Return one program with the ledger of its turns; ``None`` if the server does not know it."""
        try:
            return self._json(f"{API}/programs/{quote(program_id, safe='')}")
        except AnswerError as error:
            if error.status == 404:
                return None
            raise

    def programs(self, limit: int = 1000) -> dict[str, Any]:
        """Return the newest programs, at most ``limit``."""
        return self._json(f"{API}/programs", limit=limit)

    def decisions(self, since: int, limit: int, **more: str) -> dict[str, Any]:
        """Return the decision log from the decision with number ``since`` on, at most ``limit`` decisions.
        ``more``: further query parameters."""
        return self._json(f"{API}/decisions", since=since, limit=limit, **more)

    def post(self, path: str, **parameters: Any) -> dict[str, Any]:
        """Return the JSON object that answers a POST request."""
        return self._json(path, "POST", **parameters)

    def _answer(self, path: str, method: str = "GET", /, **parameters: Any) -> httpx.Response:
        """Return the response to a request. Raises ``AnswerError`` for any status but 200."""
        try:
            answer = self._client.request(method, path, params=parameters)
        except httpx.HTTPError as error:
            message, next_step = connection_advice(error, self.url)
            raise CliError(message, f"{next_step}; or name another server with --url") from None
        if answer.status_code == 200:
            return answer
        detail = error_of(answer)
        message = detail.get("message") or answer.reason_phrase or "no reason"
        next_step = detail.get("next") or "see sojourn doctor --url and the server's log"
        if answer.status_code == 401 or (answer.status_code == 403 and "next" not in detail):
            next_step = PASS_KEY
        elif answer.status_code == 404 and not detail.get("message"):
            next_step = "is this a server of sojourn of the same release? see sojourn doctor --url"
        raise AnswerError(
            answer.status_code, f"{self.url}{path}: {answer.status_code} {message}", str(next_step)
        )

    def _typed(self, kind: type[_Answer], what: str, path: str, **parameters: Any) -> _Answer:
        answer = self._answer(path, **parameters)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise CliError(
                f"{self.url} answered something else than {what}: {error}",
                "use the same release of sojourn here and on the server",
            ) from None

    def _json(self, path: str, method: str = "GET", /, **parameters: Any) -> dict[str, Any]:
        document = json_object(self._answer(path, method, **parameters))
        if not document:
            raise CliError(f"{self.url}{path} did not answer a JSON object", "is this a server of sojourn?")
        return document


def json_object(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in a response body; empty if the body is anything else."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the error in a response body: message and next step, as far as the server gives them."""
    error = json_object(answer).get("error")
    return error if isinstance(error, dict) else {"message": error}
