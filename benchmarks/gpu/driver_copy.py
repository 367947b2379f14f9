"""Batched copies through CUDA's driver, for a machine that has torch and no vLLM.

Replaces vLLM's ``swap_blocks_batch``: one call of ``cuMemcpyBatchAsync``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

SOURCE_IN_STREAM_ORDER, SOURCE_AT_ANY_TIME = 1, 3
"""Values of ``CUmemcpySrcAccessOrder``."""
BATCH_SINCE = 12080
"""First CUDA version with ``cuMemcpyBatchAsync``. Later versions changed the function under new names."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("source_order", ctypes.c_uint),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    ]


def driver_batch_copy() -> Callable[[Any, Any, Any, bool], None]:
    """Return a function like vLLM's ``swap_blocks_batch``. Raises ``OSError`` without a CUDA driver, or if it
    is older than CUDA 12.8."""
    driver = ctypes.CDLL("libcuda.so.1")
    found, status = ctypes.c_void_p(), ctypes.c_int()
    error = driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync", ctypes.byref(found), BATCH_SINCE, ctypes.c_uint64(0), ctypes.byref(status)
    )
    if error or not found.value:
        raise OSError("the driver has no cuMemcpyBatchAsync; expected one of CUDA 12.8 or later")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
    call = kind(found.value)

    def copy(sources: Any, destinations: Any, sizes: Any, stable_sources: bool) -> None:
        attributes = _Attributes(SOURCE_AT_ANY_TIME if stable_sources else SOURCE_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        error = call(
            destinations.data_ptr(),
            sources.data_ptr(),
            sizes.data_ptr(),
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            torch.cuda.current_stream().cuda_stream,
        )
        if error:
            raise RuntimeError(
                f"cuMemcpyBatchAsync: CUDA error {error} at part {failed.value} of {len(sizes)}"
            )

    return copy
