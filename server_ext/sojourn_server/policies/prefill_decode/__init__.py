"""Prefill/decode disaggregation: which two engines serve a request, and which one reads its KV (DualPath)?

``engine_pair_scheduler`` combines the selection of both engines with the choice of the side that reads.
"""
