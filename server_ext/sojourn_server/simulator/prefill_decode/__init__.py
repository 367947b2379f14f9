"""Separated prefill and decode in virtual time: DualPath's cluster, driven by the router's own policies."""
