"""Middleware of the engine that records the clients' requests: ``--middleware request_recorder.record``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "SOJOURN_TEST_REQUESTS"
"""Name of the variable with the path of the file, which gets one JSON object a line."""


async def record(request: Any, call_next: Any) -> Any:
    body = await request.body()
    response = await call_next(request)
    line = {
        "method": request.method,
        "path": request.url.path,
        "headers": dict(request.headers),
        "body": body.decode(),
        "status": response.status_code,
    }
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return response
