"""Prefetch: when is a program's prefix loaded back?

Protocol ``PrefetchPolicy``; policies ``none``, ``likeliest-successor``.
"""
