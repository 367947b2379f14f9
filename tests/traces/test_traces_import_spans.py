"""Spans of agent runs become programs: turns, gaps, tools, sub-agents, in every shape they are written in."""

from __future__ import annotations

import base64
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.traces.imports.span_import import read_spans
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun

START_S = 1_760_000_000


class Spans:
    """Makes spans as OTLP JSON writes them."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        """Attributes of each span as plain values."""

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        parent: str | None = None,
        trace: str = "a1",
        **told: Any,
    ) -> str:
        span_id = f"{len(self.all) + 1:016x}"
        told = {name.replace("__", "."): value for name, value in told.items()}
        self.told.append(told)
        span = {
            "traceId": f"{trace:0>32}",
            "spanId": span_id,
            "name": name,
            "startTimeUnixNano": str(int((START_S + start_s) * 1e9)),
            "endTimeUnixNano": str(int((START_S + end_s) * 1e9)),
            "attributes": [{"key": name, "value": value_of(value)} for name, value in told.items()],
        }
        if parent is not None:
            span["parentSpanId"] = parent
        self.all.append(span)
        return span_id

    def agent(self, start_s: float, end_s: float, parent: str | None = None, **told: Any) -> str:
        told = {"gen_ai__operation__name": "invoke_agent", "gen_ai__agent__name": "coder", **told}
        return self.add("invoke_agent coder", start_s, end_s, parent, **told)

    def chat(
        self, start_s: float, end_s: float, prompt: int, output: int, parent: str | None = None, **told: Any
    ) -> str:
        usage = {"gen_ai__usage__input_tokens": prompt, "gen_ai__usage__output_tokens": output}
        return self.add("chat m", start_s, end_s, parent, gen_ai__operation__name="chat", **usage, **told)

    def tool(self, name: str, start_s: float, end_s: float, parent: str | None = None, **told: Any) -> str:
        told = {"gen_ai__operation__name": "execute_tool", "gen_ai__tool__name": name, **told}
        return self.add(f"execute_tool {name}", start_s, end_s, parent, **told)

    def document(self) -> dict[str, Any]:
        return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": self.all}]}]}


def value_of(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [value_of(item) for item in value]}}
    return {"stringValue": value}


def imported(tmp_path: Path, spans: Spans, *notes: str) -> list[TraceProgram]:
    result = read_spans([write(tmp_path, spans)])
    assert result.notes == list(notes)
    return result.programs


def coder_run() -> Spans:
    spans = Spans()
    run = spans.agent(0, 30, gen_ai__conversation__id="c1")
    reasons, cached = "gen_ai__response__finish_reasons", "gen_ai__usage__cache_read__input_tokens"
    spans.chat(1, 3, 1000, 50, run, gen_ai__response__model="m-1", **{cached: 256})
    spans.tool("grep", 3.1, 3.5, run)
    spans.tool("test", 3.2, 7.1, run)
    spans.chat(8, 9, 1300, 40, run, **{reasons: ["stop"]})
    spans.chat(20, 21, 1330, 10, run, **{reasons: ["STOP"]})  # Gemini, though it calls a tool
    spans.tool("edit", 21.5, 22, run)
    spans.chat(25, 26, 400, 10, run, **{cached: 320})
    return spans


def test_a_run_becomes_a_program(tmp_path: Path) -> None:
    (program,) = imported(tmp_path, coder_run())
    assert (program.program_id, program.source) == ("c1", "otel")
    assert (program.group, program.model) == ("coder", "m-1")
    first, second, third, fourth = program.turns
    assert [t.prompt_tokens for t in program.turns] == [1000, 1300, 1330, 400]
    assert [t.append_tokens for t in program.turns] == [1000, 250, 0, 0]
    assert [t.out_dropped for t in program.turns] == [0, 0, 10, 0]
    assert [t.gap_s for t in program.turns] == pytest.approx([5, 11, 4, None])
    assert [t.gap_kind for t in program.turns] == ["tool", "human", "tool", None]
    assert [t.llm_s for t in program.turns] == pytest.approx([2, 1, 1, 1])
    assert [t.t for t in program.turns] == pytest.approx([0, 7, 19, 24])
    assert first.tools == (
        TraceToolRun(name="grep", s=pytest.approx(0.4)),
        TraceToolRun(name="test", s=pytest.approx(3.9)),
    )
    assert first.tool == "grep+test"
    assert (second.tool, second.tools) == (None, None)
    assert third.tool == "edit"
    assert (fourth.reset, fourth.prefix_tokens, fourth.cached_tokens) == (True, 320, 320)
    assert program.shared_prefix_tokens == 256
    plans = plan_turns(program)
    assert [plan.prompt_tokens for plan in plans] == [1000, 1300, 1330, 400]
    assert [plan.reused_tokens for plan in plans] == [0, 1050, 1300, 320]


def test_a_conversation_over_several_traces_is_one_program(tmp_path: Path) -> None:
    spans = Spans()
    for number in range(3):
        told = {"gen_ai__conversation__id": "talk", "trace": f"b{number}"}
        run = spans.agent(number * 100, number * 100 + 5, **told)
        spans.chat(number * 100 + 1, number * 100 + 2, 100 * (number + 1), 10, run, **told)
    (program,) = imported(tmp_path, spans)
    assert [t.gap_s for t in program.turns] == pytest.approx([99, 99, None])


def test_a_conversation_that_only_model_calls_name_is_one_program(tmp_path: Path) -> None:
    spans = Spans()
    for number in range(2):
        trace, at = f"b{number}", number * 100
        run = spans.agent(at, at + 50, trace=trace)
        talk = {"gen_ai__conversation__id": "talk", "trace": trace}
        spans.chat(at + 1, at + 2, 100 * (number + 1), 10, run, **talk)
        tool = spans.tool("delegate", at + 3, at + 20, run, trace=trace)
        helper = spans.agent(at + 4, at + 19, tool, gen_ai__agent__name="helper", trace=trace)
        spans.chat(at + 5, at + 6, 50, 5, helper, **talk)
        told = {"gen_ai__conversation__id": "aside", "trace": trace}
        other = spans.agent(at + 8, at + 18, tool, gen_ai__agent__name="third", trace=trace)
        spans.chat(at + 9, at + 10, 70 + number, 5, other, **told)
    main, first, third, second = imported(tmp_path, spans)
    assert [t.gap_s for t in main.turns] == pytest.approx([99, None])
    assert [t.tool for t in main.turns] == ["delegate", "delegate"]
    # The conversation of a sub-agent that is its parent's does not say which sub-agent it is.
    assert [len(p.turns) for p in (first, second)] == [1, 1]
    assert [(p.parent, p.parent_turn) for p in (first, second)] == [(main.program_id, t) for t in (0, 1)]
    assert [t.prompt_tokens for t in third.turns] == [70, 71]
    assert (third.parent, third.parent_turn) == (main.program_id, 0)


def test_sub_agents_are_programs_of_their_own(tmp_path: Path) -> None:
    spans = Spans()
    run = spans.agent(0, 60, gen_ai__conversation__id="c1")
    spans.chat(1, 2, 100, 10, run)
    tool = spans.tool("delegate", 3, 30, run)
    by_tool = spans.agent(4, 29, tool, gen_ai__agent__name="helper", gen_ai__conversation__id="c1")
    spans.chat(5, 6, 50, 5, by_tool)
    other = spans.agent(8, 20, by_tool, gen_ai__agent__name="third", gen_ai__conversation__id="c3")
    spans.chat(9, 10, 70, 5, other)
    node = spans.agent(31, 40, run, gen_ai__agent__name="node of the graph")
    spans.chat(32, 33, 140, 10, node)
    asking = spans.tool("summarise", 41, 45, run)
    spans.chat(42, 43, 30, 5, asking)
    main, helper, third, summary = imported(tmp_path, spans)
    assert [len(p.turns) for p in (main, helper, third, summary)] == [2, 1, 1, 1]
    assert (helper.parent, helper.parent_turn, helper.start_offset_s) == ("c1", 0, pytest.approx(4))
    assert helper.group == helper.agent_type == "helper"
    assert (third.program_id, third.parent, third.parent_turn) == ("c3", helper.program_id, 0)
    assert (summary.parent, summary.parent_turn, summary.start_offset_s) == ("c1", 1, pytest.approx(41))
    assert main.turns[0].tools == (TraceToolRun(name="delegate", s=pytest.approx(27)),)


HELD = "model spans left out, since they hold the calls that they sum up"


def test_a_call_of_two_instrumentations_counts_once(tmp_path: Path) -> None:
    spans = Spans()
    run = spans.agent(0, 9)
    outer = spans.chat(1, 3, 100, 10, run)
    http = spans.add("POST", 1.1, 2.9, outer)
    spans.chat(1.2, 2.8, 100, 10, http)
    empty = spans.add("chat m", 4, 6, run, gen_ai__operation__name="chat")
    spans.chat(4.2, 5.8, 130, 10, empty)
    (program,) = imported(tmp_path, spans, f"1 {HELD}", "1 model calls without token counts left out")
    assert [t.prompt_tokens for t in program.turns] == [100, 130]


@pytest.mark.parametrize("between", [{}, {"gen_ai__operation__name": "invoke_agent"}])
def test_a_model_span_that_holds_model_spans_sums_them_up(tmp_path: Path, between: dict[str, Any]) -> None:
    """The import kept the sum, 360 tokens in 8 s, and dropped the three calls."""
    spans = Spans()
    run = spans.agent(0, 9)
    whole = spans.chat(1, 9, 360, 30, run)
    step = spans.add("step", 1, 9, whole, **between)
    for at, prompt in ((1, 100), (4, 120), (7, 140)):
        spans.chat(at, at + 1, prompt, 10, step)
    spans.tool("ls", 2, 4, step)
    (program,) = imported(tmp_path, spans, f"1 {HELD}")
    assert [(t.prompt_tokens, t.gap_s) for t in program.turns] == [(100, 2.0), (120, 2.0), (140, None)]
    assert program.turns[0].tool == "ls"


def test_runs_of_one_agent_share_what_the_provider_found_in_the_least(tmp_path: Path) -> None:
    spans = Spans()
    for number, cached in enumerate((0, 700, 640)):
        run = spans.agent(number * 10, number * 10 + 5, trace=f"e{number}")
        told = {"gen_ai__usage__cache_read__input_tokens": cached, "trace": f"e{number}"}
        spans.chat(number * 10 + 1, number * 10 + 2, 1000, 10, run, **told)
        spans.chat(number * 10 + 3, number * 10 + 4, 1020, 10, run, trace=f"e{number}")
    programs = imported(tmp_path, spans)
    assert [p.shared_prefix_tokens for p in programs] == [640, 640, 640]
    assert [p.arrival_s for p in programs] == pytest.approx([0, 10, 20])


@pytest.mark.parametrize(
    "told",
    [
        {
            "openinference__span__kind": "LLM",
            "llm__token_count__prompt": 90,
            "llm__token_count__completion": 7,
        },
        {
            "llm__request__type": "chat",
            "gen_ai__usage__prompt_tokens": 90,
            "gen_ai__usage__completion_tokens": 7,
        },
    ],
)
def test_other_spellings_are_read(tmp_path: Path, told: dict[str, Any]) -> None:
    spans = Spans()
    run = spans.add("run", 0, 9, openinference__span__kind="AGENT", agent__name="x")
    spans.add("call", 1, 2, run, **told)
    spans.add("call", 3, 4, run, **told)
    spans.add("embed", 5, 6, run, gen_ai__operation__name="embeddings", gen_ai__usage__input_tokens=5)
    (program,) = imported(tmp_path, spans)
    assert [(t.prompt_tokens, t.output_tokens) for t in program.turns] == [(90, 7), (90, 7)]
    assert program.group == "x"


CACHE_NAMES = [
    ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_creation.input_tokens"),
    ("gen_ai.usage.cache_read_input_tokens", "gen_ai.usage.cache_creation_input_tokens"),  # OpenLLMetry
    ("gen_ai.usage.cache_read_input_tokens", "gen_ai.usage.cache_write_input_tokens"),  # Strands
    ("gen_ai.usage.details.cache_read_tokens", "gen_ai.usage.details.cache_write_tokens"),  # Pydantic AI
    ("llm.token_count.prompt_details.cache_read", "llm.token_count.prompt_details.cache_write"),
]


@pytest.mark.parametrize(("read", "created"), CACHE_NAMES)
def test_input_tokens_may_exclude_the_cache(tmp_path: Path, read: str, created: str) -> None:
    """One call tells it for all calls of the program: (9000, 12800, 0) alone could be a prompt of 9000."""
    spans = Spans()
    run = spans.agent(0, 90)
    usages = [(3, 0, 12000), (5, 12000, 800), (9000, 12800, 0), (23000, 300, 21800), (4, 45100, 0)]
    for number, (prompt, cached, written) in enumerate(usages):
        told = {read: cached, created: written}
        spans.chat(number * 10 + 1, number * 10 + 2, prompt, 100, run, **told)
    inclusive = spans.agent(100, 190, trace="a2")
    spans.chat(101, 102, 12000, 100, inclusive, trace="a2", **{read: 0, created: 12000})
    spans.chat(103, 104, 12800, 100, inclusive, trace="a2", **{read: 12000, created: 800})
    first, second = imported(
        tmp_path,
        spans,
        "1 programs whose input tokens exclude the cache: cached and created tokens added to them",
    )
    assert [t.prompt_tokens for t in first.turns] == [12003, 12805, 21800, 45100, 45104]
    assert [t.cached_tokens for t in first.turns] == [0, 12000, 12800, 300, 45100]
    assert not any(t.reset for t in first.turns)
    assert [t.prompt_tokens for t in second.turns] == [12000, 12800]


def shapes(spans: Spans) -> dict[str, str]:
    batches = [{"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]} for span in spans.all]
    return {
        "one document": json.dumps(spans.document(), indent=2),
        "a batch a line": "\n".join(json.dumps(batch) for batch in batches),
        "a span a line": "\n".join(json.dumps(span) for span in reversed(spans.all)),
        "an array": json.dumps(spans.all),
        "sent twice": "\n".join(json.dumps(batch) for batch in batches + batches),
        "in base64, as protobuf's own JSON has ids": json.dumps(
            [with_base64_ids(span) for span in spans.all]
        ),
    }


def with_base64_ids(span: dict[str, Any]) -> dict[str, Any]:
    ids = {k: span[k] for k in ("traceId", "spanId", "parentSpanId") if k in span}
    return span | {k: base64.b64encode(bytes.fromhex(v)).decode() for k, v in ids.items()}


@pytest.mark.parametrize("shape", shapes(Spans()))
def test_every_shape_of_otlp_gives_the_same(tmp_path: Path, shape: str) -> None:
    (expected,) = imported(tmp_path, coder_run())
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(shapes(coder_run())[shape].encode()))
    assert [p.turns for p in read_spans([path]).programs] == [expected.turns]


def test_what_pythons_exporter_writes_is_read(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    written = io.StringIO()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=written)))
    tracer = provider.get_tracer("test")
    made: dict[str, Any] = {}
    run = coder_run()
    for raw, told in zip(run.all, run.told, strict=True):
        above = made.get(raw.get("parentSpanId", ""))
        context = trace.set_span_in_context(above) if above is not None else None
        start_ns = int(raw["startTimeUnixNano"])
        made[raw["spanId"]] = tracer.start_span(raw["name"], context, attributes=told, start_time=start_ns)
    for raw in reversed(run.all):
        made[raw["spanId"]].end(int(raw["endTimeUnixNano"]))
    path = tmp_path / "console.txt"
    path.write_text(written.getvalue())
    (expected,) = imported(tmp_path, coder_run())
    (program,) = read_spans([path]).programs
    assert program.program_id == "c1"
    for turn, wanted in zip(program.turns, expected.turns, strict=True):
        assert (turn.prompt_tokens, turn.gap_kind, turn.tool) == (
            wanted.prompt_tokens, wanted.gap_kind, wanted.tool,
        )  # fmt: skip
        assert turn.gap_s == pytest.approx(wanted.gap_s)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no model call with token counts"),
        ("{}", "line 1: no span: it has no 'traceId'"),
        ('{"resourceSpans": 3}', "line 1: no span: 'int' object is not iterable"),
        ('{"a": 1', r"line 1: not JSON: Expecting"),
        ('\n\n"text"', "line 3: no span: 'str' object"),
        ("[" * 100_000, "line 1: not JSON: maximum recursion depth"),
        ('{"traceId":"a","spanId":"b","startTimeUnixNano":"soon"}', "line 1: no span: invalid literal"),
        (
            '{"type":"GENERATION","traceId":"a","id":"b","startTime":1900000002,"endTime":1900000001,"usage":{"input":5,"output":1}}',
            "program 'a': Expected `float` >= 0.0",
        ),
        (
            '{"type":"GENERATION","traceId":"a","id":"b","startTime":1900000001,"endTime":1900000002}',
            "no model call with token counts: 1 model calls without token counts left out",
        ),
    ],
)
def test_what_is_no_export_is_named_in_one_line(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=reason) as caught:
        read_spans([path])
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("divisor", [10**9, 10**6, 10**3])
def test_times_in_another_unit_are_refused(tmp_path: Path, divisor: int) -> None:
    """A day of agent runs became 86 ms without a word."""
    spans = coder_run()
    for span in spans.all:
        for name in ("startTimeUnixNano", "endTimeUnixNano"):
            span[name] = int(span[name]) // divisor
    with pytest.raises(TraceError, match=r"first span starts at .*; expected nanoseconds"):
        read_spans([write(tmp_path, spans)])


def test_deep_traces_and_lost_parents_work(tmp_path: Path) -> None:
    spans = Spans()
    parent = spans.agent(0, 9999)
    for depth in range(3000):
        parent = spans.add("inner", depth, 9000, parent)
    spans.chat(4000, 4001, 10, 5, parent)
    spans.chat(4002, 4003, 20, 5, "ffffffffffffffff", trace="99")
    programs = imported(
        tmp_path,
        spans,
        "2 of 2 programs have one turn only: calls belong together by an agent's span or by "
        "gen_ai.conversation.id",
    )
    assert [p.turns[0].prompt_tokens for p in programs] == [10, 20]


def write(folder: Path, spans: Spans) -> Path:
    path = folder / "spans.json"
    path.write_text(json.dumps(spans.document()))
    return path
