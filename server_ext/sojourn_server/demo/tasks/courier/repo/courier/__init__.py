"""Delivery with retries."""
