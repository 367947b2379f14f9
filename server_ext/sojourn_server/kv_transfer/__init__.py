"""KV between engines and their shared store: links, buffers and transfers, beside the engine's own steps.

May import ``kv_offload``; no torch, no vLLM. ``transfer_core`` and its tables are pure: they get the time as
``now`` and return actions. Start with ``transfer_jobs``, then ``transfer_core``.
"""
