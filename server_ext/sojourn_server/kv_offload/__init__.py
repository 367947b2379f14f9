"""KV blocks in host memory, on disk and in shared stores, below one engine's device.

Plain Python over buffers. It may import no vLLM, and torch only to view a CPU engine's tensors.
Start with ``offload_jobs`` (orders and results of a step), then ``offload_planner`` and ``offload_worker``.
"""
