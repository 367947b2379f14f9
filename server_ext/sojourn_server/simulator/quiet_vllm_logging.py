"""Silences vLLM's log messages about this machine, which is not the simulated one. Import it before vLLM."""

import logging

logging.getLogger("vllm").setLevel(logging.ERROR)
