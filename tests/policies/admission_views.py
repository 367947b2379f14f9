"""Views for admission policies."""

from __future__ import annotations

from typing import Any

from sojourn_server.policies.policy_views import AdmissionView, GrowthStatistics


def admission_view(need_blocks: int, **facts: Any) -> AdmissionView:
    """Return the view of a newcomer to a busy engine without earlier programs or history."""
    return AdmissionView(
        need_blocks=need_blocks,
        anything_running=True,
        earlier=(),
        growth=GrowthStatistics(),
        **facts,
    )
