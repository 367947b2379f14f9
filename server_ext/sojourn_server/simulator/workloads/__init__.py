"""Who arrives when, and with what: traces in closed or open loop, and the papers' synthetic tables."""
