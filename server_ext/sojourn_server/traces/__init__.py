"""Recorded agent workloads: schema, files, imports, and prompts made from them."""
