"""Prefetch: when is a program's prefix loaded back?

Protocol ``PrefetchPolicy``; policies ``none``, ``tool-end``, ``likeliest-successor``.
"""
