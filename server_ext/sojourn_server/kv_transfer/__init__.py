"""Moves KV between engines, and between engines and their shared store, while the engines compute.

The package may import ``kv_offload``, but neither torch nor vLLM. ``transfer_core`` and its tables do no I/O:
they get the time as ``now`` and return actions. Start with ``transfer_jobs``, then ``transfer_core``.

In this package a lease is a transfer's reservation of buffers, which expires unless it is renewed. It has
nothing to do with the leases of programs.
"""
