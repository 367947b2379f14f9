"""Moves KV between engines, and between engines and their shared store, while the engines compute.

The package may import ``kv_offload``, but neither torch nor vLLM. ``transfer_core`` and its tables do no I/O:
they get the time as ``now`` and return actions. Start with ``transfer_jobs``, then ``transfer_core``.
"""
