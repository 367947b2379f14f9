"""KV blocks in host memory, on disk and in shared stores: the tiers below one engine's device.

Plain Python over buffers, without vLLM. Torch is imported only by functions that use tensors or CUDA. Start
with ``offload_jobs`` (jobs and results of a step), then ``offload_planner`` and ``offload_worker``.
"""
