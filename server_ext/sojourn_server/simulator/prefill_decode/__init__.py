"""Separated prefill and decode in virtual time: DualPath's cluster, with the router's own policies."""
