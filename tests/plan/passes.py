"""A measured pass made by hand."""

from collections.abc import Iterable, Sequence

from memmgr.policies.trace import Op, OpKind, Storage, TierLink, Trace, TraceBuilder

LINK = TierLink("host", 20.0, 20.0, 0.01)  # bytes a second


def with_backward(
    builder: TraceBuilder, last: str, reads: Iterable[tuple[Sequence[str], Sequence[str]]], seconds: float = 1.0
) -> Trace:
    """The trace with a loss of `last`, and a backward whose ops read these names and the gradient, and free the second ones."""
    builder.begin_backward()
    builder.call("loss", 1.0, [last], [("g", 1, -1)])
    for read, freed in reads:
        builder.call("b", seconds, ["g", *read], [("h", 1, -1)])
        for name in freed:
            builder.release(name)
        builder.copy_from("h", "g")
        builder.release("h")
    return builder.build().check()


def blocks_of_three(n: int, ops: Sequence[tuple[str, float, int]], seconds: float = 1.0) -> Trace:
    """Layers of three ops (name, seconds, bytes), all read again by their own backward ops, which take `seconds`."""
    builder = TraceBuilder()
    builder.constant("a0", 1)
    for i in range(1, n + 1):
        for (name, took, size), read, made in zip(ops, (f"a{i - 1}", f"y{i}", f"z{i}"), "yza", strict=True):
            builder.call(name, took, [read], [(f"{made}{i}", size, -1)])
    reads = (((f"a{i}", f"z{i}", f"y{i}", f"a{i - 1}"), (f"y{i}", f"z{i}", f"a{i}")) for i in range(n, 0, -1))
    return with_backward(builder, f"a{n}", reads, seconds)


def layers(n: int, gradients: bool = False) -> Trace:
    """Each output is made of the one before, which the program itself holds until then; backward reads them in reverse.

    Args:
        gradients: the tensors that backward makes are held to the end, in the way that can be undone, and no op reads
            them.
    """
    ops = [Op("constant", 0.0, (), (0,), OpKind.CONSTANT)]
    storages = [Storage("c.0", 1, 0)]
    for k in range(1, n + 1):
        ops.append(Op(f"op{k}", 1.0, (k - 1,), (k,)))
        storages.append(Storage(f"{k}.0", 10, k, 2 * n + 2 - k, min(k + 1, n) + 1))
    for k in range(n + 1, 2 * n + 1):
        ops.append(Op("back", 1.0, (2 * n + 1 - k,), (k,), OpKind.ONCE))
        storages.append(Storage(f"{k}.0", 1, k, 2 * n + 1, 0) if gradients else Storage(f"{k}.0", 1, k, k + 1, k + 1))
    return Trace(tuple(ops), tuple(storages), "cpu", n + 1, (), copy_on_write=False).check()
