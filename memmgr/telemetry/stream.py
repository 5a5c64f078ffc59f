"""The telemetry stream's address and version: a training process and its readers have to agree on both. Imports no
heavy module: a dashboard starts without torch. Every line has a `type`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import tempfile
from pathlib import Path

PROTOCOL = 2
"""Counts up when a reader of the old format would misread the new one; new fields do not count."""

_LONGEST = 100  # bytes of a socket's path that every system takes (Linux: 107)


class Unreachable(OSError):
    """The process cannot be reached; the text has the reason, in one line."""


def folder() -> Path:
    """Where the sockets are: `memmgr` in the user's runtime folder, else `memmgr-<uid>` in the temporary one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "memmgr"
    return Path(tempfile.gettempdir()) / f"memmgr-{os.getuid()}"


def private_folder() -> Path:
    """The folder, made if need be.

    Raises:
        OSError: it cannot be made, or another user owns it, or other users may enter: then no socket is made there.
    """
    path = folder()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "not a folder of this user's alone (mode 0700)", str(path))
    return path


def socket_of(pid: int) -> Path:
    """The address of a process."""
    return folder() / f"{pid}.sock"


def processes() -> list[int]:
    """The processes of this user with an open budget, by their sockets; sockets without a process are removed."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(folder().iterdir()):
            pid = path.name.partition(".")[0]
            if not pid.isdecimal() or path.suffix not in (".sock", ".new"):
                continue
            if path.suffix == ".new":  # between bind and rename: an instant, unless its maker died there
                if not _alive(int(pid)):
                    _unlink(path)
            elif _served(path):
                found.append(int(pid))
            else:
                _unlink(path)
    return sorted(found)


def _remove_dead() -> None:
    """Sockets of processes that were killed. One that lives is not asked: that would wake it."""
    with contextlib.suppress(OSError):
        for path in sorted(folder().iterdir()):
            pid = path.name.partition(".")[0]
            if not pid.isdecimal() or path.suffix not in (".sock", ".new") or _alive(int(pid)):
                continue
            if path.suffix == ".new" or not _served(path):
                _unlink(path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _served(path: Path) -> bool:
    """Tells if a process listens there. Only a refusal proves the opposite: a busy one must not lose its address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            _at(path, probe.connect)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _at(path: Path, act: object) -> None:
    """`bind` or `connect`, also where the path is longer than a socket's address may be."""
    assert callable(act)
    if len(os.fsencode(path)) <= _LONGEST:
        act(str(path))
        return
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        act(f"/proc/self/fd/{fd}/{path.name}")
    finally:
        os.close(fd)


def listen() -> tuple[socket.socket, Path]:
    """This process's socket, mode 0600, listening.

    Raises:
        OSError: there is no folder for it.
    """
    _remove_dead()
    for _ in range(5):
        path = private_folder() / f"{os.getpid()}.sock"
        new = path.with_suffix(".new")
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.setblocking(False)
            _unlink(new)
            _at(new, server.bind)
            os.chmod(new, 0o600)
            server.listen(8)
            os.rename(new, path)  # readers that find the new path find a listening socket
        except FileNotFoundError:  # another process took the empty folder away
            server.close()
            continue
        except BaseException:
            server.close()
            _unlink(new)
            raise
        return server, path
    raise FileNotFoundError(errno.ENOENT, "the folder for the sockets is removed as soon as it is made", str(folder()))


def remove(path: Path) -> None:
    """Removes the address, and the folder if it is the last one in it."""
    _unlink(path)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def connect(pid: int, seconds: float = 5.0) -> socket.socket:
    """A connection to a process, blocking with that time-out.

    Raises:
        Unreachable: no such process, it has no open budget, it is another user's, or it does not answer.
    """
    path = socket_of(pid)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(seconds)
    try:
        _at(path, client.connect)
        return client
    except OSError as error:
        client.close()
        raise Unreachable(_why(pid, error)) from None


def _why(pid: int, error: OSError) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"there is no process {pid}"
    except (PermissionError, OverflowError):
        return f"process {pid} belongs to another user; memmgr's sockets are for their own user only"
    if isinstance(error, PermissionError):
        return f"no permission to reach process {pid}: {error.strerror}"
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return f"process {pid} has no open memmgr budget (or runs with MEMMGR_TELEMETRY=0)"
    return f"process {pid} does not answer: {error.strerror or error}"
