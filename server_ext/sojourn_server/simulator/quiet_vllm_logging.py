"""Silences messages of vLLM and PyTorch about this machine, which is not the simulated one. Import this
module before vLLM."""

import logging

logging.getLogger("vllm").setLevel(logging.ERROR)
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # "Triton not available"
