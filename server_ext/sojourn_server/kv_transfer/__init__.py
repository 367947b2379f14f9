"""KV between engines and their shared store: links, buffers and transfers, beside the engine's own steps.

May import ``kv_offload``; no torch, no vLLM. ``transfer_core`` and the tables below it are pure: they take
the time as ``now`` and return actions. Start with ``transfer_jobs``, then ``transfer_core``.
"""
