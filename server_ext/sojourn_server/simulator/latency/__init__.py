"""Latency models of steps and copies: roofline from data sheets, or fitted to a live engine."""
