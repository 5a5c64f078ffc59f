"""The results that a loop without a backward keeps: no pass ends there, so they are no leak of `leaks.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memmgr.common.constants import Purpose
from memmgr.config.sizes import show_size

from .memory_inventory import has_graph, live_nodes
from .source_lines import SourceLine

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

MOST_AT_ONCE = 8
"""More results of one line than this are kept by a loop, and not by one call."""


@dataclass(frozen=True)
class KeptResults:
    """Tensors that one line has made, or one that has grown there.

    Attributes:
        line: the line that made them; None: it is not known.
        op: the op.
        count: tensors; 0: one tensor that its op makes anew and larger each time.
        bytes: theirs.
        graphs: of them, those that keep a graph of their own.
    """

    line: SourceLine | None
    op: str
    count: int
    bytes: int
    graphs: int = 0

    @property
    def keeps_graphs(self) -> bool:
        return self.graphs > MOST_AT_ONCE

    def text(self, device: torch.device, *, binary: bool = False) -> str:
        """The kept results, and how to keep less, in whole sentences."""
        op, size = self.op.removeprefix("aten::"), show_size(self.bytes, binary=binary)
        where = f"{self.line} ({op})" if self.line else op
        if not self.count:
            return f"One tensor grows with each call of {where}, by {size} so far: a longer loop needs more."
        made = f"{self.count} results of {where} are kept: {size}"
        if self.keeps_graphs:
            return (
                f"{made}, and the graph of each with all that it has saved. Where no backward follows use torch.no_grad() or "
                ".detach()."
            )
        less = "write each to a file, or keep numbers of it" if device.type == "cpu" else "move each away with .cpu()"
        return f"{made}. A longer loop needs more: {less}."


def kept_results(
    native: Pager, tensors: Iterable[torch.Tensor], lines: Sequence[SourceLine | None]
) -> KeptResults | None:
    """The results that hold most; None: no line has made more than a few that are kept. Parameters are none.

    Args:
        native: the pager.
        tensors: those of Python: a graph keeps others.
        lines: the lines by number.
    """
    known = [
        tensor
        for tensor in tensors
        if not issubclass(type(tensor), torch.nn.Parameter) and native.storage_info(tensor) is not None
    ]
    nodes = live_nodes(tensor for tensor in known if has_graph(tensor))
    # Python still knows tensors that a graph alone keeps: those that further nodes have read.
    read = {id(node) for each in nodes for node, _ in each.next_functions}
    graphs: dict[int, bool] = {}
    for tensor in known:
        info, graph = native.storage_info(tensor), has_graph(tensor)
        if info is not None and not (graph and id(tensor.grad_fn) in read):
            graphs[info["storage"]] = graphs.get(info["storage"], False) or graph
    sums: dict[tuple[str, int], list[tuple[int, bool]]] = defaultdict(list)
    for row in native.living():
        if row["storage"] in graphs and row["op"] and not row["backward"] and row["purpose"] == Purpose.OTHER:
            sums[row["op"], row["line"]].append((row["bytes"], graphs[row["storage"]]))
    found = [
        KeptResults(lines[line], op, len(each), sum(size for size, _ in each), sum(graph for _, graph in each))
        for (op, line), each in sums.items()
        if len(each) > MOST_AT_ONCE
    ]
    for cell in native.grown(MOST_AT_ONCE):
        found.append(KeptResults(lines[cell["line"]], cell["op"], 0, cell["bytes"]))
    # Beside results that keep graphs, data may be there that only these have saved.
    return max(found, key=lambda each: (each.keeps_graphs, each.bytes), default=None)
