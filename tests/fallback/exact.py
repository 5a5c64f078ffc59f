"""A share of tests/exactness without the compiled shim; prints a line for each. Run by test_exactness.py.

`MEMMGR_SHIM=0 python -m fallback.exact [NAME/MODE...]`, in the folder tests.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable

import torch

import memmgr._native_py as native_py

MODELS = {  # of tests/exactness/cases.py
    name: ("torture", "auto@50")
    for name in (
        "mlp",
        "tree_lstm",
        "unet",
        "inplace_ops",
        "views_saved",
        "function_raw_cross_entropy",
        "gradient_accumulation",
        "variable_shapes",
    )
}
HOSTILE = {  # of tests/exactness/test_hostile.py
    name: ("torture", "evict@50")
    for name in (
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
        "shared_ancestors_stay_linear",
    )
}
ERRORS = ("output_of_sigmoid_written", "saved_tensor_written_through_a_view", "saved_tensor_resized")
EXPOSED = ("torture", "auto@50", "evict@50", "offload@50")


def runs() -> dict[str, Callable[[], object]]:
    """NAME/MODE -> what to run; it raises when the bits differ."""
    from exactness import cases, test_hostile
    from exactness.harness import HUGE_BYTES, check, managed, outcome, unmanaged

    from . import exposed

    def same_error(name: str) -> None:
        fn = test_hostile.ERRORS[name]
        plain = outcome(lambda: unmanaged(fn))
        assert isinstance(plain.error, RuntimeError), plain
        outcome(lambda: managed(fn, HUGE_BYTES, "torture")).same_as(plain, name)

    found: dict[str, Callable[[], object]] = {}
    for name, modes in MODELS.items():
        for mode in modes:
            found[f"{name}/{mode}"] = lambda name=name, mode=mode: check(cases.CASES[name].fn, mode)
    for name, modes in HOSTILE.items():
        for mode in modes:
            found[f"{name}/{mode}"] = lambda name=name, mode=mode: check(test_hostile.HOLES[name], mode, moves=False)
    for name in exposed.HOLES:
        for mode in EXPOSED:
            found[f"{name}/{mode}"] = lambda name=name, mode=mode: check(exposed.HOLES[name], mode, moves=False)
    for name in ERRORS:
        found[f"{name}/error"] = lambda name=name: same_error(name)
    return found


def main() -> None:
    warnings.filterwarnings("ignore")  # what torch says of nested tensors and the like
    warnings.filterwarnings("error", message=".*memmgr")
    native_py.warned = True  # the warning has a test of its own
    torch.set_num_threads(1)
    everything = runs()
    for wanted in sys.argv[1:] or list(everything):
        try:
            everything[wanted]()
        except Exception:
            traceback.print_exc()
        else:
            print("passed", wanted, flush=True)


if __name__ == "__main__":
    main()
