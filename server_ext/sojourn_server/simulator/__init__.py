"""The simulator: vLLM's own scheduler in virtual time. A latency model replaces the forward pass.

Of sojourn's packages, only ``cli`` imports the simulator. Start with ``simulation_run`` (a specification in,
a log out), then ``simulation`` (the loop).
"""
