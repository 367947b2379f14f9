"""Programs, requests and tool calls as spans of the GenAI conventions, with the server's outcomes on them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import sojourn
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sojourn import runtime
from sojourn.testing import FakeServer, ToolUse
from sojourn_integrations.otel import export as otel_export
from sojourn_integrations.otel.export import SpanExport, export_spans
from sojourn_integrations.otel.source import install
from virtual_engine import VirtualEngine, prompt

SECRET = "zebra-4711"
"""Stands in every prompt, argument and answer; must stand in no span."""
PAGE = (Path(__file__).parents[2] / "docs" / "opentelemetry.md").read_text(encoding="utf-8")
TABLES = "\n".join(re.findall(r"^\|.*$", PAGE.partition("## Spans out")[2], re.M))
RARE = {"error.type", "gen_ai.request.stream", "gen_ai.response.time_to_first_chunk"}
"""Attributes of failures and streams."""
TOKENS = ("input_tokens", "output_tokens", "cache_read.input_tokens")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(api_key="k") as fake:
        fake.reply = f"the answer is {SECRET}"
        sojourn.init(fake.url, api_key="k")
        yield fake
        sojourn.shutdown()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


@pytest.fixture
def export(provider: TracerProvider, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanExport]:
    monkeypatch.setattr(otel_export, "RETRY_S", 0.01)
    made = export_spans(provider)
    yield made
    made.close()
    assert not runtime.usage_wanted


def ask(server: FakeServer, *, responses: bool = False, max_retries: int = 2, **more) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=max_retries) as client:
        if responses:
            answer = client.responses.create(model="m", input=SECRET, **more)
        else:
            messages = [{"role": "user", "content": SECRET}]
            answer = client.chat.completions.create(model="m", messages=messages, **more)
        if more.get("stream"):
            for _ in answer:
                pass


class Ledgers(dict):
    """A real ledger of all requests that arrived so far. Each turn came 1.5 seconds after a tool call, and
    meanwhile part of its context was evicted. ``more`` has fields that replace those of the turns."""

    def __init__(self, server: FakeServer, **more) -> None:
        self._server, self._more = server, more

    def get(self, program_id, default=None):
        engine = VirtualEngine("fixed-ttl")
        engine.turn(program_id, prompt(80))
        contexts = [request.context for request in self._server.requests]
        asked = dict.fromkeys(each.request_id for each in contexts if each.program_id == program_id)
        for number, request_id in enumerate(asked, 1):
            engine.wait(1.5)
            engine.evict(prompt(80), keep=16)
            request = engine.arrive(program_id, prompt(80 + 21 * number), request_id=request_id)
            engine.wait(0.25)
            engine.admit(request)
            engine.wait(0.5)
            engine.program_scheduler.first_token(request, engine.now)
            engine.finish(request)
        ledger = engine.ask("program", program_id=program_id)["ledger"]
        return {"ledger": [{**turn, **self._more} for turn in ledger]}


def spans(exporter: InMemorySpanExporter, export: SpanExport, name: str | None = None):
    assert export.flush()
    finished = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
    assert SECRET not in json.dumps([json.loads(span.to_json()) for span in finished])
    return [span for span in finished if name is None or span.name == name]


def attributes(span) -> dict:
    return dict(span.attributes)


def test_every_attribute_an_agent_run_has(server, exporter, export):
    server.programs = Ledgers(server)
    server.fail_next = 1  # a retry is no span of its own
    with sojourn.program("boss") as boss, sojourn.program("fixer", id="a/b c", tenant="acme") as program:
        program.enter_node("mend")
        ask(server)
        with sojourn.tool_call("bash", "call_1", tool_class="pytest"):
            pass
    (chat,), (tool,), (agent,) = (
        spans(exporter, export, name) for name in ("chat m", "execute_tool bash", "invoke_agent fixer")
    )
    port = server.host.rpartition(":")[2]
    whose = {
        "gen_ai.provider.name": "vllm",
        "gen_ai.conversation.id": program.id,
        "gen_ai.agent.id": program.id,
        "gen_ai.agent.name": "fixer",
    }
    assert attributes(agent) == {
        **whose,
        "gen_ai.operation.name": "invoke_agent",
        "sojourn.parent_program_id": boss.id,
        "sojourn.root_program_id": boss.id,
        "sojourn.tenant": "acme",
        "sojourn.status": "ok",
    }
    assert attributes(tool) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "bash",
        "gen_ai.tool.call.id": "call_1",
        "gen_ai.tool.type": "function",
        "gen_ai.conversation.id": program.id,
        "sojourn.tool.class": "pytest",
        "sojourn.node": "mend",
        "sojourn.status": "ok",
    }
    assert attributes(chat) == {
        **whose,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        **{f"gen_ai.usage.{name}": count for name, count in zip(TOKENS, (12, 3, 8), strict=True)},
        "server.address": "localhost",
        "server.port": int(port),
        "sojourn.request_id": server.requests[0].context.request_id,
        "sojourn.request.attempts": 2,
        "sojourn.node": "mend",
        "sojourn.status": "ended",
        "sojourn.turn": 2,
        "sojourn.outcome": "stopped",
        "sojourn.leased": True,
        "sojourn.lease.ttl_s": 10.0,
        "sojourn.gap_s": 1.5,
        "sojourn.tool_before": "bash:pytest",
        "sojourn.preemptions": 0,
        "sojourn.queued_s": 0.25,
        "sojourn.prefilling_s": 0.5,
        "sojourn.new_tokens": 19,
        "sojourn.tail_tokens": 2,
        "sojourn.tier_hits.device": 64,
        "sojourn.tier_hits.host": 0,
        "sojourn.lost_tokens": 16,
        "sojourn.lost_cause": "evicted",
    }
    assert [span.kind.name for span in (agent, tool, chat)] == ["INTERNAL", "INTERNAL", "CLIENT"]
    assert {span.parent.span_id for span in (tool, chat)} == {agent.context.span_id}
    assert server.program_lookups == [program.id]
    seen = {name for span in (agent, tool, chat) for name in span.attributes}
    assert (
        set(re.findall(r"`((?:sojourn|gen_ai|server|error)\.[a-z_.]+)`", TABLES))
        == seen - {"sojourn.tier_hits.host"} | RARE
    )


@pytest.mark.parametrize("responses", [False, True])
def test_a_streamed_answers_span_has_first_chunk_and_usage(server, exporter, export, responses):
    server.chunk_delay_s = 0.01
    more = {} if responses else {"stream_options": {"include_usage": True}}
    with sojourn.program("fixer"):
        ask(server, stream=True, responses=responses, **more)
    told = attributes(spans(exporter, export, "chat m")[0])
    assert told["gen_ai.request.stream"] is True
    assert 0 < told["gen_ai.response.time_to_first_chunk"] < 5
    assert [told[f"gen_ai.usage.{name}"] for name in TOKENS] == [12, 3, 8]


def test_errors_of_requests_tools_and_programs(server, exporter, export):
    server.fail_next = 1

    @sojourn.program
    def fixer() -> None:
        with pytest.raises(TimeoutError), sojourn.tool_call("bash", "c1"):
            raise TimeoutError(SECRET)
        with sojourn.tool_call("grep", "c2") as call:
            call.status = "nonzero"
        ask(server, max_retries=0)

    with pytest.raises(openai.InternalServerError):
        fixer()
    told = {span.name: span for span in spans(exporter, export)}
    said = {
        name: (span.status.status_code.name, *map(span.attributes.get, ("sojourn.status", "error.type")))
        for name, span in told.items()
    }
    assert said == {
        "invoke_agent fixer": ("ERROR", "error", "_OTHER"),
        "execute_tool bash": ("ERROR", "timeout", "timeout"),
        "execute_tool grep": ("UNSET", "nonzero", None),
        "chat m": ("ERROR", "failed", "InternalServerError"),
    }


def test_where_no_thread_can_start_spans_end_without_outcomes(server, exporter, export, monkeypatch):
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "sojourn-otel-outcomes":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with sojourn.program("fixer"):
        ask(server)
        assert len(exporter.get_finished_spans()) == 1


@pytest.mark.parametrize("mode", ["500", "404", "garbage"])
def test_a_server_that_does_not_say_costs_only_the_outcomes(server, exporter, export, mode):
    if mode == "garbage":
        server.programs = Ledgers(server, tokens="none", turn="three", seconds=[1], leased="yes")
    with sojourn.program("fixer"):
        ask(server)
        server.mode = mode if mode == "500" else "ok"
    (chat,) = spans(exporter, export, "chat m")
    assert chat.attributes["gen_ai.usage.input_tokens"] == 12
    assert "sojourn.turn" not in chat.attributes
    assert sojourn.stats()["internal_error"] == 0
    assert sojourn.stats()["otel_outcomes_failed"] == (mode == "500")


def test_what_waits_is_bounded_and_a_request_keeps_the_time_of_its_end(server, exporter, export, monkeypatch):
    monkeypatch.setattr(otel_export, "MAX_PENDING", 2)
    server.programs = Ledgers(server)
    programs = [sojourn.program(f"p{number}").make().start() for number in range(4)]
    for program in programs:
        with program.here():
            ask(server)
    ended_ns = time.time_ns()
    assert len(exporter.get_finished_spans()) == 2
    found = spans(exporter, export, "chat m")
    assert ["sojourn.turn" in span.attributes for span in found] == [True, True, False, False]
    assert max(span.end_time for span in found) <= ended_ns
    assert sojourn.stats()["otel_outcomes_skipped"] == 2
    for program in programs:
        program.end()


@pytest.mark.parametrize("outcomes", [False, True])
def test_outcomes_can_be_left_out_and_a_stock_server_is_never_asked(provider, exporter, outcomes):
    with FakeServer(sojourn=not outcomes) as server:
        sojourn.init(server.url)
        export = export_spans(provider, outcomes=outcomes)
        with sojourn.program("fixer"):
            ask(server)
            assert outcomes or len(exporter.get_finished_spans()) == 1
        export.close()
        sojourn.shutdown()
        assert server.program_lookups == []
    assert len(exporter.get_finished_spans()) == 2


def test_requests_outside_any_program_are_spans_of_their_own(server, exporter, export):
    ask(server)
    (chat,) = spans(exporter, export)
    assert chat.parent is None
    assert "gen_ai.conversation.id" not in chat.attributes
    assert server.program_lookups == []


def test_source_and_export_together_echo_nothing_and_write_no_span_twice(server, exporter, provider, export):
    install(provider)
    server.programs = Ledgers(server)
    server.script = [ToolUse("research", {}, "call_1"), "found", "done"]
    tracer = provider.get_tracer("some.framework")

    def span(operation: str, name: str, **more):
        return tracer.start_as_current_span(
            f"{operation} {name}", attributes={"gen_ai.operation.name": operation, **more}
        )

    with span("invoke_agent", "boss"):
        ask(server)
        with (
            span("execute_tool", "research", **{"gen_ai.tool.call.id": "call_1"}),
            span("invoke_agent", "sub"),
        ):
            ask(server)
        with span("chat", "theirs"):
            ask(server)
    found = spans(exporter, export)
    names = {item.context.span_id: item.name for item in found}
    assert [(item.name, item.parent and names[item.parent.span_id]) for item in found] == [
        ("invoke_agent boss", None),
        ("chat m", "invoke_agent boss"),
        ("execute_tool research", "invoke_agent boss"),
        ("invoke_agent sub", "execute_tool research"),
        ("chat m", "invoke_agent sub"),
        ("chat theirs", "invoke_agent boss"),
        ("chat m", "chat theirs"),
    ]
    starts = [event for event in server.program_events() if type(event).__name__ == "ProgramStart"]
    assert [event.name for event in starts] == ["boss", "sub"]
    assert found[1].attributes["sojourn.turn"] == 2


def test_at_exit_everything_is_written_with_its_outcomes():
    code = """
    import json, sys
    import openai, sojourn
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    from sojourn.testing import FakeServer
    from sojourn_integrations import otel

    provider = TracerProvider()
    provider.add_span_processor(
        BatchSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.to_json(indent=None) + "\\n"))
    )
    trace.set_tracer_provider(provider)
    otel.install()
    otel.export_spans()
    server = FakeServer().__enter__()
    sojourn.init(server.url)
    with sojourn.program("ended"):
        pass
    left_open = sojourn.program(id="p").__enter__()  # so that its request waits for company
    with openai.OpenAI(base_url=server.base_url, api_key="x") as client:
        client.chat.completions.create(model="m", messages=[])
    request_id = server.requests[0].context.request_id
    server.programs["p"] = {"ledger": [{"request_id": request_id, "turn": 1}]}
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert {span["name"]: span["attributes"].get("sojourn.turn") for span in told} == {
        "invoke_agent ended": None,
        "chat m": 1,
    }
    assert done.stderr == ""
