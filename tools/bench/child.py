"""`python child.py ADDRESS bare|managed`: a process that has torch, or memmgr too, and forks a process for every cell.

It reads one JSON object a line, forks, and the child connects to ADDRESS and says its key. Between the two stands a keeper
that says how the child ended where that could not. The package of the tools is loaded by its path, under a name of its own: as
`memmgr.tools` it would import memmgr, which has no place in an unmanaged training.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import signal
import sys
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

PACKAGE = "_memmgr_bench_tools"


def load() -> Any:
    """The module `cell`."""
    tools = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        PACKAGE, tools / "__init__.py", submodule_search_locations=[str(tools)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{PACKAGE}.bench.cell")


def main(address: str, what: str) -> None:
    """Forks until standard input ends."""
    end_with_parent()
    cell = load()
    cell.preload()
    if what == "managed":
        from memmgr import budget  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for keepers
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            keep(cell, address, json.loads(line))


def end_with_parent() -> None:
    """A cell is stopped while others have their turn, and this process imports for seconds: no other would end them when the
    bench is. On Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def keep(cell: Any, address: str, spec: dict[str, Any]) -> None:
    """In a process of its own: the cell's, one further on."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent()
    pipe = Client(address, "AF_UNIX")
    child = os.fork()
    if child == 0:
        end_with_parent()
        pipe.send({"key": spec["key"], "pid": os.getpid()})
        code = 1
        try:
            cell.run(spec, pipe)
            code = 0
        except BaseException as error:
            pipe.send({"error": cell.in_short(error)})
        finally:
            os._exit(code)  # torch's threads and memmgr's are not waited for
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        pipe.send({"error": f"its process was ended by {name}"})
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
