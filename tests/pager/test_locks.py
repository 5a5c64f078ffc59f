"""The pager's locks (allocator/pager/base/lock.h): a wrong order ends the process, and a child of fork finds them free."""

import os
import re
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest

from memmgr.tools.house import check_locks

ROOT = Path(__file__).resolve().parents[2]
PAGER = ROOT / "allocator" / "pager"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("locks") / "locks"
    sources = [Path(__file__).with_name("locks.cpp"), PAGER / "base" / "lock.cpp"]
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-Wall", "-Werror", f"-I{PAGER}", *map(str, sources), "-o"]
    subprocess.run([*command, str(made)], check=True)
    return made


@pytest.mark.parametrize("case", ["in_order", "given_back", "forks"])
def test_locks_in_rising_rank(program: Path, case: str) -> None:
    subprocess.run([program, case], check=True, timeout=120)


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("out_of_order", ["Graph (rank 3)", "Kinds (rank 100)"]),
        ("two_leaves", ["Events (rank 100)", "Kinds (rank 100)"]),
    ],
)
def test_a_wrong_order_ends_the_process_with_both_names(program: Path, case: str, named: list[str]) -> None:
    done = subprocess.run([program, case], capture_output=True, text=True, timeout=60)
    assert done.returncode < 0
    assert all(name in done.stderr for name in named)


def test_the_table_in_the_docs_is_of_today() -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "house" / "lock_table.py", "--check"], check=True)


COLLECTIVES = """
import torch, torch.distributed as dist, memmgr
from memmgr.native import binding

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with memmgr.budget("64MB", quiet=True):
    binding.load().set_graph_checks(0.0)  # ranks are checked from here on
    for _ in range(20):
        y = torch.ones(40_000) * 2
        dist.all_reduce(y, async_op=True)
        del y
        torch.ones(40_000) + 1
print("done")
"""


def test_a_collective_that_has_the_last_tensor_ends_outside_of_its_lock() -> None:
    """The end of the tensor takes the graph's lock, which comes before the lock of works."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = forkserver.run([sys.executable, "-c", COLLECTIVES], capture_output=True, text=True, env=env, timeout=90)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_each_function_that_wants_a_lock_says_which() -> None:
    named: set[str] = set()
    marked: set[str] = set()  # and pointers to functions, which cannot be marked
    for path in (*PAGER.rglob("*.h"), *PAGER.rglob("*.cpp")):
        text = path.read_text()
        named |= set(re.findall(r"\b(\w+_locked)\(", text))
        marked |= set(re.findall(r"\b(\w+_locked)\((?:[^;{}]|\{\})*?\)\s*(?:const\s*)?REQUIRES", text))
        marked |= set(re.findall(r"\(\*(\w+_locked)\)", text))
    assert named - marked == set()


UNIT = """
#include "base/lock.h"
namespace memmgr::pager {
int state OF_GRAPH = 0;
void change_locked() REQUIRES(graph_lock());
void work() {
  %s
}
}
"""


@pytest.mark.skipif(not check_locks.program(), reason="there is no clang-tidy")
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("const Hold lock(graph_lock()); ++state; change_locked();", ""),
        ("++state;", "writing variable 'state' requires holding mutex 'graph_lock()'"),
        ("change_locked();", "calling function 'change_locked' requires holding mutex 'graph_lock()'"),
        ("const Hold lock(graph_lock()); const Unlocked free(graph_lock()); ++state;", "writing variable 'state'"),
        ("Hold lock(graph_lock()); { const Unlocked free(graph_lock()); } ++state;", ""),
        ("const Hold lock(lock_of(LockId::kKinds)); ++state;", "writing variable 'state'"),
    ],
)
def test_clang_compares_guarded_state_with_held_locks(tmp_path: Path, code: str, error: str) -> None:
    unit = tmp_path / "unit.cpp"
    unit.write_text(UNIT % code)
    done = check_locks.check(unit)
    assert (done.returncode != 0) == bool(error), done.stdout + done.stderr
    assert error in done.stdout
