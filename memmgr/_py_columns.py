"""What the policies see of the cells that could leave: columns of plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._py_table import Table
from ._py_types import EVICTED, KEEP, Cell, Recipe, can_evict
from ._sizes import UNLIMITED


class Columns(Table):
    """Sizes, ages and costs, DTR's neighbourhoods among them."""

    def columns(self, neighbours: bool = True) -> tuple[Any, ...]:
        """(cells, size, staleness, cost, chain, component, recomputable, clean, seq): what could leave now."""
        self._settle()
        with self._lock:
            cells = [cell for cell in self._oldest_first() if cell.armed == KEEP and cell.ours_alone]
            chain, component = [], []
            for cell in cells:
                ahead = behind = 0.0
                if neighbours and cell.recipe is not None:
                    ahead, behind = self._chain_cost(cell.recipe), self._children_cost(cell)
                chain.append(ahead)
                component.append(ahead + behind)
        columns = (
            np.array([cell.nbytes for cell in cells], dtype=np.int64),
            np.array([self._clock - cell.last_access for cell in cells], dtype=np.float64),
            np.array([cell.cost for cell in cells], dtype=np.float64),
            np.array(chain, dtype=np.float64),
            np.array(component, dtype=np.float64),
            np.array([can_evict(cell) and self._room_to_remake(cell) for cell in cells], dtype=np.uint8),
            np.array([cell.slot >= 0 for cell in cells], dtype=np.uint8),
            np.array([cell.seq for cell in cells], dtype=np.int64),
        )
        return (cells, *(bytearray(column.tobytes()) for column in columns))

    def _room_to_remake(self, cell: Cell) -> bool:
        """Is what making the bytes takes at once there beside the floor, when backward asks for them? See vault.cpp."""
        if not self._can_offload() or self._budget == UNLIMITED or cell.recipe is None:
            return True
        return cell.recipe.room_bytes <= max(0, self._budget - self._floor) + cell.nbytes

    def _chain_cost(self, recipe: Recipe) -> float:
        """The cost of what must run again before the recipe can, each op once. See traffic.cpp."""
        self._stamp += 1
        recipe.stamp = stamp = self._stamp
        total, work = 0.0, [recipe]
        for _ in range(512):
            if not work:
                break
            for parent in work.pop().inputs:
                above = parent.recipe
                if above is None or above.stamp == stamp or parent.slot >= 0:
                    continue
                if parent.present and (parent.handles > 0 or not above.inputs):
                    continue
                above.stamp = stamp
                total += above.cost
                work.append(above)
        return total

    def _children_cost(self, cell: Cell) -> float:
        self._stamp += 1
        stamp, total, work = self._stamp, 0.0, [cell]
        for _ in range(128):
            if not work:
                break
            for ref in list(work.pop().named_by.values())[:32]:
                recipe = ref()
                if recipe is None or recipe.stamp == stamp:
                    continue
                recipe.stamp = stamp
                gone = next((out for out in recipe.outputs if out is not None and out.gone == EVICTED), None)
                if gone is not None:
                    total += recipe.cost
                    work.append(gone)
        return total
