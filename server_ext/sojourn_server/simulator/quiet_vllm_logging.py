"""Imported before vLLM: keeps it from saying what it thinks of this machine, which is not the one played."""

import logging

logging.getLogger("vllm").setLevel(logging.ERROR)
