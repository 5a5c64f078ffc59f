"""`subprocess.run` and `subprocess.Popen` for Python programs, without the seconds that importing torch takes.

A process that has imported torch, and no module of memmgr, forks a child for each program and gives it the program's
arguments, folder, environment and standard streams. The child's interpreter ends as every one does, without the
destructors of torch's libraries, and it is this process's child, as `Popen` makes it. Half of the suite's time was the
start of interpreters.

Variables that torch or the C library read when they are loaded have no effect any more. A program that sets such a
variable gets an interpreter of its own, and so does one with an option that is not known here.

This module may stand where a module has imported `subprocess`.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT, CompletedProcess, SubprocessError, TimeoutExpired
from typing import Any

__all__ = ["PIPE", "STDOUT", "CompletedProcess", "Popen", "SubprocessError", "TimeoutExpired", "commands", "run"]

_READ_AT_LOAD = (
    "LD_",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS",
    "MALLOC_",
    "GLIBC_",
    "ATEN_",
    "TORCH_",
    "PYTHON",
    "ASAN",
    "TSAN",
    "CUDA",
)
_TAKEN_UP = (
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "PYTHONSAFEPATH",
    "PYTHONWARNINGS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "CUDA_VISIBLE_DEVICES",  # read when CUDA is first used
    "OMP_WAIT_POLICY",  # how threads wait, where there is one
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # torchrun's, read when a group is made
)
_CODE = "from forkserver import serve; serve({})"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER

_lock = threading.Lock()


def _at_load(environment: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_READ_AT_LOAD) and k not in _TAKEN_UP}


@functools.cache
def _server() -> tuple[socket.socket, dict[str, str]]:
    """The socket to it, and its environment."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = dict(os.environ)
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {_CODE.format(its.fileno())}",
        ],
        env={
            **{k: v for k, v in environment.items() if not k.startswith("MEMMGR_")},
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        },
        pass_fds=[its.fileno()],
        start_new_session=True,
    )
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours, environment


def _parsed(args: list[str]) -> dict[str, Any] | None:
    """The interpreter's options; None: one is not known here."""
    if args[0] != sys.executable:
        return None
    warnings, safe, rest = [], False, args[1:]
    while rest and rest[0] in ("-W", "-P"):
        if rest[0] == "-W":
            warnings.append(rest[1])
        safe = safe or rest[0] == "-P"
        rest = rest[2 if rest[0] == "-W" else 1 :]
    kind = rest[0] if rest and rest[0] in ("-c", "-m") else ""
    if not rest or (not kind and rest[0].startswith("-")):
        return None
    return {"kind": kind, "what": rest[bool(kind)], "argv": rest[bool(kind) + 1 :], "warnings": warnings, "safe": safe}


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen`; `args` a list that begins with `sys.executable`."""

    def __init__(self, args: list[str], **more: Any) -> None:
        self._session = bool(more.get("start_new_session"))
        super().__init__(args, **more)

    def _execute_child(self, args: Any, *more: Any) -> None:  # type: ignore[override]
        cwd, env, pipes = more[4], more[5], more[9:15]
        words = [os.fspath(word) for word in args]
        environment = dict(os.environ if env is None else env)
        request = _parsed(words)
        if request is None or more[1] is not None or more[3] or more[8]:  # preexec_fn, pass_fds, shell
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        with _lock:
            server, its = _server()
            if _at_load(environment) != _at_load(its):
                super()._execute_child(args, *more)  # type: ignore[misc]
                return
            request |= {
                "cwd": os.fspath(cwd or os.getcwd()),
                "env": environment,
                "session": self._session,
                "words": words,
            }
            streams = [ours if ours != -1 else standard for standard, ours in enumerate((pipes[0], pipes[3], pipes[5]))]
            libc = ctypes.CDLL(None)
            libc.prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(server, [json.dumps(request).encode()], streams)
                self.pid = int(server.recv(32))
            finally:
                libc.prctl(_SUBREAPER, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(args: list[str], *, timeout: float | None = None, check: bool = False, **more: Any) -> CompletedProcess[Any]:
    """As `subprocess.run`."""
    if more.pop("capture_output", False):
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    said = more.pop("input", None)
    if said is not None:
        more["stdin"] = subprocess.PIPE
    with Popen(args, **more) as process:
        try:
            out, err = process.communicate(said, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


_SHIM = """#!{python} -ISB
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as there:
    there.connect({address!r})
    asked = [sys.argv[0], *sys.argv[1:]], os.getcwd(), dict(os.environ)
    text = json.dumps(asked).encode()
    socket.send_fds(there, [len(text).to_bytes(8, "little")], [0, 1, 2])
    there.sendall(text)
    code = int(there.recv(32))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_COMMANDS = {"python": [], "memmgr": ["-P", "-m", "memmgr"]}


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Path]:
    """A folder for the PATH, in `folder`, whose `python` and `memmgr` run by the fork server, for shells and scripts."""
    place = folder / "commands"
    place.mkdir()
    address = str(place / "socket")
    for name in _COMMANDS:
        (place / name).write_text(_SHIM.format(python=sys.executable, address=address))
        (place / name).chmod(0o755)

    def one(connection: socket.socket) -> None:
        with connection:
            length, streams, _, _ = socket.recv_fds(connection, 8, 3)
            text = b""
            while len(text) < int.from_bytes(length, "little"):
                text += connection.recv(1 << 20)
            (name, *words), cwd, environment = json.loads(text)
            command = [sys.executable, *_COMMANDS[Path(name).name], *words]
            stdin, stdout, stderr = streams
            process = Popen(command, cwd=cwd, env=environment, stdin=stdin, stdout=stdout, stderr=stderr)
            for descriptor in streams:
                os.close(descriptor)
            connection.sendall(str(process.wait()).encode())

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield place
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def serve(number: int) -> None:
    """Forks for each request until the socket closes; in the children, this runs the program."""
    import gc

    import numpy  # noqa: F401

    # Its binding would report, at the end, objects that we keep for the programs.
    sys.modules["triton"] = None  # type: ignore[assignment]
    import torch._dynamo  # noqa: F401  which torch's optimizers import on their way

    del sys.modules["triton"]

    gc.collect()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(gc.get_objects()))  # a program that ends does not take torch apart
    gc.freeze()
    _keep_frozen()
    server = socket.socket(fileno=number)
    while True:
        text, streams, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not text:
            os._exit(0)
        reading, writing = os.pipe()
        waits, goes = os.pipe()
        between = os.fork()
        if between == 0:  # it ends at once, so that the program is a child of the requesting process
            child = os.fork()
            if child:
                os.write(writing, str(child).encode())
                os._exit(0)
            for descriptor in (reading, writing, goes):
                os.close(descriptor)
            server.close()
            # a program that ends with its parent (PR_SET_PDEATHSIG) would end with the process in between
            os.read(waits, 1)
            os.close(waits)
            _become(json.loads(text), streams)
            return
        os.close(writing)
        os.waitpid(between, 0)
        server.send(os.read(reading, 32))
        for descriptor in (reading, waits, goes, *streams):
            os.close(descriptor)


def _keep_frozen() -> None:
    """`gc.unfreeze` does nothing until the program itself freezes. A budget unfreezes when it opens. Every later collection,
    at the program's end above all, then goes through all of torch, which took longer than the rest of the program. Nor are
    the frozen objects counted, which a budget does first: that goes through them, and took most of its opening.
    """
    import gc

    freeze, unfreeze, count = gc.freeze, gc.unfreeze, gc.get_freeze_count

    def keep() -> None:
        pass

    def program_freezes() -> None:
        if gc.unfreeze is keep:
            gc.unfreeze, gc.get_freeze_count = unfreeze, count
        freeze()

    gc.freeze, gc.unfreeze, gc.get_freeze_count = program_freezes, keep, lambda: 0


def _become(request: dict[str, Any], streams: list[int]) -> None:
    import faulthandler
    import runpy
    import warnings

    import torch

    if request["session"]:
        os.setsid()
    for standard, descriptor in enumerate(streams):
        os.dup2(descriptor, standard)
    for descriptor in streams:
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    options = [*filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")), *request["warnings"]]
    sys.warnoptions[:] = options
    warnings._processoptions(options)  # type: ignore[attr-defined]
    sys.orig_argv[:] = request["words"]
    kind, what = request["kind"], request["what"]
    sys.argv[:] = [kind or what, *request["argv"]]
    sys.path.remove(str(Path(__file__).parent))
    if not request["safe"] and not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, {"-c": "", "-m": os.getcwd()}.get(kind, str(Path(what).resolve().parent)))
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # found anew, by this program's TMPDIR
    main = sys.modules["__main__"].__dict__
    for name in ("serve", "sys"):
        main.pop(name, None)
    # The destructors of torch's own libraries take half of a short program's time. Those of libraries that the program loads
    # run before this, and nothing waits in a buffer of C's.
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 2, 0)
    libc.on_exit(libc._exit, None)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        torch._import_device_backends()  # as importing it does at its end
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    if not kind:
        main["__file__"] = what
    exec(compile(what if kind else Path(what).read_bytes(), "<string>" if kind else what, "exec"), main)
