"""Tests that are not run, and differences that have a reason.

An entry is a pattern of test names, with its reason. `NOT_RUN` is for tests that cannot run here at all. A test of `DIFFERENT`
runs, and is counted as known where it differs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Tests of one suite.

    Attributes:
        pattern: a regular expression, found anywhere in a test's name.
        reason: why.
    """

    pattern: str
    reason: str


NOT_RUN: dict[str, tuple[Entry, ...]] = {}

DIFFERENT: dict[str, tuple[Entry, ...]] = {
    "op_db": (
        Entry(
            r"op_db-(new_)?empty(_like|_permuted|_strided)?-",
            "the result is uninitialized memory, in which two plain runs may find the same bytes",
        ),
        Entry(
            r"op_db-linalg\.lstsq(\.grad_oriented)?-",
            "LAPACK reads pivots that torch does not initialize (before 2.14), so the bits depend on the earlier contents of memory",
        ),
    ),
    "optim_db": (
        Entry(
            r"SGD-.*_fused-bfloat16\]",
            "torch's fused SGD leaves momentum in bfloat16 that depends on the earlier contents of memory, without memmgr too",
        ),
    ),
}
