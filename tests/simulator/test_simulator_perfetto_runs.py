"""A simulated run as a Perfetto trace: phases and tools of each program, at their virtual times."""

from __future__ import annotations

from sojourn_server.simulator.report.perfetto_runs import add_run
from sojourn_server.traces.perfetto_trace import PerfettoTrace
from test_simulator_program_explanation import life


def test_a_run_has_phases_and_exact_tools() -> None:
    trace = PerfettoTrace()
    add_run(trace, life(), "stock")
    document = trace.document()
    slices = {
        (event["name"], event["ts"]): (event["dur"], event.get("args"))
        for event in document["traceEvents"]
        if event["ph"] == "X"
    }
    assert document["otherData"]["zero_s"] == 10.0
    assert slices["turn 0", 0.0][0] == 10e6
    assert slices["held back", 0.0] == (2e6, None)
    assert slices["decode", 6e6] == (4e6, None)
    assert slices["[bold]bash", 10e6] == (5e6, {"inferred": False})
    assert slices["turn 1", 15e6][1]["regenerated"] == {"evicted": 200}
