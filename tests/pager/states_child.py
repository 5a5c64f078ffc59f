"""Trains a model whose states do not fit, in a process of its own: bytes left behind by others would count against the
budget.

    python states_child.py '{"share": 0.4, "tokens": 64, "keep": false, ...}'

Prints `memmgr.stats()`, and the summary, as one JSON object.
"""

import contextlib
import io
import json
import sys
from typing import Any

import torch

import memmgr

SPEC: dict[str, Any] = json.loads(sys.argv[1])
WIDTH, LAYERS, STEPS = 256, 6, 9

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    *(
        torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(LAYERS)
    )
)
optimizer = torch.optim.AdamW(model.parameters(), fused=SPEC.get("fused", True))
x = torch.randn(SPEC.get("tokens", 64), WIDTH)
states = 4 * sum(p.nbytes for p in model.parameters())
said = io.StringIO()
readings = []
with contextlib.redirect_stderr(said):
    with memmgr.budget(int(SPEC["share"] * states), log=SPEC.get("log")) as mm:
        for step in range(STEPS):
            model(x).square().mean().backward()
            if step % SPEC.get("accumulate", 1) == SPEC.get("accumulate", 1) - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not SPEC.get("keep", False))
            readings.append(mm.stats())
        with torch.no_grad():
            model(x)  # slices of the last step that wait have its gradients until then
    stats = mm.stats()
large = [p for p in model.parameters() if p.nbytes >= 64 << 10]
print(
    json.dumps(
        {"stats": stats, "readings": readings, "said": said.getvalue(), "parameters": sum(p.nbytes for p in large)}
    )
)
