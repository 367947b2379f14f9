"""P/D ratios without a link bottleneck, against DualPath's example."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.prefill_decode_ratio import (
    NodeLinks,
    link_utilisation,
    pd_ratio_range,
)


def test_the_papers_example() -> None:
    found = pd_ratio_range(NodeLinks(devices=8, storage_nic_bytes_per_s=50e9, dram_bytes_per_s=500e9))
    assert (found.least, found.most) == pytest.approx((1 / 7, 3.5))
    assert found.possible
    assert {bound.link: bound.most for bound in found.bounds if bound.most < math.inf} == pytest.approx(
        {"decode compute NIC, read": 6.0, "decode compute NIC, write": 3.5, "decode DRAM": 3.5}
    )


def test_too_little_of_a_link_leaves_no_ratio() -> None:
    assert not pd_ratio_range(NodeLinks(devices=1)).possible
    assert not pd_ratio_range(NodeLinks(dram_bytes_per_s=140e9)).possible
    assert not pd_ratio_range(NodeLinks(dram_bytes_per_s=90e9)).possible


links = st.builds(
    NodeLinks,
    devices=st.integers(1, 16),
    compute_nic_bytes_per_s=st.floats(1e9, 1e11),
    storage_nic_bytes_per_s=st.floats(1e9, 1e11),
    dram_bytes_per_s=st.floats(1e10, 1e12),
)


@given(links, st.integers(1, 40), st.integers(1, 40))
def test_the_range_is_where_no_link_is_overloaded(node: NodeLinks, prefill: int, decode: int) -> None:
    loads = link_utilisation(node, prefill, decode)
    fullest = max(loads.values())
    if abs(fullest - 1) < 1e-9:
        return
    assert pd_ratio_range(node).contains_ratio(prefill / decode) is (fullest < 1)
    assert [bound.link for bound in pd_ratio_range(node).bounds] == list(loads)
