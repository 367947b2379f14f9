"""KV blocks in host memory, on disk and in shared stores: the tiers below one engine's device.

Plain Python over buffers, without vLLM. Torch is imported only by functions that use tensors or CUDA. Read
``offload_jobs`` first (the jobs of an engine step, and their results), then ``offload_scheduler``,
``disk_tier`` and ``offload_worker``.
"""
