"""The files of the web page: served alike by an engine and a gateway, without a key and without data.
``test_api_web_page_browser`` sees that they load no others."""

from __future__ import annotations

import re

import pytest
from api_test_engines import KEY, ScriptedEngine, check_error, client_of, engine_answers
from fastapi.testclient import TestClient
from sojourn_server.api.web_page import FOLDER, HEADERS
from sojourn_server.gateway.http.gateway_app import GatewayOptions, build_gateway
from sojourn_server.gateway.http.tenant_keys import TenantKeys
from sojourn_server.metrics.live_frame import FRAME_VERSION, ProgramRow
from sojourn_server.policies.cluster_preset import parse_cluster_preset


@pytest.fixture(params=["engine", "gateway"])
def server(request: pytest.FixtureRequest) -> TestClient:
    """A server that asks for a key. The gateway's background tasks do not run."""
    if request.param == "engine":
        return client_of(ScriptedEngine(engine_answers()), [KEY])
    preset = parse_cluster_preset('routing = "session-affinity"', source="test")
    _, app = build_gateway(["http://127.0.0.1:9"], preset, TenantKeys({KEY: "a"}), GatewayOptions())
    return TestClient(app)


def test_the_page_needs_no_key_and_its_data_do(server: TestClient) -> None:
    page = server.get("/sojourn")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert server.get("/sojourn/page/page.js").headers["content-type"].startswith("text/javascript")
    for missing in ("none.js", "%2e%2e/web_page.py"):
        check_error(server.get(f"/sojourn/page/{missing}"), 404)
    check_error(server.get("/sojourn/v1/stream?once=1"), 401)
    assert server.get("/sojourn/", follow_redirects=False).headers["location"].endswith("/sojourn")


def test_the_headers_forbid_everything_from_elsewhere(server: TestClient) -> None:
    """What the policy forbids, the browser's test tries."""
    assert HEADERS["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; ")
    for path in ("/sojourn", "/sojourn/page/page.js"):
        assert server.get(path).headers.items() >= {k.lower(): v for k, v in HEADERS.items()}.items()


def test_the_page_reads_frames_of_this_version_and_the_fields_of_a_row_in_their_order() -> None:
    text = (FOLDER / "live_state.js").read_text(encoding="utf-8")
    assert f"export const FRAME_VERSION = {FRAME_VERSION};" in text
    [listed] = re.findall(r"FIELDS = \[(.*?)\]", text, re.DOTALL)
    assert tuple(re.findall(r'"(\w+)"', listed)) == ProgramRow.__struct_fields__
