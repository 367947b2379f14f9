"""Where KV goes that leaves the device. Plain Python over buffers: no torch, no vLLM."""
