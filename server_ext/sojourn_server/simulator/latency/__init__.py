"""How long a step or a copy would take: roofline from data sheets, or fitted to a live engine."""
