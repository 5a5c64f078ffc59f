"""Arguments that a kernel may write although its schema does not declare it: all that look like state have a reason, and the
bytes of every undeclared argument are compared around the ops that run here."""

from __future__ import annotations

import pytest
import torch

from memmgr.native import binding as native

from . import state_arguments, sweep, writes

HERE = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def pager() -> native.Pager:
    return native.load()


def test_each_argument_that_looks_like_state_has_a_reason() -> None:
    written, read = state_arguments.known()
    found = {(op, argument) for op, _, argument in state_arguments.undeclared()}
    assert len(found) > 100
    new = sorted(found - written - read)
    assert not new, f"read the kernels of {new}, and give each a reason in tests/ops/state_arguments.py"


@pytest.mark.skipif(HERE != (2, 13), reason="the reasons, but for those of later ops, are counted with 2.13")
def test_no_reason_is_left_over() -> None:
    found = {(op, argument) for op, _, argument in state_arguments.undeclared()}
    for reason in (*state_arguments.WRITTEN, *state_arguments.READ):
        pairs = state_arguments._pairs((reason,))
        assert {op for op, _ in pairs} == {op for op, argument in pairs & found}, reason.text
        assert {argument for _, argument in pairs} == {argument for op, argument in pairs & found}, reason.text
    assert not set.intersection(*state_arguments.known())


def test_the_pager_counts_what_is_written(pager: native.Pager) -> None:
    """The pager counts no other undeclared argument as written."""
    written, _ = state_arguments.known()
    checked = set()
    for schema in state_arguments.schemas():
        names = pager.written_arguments(schema.name, schema.overload_name)
        silent = {a.name for a in schema.arguments if a.name in names and not state_arguments.is_write(a)}
        want = {
            a.name for a in schema.arguments if not state_arguments.is_write(a) and (schema.name, a.name) in written
        }
        assert silent == want, schema
        checked |= {(schema.name, name) for name in silent}
    assert len(checked) > 12


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def _unlisted(watch: writes.Watch) -> list[tuple[str, str]]:
    return sorted(set(watch.found) - state_arguments.known()[0])


@pytest.mark.parametrize("device", DEVICES)
def test_layers_and_steps_write_what_the_table_says(device: str) -> None:
    watch = writes.Watch()
    writes.watch_programs(watch, device)
    assert not _unlisted(watch)
    expected = {("aten::native_batch_norm", "running_mean"), ("aten::batch_norm_update_stats", "running_var")}
    if device == "cuda":
        expected |= {("aten::cudnn_batch_norm", "running_mean"), ("aten::_cudnn_rnn", "dropout_state")}
    elif "onednn" in torch.backends.quantized.supported_engines:
        expected |= {("quantized::conv2d_add", "qaccum")}
    assert expected <= set(watch.found), watch.found  # otherwise nothing was shown
    assert len(watch.seen) > 30, watch.seen


@pytest.mark.parametrize(
    ("share", "samples"),
    [
        (16, 1),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(1, 8, marks=pytest.mark.slow),
    ],
)  # all ops take 40 s of a processor, and further samples are near copies of the first one
@pytest.mark.parametrize("device", DEVICES)
def test_ops_write_what_they_declare(device: str, share: int, samples: int) -> None:
    """Those of torch's operator database, or every fourth or sixteenth one, forward and backward."""
    pytest.importorskip("expecttest", reason="torch's operator database needs it")
    with sweep.quiet_op():
        from torch.testing._internal.common_methods_invocations import op_db

    watch = writes.Watch()
    for info in op_db[::share]:
        if not info.name.startswith("jiterator"):  # compiled on the spot, for CUDA alone
            writes.watch_op(watch, info, device, samples)
    assert not _unlisted(watch)
    assert len(watch.seen) > 400 // share, watch.seen
