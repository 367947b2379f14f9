"""P/D ratios without a link bottleneck, against DualPath's example; the maximum gain of two paths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.prefill_decode_ratio import (
    AverageTurnSizes,
    NodeLinks,
    link_utilisation,
    pd_ratio_range,
    two_path_gain,
)

LINKS = NodeLinks()


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


@given(st.integers(1, 30), st.integers(1, 30), st.floats(1, 1e6), st.floats(1, 1e4))
def test_two_paths_bring_between_nothing_and_all_nics(
    prefill: int, decode: int, hit: float, new: float
) -> None:
    gain = two_path_gain(LINKS, AverageTurnSizes(hit_tokens=hit, new_tokens=new), prefill, decode)
    assert 1.0 <= gain.max_speedup <= (prefill + decode) / prefill * (1 + 1e-12)


def test_what_is_gained_by_hand() -> None:
    turn = AverageTurnSizes(hit_tokens=1000, new_tokens=10, kv_bytes_per_token=50_000, new_tokens_per_s=1000)
    gain = two_path_gain(LINKS, turn, 2, 4)  # 50 MB a turn of 50 GB/s: 1,000 turns/s a node
    assert gain[:2] == pytest.approx((2000, 6000))
    assert gain.compute == pytest.approx(1600)
    assert gain.max_speedup == 1.0  # computing is the bottleneck already
    faster = AverageTurnSizes(hit_tokens=1000, new_tokens=4, kv_bytes_per_token=50_000, new_tokens_per_s=1000)
    assert two_path_gain(LINKS, faster, 2, 4).max_speedup == pytest.approx(2.0)
