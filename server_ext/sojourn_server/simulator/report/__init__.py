"""Reports of simulations: tables, JSON, plots, and the timeline of one program."""
