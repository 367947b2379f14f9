"""Simulates separate prefill and decode engines (DualPath's cluster) with the policies of sojourn's
router."""
