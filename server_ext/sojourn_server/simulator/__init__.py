"""The simulator: vLLM's own scheduler in virtual time. A latency model replaces the forward pass.

The simulator may import every package except gateway, cli and demo. Only cli and benchmarks import the
simulator. Start with ``simulation_run`` (a specification in, a log out), then ``simulation`` (the loop).
"""
