"""Runs a module of vLLM as the main program, and keeps the garbage collector off what vLLM imports.

``python -m sojourn_server.vllm.server_main MODULE [arguments]`` is ``python -m MODULE [arguments]``. vLLM and
torch make hundreds of thousands of objects while they are imported, and these objects stay. Without this
module, they would be scanned by the collections during the imports, and by the full collections that vLLM
requests while an engine starts.

A process that the server spawns, for the scheduler or a worker, first imports the server's main module, which
is this one. So its imports are kept from the collector too.
"""

from __future__ import annotations

import gc
import runpy
import sys
from importlib import import_module

from .compat import ENGINE_CORE_MODULE


def _import_without_collections(module: str) -> None:
    """Import ``module``. No later collection scans what exists then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        import_module(module)
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


if __name__ == "__mp_main__":
    _import_without_collections(ENGINE_CORE_MODULE)
elif __name__ == "__main__":
    del sys.argv[0]
    _import_without_collections(sys.argv[0])
    del sys.modules[sys.argv[0]]  # it runs as __main__; what it imported stays
    runpy.run_module(sys.argv[0], run_name="__main__")
