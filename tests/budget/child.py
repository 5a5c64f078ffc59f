"""The script that `outside.py` watches: trains a model with or without a budget and prints markers and one result.

    python child.py '{"model": "gpt", "how": "with", "budget": 100000000, ...}'

`how`: plain (no memmgr in the process) · measure (no limit) · with · decorator · environment (unmodified: the parent set
MEMMGR_BUDGET). `inside`: the model is built under the budget. `fail`:
"forward" or "backward" raises in the last step, and the exception leaves the budget.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

SPEC: dict[str, Any] = json.loads(sys.argv[1])
if SPEC["how"] in ("with", "decorator", "measure"):
    import memmgr

from budget import models  # noqa: E402  after memmgr, as a user would


class Deliberate(Exception):
    """Raised on purpose."""


def io_counters() -> dict[str, int]:
    """/proc/self/io."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(":") for line in lines)}


def digest(training: models.Training, losses: list[str]) -> str:
    """The digest of all tensors that training has changed."""
    sha = hashlib.sha256()
    for tensor in [*training.model.parameters(), *training.model.buffers()]:
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    for state in training.optimizer.state_dict()["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state[name]
            moment = moment.to_tensor() if hasattr(moment, "to_tensor") else moment
            sha.update(moment.contiguous().numpy().tobytes())
    sha.update(torch.get_rng_state().numpy().tobytes())
    sha.update(" ".join(losses).encode())
    return sha.hexdigest()


def warm_up() -> None:
    """One tiny step: libraries load and threads start before the start is measured. Nothing is saved for backward."""
    a = torch.ones(64, 64)
    (a @ a).sum().item()
    x = torch.ones(1, 3, 8, 8)
    torch.nn.functional.conv2d(x, torch.ones(4, 3, 3, 3)).sum().item()
    # The first optimizer imports 70 MB of torch's compiler.
    w = torch.nn.Parameter(torch.ones(64))
    w.grad = torch.ones(64)
    torch.optim.AdamW([w]).step()
    if SPEC["how"] != "environment":  # there, the first saved tensor opens the budget
        w = torch.ones(64, 64, requires_grad=True)
        torch.nn.functional.gelu(a @ w).sum().backward()


def build() -> models.Training:
    torch.manual_seed(0)
    return getattr(models, SPEC["model"])(**SPEC["sizes"])


def train(training: models.Training | None, result: dict[str, Any]) -> models.Training:
    """Builds the model if there is none yet, and takes the steps."""
    if training is None:
        training = build()
    losses = result["losses"]
    for index in range(SPEC["steps"]):
        if index == SPEC["steps"] - 1 and SPEC.get("fail"):
            hurt(training)
        losses.append(training.step().hex())
    result["digest"] = digest(training, losses)
    return training


def hurt(training: models.Training) -> None:
    """Makes the next step raise, deep inside."""
    module = [m for m in training.model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)][-2]
    if SPEC["fail"] == "forward":
        module.register_forward_hook(lambda *_: raise_it())
    else:
        next(module.parameters()).register_hook(lambda _: raise_it())


def raise_it() -> None:
    raise Deliberate("on purpose")


def main() -> None:
    how, result = SPEC["how"], {"losses": [], "error": None, "stats": {}}
    warm_up()
    print("start", flush=True)
    sys.stdin.readline()
    io_before = io_counters()
    training = None if SPEC.get("inside") else build()
    options = dict(SPEC.get("options", {}))
    if "disk" in options and isinstance(options["disk"], list):
        options["disk"] = tuple(options["disk"])
    kept = None
    try:
        if how in ("plain", "environment"):
            training = train(training, result)
        elif how == "decorator":
            training = memmgr.budget(SPEC["budget"], quiet=True, **options)(train)(training, result)
        else:
            limit = None if how == "measure" else SPEC["budget"]
            with memmgr.budget(limit, quiet=True, **options):
                if how != "measure":
                    result["tier_at_start"] = memmgr.api.budget.current().native.tier_stats()
                training = train(training, result)
                if how != "measure":
                    native = memmgr.api.budget.current().native
                    result["tier"] = native.tier_stats()
    except Deliberate as error:
        kept = error  # its traceback keeps the graph, as a debugger's would
        result["error"] = "Deliberate"
    except torch.OutOfMemoryError as error:
        result["error"] = f"{type(error).__name__}: {error}"
        kept = error
    if "memmgr.runtime.session" in sys.modules:
        result["stats"] = {k: v for k, v in sys.modules["memmgr"].stats().items() if isinstance(v, int | float)}
    result["memmgr"] = "memmgr.runtime.session" in sys.modules
    result["io"] = {k: v - io_before[k] for k, v in io_counters().items()}
    print("end", flush=True)
    sys.stdin.readline()
    del kept
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os.environ.pop("MEMMGR_BUDGET", None)
