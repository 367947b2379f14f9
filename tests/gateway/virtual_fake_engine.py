"""A fake engine whose ``/sojourn/v1`` is the real one, over a virtual engine."""

from __future__ import annotations

from typing import Any

from api_contract import VirtualRpc
from fake_engine import FakeEngine
from fastapi import FastAPI
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.routes import build_router
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from virtual_engine import VirtualEngine


class VirtualFakeEngine(FakeEngine):
    """Generates like a ``FakeEngine``. ``/sojourn/v1`` answers from the virtual engines ``ranks``."""

    def __init__(self, ranks: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = [VirtualEngine() for _ in range(ranks)]
        self.virtual = self.ranks[0]
        self.rpc = VirtualRpc(*self.ranks)

    def _app(self) -> Starlette:
        keys = ApiKeys()
        keys.configure([])
        sojourn = FastAPI()
        sojourn.include_router(build_router(self.rpc, keys))
        kept = [
            route
            for route in super()._app().routes
            if isinstance(route, Route) and not route.path.startswith("/sojourn")
        ]
        return Starlette(routes=[*kept, Mount("/", sojourn)])
