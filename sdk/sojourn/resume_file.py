"""A file that holds a program's id until the program ends cleanly. A restarted client continues the program.

    with sojourn.program("fix-issue", resume="run.id"): ...

A run uses the id in the file. If there is no file, the run creates one with a fresh id, readable by the owner
only. A run that ends ``ok`` removes the file. A run that fails, is cancelled or dies leaves the file, so that
the next attempt is the same program.

The running process holds a lock on the file. The system releases the lock when the process ends. A second run
meanwhile gets an id of its own and does not touch the file. On systems without such a lock (Windows) a second
run is not detected.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from types import ModuleType
from weakref import WeakSet

from .errors import ArgumentError
from .ids import MAX_ID_BYTES, ProgramId
from .process_hooks import register_at_fork
from .valid_ids_and_names import new_program_id

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None

EXPECTED = f"one line, a program id of 1 to {MAX_ID_BYTES} bytes of UTF-8"
_NO_FILE = "it is not a regular file"
_MAX_TRIES = 100
"""Maximum number of tries to lock the file. A try fails if another run ends and removes the file
meanwhile."""


class ResumeBusy(Exception):
    """Raised if another run has locked the file."""


class ResumeFile:
    """A resume file held by this process, open and locked."""

    __slots__ = ("__weakref__", "_fd", "id", "is_new", "path")

    def __init__(self, path: str) -> None:
        """Lock the file; create it if it is missing.

        Raises ``ArgumentError`` for a file that cannot be read, written or parsed. Raises ``ResumeBusy`` if
        another run has locked it.
        """
        self.path = path
        self._fd: int | None = None
        self._fd = _opened(path)
        try:
            given = _id_in(path, os.read(self._fd, _MAX_READ))
            self.is_new = given is None
            """True if the file held no id, so that the program is new."""
            if given is None:
                given = new_program_id()
                os.lseek(self._fd, 0, os.SEEK_SET)
                os.ftruncate(self._fd, 0)
                # One write under the lock, so that a reader sees the whole id or an empty, new file. Without
                # fsync, which may block the agent for seconds. Only a crash of the machine loses the write,
                # and then the next run is a new program.
                os.write(self._fd, given.encode() + b"\n")
            self.id = given
        except OSError as error:
            self.close()
            raise _cannot(path, error) from None
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def remove(self) -> None:
        """Remove the file and release its lock. Called after the program's clean end. If ``path`` now names a
        different file, that file stays. Raises ``OSError``."""
        fd = self._fd
        try:
            # Only our own file, not one that replaced it.
            if fd is not None and os.path.samestat(os.fstat(fd), os.stat(self.path)):
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Release the file's lock; the file stays. Repeating it is harmless."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.close()


_MAX_READ = MAX_ID_BYTES + 3
"""Bytes read: the longest id, a line end, and one more byte that shows that the content is too long."""
_held: WeakSet[ResumeFile] = WeakSet()


def check(path: str) -> str:
    """Check that ``path`` can be a resume file, without creating or locking it. Raises ``ArgumentError``.
    Return the absolute path, since the agent may change its working folder later."""
    try:
        absolute = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except OSError as error:
        raise ArgumentError(
            f"resume file {path!r} is in the working folder, which cannot be found ({error.strerror}); "
            "expected a working folder that exists, or an absolute path"
        ) from None
    try:
        fd = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        folder = os.path.dirname(absolute)
        if not os.path.isdir(folder):
            raise ArgumentError(f"resume file {path!r}: {folder!r} is not a folder") from None
        return absolute
    except (OSError, ValueError) as error:
        raise _cannot(path, error) from None
    try:
        _id_in(path, os.read(fd, _MAX_READ))
    except OSError as error:
        raise _cannot(path, error) from None
    finally:
        os.close(fd)
    return absolute


_NO_DETOUR = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags for opening the file. ``O_NONBLOCK``: if the path is a pipe, opening it does not block the agent.
``O_NOFOLLOW``: a symbolic link is refused, since ``remove`` would remove only the link."""


def _open(path: str, flags: int) -> int:
    try:
        fd = os.open(path, flags | _NO_DETOUR, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _NO_FILE) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, _NO_FILE)
    return fd


def _opened(path: str) -> int:
    for _ in range(_MAX_TRIES):
        try:
            fd = _open(path, os.O_RDWR | os.O_CREAT)
        except (OSError, ValueError) as error:
            raise _cannot(path, error) from None
        try:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file before we locked it. Then our file is unlinked.
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(fd)
            raise ResumeBusy(path) from None
        except OSError as error:
            os.close(fd)
            raise _cannot(path, error) from None
        os.close(fd)
    raise ResumeBusy(path)


def _id_in(path: str, content: bytes) -> ProgramId | None:
    """Return the id in a file's bytes; ``None`` for an empty file. A file with only zero bytes, which a crash
    of the machine may leave, counts as empty. Raises ``ArgumentError`` for bytes that are no id."""
    if len(content) < _MAX_READ and not content.strip(b"\0"):
        return None
    try:
        text = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable() or len(text.encode()) > MAX_ID_BYTES:
        shown = content[:40] + b"..." if len(content) > 40 else content
        raise ArgumentError(f"resume file {path!r} holds {shown!r}; expected {EXPECTED}")
    return ProgramId(text)


def _cannot(path: str, error: Exception) -> ArgumentError:
    reason = getattr(error, "strerror", None) or str(error)
    return ArgumentError(f"resume file {path!r} cannot be used ({reason}); expected {EXPECTED}, or no file")


def _after_fork() -> None:
    # The child shares the lock. A child that outlives its parent would block the next attempt.
    for file in list(_held):
        file.close()


register_at_fork(after_in_child=_after_fork)
