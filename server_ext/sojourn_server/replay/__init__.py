"""Drive a live server with a recorded workload and measure what becomes of it."""
