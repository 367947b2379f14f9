"""Costs of computing, copying and reloading KV on one engine. Policies use them as inputs.

Start at ``engine_profile``, the file that ``sojourn profile`` writes.
"""
