"""What an engine's own page of metrics says of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.metrics.vllm_metrics_page import (
    CachePool,
    cache_pool,
    cache_pools,
    process_start_time,
    whole,
)

PAGE = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="a \\"b\\" }",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="None"} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76e+09
"""


def test_each_engine_has_a_line() -> None:
    assert cache_pools(PAGE) == [CachePool("0", 16, 100), CachePool("1", 16, None)]
    assert cache_pool(PAGE) == CachePool("0", 16, 100)
    assert process_start_time(PAGE) == "1.76e+09"
    assert process_start_time("process_start_time_seconds 1.79535080295e+09\n") == "1.79535080295e+09"


@pytest.mark.parametrize("page", ["", "<html>", 'other:cache_config_info{block_size="16"} 1.0\n'])
def test_another_servers_page_says_nothing(page: str) -> None:
    assert cache_pools(page) == []
    assert cache_pool(page) == CachePool()
    assert process_start_time(page) is None


@pytest.mark.parametrize(
    ("value", "number"),
    [("16", 16), (16, 16), (0, None), ("-3", None), ("1.5", None), ("None", None), (None, None), ([], None)],
)
def test_only_whole_numbers_above_0_count(value: Any, number: int | None) -> None:
    assert whole(value) == number


@given(st.text())
def test_no_text_makes_it_raise(text: str) -> None:
    for page in (text, f"vllm:cache_config_info{{{text}}} 1.0\n", f"process_start_time_seconds {text}\n"):
        cache_pools(page)
        process_start_time(page)
    whole(text)
