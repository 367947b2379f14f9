"""Fairness between tenants (``sharing`` and ``tenant_preemption`` in presets): whose request is sent next,
and which request makes way for a more urgent tenant?

Protocols ``SharePolicy`` (``in-order``, ``agent-fair-share``) and ``TenantPreemptionPolicy`` (``none``,
``to-urgent``).
"""
