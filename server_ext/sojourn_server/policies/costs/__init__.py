"""Costs of computing, copying and reloading KV on one engine; inputs of policies, not a question.

Start at ``engine_profile``, the file that ``sojourn profile`` writes.
"""
