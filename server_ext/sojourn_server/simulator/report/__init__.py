"""What a simulation found: table, JSON, plots, one program's life."""
