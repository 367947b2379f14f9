"""The simulator: vLLM's own scheduler in virtual time; only the forward pass is replaced, by a latency model.

The simulator may import every package except gateway, cli and demo. Only cli and benchmarks import the
simulator. Start with ``simulation_run`` (a specification in, a log out), then ``simulation`` (the loop).
"""
