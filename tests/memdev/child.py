"""Runs a function of `scenarios` in a fresh interpreter: the device's name and its place as *the* accelerator are for good.

result = child.run("streams", mode="late")      # in a test
python -m memdev.child streams '{"mode": "late"}'  # that call runs this
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import forkserver
from exactness import children


def start(
    scenario: str, *, timeout: float = 60, module: str = "memdev.scenarios", **kwargs: Any
) -> subprocess.Popen[str]:
    """Starts ``module.scenario(**kwargs)`` in a process of its own."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "EXACTNESS_DUMP_AFTER": str(timeout - 3),
    }
    return forkserver.Popen(
        [sys.executable, "-W", "error", "-m", "memdev.child", module, scenario, json.dumps(kwargs)],
        cwd=children.TESTS,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> Any:
    """The function's result (JSON). The failure has its whole output if it raised, crashed or hung."""
    return json.loads(children.finish(process, timeout).splitlines()[-1])


def run(scenario: str, *, timeout: float = 60, **kwargs: Any) -> Any:
    """`start` and `finish`."""
    return finish(start(scenario, timeout=timeout, **kwargs), timeout)


def each_once(
    scenarios: dict[str, tuple[str, str, dict[str, Any]]], timeout: float = 60
) -> Iterator[Callable[[str], Any]]:
    """Yields a function from a scenario's name to its result; a scenario is (module, function, arguments). Each runs once,
    two at a time, requested ones first. For a fixture."""
    pool = ThreadPoolExecutor(max_workers=2)
    started: dict[str, Any] = {}

    def result(name: str) -> Any:
        for each in (name, *scenarios):
            if each not in started:
                module, scenario, kwargs = scenarios[each]
                started[each] = pool.submit(run, scenario, module=f"memdev.{module}", timeout=timeout, **kwargs)
        return started[name].result()

    yield result
    pool.shutdown(cancel_futures=True)


def main() -> None:
    children.arm()
    module, scenario, kwargs = sys.argv[1:]
    result = getattr(__import__(module, fromlist=[scenario]), scenario)(**json.loads(kwargs))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
