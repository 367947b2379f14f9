"""The plugin for vLLM: scheduler mix-in, eviction order, waiting queue, KV connectors, endpoints.

Only ``compat.py`` names modules of vLLM. This package decides nothing: it calls ``core.ProgramScheduler``.
Start reading at ``scheduler.py``, whose hooks call ``scheduler_adapter.py``.
"""
