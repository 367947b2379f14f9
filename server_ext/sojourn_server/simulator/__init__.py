"""The simulator: vLLM's own scheduler in virtual time; only the forward pass is replaced, by a latency model.

It may import every package but gateway, cli and demo; of those below it, only cli and benchmarks import it.
Start with ``simulation_run`` (a specification in, a log out), then ``simulation`` (the loop).
"""
