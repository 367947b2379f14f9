"""Runs a module of vLLM as the main program, and excludes imported objects from garbage collection.

``python -m sojourn_server.vllm.server_main MODULE [arguments]`` runs ``python -m MODULE [arguments]``. The
imports of vLLM and torch create hundreds of thousands of objects, which are never freed. Without this module,
the garbage collector would scan them during the imports, and in each full collection that vLLM requests while
an engine starts.

The server spawns processes for the engine core and the workers. Each first imports the server's main module,
which is this module. So the objects that such a process imports are excluded too.
"""

from __future__ import annotations

import gc
import runpy
import signal
import sys
from importlib import import_module

from .compat import ENGINE_CORE_MODULE


def _import_without_collections(module: str) -> None:
    """Import ``module`` with the collector off, and exclude all present objects from later collections."""
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
    try:
        _import_without_collections(sys.argv[0])
    except KeyboardInterrupt:
        print("sojourn: interrupted while vLLM was imported", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    del sys.modules[sys.argv[0]]  # it runs as __main__; what it imported stays
    runpy.run_module(sys.argv[0], run_name="__main__")
