"""Settings of the SDK, from arguments and environment variables. Only this file reads the SDK's environment
variables. The functions ``claim`` and ``unclaim`` also write one: ``SOJOURN_PROGRAM_CLAIM``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from .dialects import DIALECTS
from .errors import ConfigError
from .ids import id_problem

LLM_PATHS = ("/chat/completions", "/completions", "/responses", "/v1/messages")
"""Suffixes of the URLs of LLM requests. A patched client adds nothing to requests with other paths."""
_TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"", "0", "false", "no", "off"})
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
_DEFAULT_PORT = {"http": 80, "https": 443}
_CLAIM = "SOJOURN_PROGRAM_CLAIM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment variables of this package."""

    url: str | None = None
    """``SOJOURN_URL``: the server's URL, used if ``init()`` is called without a URL or not at all."""
    api_key: str | None = None
    """``SOJOURN_API_KEY``: bearer key for sending events. ``OPENAI_API_KEY`` is never used for that."""
    dialect: str | None = None
    """``SOJOURN_DIALECT``: a name of ``dialects.DIALECTS``; without it the server's dialect is detected."""
    program_id: str | None = None
    """``SOJOURN_PROGRAM_ID``: the id of this process's own program, for requests outside ``program()``."""
    own_program: bool = False
    """``SOJOURN_OWN_PROGRAM``: all requests of a process outside ``program()`` form one program. This ends
    once the code opens programs of its own or these requests overlap. ``sojourn run`` sets this variable."""
    reported: bool = False
    """``SOJOURN_REPORTED_URL`` is ``url``: ``sojourn run`` has told the user that no server answers there.
    The SDK then does not warn of that again."""
    disabled: bool = False
    """``SOJOURN_DISABLED``: the SDK sends nothing and patches nothing; its functions can still be called."""

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> Environment:
        """Read and check the variables, by default those of this process. Raises ``ConfigError``."""
        env = os.environ if env is None else env
        return cls(
            url=env.get("SOJOURN_URL") or None,
            api_key=env.get("SOJOURN_API_KEY") or None,
            dialect=env.get("SOJOURN_DIALECT") or None,
            program_id=_checked_id("SOJOURN_PROGRAM_ID", env.get("SOJOURN_PROGRAM_ID") or None),
            own_program=_switch("SOJOURN_OWN_PROGRAM", env.get("SOJOURN_OWN_PROGRAM", "")),
            reported=bool(env.get("SOJOURN_URL")) and env.get("SOJOURN_REPORTED_URL") == env["SOJOURN_URL"],
            disabled=_switch("SOJOURN_DISABLED", env.get("SOJOURN_DISABLED", "")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one ``init()``."""

    url: str
    """Root of the server, without a trailing slash and without ``/v1``."""
    api_key: str | None = None
    host: str = ""
    """``host:port`` of ``url``."""
    event_server: str = ""
    """The entry of ``hosts`` for the server at ``url``, which receives the events."""
    hosts: frozenset[str] = frozenset()
    """The servers that may receive program ids. Each entry is ``host:port``, followed by the path of the
    server's URL, if it has one. A gateway may serve several providers at one port. Loopback names count as
    one host."""
    dialect: str | None = None
    """Dialect that the caller named. If it is ``None``, the server's dialect is detected."""
    probe_timeout_s: float = 0.3
    """Longest time that ``init()`` waits for the server's answer about its dialect; 0 means no wait."""
    threads: bool = False
    """Carry the current program into new threads and thread pools."""
    instrument: bool = True
    """Whether ``init()`` patches every supported framework. If False, only ``instrument()`` and ``wrap()``
    do."""
    program_id: str | None = None
    """``Environment.program_id``."""
    own_program: bool = False
    """``Environment.own_program``."""
    url_from_environment: bool = False
    """Whether ``url`` comes from ``SOJOURN_URL``, which ``sojourn run`` sets."""
    reported: bool = False
    """Whether ``sojourn run`` has told the user that no server answers at ``url``."""
    queue_events: int = 10_000
    """Maximum number of unsent events; further events are dropped and counted."""
    batch_events: int = 256
    """Maximum number of events in a batch."""
    linger_s: float = 0.005
    """How long a batch waits for more events. During this time, a request of a program can still carry the
    program's events."""
    send_timeout_s: float = 2.0
    """Timeout of the SDK's own HTTP requests to the server."""
    heartbeat_s: float = 3.0
    """Interval of a program's heartbeats."""
    close_timeout_s: float = 1.0
    """Longest time for sending queued events when the session closes or the process exits."""

    @property
    def server(self) -> str:
        """``url`` without user name and password, to tell servers apart."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    @property
    def address(self) -> str:
        """``server`` for log messages and ``Stats``. A path that contains ``@`` may be a part of a password,
        so it is shown as ``/...``."""
        parts = urlsplit(self.server)
        return parts._replace(path="/...").geturl() if "@" in parts.path else self.server

    def listed(self, host: str, path: str) -> str | None:
        """Return the entry of ``hosts`` for a request to ``host`` (``host:port``) and ``path``; ``None`` if
        there is none. If several entries fit, the one with the longest path wins."""
        place = host + path
        while place not in self.hosts:
            place, slash, _ = place.rpartition("/")
            if not slash:
                return None
        return place

    @classmethod
    def resolve(
        cls,
        url: str | None,
        *,
        api_key: str | None = None,
        hosts: Iterable[str] | None = None,
        dialect: str | None = None,
        probe_timeout_s: float = 0.3,
        threads: bool = False,
        instrument: bool = True,
        environment: Environment | None = None,
    ) -> Config:
        """Return the settings from arguments and environment; arguments win. Raises ``ConfigError``."""
        environment = Environment.read() if environment is None else environment
        url_from_environment = not url
        url = url or environment.url
        if not url:
            raise ConfigError("no server named: call sojourn.init(url) or set SOJOURN_URL")
        root, own_host = _root(url)
        if isinstance(hosts, str):
            raise ConfigError(f"hosts is the string {_named(hosts)}; expected a list of 'host:port'")
        dialect = dialect or environment.dialect
        if dialect is not None:
            dialect = dialect.replace("-", "_")
            if dialect not in DIALECTS:
                raise ConfigError(f"dialect {dialect!r} is unknown; expected one of {sorted(DIALECTS)}")
        if not (math.isfinite(probe_timeout_s) and probe_timeout_s >= 0):
            raise ConfigError(f"probe_timeout_s is {probe_timeout_s}; expected seconds ≥ 0")
        key = api_key or environment.api_key
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key holds characters that an HTTP header cannot carry")
        event_server = _place(root, root)
        return cls(
            url=root,
            api_key=key,
            host=own_host,
            event_server=event_server,
            hosts=frozenset({event_server, *(_place(host, root) for host in hosts or ())}),
            dialect=dialect,
            probe_timeout_s=probe_timeout_s,
            threads=threads,
            instrument=instrument,
            program_id=environment.program_id,
            own_program=environment.own_program,
            url_from_environment=url_from_environment,
            reported=url_from_environment and environment.reported,
        )


def host_key(host: str, like: str = "http://") -> str:
    """Return ``host:port`` in normal form, from a URL or ``host[:port]``. Raises ``ConfigError``.

    A host without a scheme gets the scheme of the URL ``like``. A missing port becomes the scheme's default
    port.
    """
    text = host if "://" in host else f"{urlsplit(like).scheme}://{host}"
    try:
        parts = urlsplit(text)
        port = parts.port or _DEFAULT_PORT.get(parts.scheme)
    except ValueError as error:
        raise ConfigError(f"{_named(host)} does not name a host{_reason(host, error)}") from None
    if not parts.hostname or port is None:
        raise ConfigError(f"{_named(host)} does not name a host; expected e.g. '127.0.0.1:8000'")
    return canonical_host(parts.hostname, port)


class Target(NamedTuple):
    """Where an LLM request goes, by its URL."""

    listed: str | None
    """The server's entry of ``Config.hosts``; ``None`` if the server is not listed."""
    host: str
    """``host:port`` in normal form."""
    path: str
    written: str
    """The host as the user wrote it, with its port, for messages."""


@lru_cache(maxsize=256)
def target_of(config: Config, url: str) -> Target | None:
    """Return where a request to ``url`` goes; ``None`` if it is no LLM request. Raises ``ConfigError``."""
    if not url.partition("?")[0].endswith(LLM_PATHS):
        return None
    host, path = host_key(url), unquote(urlsplit(url).path)
    return Target(config.listed(host, path), host, path, written_host(url))


def _place(host: str, like: str) -> str:
    """Return the ``host_key`` of ``host``, followed by the path of ``host`` without ``/v1``."""
    key = host_key(host, like)
    path = unquote(urlsplit(host if "://" in host else f"//{host}").path)
    return key + path.rstrip("/").removesuffix("/v1").rstrip("/")


def written_host(url: str) -> str:
    """Return ``host:port`` of a valid URL with the host as the user wrote it, for messages. A missing port
    becomes the scheme's default port."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].removesuffix(":")  # a port may be empty
    return host if parts.port is not None else f"{host}:{_DEFAULT_PORT.get(parts.scheme)}"


@lru_cache(maxsize=256)
def canonical_host(hostname: str, port: int) -> str:
    """Return ``host:port`` in lower case, with ``localhost`` for every loopback name, since users mix
    ``localhost`` and ``127.0.0.1``."""
    name = hostname.lower().rstrip(".").strip("[]")
    return f"{'localhost' if name in _LOOPBACK else name}:{port}"


def _checked_id(field: str, value: str | None) -> str | None:
    if value is not None and (problem := id_problem(value)) is not None:
        raise ConfigError(f"{field} {problem}")
    return value


def claim(program_id: str) -> bool:
    """Return whether this process reports the end of the program that ``SOJOURN_PROGRAM_ID`` names.

    The first process that calls this function claims the program. It writes its pid and the program id to the
    environment. Forked workers and child processes inherit the environment. An inherited claim on another
    program is overwritten.
    """
    mark = os.environ.get(_CLAIM, "")
    pid, _, claimed = mark.partition(" ")
    if claimed == program_id and pid != str(os.getpid()):
        return False
    os.environ[_CLAIM] = f"{os.getpid()} {program_id}"
    return True


def unclaim() -> None:
    """Remove this process's claim on the program, if any."""
    if os.environ.get(_CLAIM, "").partition(" ")[0] == str(os.getpid()):
        os.environ.pop(_CLAIM, None)


def local_url(host: str | None, port: int, scheme: str = "http") -> str:
    """Return the URL at which this machine reaches a server that listens on ``host``. ``None``, ``0.0.0.0``
    and ``::`` mean all interfaces."""
    if not host or host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def without_credentials(url: str) -> str:
    """Return ``url`` without user name and password. ``url`` need not be valid. Everything between the scheme
    and the last ``@`` is left out, since an unencoded password may hold ``/``."""
    credentials, found, rest = url.rpartition("@")
    scheme = _SCHEME.match(credentials)
    return f"{scheme[0] if scheme else ''}{rest}" if found else url


def _named(url: str) -> str:
    """Return ``url`` in quotes for an error message, without user name and password."""
    return repr(without_credentials(url)) + (" (user name and password left out)" if "@" in url else "")


def _reason(url: str, error: ValueError) -> str:
    """Return the end of an error message: why ``url`` cannot be read. If ``url`` has an ``@``, the text of
    ``error`` is left out, since it may quote a part of the password. For the same reason do not chain
    ``error``."""
    return "; percent-encode the user name and the password" if "@" in url else f": {error}"


_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d+(/.*)?")


def with_scheme(url: str) -> str:
    """Return ``url``, with ``http://`` in front if it is only host and port, such as ``127.0.0.1:8000``."""
    return f"http://{url}" if _HOST_AND_PORT.fullmatch(url) else url


def _root(url: str) -> tuple[str, str]:
    url = with_scheme(url)
    try:
        parts = urlsplit(url)
        scheme, hostname = parts.scheme, parts.hostname
    except ValueError as error:
        raise ConfigError(f"{_named(url)} is not a URL{_reason(url, error)}") from None
    if scheme not in _DEFAULT_PORT or not hostname:
        raise ConfigError(f"{_named(url)} is not the URL of a server; expected e.g. 'http://127.0.0.1:8000'")
    host = host_key(url)
    # Users paste the base_url of their OpenAI client; the events endpoint is beside /v1, not below it.
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{scheme}://{parts.netloc}{path}", host


def _switch(name: str, value: str) -> bool:
    word = value.strip().lower()
    if word in _TRUE:
        return True
    if word in FALSE:
        return False
    raise ConfigError(f"{name} is {value!r}; expected 1 or 0")
