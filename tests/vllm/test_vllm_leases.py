"""Leases in vLLM's own scheduler: which blocks they pin, when they end, and that no request starves."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from sojourn_server.metrics.turn_explanation import explain
from sojourn_server.programs.statements import PLAN, StepsLeft
from turns import add_request, change_config, end, last_turn, prompt, tool


def test_a_lease_survives_traffic_that_would_evict_it(make_engine):
    """The reason for all of this: 8 other prompts pass, and the agent's context is still there."""
    for policy, expected in (("observe", 0), ("fixed-ttl", 288)):
        engine = make_engine(policy, blocks=65)
        engine.add("a1", prompt(1, 300), program_id="A", max_tokens=4)
        engine.run()
        engine.tell(tool("A", 1))
        for other in range(8):
            engine.add(f"x{other}", prompt(10 + other, 300))
            engine.run()
        engine.add("a2", [*prompt(1, 300), 7, 7, 7, 7, *prompt(2, 50)], program_id="A")
        engine.run()
        assert last_turn(engine, "A")["tokens"]["device"] == expected


def test_kv_that_a_request_must_not_read_is_not_lost(make_engine):
    """vLLM computes the whole prompt for its logprobs. The KV is there, and the next turn reads it."""
    engine = make_engine(blocks=65)
    for turn, whole in enumerate((False, True, False)):
        request = engine.add(f"a{turn}", prompt(1, 320), program_id="A")
        request.skip_reading_prefix_cache = whole
        engine.run()
    split = [turn["tokens"] for turn in engine.ask("program", program_id="A")["ledger"]]
    assert [(each["device"], each["lost"]) for each in split] == [(0, {}), (0, {"unread": 304}), (304, {})]
    assert engine.adapter.program_scheduler.program("A").lost_tokens == 0
    counters = engine.ask("drain_metrics")["counters"]
    counted = {labels["result"]: tokens for labels, tokens in counters["sojourn_prompt_tokens_total"]}
    assert (counted["unread"], counted.get("lost")) == (304, None)
    explained = explain(engine.ask("program", program_id="A"), 2)
    assert "304 tokens were computed again, because the request may not read cached KV" in explained.text
    assert [each.hint for each in explained.advice] == [None]


def test_the_references_of_a_lease_make_no_prefix_common_to_all_requests(make_engine):
    """Cascade attention would otherwise let a request without a system prompt read the KV of this prompt."""
    manager = make_engine("fixed-ttl").scheduler.kv_cache_manager
    assert manager.get_num_common_prefix_blocks("x0") == [0]


class CharacterTokenizer:
    """A tokenizer whose tokens are code points."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_string_ends_a_turn_as_an_end_token_does(make_engine, asynchronous):
    """vLLM's API server finds stop strings. It then aborts the request, some tokens later."""
    written = "I look.\n```bash\npytest -q\n```\nObservation: passed, I would say"
    engine = make_engine(blocks=65, asynchronous=asynchronous)
    engine.scheduler.sojourn.reader.tokenizer = CharacterTokenizer()
    engine.tokens = lambda request: ord(written[request.num_output_tokens])
    request = engine.add("a1", prompt(1, 300), program_id="A", max_tokens=100)
    request.sampling_params.stop = ["\nNever:", "\nObservation:"]
    while request.num_output_tokens < len(written) - 3:
        engine.step()
    engine.abort("a1")
    program = engine.ask("program", program_id="A")
    assert (program["ledger"][-1]["outcome"], program["turns"]) == ("stopped", 1)
    assert program["tool"] == "bash:pytest"
    assert engine.ask("stats")["leases"] == 1
    for other in range(8):
        engine.add(f"x{other}", prompt(10 + other, 300))
        engine.run()
    kept = written[: written.index("Observation")]
    engine.add("a2", [*prompt(1, 300), *map(ord, kept), *prompt(2, 50)], program_id="A")
    engine.run()
    assert last_turn(engine, "A")["tokens"]["device"] == (300 + len(kept)) // 16 * 16


def test_an_output_that_writes_a_to_do_list_states_the_turns_left(make_engine):
    todos = '[{"content": "a", "status": "completed"}, {"content": "b", "status": "pending"}]'
    written = f'<tool_call>{{"name": "TodoWrite", "arguments": {{"todos": {todos}}}}}</tool_call>'
    engine = make_engine("sojourn", blocks=65)
    adapter = engine.scheduler.sojourn
    adapter.reader.tokenizer = CharacterTokenizer()
    engine.tokens = lambda request: ord(written[request.num_output_tokens])
    engine.add("a1", prompt(1, 300), program_id="A", max_tokens=len(written))
    engine.run()
    (program,) = adapter.program_scheduler.state.programs
    assert program.steps_left is None, "the output was cut off, as far as the engine knows"
    request = engine.add("a2", prompt(1, 300), program_id="A", max_tokens=len(written) + 1)
    request.sampling_params.stop = ["</tool_call>"]
    while request.num_output_tokens < len(written):
        engine.step()
    engine.abort("a2")
    assert program.steps_left == StepsLeft(PLAN, 2.0, after=2)


def test_a_warning_says_that_vllm_caches_no_prefixes(make_engine, monkeypatch, warnings):
    """It turns prefix caching off for some models, whatever was asked for. A lease then keeps nothing."""
    make_engine()
    assert not warnings
    change_config(monkeypatch, lambda config: setattr(config.cache_config, "enable_prefix_caching", False))
    engine = make_engine()
    assert "prefix caching is off" in warnings[0]
    engine.add("a1", prompt(1, 300), program_id="A")
    engine.run()
    assert engine.ask("stats")["leases"] == 0


def test_the_first_hint_with_a_mistake_is_told(make_engine, warnings):
    engine = make_engine()
    stream(engine, "a1", prompt(1, 30), key="program_id")
    assert not warnings
    for name in ("a2", "a3"):
        stream(engine, name, prompt(1, 30), key="program")
    assert len(warnings) == 1
    assert "a mistake in a request's agentic_context" in warnings[0]
    assert "required field `program_id`" in warnings[0]


def stream(engine, program, tokens, *, resumable=True, key="program_id"):
    """Add a part of a prompt that a program's client streams."""
    add_request(engine, program, tokens, hints={key: program}, resumable=resumable)


def test_a_warning_says_which_sessions_wait_for_blocks_that_they_hold(make_engine, clock, warnings):
    """As in stock vLLM they wait for ever: each keeps its blocks, and the client must end one."""
    engine = make_engine(blocks=65)
    for number, part in enumerate((500, 64)):
        for program in ("A", "B"):
            stream(engine, program, prompt(ord(program) * 10 + number, part))
        for _ in range(3):
            engine.step()
    for expected in (0, 0, 1, 1):
        assert len(warnings) == expected
        clock.now += 151
        engine.step()
    assert "nothing was computed for 300 s, although 2 requests" in warnings[0]
    assert "A: WAITING, holds 32 blocks; B: WAITING, holds 32 blocks" in warnings[0]


def test_a_further_part_of_a_streamed_prompt_is_not_recomputed_after_a_preemption(make_engine, clock):
    engine = make_engine(blocks=65)
    for number in range(3):
        stream(engine, "A", prompt(number, 64))
        engine.step()
        clock.now += 1.0
    stream(engine, "A", prompt(3, 64), resumable=False)
    engine.run(max_steps=20)
    (turn,) = engine.ask("program", program_id="A")["ledger"]
    assert (turn["preemptions"], turn["recomputed_after_preemption_tokens"]) == (0, 0)


def test_the_whole_pool_leased_and_a_long_request_is_admitted_at_once(make_engine):
    """C8: no deadlock, and no waiting for a lease to run out while the engine stands still."""
    engine = make_engine(blocks=65, settings={"lease_budget_fraction": 1.0})
    for number in range(4):
        engine.add(f"p{number}", prompt(1 + number, 256), program_id=f"P{number}")
        engine.run()
        engine.tell(tool(f"P{number}", 1))
    assert engine.ask("stats")["blocks"]["leased"] == 64
    engine.add("new", prompt(50, 800), program_id="NEW")
    result = engine.step()
    assert result.planned.num_scheduled_tokens == {"new": 800}
    released = [d for d in engine.ask("decisions")["decisions"] if d["kind"] == "release"]
    assert [d["program_id"] for d in released] == ["P3", "P2", "P1", "P0"], "latest arrival first"
    assert {d["reason"] for d in released} == {"pressure"}


def test_a_common_beginning_outlives_its_programs_and_what_they_alone_used_goes_first(make_engine):
    """The end of the last one threw it away, and the next that began alike computed it again."""
    engine = make_engine(blocks=65)
    shared = list(prompt(9, 128))
    engine.add("S1", prompt(ord("S"), 64))  # a request of no program, before all others
    engine.run()
    for name in ("A", "B"):
        engine.add(f"{name}1", [*shared, *prompt(ord(name), 64)], program_id=name)
        engine.run()
    engine.tell(end("A"), end("B"))
    uncached = engine.ask("stats")["blocks"]["free"]
    engine.add("D1", prompt(ord("D"), (uncached + 4) * 16), program_id="D")
    engine.run()
    engine.add("C1", [*shared, *prompt(ord("C"), 16)], program_id="C")
    engine.run()
    assert last_turn(engine, "C")["tokens"]["device"] == 128
    engine.add("S2", [*prompt(ord("S"), 64), 1], program_id="S")
    engine.run()
    assert last_turn(engine, "S")["tokens"]["device"] == 64
    engine.add("A2", [*shared, *prompt(ord("A"), 64)], program_id="A2")
    engine.run()
    assert last_turn(engine, "A2")["tokens"]["device"] == 128


@pytest.mark.parametrize("fails", [False, True], ids=["refuses", "fails"])
def test_a_reset_counts_for_the_device_even_if_vllms_connector_was_not_reset(make_engine, fails):
    """vLLM clears the device first, and then asks the connector, whose answer becomes the result."""

    def reset_cache():
        if fails:
            raise OSError("broken on purpose")
        return False

    engine = make_engine(blocks=65)
    engine.add("a1", prompt(1, 300), program_id="A")
    engine.run()
    scheduler, adapter = engine.scheduler, engine.scheduler.sojourn
    assert adapter.program_scheduler.context("A")
    assert len(adapter._queue.owners.of)
    scheduler.connector = SimpleNamespace(reset_cache=reset_cache)
    with pytest.raises(OSError, match="on purpose") if fails else nullcontext():
        assert scheduler.reset_prefix_cache(reset_connector=True) is False
    scheduler.connector = None
    assert adapter.program_scheduler.context("A") is None
    assert len(adapter._queue.owners.of) == 0


def test_no_client_can_stretch_a_lease_for_ever(make_engine, clock):
    """Tools that start and stop without end: the lease ends at its limit, and no other follows in the gap."""
    engine = make_engine("continuum", blocks=65)
    engine.add("a1", prompt(1, 300), program_id="A", context={"kv_retention_ttl_seconds": 300})
    engine.run()
    begin = clock.now
    sequence = 0
    while clock.now - begin < 400.0:
        clock.now += 1.0
        for kind in ("tool_start", "tool_stop"):
            sequence += 1
            event = {"type": kind, "program_id": "A", "seq": sequence, "call_id": f"c{sequence // 2}"}
            extra = {"tool": f"t{sequence}"} if kind == "tool_start" else {"duration_s": 0.1}
            engine.tell({**event, **extra})
    released = [d for d in engine.ask("decisions")["decisions"] if d["kind"] == "release"]
    assert [d["reason"] for d in released] == ["ttl"]
    assert released[0]["held_s"] <= 311.0
    assert engine.ask("stats")["leases"] == 0


def test_a_running_request_takes_all_leases_before_a_preemption_even_if_the_first_frees_nothing(make_engine):
    engine = make_engine("continuum", blocks=65, settings={"lease_budget_fraction": 1.0})
    for program, start in (("C", 2), ("A", 1)):
        context = {"kv_retention_ttl_seconds": 60}
        engine.add(f"{program}1", prompt(start, 256), program_id=program, max_tokens=4, context=context)
        engine.run()
        engine.tell(tool(program, 1))
    # All blocks that A holds are B's as well.
    engine.add("b1", [*prompt(1, 256), *prompt(5, 300)], program_id="B", max_tokens=200)
    engine.add("d1", prompt(7, 100), max_tokens=150)
    engine.run(max_steps=1000)
    log = [(d["kind"], d["program_id"]) for d in engine.ask("decisions")["decisions"]]
    assert [entry for entry in log if entry[0] in ("release", "preempt")] == [
        ("release", "A"),
        ("release", "C"),
    ]
