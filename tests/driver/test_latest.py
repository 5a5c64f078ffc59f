"""When a cell was last used, as two threads note it at once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from . import build

PROGRAM = r"""
#include "base/latest.h"
#include <thread>
using memmgr::pager::raise_to;
std::atomic<uint64_t> now{1}, latest{0};
int main() {
  // One thread has read the clock and is late; the other's later work, behind a mark, was noted meanwhile.
  raise_to(latest, 6);
  raise_to(latest, 5);
  if (latest.load() != 6) return 1;
  const auto use = [] {
    for (int i = 0; i < 100000; ++i) raise_to(latest, now.fetch_add(1) + 1);
  };
  std::thread one(use), other(use);
  one.join();
  other.join();
  return latest.load() == now.load() ? 0 : 2;
}
"""


def test_an_older_time_never_replaces_a_later_one(tmp_path: Path) -> None:
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = tmp_path / "latest.cpp", tmp_path / "latest"
    source.write_text(PROGRAM)
    pager = build.CORE.parent / "pager"
    subprocess.run([compiler, "-std=c++20", "-O2", "-pthread", f"-I{pager}", source, "-o", program], check=True)
    assert subprocess.run([program]).returncode == 0
