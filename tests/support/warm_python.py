"""Starts Python programs as forks of one that has imported vLLM, which takes eight seconds of a core.

``start_engines_warm`` and ``fork_for_multiprocessing`` patch this process: code that would start an engine's
server, or a process of ``multiprocessing``, asks a *warm* process instead. The warm process forks. The fork
takes over arguments, environment, folder and files, and becomes a child of this process, as if this process
had started it. The warm process has imported vLLM and nothing of sojourn. It starts when it is first needed,
and ends with this process.

A program starts as usual, without a fork, if variables that its interpreter reads differ from those of the
warm process, if ``SOJOURN_TEST_SPAWN`` is set, or if there is no warm process. A warning then says why.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from forked_processes import sitecustomize

IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "rich.console",
    "typer",
)
SERVE = ("-m", "sojourn_server.cli", "serve")
API_SERVER = "vllm.entrypoints.openai.api_server"
OF_THE_INTERPRETER = (
    "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TORCHDYNAMO_", "LD_", "HF_", "TRANSFORMERS_", "LANG", "LC_", "TZ",
)  # fmt: skip
"""Beginnings of the names of variables that are read at a program's start, or while torch is imported."""
READ_LATER = {"PYTHONPATH", "PYTHONHASHSEED"}
"""But these: the fork takes over the path, and vLLM reads the seed from the environment."""

_PR_SET_CHILD_SUBREAPER = 36
_MOST_FILES = 64


class WarmPython:
    """The warm process. ``start`` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._ended = False

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with this environment may be a fork."""
        if "SOJOURN_TEST_SPAWN" in environment or self._ended:
            return False
        with self._lock:
            try:
                self._open()
            except (OSError, EOFError) as error:
                self._give_up(error)
                return False
        return _of_the_interpreter(environment) == _of_the_interpreter(self._environment)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[int, int],
        *,
        folder: str | None = None,
        new_session: bool = False,
    ) -> int | None:
        """Start ``python *arguments`` and return the process id of what is now this process's child; ``None``
        if the warm process has ended. ``files``: its file descriptors, and the ones of this process that they
        are to be."""
        request = pickle.dumps(
            (list(arguments), dict(environment), list(files), folder or os.getcwd(), new_session)
        )
        with self._lock:
            answer = b""
            try:
                connection = self._open()
                # What the warm process's child leaves behind becomes ours.
                _adopt_orphans(True)
                try:
                    socket.send_fds(connection, [len(request).to_bytes(8, "big")], list(files.values()))
                    connection.sendall(request)
                    answer = connection.recv(8)
                finally:
                    _adopt_orphans(False)
            except (OSError, EOFError) as error:
                self._give_up(error)
                return None
            except BaseException:  # a time limit or Ctrl-C: the answer would be taken for the next one's
                self._close()
                raise
            if not answer:
                self._give_up(EOFError("it closed the connection"))
                return None
        return int.from_bytes(answer, "big")

    def _give_up(self, error: Exception) -> None:
        self._ended = True
        self._close()
        warnings.warn(f"the warm process has ended: {error!r}; programs start as usual", stacklevel=3)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _open(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair()
            self._environment = dict(os.environ)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is not for it
                )
            if not ours.recv(1):  # it has imported
                ours.close()
                raise EOFError("it ended while it imported")
            self._socket = ours
        return self._socket


warm = WarmPython()


def start_engines_warm() -> None:
    """Patch ``subprocess``, so that servers are forks of the warm process."""
    usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(usual)

    def execute_child(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        command, environment = given["args"], given["env"]
        if environment is None:
            environment = dict(os.environ)
        if given["shell"] or given["preexec_fn"] or given["pass_fds"] or not _is_server(command):
            return usual(self, *args, **kwargs)
        if not warm.fits(environment):
            return usual(self, *args, **kwargs)
        streams = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
        files = {at: at if given[name] == -1 else given[name] for name, at in streams}
        folder = None if given["cwd"] is None else os.fspath(given["cwd"])
        pid = warm.start(
            command[1:], environment, files, folder=folder, new_session=given["start_new_session"]
        )
        if pid is None:
            return usual(self, *args, **kwargs)
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPE_ENDS))
        return None

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


_PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def fork_for_multiprocessing(patch: Any, starts: Callable[[str], bool]) -> None:
    """Have ``multiprocessing`` ask the warm process for each process whose code ``starts`` returns true for.
    ``patch``: a MonkeyPatch."""
    from multiprocessing import util

    usual = util.spawnv_passfds

    def spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
        command = [os.fsdecode(arg) for arg in args]
        at = command.index("-c") if "-c" in command else 0
        if not at or not starts(command[at + 1]) or not warm.fits(os.environ):
            return usual(path, args, passfds)
        pid = warm.start(command[at:], os.environ, {fd: fd for fd in (0, 1, 2, *passfds)})
        return usual(path, args, passfds) if pid is None else pid

    patch.setattr(util, "spawnv_passfds", spawn)


def is_spawned(code: str) -> bool:
    """``multiprocessing`` runs it in a process that it spawns."""
    return "spawn_main(" in code


def forks_simulations(code: str) -> bool:
    """It is the server of ``multiprocessing`` that forks simulations, with vLLM imported."""
    return "forkserver" in code and "sojourn_server.simulator" in code


def _is_server(command: Any) -> bool:
    if not isinstance(command, list) or command[:1] != [sys.executable]:
        return False
    return tuple(command[1:4]) == SERVE or API_SERVER in command


def _of_the_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(OF_THE_INTERPRETER) and name not in READ_LATER
    }


def _adopt_orphans(so: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(so), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


# --- the warm process -------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    """Import, then fork for each request until the other end is closed."""
    import gc
    from importlib import import_module

    gc.disable()
    path_before = [*sys.path[1:]]  # without this file's folder
    for module in IMPORTED:
        import_module(module)
    sitecustomize.spin_for_a_moment_only()
    import_module(
        "setproctitle"
    ).getproctitle()  # finds its place beside the environment, which a fork replaces
    gc.freeze()
    connection.sendall(b"r")
    while True:
        size, files, _, _ = socket.recv_fds(connection, 8, _MOST_FILES)
        if not size:
            os._exit(0)
        request = b""
        while len(request) < int.from_bytes(size, "big"):
            part = connection.recv(1 << 20)
            if not part:
                os._exit(0)
            request += part
        arguments, environment, numbers, folder, new_session = pickle.loads(request)
        reader, writer = os.pipe()
        parent = os.fork()
        if not parent:  # it ends at once: its child is then the one's that asked
            child = os.fork()
            if child:
                os.write(writer, child.to_bytes(8, "big"))
                os._exit(0)
            os.close(reader)
            os.close(writer)
            connection.close()
            gc.enable()
            _become(
                arguments,
                environment,
                dict(zip(numbers, files, strict=True)),
                folder,
                new_session,
                path_before,
            )
        os.close(writer)
        os.waitpid(parent, 0)
        child_id = os.read(reader, 8)
        os.close(reader)
        for fd in files:
            os.close(fd)
        connection.sendall(child_id)


def _become(
    arguments: list[str],
    environment: dict[str, str],
    files: dict[int, int],
    folder: str,
    new_session: bool,
    path: list[str],
) -> NoReturn:
    """Be what ``python *arguments`` would be."""
    import fcntl

    if new_session:
        os.setsid()
    above = max(300, *files) + 1
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in files.items()}
    for fd in files.values():
        os.close(fd)
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(folder)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [entry for entry in path if entry not in before]
    _run_program(arguments, environment, base)


def _run_program(arguments: list[str], environment: dict[str, str], base: list[str]) -> NoReturn:
    """Run it as the main program, and end."""
    import runpy

    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv[1:] = arguments
    rest = list(arguments)
    while rest[0] == "-W":
        warnings._processoptions([rest[1]])  # type: ignore[attr-defined]
        sys.warnoptions.append(rest[1])
        del rest[:2]
    kind, what = rest[:2]
    extra = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [os.getcwd() if kind == "-m" else "", *extra, *base]
    sys.argv[:] = [kind, *rest[2:]]
    _configure_logging()

    execve = os.execve

    def become_another(program: str, argv: list[str], env: Mapping[str, str]) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        if program != sys.executable or _of_the_interpreter(env) != _of_the_interpreter(environment):
            execve(program, argv, env)
        _run_program(argv[1:], dict(env), base)

    os.execve = become_another  # type: ignore[assignment]
    code = 0
    try:
        sitecustomize.fork_where_vllm_spawns()  # its own processes too
        sitecustomize.inspect_models_here()
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        if kind == "-m":
            runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        else:
            exec(compile(what, "<string>", "exec"), vars(main))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        _finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    _end(code)


def _configure_logging() -> None:
    """vLLM sets up its logs when it is imported."""
    from vllm import envs, logger

    if hasattr(envs.__getattr__, "cache_clear"):
        envs.__getattr__.cache_clear()
    logger._configure_vllm_root_logger()


def _end(code: int) -> NoReturn:
    """As an interpreter ends."""
    try:
        _finish()
    finally:
        os._exit(code)


def _finish() -> None:
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
