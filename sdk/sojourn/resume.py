"""A file that holds a program's id until its clean end, so that a restarted client goes on with it.

    with sojourn.program("fix-issue", resume="run.id"): ...

Found, its id is taken up; else a fresh one is written, readable by its owner only.
A run that ends ``ok`` removes it; one that fails, is cancelled or dies leaves it,
so that the next attempt is the same program. Whoever runs the program holds a lock
on the file, which the system lifts with the process; a second one meanwhile runs
under an id of its own and leaves the file alone. Where the system has no such lock
(Windows), nobody is told of the other.
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
from .naming import new_program_id

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None

EXPECTED = f"one line, a program id of 1 to {MAX_ID_BYTES} bytes of UTF-8"
_NO_FILE = "it is not a regular file"
_MAX_TRIES = 100
"""A holder that ends while we wait in line removes the file; so often in a row means somebody else does."""


class ResumeBusy(Exception):
    """Another run holds the file."""


class ResumeFile:
    """A resume file held by this process, open and locked."""

    __slots__ = ("__weakref__", "_fd", "id", "is_new", "path")

    def __init__(self, path: str) -> None:
        """Take the file, and make it where it is not there.

        Raises ``ArgumentError`` for one that cannot be read, written or understood, and ``ResumeBusy``.
        """
        self.path = path
        self._fd: int | None = None
        self._fd = _opened(path)
        try:
            given = _id_in(path, os.read(self._fd, _MAX_READ))
            self.is_new = given is None
            """It held no id: nobody has begun this program before."""
            if given is None:
                given = new_program_id()
                # In one write and under the lock: whoever reads it waits for us, or finds it empty, as new.
                os.write(self._fd, given.encode() + b"\n")
                os.fsync(self._fd)
            self.id = given
        except OSError as error:
            self.close()
            raise _cannot(path, error) from None
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def remove(self) -> None:
        """The program has ended cleanly: nobody is to go on with it. Raises ``OSError``."""
        fd = self._fd
        try:
            # Not a file that somebody else has put in its place.
            if fd is not None and os.path.samestat(os.fstat(fd), os.stat(self.path)):
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Give it back. Repeating it is harmless."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.close()


_MAX_READ = MAX_ID_BYTES + 3
"""The longest id, a line's end, and one more byte to see that it is too long."""
_held: WeakSet[ResumeFile] = WeakSet()


def check(path: str) -> None:
    """Look at the file without taking it. Raises ``ArgumentError`` where it could not be used."""
    try:
        fd = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise ArgumentError(f"resume file {path!r}: {folder!r} is not a folder") from None
        return
    except (OSError, ValueError) as error:
        raise _cannot(path, error) from None
    try:
        _id_in(path, os.read(fd, _MAX_READ))
    except OSError as error:
        raise _cannot(path, error) from None
    finally:
        os.close(fd)


_NO_DETOUR = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""A pipe must not keep the agent waiting. A link would lead to what somebody else chose, and be all that
``remove`` removes."""


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
            # Its holder may have removed it between the two lines above: then we locked a file of no name.
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
    """The id a file's bytes say, ``None`` where it is empty. Raises ``ArgumentError``."""
    if not content:
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
    # A child that outlives its parent would keep the lock, which they share, and the next attempt out.
    for file in list(_held):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
