"""Sharing and yielding: which tenant's request goes next, and which one yields?

Protocols ``SharePolicy`` (``in-order``, ``agent-fair-share``) and ``TenantPreemptionPolicy`` (``none``,
``to-urgent``).
"""
