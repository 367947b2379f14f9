"""The SDK's own HTTP client: nothing of it is shared with, or patched by, what it observes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import httpx


class Answer(NamedTuple):
    """Status and body of a response."""

    status: int
    body: bytes


class Transport(Protocol):
    """What the emitter and the probe need of a network. Methods raise on network failure."""

    def post(self, path: str, body: bytes) -> Answer:
        """POST JSON to ``path`` below the server's root."""

    def get(self, path: str, timeout_s: float) -> Answer:
        """GET ``path`` below the server's root."""

    def after_fork(self) -> None:
        """Let go of the parent's connections without closing them."""

    def close(self) -> None:
        """Close the connections."""


class HttpTransport:
    """``Transport`` over httpx. Proxies come from the environment, as they do for the agent's own client."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._inherited: list[httpx.Client] = []
        # Now, on the caller's thread, since it imports: a fork while the sender imported would leave the
        # child with half a module for good. The codec is imported by the first look-up of a host's address.
        self._client: httpx.Client | None = self._new()
        "x".encode("idna")

    def post(self, path: str, body: bytes) -> Answer:
        response = self._open().post(self._url + path, content=body)
        return Answer(response.status_code, response.content)

    def get(self, path: str, timeout_s: float) -> Answer:
        response = self._open().get(self._url + path, timeout=timeout_s)
        return Answer(response.status_code, response.content)

    def after_fork(self) -> None:
        # Kept, not closed: closing a TLS connection would say goodbye in the parent's name.
        if self._client is not None:
            self._inherited.append(self._client)
        self._client = None

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _open(self) -> httpx.Client:
        if self._client is None:
            self._client = self._new()
        return self._client

    def _new(self) -> httpx.Client:
        return httpx.Client(
            headers=self._headers,
            timeout=self._timeout_s,
            # Loading certificates takes tens of milliseconds and serves nothing on plain HTTP.
            verify=self._url.startswith("https"),
            # vLLM's server closes a connection idle for 5 s; reusing it at that very moment loses a batch.
            limits=httpx.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=4.0),
        )
