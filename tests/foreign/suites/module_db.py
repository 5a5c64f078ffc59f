"""PyTorch's database of modules: each module in each dtype, training and evaluating. `tests/ops` runs the samples."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from ops import sweep

from foreign.recorder import RECORDER

NAMES = [name for name in sweep.op_names() if name.startswith("module ")]


@pytest.mark.parametrize("dtype", sweep.MODULE_SAMPLES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", NAMES)
def test_module(name: str, dtype: Any, note: Any) -> None:
    found = False
    for way, cases in groupby(sweep.cases_of(name, {dtype}), lambda case: case.way):
        for case in cases:
            found = True
            with RECORDER.inside():
                entries = sweep.run(case).entries
            entries.pop("text", None)  # of an error: sizes and addresses of the run
            for key, value in entries.items():
                note(f"{way} {case.index} {key}", value)
    if not found:
        pytest.skip("no sample of this dtype")
