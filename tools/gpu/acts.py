"""Uses of memmgr besides plain training, one act in a process: `python -P acts.py NAME [cuda|cpu] [WORD]`. JSON lines.

    graphs     a CUDA graph captured inside a budget under pressure, and its replays
    streams    two streams with record_stream in a budget under pressure
    compiled   torch.compile in a budget, beside the same compiled model without one
    trainer    transformers' Trainer, with nothing but MEMMGR_BUDGET
    answers    the questions about memory that a script may ask torch.cuda (answers.py)
    largest    WORD plain or memmgr: the largest batch of GPT-2 in 8 GB, and its step
    two        two processes on one GPU, each in half of its activations

On the CPU, streams and graphs are left out of the programs, so that the rest of them can be rehearsed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAME, DEVICE, WORD = [*sys.argv[1:4], "", "", ""][:3]
ON_GPU = DEVICE == "cuda"
GIGABYTE = 10**9


def say(name: str, ok: bool | None, **fields: Any) -> None:
    """A check that held, did not, or (None) could not be made."""
    print(json.dumps({"event": "check", "name": name, "ok": ok, **fields}), flush=True)


def pressed(budget: Any) -> tuple[Callable[[], None], Any]:
    """A step that does not fit into the budget without evictions, and the options of that budget."""
    import torch

    size = (64 << 20) if ON_GPU else (1 << 20)  # bytes of each of 24 saved tensors
    weight = torch.ones(size // 4, device=DEVICE, requires_grad=True)

    def step() -> None:
        y = weight
        for _ in range(12):
            y = y.sin().cos()
        y.sum().backward()
        weight.grad = None

    return step, budget(14 * size, device=DEVICE, quiet=True, host="2GiB" if ON_GPU else None)


# ---- in a budget -----------------------------------------------------------------------------------------------------


def graphs() -> None:
    """Replays have the result of the same ops without a graph, while other tensors come and go."""
    import memmgr

    import torch  # isort: skip

    step, opened = pressed(memmgr.budget)
    with opened as mm:
        layers = [torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)]
        model = torch.nn.Sequential(*layers).to(DEVICE)
        given = torch.zeros(256, 512, device=DEVICE)
        with torch.no_grad():
            model(given)
            step_with_grad = torch.enable_grad()(step)
            step_with_grad()
            graph = torch.cuda.CUDAGraph() if ON_GPU else None
            with torch.cuda.graph(graph) if graph is not None else contextlib.nullcontext():
                out = model(given)
            right = []
            for value in (1.0, 2.0, 3.0):
                given.fill_(value)
                step_with_grad()
                if graph is not None:
                    graph.replay()
                else:
                    out = model(given)
                right.append(torch.equal(out, model(given)))
        stats = mm.stats()
        left = stats["offloads"] + stats["evictions"]
        say("a graph replays in a budget", all(right) and left > 0, left=left, text=f"{right}, {left} cells left")


def streams() -> None:
    """A side stream reads a tensor that the main stream has freed: never the bytes of a later one."""
    import memmgr

    import torch  # isort: skip

    step, opened = pressed(memmgr.budget)
    words = (16 << 20) if ON_GPU else (1 << 18)
    with opened as mm:
        side = torch.cuda.Stream() if ON_GPU else None
        right = []
        for turn in range(6):
            source = torch.full((words,), turn, dtype=torch.int32, device=DEVICE)
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
                if ON_GPU:
                    torch.cuda._sleep(20_000_000)
                total = source.sum()
            if side is not None:
                source.record_stream(side)
            del source
            step()
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            right.append(total.item() == turn * words)
        stats = mm.stats()
        left = stats["offloads"] + stats["evictions"]
        say("two streams in a budget", all(right) and left > 0, left=left, text=f"{right}, {left} cells left")


def compiled() -> None:
    """A training of a compiled model has the bits of the plain compiled one: in a budget, and with all tensors evicted
    after each launch. The floor is far below the need only if its graphs are paged launch by launch.
    """
    import memmgr

    import torch  # isort: skip

    width, rows = (1024, 8192) if ON_GPU else (64, 512)
    layers: list[torch.nn.Module] = []
    torch.manual_seed(3)
    for _ in range(6):
        layers += [torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    run = torch.compile(model)

    def trained() -> tuple[list[Any], float]:
        torch.manual_seed(4)
        model.load_state_dict(before)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            begun = time.perf_counter()
            run(torch.randn(rows, width, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if ON_GPU:
                torch.cuda.synchronize()
        return [p.detach().cpu().clone() for p in model.parameters()], time.perf_counter() - begun

    plain, seconds = trained()
    fields: dict[str, Any] = {"seconds": {"plain": round(seconds, 4)}}
    right, need, limit = [], 0, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, policy in (("free", "auto"), ("auto", "auto"), ("torture", "torture")):
            with memmgr.budget(limit, device=DEVICE, policy=policy, quiet=True) as mm:
                managed, seconds = trained()
                stats = mm.stats()
            fields["seconds"][name] = round(seconds, 4)
            right.append(all(torch.equal(a, b) for a, b in zip(plain, managed, strict=True)))
            if limit is None:
                need, fields["floor"] = stats["unmanaged_peak_bytes"], stats["floor_bytes"]
                limit = int(0.6 * need)
            else:
                right.append(stats["resident_bytes.peak"] <= limit)
                fields[name] = {key: stats[key] for key in ("offloads", "evictions", "recomputes", "refused_kinds")}
    fields |= {"need": need, "not paged": [str(each.message)[:200] for each in caught if "paged" in str(each.message)]}
    say("torch.compile in a budget", all(right), **fields, text=f"same bits, peak kept: {right}; {fields}")


# ---- in processes of their own ---------------------------------------------------------------------------------------


def child(*words: str, **env: str) -> list[dict[str, Any]]:
    """The JSON lines of this file's, or another's, process; an empty variable is taken out of its environment.

    Raises `RuntimeError`: it failed.
    """
    given = {name: value for name, value in (os.environ | env).items() if value}
    done = subprocess.run([sys.executable, "-P", *words], env=given, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]  # a Trainer prints more
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)[:200]} ended with code {done.returncode}: {lines[-1:]}")
    return lines


def trainer() -> None:
    """The losses of a Trainer without a call of memmgr, without and with the variable."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        return say("Trainer by environment", None, text="transformers or accelerate is missing")
    plain = child(__file__, "_trainer", DEVICE, MEMMGR_INSTALL="0", MEMMGR_BUDGET="")[-1]
    limit = int(0.75 * plain["peak"]) if ON_GPU else 12_000_000
    managed = child(__file__, "_trainer", DEVICE, MEMMGR_BUDGET=str(limit))[-1]
    ok = plain["losses"] == managed["losses"] and managed["left"] > 0 and managed["peak"] <= limit
    fields = {"limit": limit, "plain_peak": plain["peak"], "peak": managed["peak"], "left": managed["left"]}
    same = plain["losses"] == managed["losses"]
    say("Trainer by environment", ok, **fields, text=f"same losses: {same}; {fields}")


def _trainer() -> None:
    import tempfile

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(7)
    width, layers, length, batch = (256, 6, 256, 16) if ON_GPU else (64, 2, 64, 8)
    config = GPT2Config(vocab_size=1000, n_positions=length, n_embd=width, n_layer=layers, n_head=4)
    tokens = torch.randint(1000, (6 * batch, length))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 5}
        options |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 2, "logging_steps": 1}
        options |= {"use_cpu": not ON_GPU, "bf16": ON_GPU, "max_steps": 6}
        run = Trainer(GPT2LMHeadModel(config), TrainingArguments(folder, **options), train_dataset=rows)
        run.train()
    losses = [float(entry["loss"]).hex() for entry in run.state.log_history if "loss" in entry]
    stats: dict[str, Any] = sys.modules["memmgr"].stats() if os.environ.get("MEMMGR_BUDGET") else {}
    peak = int(stats.get("resident_bytes.peak", 0)) or (torch.cuda.max_memory_allocated() if ON_GPU else 0)
    left = stats.get("offloads", 0) + stats.get("evictions", 0)
    print(json.dumps({"losses": losses, "peak": peak, "left": left}), flush=True)


def answers() -> None:
    """One check for each question."""
    if not ON_GPU:
        return say("answers", None, text="CUDA only")
    found = child(str(HERE / "answers.py"))[-1]
    for question, said in found.items():
        if question != "allocator":
            say(question, said == "ok", text=said)


def _sibling(name: str, spec: dict[str, Any]) -> Any:
    """Runs `train.py` with that spec; without memmgr if the spec is plain."""
    sys.argv[1:] = [json.dumps(spec)]
    found = importlib.util.spec_from_file_location(f"_gpu_acts_{name}", HERE / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def largest() -> None:
    """Doubles the batch until two steps do not fit, then halves the gap three times. Ten steps of the largest are timed."""
    plain = WORD == "plain"
    limit = 8 * GIGABYTE if ON_GPU else GIGABYTE // 50
    if plain and not ON_GPU:
        return say("largest batch, plain", None, text="CUDA only: nothing limits the CPU's memory")
    if plain and os.environ.get("MEMMGR_INSTALL") != "0":
        for line in child(__file__, NAME, DEVICE, WORD, MEMMGR_INSTALL="0"):
            print(json.dumps(line), flush=True)
        return None
    spec: dict[str, Any] = {"model": "gpt2", "plain": plain, "device": DEVICE, "tiny": not ON_GPU, "runs": []}
    train = _sibling("train", spec)
    torch = train.torch
    if plain:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)

    def tried(batch: int, steps: int) -> float:
        """Seconds of the last half of the steps, each; 0: it does not fit."""
        train.SPEC["batch"] = batch
        options: dict[str, Any] = {"host": "32GiB"} if ON_GPU else {}
        opened = contextlib.nullcontext() if plain else train.memmgr.budget(limit, device=DEVICE, quiet=True, **options)
        try:
            with opened:
                return _steps(train, steps)
        except torch.OutOfMemoryError:
            return 0.0
        finally:
            train.gc.collect()
            if ON_GPU:
                torch.cuda.empty_cache()

    ends = time.perf_counter() + (40 if ON_GPU else 10)
    fits, fails = 0, 0
    while not fails or fails - fits > 1 + fits // 8:
        batch = (fits + fails) // 2 if fails else 2 * fits or 2
        if batch > 4096 or time.perf_counter() > ends:
            break
        took = tried(batch, 2)
        say(f"batch {batch}, {WORD}", None if not took else True, text="fits" if took else "does not fit")
        fits, fails = (batch, fails) if took else (fits, batch)
    seconds = tried(fits, 6) if fits else 0.0
    bound = "at least " if not fails else ""
    each = 1e3 * seconds / max(1, fits)
    text = f"{bound}{fits}; {each:.2f} ms for each sequence"
    say(f"largest batch, {WORD}", fits > 0, batch=fits, seconds=round(seconds, 4), text=text)
    return None


def _steps(train: Any, steps: int) -> float:
    torch = train.torch
    torch.manual_seed(11)
    with torch.device(DEVICE):
        model, loss = train.MODELS["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(steps):
        if step == steps // 2:
            train.synchronize()
            begun = time.perf_counter()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    train.synchronize()
    return (time.perf_counter() - begun) / (steps - steps // 2)


def two() -> None:
    """Both end, with the same bits, and without errors of the driver."""
    steps: dict[str, Any] = {"warm": 1, "steps": 4}
    runs = [{"name": "measure", "measure": True, **steps}, {"name": "half", "of_activations": 0.5, **steps}]
    # Each measures before the other's budget opens: an H100 has room for both without one.
    spec = {
        "model": "gpt_fp32",
        "deterministic": True,
        "device": DEVICE,
        "tiny": not ON_GPU,
        "host": "8GiB",
        "runs": runs,
    }
    command = [sys.executable, "-P", str(HERE / "train.py"), json.dumps(spec)]
    env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    lines = [json.loads(line) for text in said for line in text.splitlines() if line.startswith("{")]
    halves = [line for line in lines if line.get("run") == "half" and line.get("event") == "result"]
    digests = {line.get("digest") for line in lines if line.get("event") == "result"}
    wrong = sum(line.get("driver_errors") or 0 for line in halves)
    ok = len(halves) == 2 and len(digests) == 1 and not wrong and all(h["peak"] <= h["budget"] for h in halves)
    failed = [line["error"][:200] for line in lines if line.get("event") == "failed"]
    text = f"{len(halves)} of 2 ended, {len(digests)} digest, {wrong} driver errors {failed or ''}"
    say("two processes on one GPU", ok, seconds=[line["step"] for line in halves], text=text)


ACTS: dict[str, Callable[[], None]] = {
    act.__name__: act for act in (graphs, streams, compiled, trainer, answers, largest, two, _trainer)
}

if __name__ == "__main__":
    ACTS[NAME]()
    sys.stdout.flush()
