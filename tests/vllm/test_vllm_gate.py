"""The entry gate in vLLM's own scheduler: programs wait behind it, others pass, and nobody waits in vain."""

from __future__ import annotations


def prompt(start: int, tokens: int) -> range:
    return range(start * 1000, start * 1000 + tokens)


def running(engine) -> set[str]:
    return {request.request_id for request in engine.scheduler.running}


def status(engine, program: str) -> str:
    return engine.ask("program", program_id=program)["status"]


def crowd(make_engine, policy: str = "continuum"):
    """Three programs of 20 blocks each in a pool of 100; each is expected to grow by 66 blocks."""
    engine = make_engine(policy, blocks=101, max_model_len=2048)
    for number in range(3):
        engine.add(f"r{number}", prompt(1 + number, 320), program_id=f"P{number}", max_tokens=64)
    engine.step()
    return engine


def test_a_program_waits_until_those_before_it_can_still_grow(make_engine):
    engine = crowd(make_engine)
    assert running(engine) == {"r0", "r1"}
    assert status(engine, "P2") == "gated"
    assert len(engine.scheduler.waiting) == 1
    assert not engine.scheduler.waiting
    assert running(crowd(make_engine, "continuum-paper")) == {"r0", "r1", "r2"}


def test_the_gate_opens_when_somebody_leaves(make_engine):
    engine = crowd(make_engine)
    engine.abort("r0")
    engine.step()
    assert running(engine) == {"r1", "r2"}
    assert status(engine, "P2") == "reasoning"
    engine.run()
    assert engine.ask("stats")["requests"] == 0


def test_strangers_pass_the_gate(make_engine):
    engine = crowd(make_engine)
    engine.add("plain", prompt(9, 64), max_tokens=5)
    engine.step()
    assert "plain" in running(engine)
    assert status(engine, "P2") == "gated"


def test_a_gated_request_can_be_aborted(make_engine):
    engine = crowd(make_engine)
    engine.abort("r2")
    engine.run()
    assert engine.ask("stats")["requests"] == 0
    assert engine.pool.get_num_free_blocks() == 100
    assert status(engine, "P2") == "acting"


def test_a_leased_program_is_not_asked_again(make_engine, clock):
    engine = make_engine("continuum", blocks=101, max_model_len=2048)
    context = {"kv_retention_ttl_seconds": 60}
    engine.add("a1", prompt(1, 320), program_id="A", context=context)
    engine.run()
    for number in range(2):
        engine.add(f"r{number}", prompt(5 + number, 320), program_id=f"P{number}", max_tokens=64)
    engine.step()
    engine.add("a2", [*prompt(1, 320), 7, *prompt(2, 40)], program_id="A", max_tokens=5)
    engine.step()
    assert "a2" in running(engine)


def test_what_a_program_shares_with_those_inside_needs_no_room(make_engine):
    """Ten agents with one long system prompt: their prompts are mostly the same blocks."""
    engine = make_engine("continuum", blocks=101, max_model_len=2048)
    system = list(prompt(7, 960))
    engine.add("first", [*system, *prompt(1, 16)], program_id="P0", max_tokens=64)
    engine.step()
    engine.add("second", [*system, *prompt(2, 16)], program_id="P1", max_tokens=64)
    engine.step()
    needed = engine.scheduler.sojourn._shared["second"][1]
    assert needed == 60


def test_while_nothing_runs_the_gate_is_open(make_engine, clock):
    engine = make_engine("continuum", blocks=33, max_model_len=512)
    for number in range(6):
        engine.add(f"r{number}", prompt(number, 300), program_id=f"P{number}", max_tokens=40)
    assert engine.run(max_steps=2000) < 2000
    assert engine.ask("stats")["ledger"]["turns"] == 6


def test_programs_pass_the_gate_in_the_order_of_their_arrival(make_engine):
    engine = make_engine("continuum", blocks=101, max_model_len=2048)
    order = []
    for number in range(8):
        engine.add(f"r{number}", prompt(number, 320), program_id=f"P{number}", max_tokens=30)
    while engine.scheduler.has_unfinished_requests():
        planned = engine.step().planned
        order += [new.req_id for new in planned.scheduled_new_reqs]
    assert order == [f"r{number}" for number in range(8)]
