"""Names of what ``--replicas`` runs; and the policy of one's own in docs/simulator.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from sojourn.ids import ProgramId
from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.policy_views import FinishedTurnView
from sojourn_server.policies.preset import read_preset
from sojourn_server.programs.windowed_history import ToolHistory
from sojourn_server.simulator.simulator_policies import PolicyError, find_cluster_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy" / "break_even.toml"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("prefix-affinity/stock", "prefix-affinity/stock"),
        ("thunderagent/thunderagent-offload", "thunderagent/thunderagent-offload"),
        # A routing alone takes its own engines; what is both is a routing.
        ("saga", "saga/saga"),
        ("mori-paper", "mori-paper/mori-paper"),
        ("thunderagent", "thunderagent/thunderagent"),
        # An engine alone stands behind prefix affinity, or the router that it brings.
        ("stock", "prefix-affinity/stock"),
        ("lru-offload", "prefix-affinity/lru-offload"),
        ("thunderagent-offload", "thunderagent/thunderagent-offload"),
        (str(EXAMPLE), "prefix-affinity/break_even"),
        (f"saga/{EXAMPLE}", "saga/break_even"),
    ],
)
def test_a_name_is_a_routing_an_engine_or_both(name: str, found: str) -> None:
    assert find_cluster_policy(name).name == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sagga/stock", "sagga/stock: unknown routing 'sagga'; expected ROUTING/ENGINE or one of"),
        ("prefix-afinity", "did you mean 'prefix-affinity'?"),
        ("random/stok", "unknown policy 'stok'; expected one of"),
        ("random/stok", "did you mean 'stock'?"),
        ("saga/thunderagent", "thunderagent has its own router"),
        ("nothing.toml", "policy file nothing.toml"),
        ("", "unknown policy ''"),
        ("/stock", "unknown routing ''"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        find_cluster_policy(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tool", "decision"),
    [
        ("bash", RetentionDecision(5.0, DecisionReason.LEAST_WASTE)),
        (None, RetentionDecision(0.0, DecisionReason.NO_TOOL_CALL)),
    ],
)
def test_the_example_keeps_for_as_long_as_the_loss_would_cost(
    tool: str | None, decision: RetentionDecision
) -> None:
    turn = FinishedTurnView(
        program_id=ProgramId("p"), tool=tool, context_tokens=1000, reload_s=2.0, mean_evicted_wait_s=3.0,
        memoryfulness=1.0, history=ToolHistory(),
    )  # fmt: skip
    assert read_preset(EXAMPLE).retention.keep(turn, 0.0) == decision


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_the_example_runs_in_vllms_scheduler_and_does_what_it_says() -> None:
    pytest.importorskip("vllm")
    from simulator_small_runs import SmallRun
    from simulator_small_workload import assert_played, small_workload

    def reasons(policy: str) -> list[str]:
        loop = small_workload(seed=3)
        run = SmallRun(policy, loop)
        assert_played(run.log, loop.programs)
        return [what["reason"] for _, (kind, what) in run.decisions if kind == "decision"]

    assert reasons(str(EXAMPLE)).count(DecisionReason.LEAST_WASTE.value) > 10
    assert DecisionReason.LEAST_WASTE.value not in reasons("program-fcfs")
