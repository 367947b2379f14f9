"""An engine's connection without a socket."""

from __future__ import annotations

from typing import Any

from sojourn_server.gateway.http.engine_connection import EngineConnection


class SocketlessConnection:
    """A connection that has sent a request, with itself as transport and owner. With ``fails``, the write of
    the request fails, as on a socket that the peer has closed."""

    def __init__(self, *, fails: bool = False) -> None:
        self.is_aborted = self.is_released = False
        self._fails = fails
        self.connection = EngineConnection(self)
        self.connection.connection_made(self)
        self.response = self.connection.send(b"", b"", 0.0)

    def receive(self, data: bytes) -> None:
        """Let bytes arrive, unless the connection is closed."""
        if not self.is_aborted:
            self.connection.data_received(data)

    def release(self, connection: EngineConnection) -> None:
        self.is_released = True

    def lost(self, connection: EngineConnection) -> None: ...

    def get_extra_info(self, name: str) -> None: ...

    def write(self, data: bytes) -> None:
        self.is_aborted = self._fails

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: None
