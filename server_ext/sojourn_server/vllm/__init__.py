"""The plugin for vLLM: scheduler mix-in, eviction order, waiting queue, KV connectors, endpoints.

Only ``compat.py`` names modules of vLLM. Policy is in ``core.ProgramScheduler``; this package calls it.
Start reading at ``scheduler.py``, whose hooks call ``scheduler_adapter.py``.
"""
