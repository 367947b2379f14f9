"""Runs at the start of every Python below ``sojourn run``: attaches to an agent when one is imported.

``sojourn run`` puts this folder first on ``PYTHONPATH``. The interpreter that finds it may be a
foreign one, in which nothing of ours or of mini is installed, so only the standard library is
used here, nothing heavy is imported, and every failure leaves the program as it was. A
``sitecustomize`` of the user's own, hidden by this one, is run as if this one were not there.
"""

import sys


class WhenImported:
    """A meta path finder that lets the others find one module, then runs ``action`` after its body."""

    def __init__(self, name, action, *, quiet):
        self.name = name
        self.action = action
        self.quiet = quiet
        """Say nothing where our packages are absent: the module is used by more than agents."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                self.act_after(spec.loader)
                return spec
        return None

    def act_after(self, loader):
        execute = getattr(loader, "exec_module", None)
        if execute is None or not hasattr(loader, "__dict__"):
            return

        def exec_module(module):
            execute(module)
            try:
                self.action()
            except Exception as error:
                if not (self.quiet and isinstance(error, ImportError)):
                    print(f"sojourn: not attached: {type(error).__name__}: {error}", file=sys.stderr)

        loader.exec_module = exec_module


def attach_to_mini():
    from sojourn_integrations import mini_swe_agent

    mini_swe_agent.instrument()


def attach_to_openai():
    import sojourn

    sojourn.init()


def run_hidden_sitecustomize():
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, WhenImported("minisweagent.agents.default", attach_to_mini, quiet=False))
sys.meta_path.insert(0, WhenImported("openai", attach_to_openai, quiet=True))
run_hidden_sitecustomize()
