"""Who goes next and who is preempted, in vLLM's own scheduler (C6, C8)."""

from __future__ import annotations


def prompt(start: int, tokens: int) -> range:
    return range(start * 1000, start * 1000 + tokens)


def test_waiting_requests_go_by_preemption_then_lease_then_programs_arrival(make_engine, clock):
    engine = make_engine("fixed-ttl", blocks=129, max_num_seqs=1)
    for name in ("OLD", "HELD"):
        engine.add(f"{name}1", prompt(ord(name[0]), 64), program_id=name)
        engine.run()
    engine.tell({"type": "tool_start", "program_id": "HELD", "seq": 1, "call_id": "c", "tool": "bash"})
    engine.add("busy", prompt(1, 32), max_tokens=30)
    engine.step()
    engine.add("new1", prompt(2, 64), program_id="NEW")
    engine.add("plain", prompt(3, 64))
    engine.add("OLD2", prompt(4, 64), program_id="OLD")
    engine.add("HELD2", [*prompt(ord("H"), 64), 7, 1, 2], program_id="HELD")
    assert [r.request_id for r in engine.scheduler.waiting] == ["HELD2", "OLD2", "new1", "plain"]


def test_user_priority_comes_before_ours(make_engine):
    engine = make_engine("continuum", blocks=129, max_num_seqs=1, scheduling_policy="priority")
    engine.add("first", prompt(1, 32), program_id="A", priority=5)
    engine.add("second", prompt(2, 32), program_id="B", priority=1)
    engine.add("third", prompt(3, 32), program_id="C", priority=1)
    assert [r.request_id for r in engine.scheduler.waiting] == ["second", "third", "first"]


def test_a_returning_program_is_not_preempted_for_having_come_back_late(make_engine):
    """The engine's own rule preempts the last admitted: here the earliest program's second turn."""
    victims = {}
    for policy in ("observe", "continuum"):
        engine = make_engine(policy, blocks=33, max_model_len=512)
        engine.add("a1", prompt(1, 40), program_id="A")
        engine.run()
        engine.add("b1", prompt(2, 200), program_id="B", max_tokens=120)
        engine.step()
        engine.add("a2", prompt(3, 200), program_id="A", max_tokens=120)
        engine.run()
        victims[policy] = [
            d["program_id"] for d in engine.ask("decisions")["decisions"] if d["kind"] == "preempt"
        ]
    assert victims["observe"][0] == "A"
    assert set(victims["continuum"]) == {"B"}


def test_victims_priority_is_put_back(make_engine):
    engine = make_engine("continuum-paper", blocks=33, max_model_len=512)
    requests = [engine.add(f"r{n}", prompt(n, 100), max_tokens=150, program_id=f"P{n}") for n in range(4)]
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        assert {request.priority for request in requests} == {0}
    assert any(request.num_preemptions for request in requests)
    assert [request.num_output_tokens for request in requests] == [150] * 4


def test_a_request_that_is_skipped_at_every_step_has_one_promotion_at_most(make_engine, clock):
    """vLLM puts it back into the queue at each step, for example while its LoRA adapter has no slot."""
    from vllm.v1.request import RequestStatus

    engine = make_engine("autellix", blocks=4000)
    engine.add("first", prompt(1, 100), program_id="A", max_tokens=4)
    while engine.scheduler.requests:
        engine.step()
        clock.now += 30.0
    skipped = engine.add("skipped", prompt(2, 100), program_id="A", max_tokens=4)
    skipped.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.add("running", prompt(3, 100), max_tokens=3000)
    promotions = engine.scheduler.sojourn._waiting._promotions
    for _ in range(300):
        engine.step()
        clock.now += 0.02
    assert len(promotions) == 1
    assert len(promotions._heap) < 100
    engine.abort("skipped")
    assert not promotions
