"""Runs at the start of every Python process under ``sojourn run``, and instruments agent frameworks that
the process imports.

``sojourn run`` puts this folder first on ``PYTHONPATH``. Interpreters of any version find this file, even
where neither sojourn nor a framework is installed. So the file is ASCII that Python 2 can read, uses only the
standard library, and imports nothing heavy. A failure leaves the process as it was. Python finds this file
before a ``sitecustomize`` of the user, so this file runs the user's ``sitecustomize`` too.
"""

import os
import sys

OLDEST = (3, 10)
"""Oldest Python that sojourn supports. In older versions this file does nothing."""

AGENT = "SOJOURN_RUN_AGENT"
"""Environment variable with the process id of the agent's Python. A Python process that a tool starts finds
another process's id in the variable, and so knows that it is not the agent."""

CHILDREN = "SOJOURN_RUN_CHILDREN"
"""Environment variable that ``sojourn run --children`` sets. With it, the agent's Python child processes are
instrumented too."""

PACKAGES = (
    "openai",
    "anthropic",
    "crewai",
    "litellm",
    "langchain_core",
    "langgraph.pregel",
    "autogen_agentchat",
    "agents",
)
"""Packages to instrument when they are imported. mini-swe-agent is recognised by one of its modules
instead."""

WORKERS = ("--multiprocessing-fork", "from multiprocessing.forkserver import main")
"""Parts of the command line by which worker processes of multiprocessing are recognised."""


class WhenImported:
    """A meta path finder that runs ``action`` after the import of the module ``name``. The module itself is
    found and loaded by the other finders.

    The finder waits until the import succeeds, since a module that was found may fail to import. Then it
    finds nothing any more, but stays installed. Python walks through the live list ``sys.meta_path``, so a
    removal could make an import in another thread skip the next finder.
    """

    def __init__(self, name, action, quiet):
        self.name = name
        self.action = action
        self.quiet = quiet  # no message if sojourn is missing, since not only agents import the module
        self.done = False

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name or self.done:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
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
            # One loader may serve many modules, for example the loader of a zip file.
            if module.__name__ == self.name and not self.done:
                self.done = True
                if loader.__dict__.get("exec_module") is exec_module:
                    del loader.exec_module
                self.act()

        loader.exec_module = exec_module

    def act(self):
        try:
            self.action()
        except Exception as error:
            if not (self.quiet and isinstance(error, ImportError)):
                sys.stderr.write(
                    " ".join(("sojourn: not attached:", type(error).__name__ + ":", str(error), "\n"))
                )


def attach_to_mini():
    from sojourn_integrations import mini_swe_agent

    mini_swe_agent.instrument()


def attach_to(package):
    def attach():
        from sojourn._import_hook import run_import_callback
        from sojourn.runtime import session

        session()  # the session that the user's code has set up, or a new one for SOJOURN_URL
        # The session may begin during this import, as when litellm imports openai. Then the import hook is
        # too late to see the import's start.
        run_import_callback(package)

    return attach


def is_the_agent():
    """Return whether this process is the agent of ``sojourn run``, not a Python that one of its tools
    started.

    The agent is the first Python process below ``sojourn run``. The agent's multiprocessing workers, and a
    Python that replaces the agent by exec, count as the agent too. With ``--children`` every Python process
    counts.
    """
    agent = os.environ.get(AGENT)
    if not agent or os.environ.get(CHILDREN) or agent == str(os.getpid()):
        return True
    is_worker = any(mark in part for part in sys.orig_argv for mark in WORKERS)
    return is_worker and agent == str(os.getppid())


def watch_imports():
    if sys.version_info < OLDEST or not is_the_agent():
        return
    os.environ[AGENT] = str(os.getpid())
    sys.meta_path.insert(0, WhenImported("minisweagent.agents.default", attach_to_mini, quiet=False))
    for package in PACKAGES:
        sys.meta_path.insert(0, WhenImported(package, attach_to(package), quiet=True))


def run_hidden_sitecustomize():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    if sys.version_info < (3, 5):  # noqa: UP036
        del sys.modules["sitecustomize"]
        try:  # noqa: SIM105
            __import__("sitecustomize")
        except ImportError:
            pass
        return
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


watch_imports()
run_hidden_sitecustomize()
