"""Client of one OpenAI-compatible server: looks up its models, and measures completions of token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import msgspec
from sojourn.wire_codec import CAPABILITIES_PATH, WIRE_VERSION

from ..metrics.live_frame import PROBE_ID
from ..metrics.vllm_metrics_page import whole


class ServerError(Exception):
    """The server cannot be used. ``next_step`` says what to do."""

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step


class RequestError(Exception):
    """A request failed. ``reason`` is a short text without details, so that failures can be counted by it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that the server serves, and properties of the server."""

    name: str
    max_context_tokens: int | None
    """Maximum context length (vLLM's ``max_model_len``); ``None`` if the server does not report it."""
    speaks_sojourn: bool
    """Whether the server runs the sojourn plugin with this client's wire version."""
    engine: str
    """Name and version of the engine, as far as the server reports them."""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    """What sojourn's plugin says of the engine; empty without the plugin."""

    @property
    def block_size(self) -> int | None:
        """Tokens per KV block; ``None`` if the server does not report it."""
        return whole(self.capabilities.get("block_size"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Measurements of one finished request. Times are in seconds."""

    ttft_s: float
    """Seconds from sending the request to the first token."""
    latency_s: float
    """Seconds from sending the request to the last token."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """Number of prompt tokens from the prefix cache; ``None`` if the server does not report it."""
    output_ids: tuple[int, ...] | None = None
    """Token ids of the output; ``None`` if the server does not return them."""

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; ``None`` with fewer than two tokens."""
        later = self.output_tokens - 1
        return (self.latency_s - self.ttft_s) / later if later > 0 else None


class CompletionsClient:
    """An async client for ``/v1/completions``. Use it in an ``async with`` statement. ``url`` is the server's
    root, with or without ``/v1``."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 3600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            # The replay limits concurrency. A wait for a pooled connection would count as TTFT.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            # A proxy would see the key, and its time would count as the server's.
            trust_env=False,
            verify=httpx.create_ssl_context(),  # still uses SSL_CERT_FILE of the environment
        )

    async def __aenter__(self) -> CompletionsClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def discover(self, model: str | None) -> ServedModel:
        """Return the served model named ``model``, or the first served one if ``model`` is ``None``.

        Raises ``ServerError`` if the server cannot be used, or does not serve ``model``."""
        answer = await self.get("/v1/models")
        try:
            models = {str(entry["id"]): entry for entry in answer.json()["data"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ServerError(
                f"{self.url}/v1/models does not answer like an OpenAI-compatible server",
                "check --url: expected the server's root, for example http://127.0.0.1:8000",
            ) from None
        if not models:
            raise ServerError(f"{self.url} serves no model", "start it with a model: sojourn serve MODEL")
        name = next(iter(models)) if model is None else model
        if name not in models:
            raise ServerError(
                f"{self.url} does not serve the model {name!r}",
                f"use --model with one of: {', '.join(models)}",
            )
        owner, version = models[name].get("owned_by"), (await self._json("/version")).get("version")
        plugin = await self._json(CAPABILITIES_PATH)
        wires, described = plugin.get("wire"), plugin.get("engine")
        speaks_sojourn = plugin.get("name") == "sojourn" and isinstance(wires, list) and WIRE_VERSION in wires
        return ServedModel(
            name=name,
            max_context_tokens=whole(models[name].get("max_model_len")),
            speaks_sojourn=speaks_sojourn,
            engine=" ".join(str(part) for part in (owner or "unknown", version) if part is not None),
            capabilities=described if speaks_sojourn and isinstance(described, dict) else {},
        )

    async def complete(
        self,
        model: str,
        prompt: list[int],
        max_tokens: int,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        return_token_ids: bool = False,
    ) -> Completion:
        """Request a completion of ``prompt`` with ``max_tokens`` tokens, and return the measurements.

        ``body`` and ``headers`` are added to those of the request. Only stop tokens in ``body`` can end the
        output earlier. ``return_token_ids`` asks for the ids of the output. vLLM then also returns the
        prompt's ids before the first token, which increases ``ttft_s`` of long prompts. Raises
        ``RequestError``.
        """
        request = {
            "model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True,
            "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
            **({"return_token_ids": True} if return_token_ids else {}), **(body or {}),
        }  # fmt: skip
        # Encode before the clock starts, because encoding a long prompt takes milliseconds.
        content = msgspec.json.encode(request)
        # The id says that this is no request of an agent.
        ours = {"Content-Type": "application/json", "X-Request-Id": f"{PROBE_ID}-{uuid4().hex}"}
        all_headers, path = ours | dict(headers or {}), f"{self.url}/v1/completions"
        started = time.monotonic()
        first = last = 0.0
        usage: dict[str, Any] = {}
        output_ids: list[int] = []
        try:
            async with self._http.stream("POST", path, content=content, headers=all_headers) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, (await answer.aread()).decode("utf-8", "replace"))
                async for line in answer.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise RequestError("error in stream", str(event["error"])[:300])
                    if event.get("choices"):
                        last = time.monotonic()
                        first = first or last
                        output_ids += event["choices"][0].get("token_ids") or ()
                    usage = event.get("usage") or usage
            output_tokens = int(usage.get("completion_tokens") or len(output_ids) or max_tokens)
            prompt_tokens = int(usage.get("prompt_tokens") or len(prompt))
            cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except httpx.TimeoutException as error:
            raise RequestError("timeout", str(error)) from error
        except httpx.HTTPError as error:
            raise RequestError("connection lost", f"{type(error).__name__}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RequestError("not an OpenAI stream", str(error)[:300]) from error
        if not first:
            raise RequestError("no tokens", "the stream ended before the first token")
        return Completion(
            ttft_s=first - started,
            latency_s=last - started,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            output_ids=tuple(output_ids) or None,
        )

    async def get(self, path: str) -> httpx.Response:
        """Return the response to ``GET path``. Raises ``ServerError`` if the server does not answer with
        status 200."""
        try:
            answer = await self._http.get(self.url + path, timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(
                f"no server answers at {self.url}: {reason}",
                "start one with: sojourn serve MODEL, or correct --url",
            ) from error
        if answer.status_code in (401, 403):
            raise ServerError(
                f"{self.url} rejects the API key ({answer.status_code})",
                "pass the server's key with --api-key or in SOJOURN_API_KEY",
            )
        if answer.status_code != 200:
            raise ServerError(
                f"{self.url}{path} answers {answer.status_code}",
                "check --url: expected the root of an OpenAI-compatible server",
            )
        return answer

    async def _json(self, path: str) -> dict[str, Any]:
        """Return the JSON object at ``path``; empty without one."""
        try:
            return dict((await self.get(path)).json())
        except (ServerError, ValueError, TypeError, RecursionError):
            return {}


def _refusal(status: int, text: str) -> RequestError:
    """Return the error for an HTTP answer with another status than 200. ``text``: the answer's body."""
    lowered, reason = text.lower(), f"HTTP {status}"
    if any(words in lowered for words in ("context length", "max_model_len", "maximum input length")):
        reason = "context too long"
    elif "vocab" in lowered:
        reason = "token id outside the vocabulary"
    elif status in (401, 403):
        reason = "API key refused"
    return RequestError(reason, text[:300])
