"""A share of tests/exactness without the compiled shim; prints a line for each. Run by test_exactness.py.

`MEMMGR_SHIM=0 python -m fallback.exact [NAME/MODE...]`, in the folder tests.
"""

from __future__ import annotations

import ast
import gc
import sys
import traceback
import warnings
from pathlib import Path

import torch

import memmgr._native_py as native_py

MODELS = (  # of tests/exactness/cases.py
    "mlp",
    "tree_lstm",
    "unet",
    "inplace_ops",
    "views_saved",
    "function_raw_cross_entropy",
    "variable_shapes",
)
HOSTILE = (  # of tests/exactness/test_hostile.py
    "explicit_generator_moved_before_backward",
    "reseeded_between_forward_and_backward",
    "batch_norm_running_stats",
    "embedding_max_norm",
    "inplace_while_nothing_was_recorded",
    "inplace_on_a_buffer_before_backward",
    "out_variants_into_a_reused_buffer",
    "data_add_on_an_input",
    "data_add_on_a_held_activation",
    "numpy_write_to_an_input",
    "numpy_view_taken_before_forward",
    "from_numpy_rewritten_before_backward",
    "raw_pointer_kept_from_an_earlier_step",
    "root_emptied_and_refilled_as_fsdp_does",
    "storage_grown_after_saving",
    "forward_inside_default_dtype",
    "views_of_a_base_written_later",
    "custom_op_that_lies_about_its_writes",
    "nothing_kept_alive",
    "batched_gradients",
)
ERRORS = ("output_of_sigmoid_written", "saved_tensor_written_through_a_view", "saved_tensor_resized")


def exposed_names() -> list[str]:
    """The holes of exactness/exposed.py, which is not imported for it."""
    tree = ast.parse((Path(__file__).parents[1] / "exactness" / "exposed.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "hole" for d in node.decorator_list)
    ]


def names() -> list[str]:
    """What there is to run, as NAME/MODE; a mode is one of tests/exactness/harness.py, or `error`."""
    found = [f"{name}/torture" for name in (*MODELS, *HOSTILE)]
    found += [f"{name}/auto@50" for name in MODELS[:4]]
    found += [f"{name}/{mode}" for name in exposed_names() for mode in ("torture", "offload@50")]
    return found + [f"{name}/error" for name in ERRORS]


def run(name: str, mode: str) -> None:
    """Raises when the bits differ."""
    from exactness import cases, exposed, test_hostile
    from exactness.harness import HUGE_BYTES, check, managed, outcome, unmanaged

    if mode == "error":
        fn = test_hostile.ERRORS[name]
        plain = outcome(lambda: unmanaged(fn))
        assert isinstance(plain.error, RuntimeError), plain
        outcome(lambda: managed(fn, HUGE_BYTES, "torture")).same_as(plain, name)
    elif name in MODELS:
        check(cases.CASES[name].fn, mode)
    else:
        check((test_hostile.HOLES | exposed.HOLES)[name], mode, moves=False)


def main() -> None:
    warnings.filterwarnings("ignore")  # what torch says of nested tensors and the like
    warnings.filterwarnings("error", message=".*memmgr")
    native_py.warned = True  # the warning has a test of its own
    torch.set_num_threads(1)
    run(*names()[0].split("/"))  # imports everything
    gc.collect()
    gc.freeze()  # each run collects garbage; what the imports made need not be walked a hundred times
    for wanted in sys.argv[1:] or names():
        try:
            run(*wanted.split("/"))
        except Exception:
            traceback.print_exc()
        else:
            print("passed", wanted, flush=True)


if __name__ == "__main__":
    main()
