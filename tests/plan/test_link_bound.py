"""The bound of a step's time with a link (a study): no plan is faster, and it grows where memory is short."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from memmgr.policies.plan.planner import plan
from memmgr.policies.trace import TierLink

from .test_paging import Training

pytest.importorskip("scipy", reason="linear programs need scipy")
STUDY = Path(__file__).parents[2] / "tools" / "bench" / "studies" / "link_bound.py"


@pytest.fixture(scope="module")
def study() -> Any:
    spec = importlib.util.spec_from_file_location("link_bound", STUDY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["link_bound"] = module
    spec.loader.exec_module(module)
    return module


def test_no_plan_is_faster_than_the_bound(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "SMALL", 0)
    trace = Training(8).trace()
    link = TierLink("host", 2e3, 2e3) if not trace.links else trace.links[0]
    need, bounds = trace.unmanaged_peak[0], []
    for share in (0.9, 0.6, 0.4):
        found = plan(trace, int(share * need), link=link)
        delay = study.Program(trace, link, int(share * need)).solve()
        assert delay is not None and found.overhead is not None
        bounds.append(1 + delay / trace.seconds)
        assert bounds[-1] <= found.overhead * (1 + 1e-6)
    assert bounds == sorted(bounds) and bounds[-1] > bounds[0]
