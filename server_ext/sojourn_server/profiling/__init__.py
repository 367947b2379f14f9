"""Measuring what an engine profile holds: prefill times over HTTP, copy bandwidths on this machine."""
