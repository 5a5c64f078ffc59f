"""Cells, recipes and refs of the accounting path: the same words and fields as in `allocator/shim/shim.h`.

Nothing here decides anything. What must happen when a handle or a recipe goes is put on the `graveyard`, because Python
may end an object at any moment, in any thread; `_py_cells` buries it at the next quiet one.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ._py_versions import C, Version, quiet, same_counter, under_counter

PRESENT, EVICTED, OFFLOADED = range(3)
KEEP, EVICT, OFFLOAD = range(3)
OP_VIEW, OP_PURE, OP_SLOW, OP_OPAQUE = range(4)
TRUST_NEW, TRUST_YES, TRUST_NO = range(3)

_use_count = C._storage_Use_Count

# (what, payload): "handle" cell | "recipe" (serial, inputs) | "slot" (slot, the memory that a transfer may still use)
graveyard: deque[tuple[str, Any]] = deque()
bury: list[Callable[[], None]] = []  # `_py_cells` puts in what empties the graveyard if no lock is in the way


def _end(what: str, payload: Any) -> None:
    graveyard.append((what, payload))
    for now in bury:
        now()


# ---- storages -------------------------------------------------------------------------------------------------------


class Known(weakref.ref):  # type: ignore[type-arg]
    """A storage that was seen alive: weak, so that it dies when nobody else has it."""

    __slots__ = ("cell", "counted", "exposed", "key", "nbytes", "remade", "taken")

    cell: Cell | None
    counted: bool  # part of the live bytes; else it was there before, or belongs to somebody else
    exposed: bool  # a pointer to it was handed out: that outlives the version that was there then (rule 6)
    key: int
    nbytes: int
    taken: int  # what the allocator takes for them
    remade: bool  # ours: another block than the one that the program was given

    def __new__(cls, storage: Any, died: Callable[[Any], None], counted: bool) -> Known:
        return super().__new__(cls, storage, died)

    def __init__(self, storage: Any, died: Callable[[Any], None], counted: bool) -> None:
        super().__init__(storage, died)  # type: ignore[call-arg]
        self.key = storage._cdata
        self.nbytes = self.taken = storage.nbytes()
        self.counted = counted
        self.exposed = self.remade = False
        self.cell = None


def _references(storage: Any) -> tuple[int, int]:
    return _use_count(storage._cdata), sys.getrefcount(storage)


class _Slot:
    __slots__ = ("strong",)
    strong: Any


def _measure_alone() -> tuple[int, int]:
    slot = _Slot()
    slot.strong = torch.UntypedStorage(8)
    return _references(slot.strong)


def _through(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return _references(storage)


# How the two counts read when one slot of ours holds a storage and nobody else has it; it depends on torch's version.
_ALONE = _measure_alone()
_ONE_TENSOR = _through(torch.empty(8, dtype=torch.uint8))


def only_tensor(tensor: torch.Tensor) -> bool:
    """Nobody can reach the tensor's storage but through it."""
    return _through(tensor) == _ONE_TENSOR


# ---- cells, recipes, refs -------------------------------------------------------------------------------------------


class Kind:
    """Op, shapes, dtypes, strides, arguments and circumstances (rule 7), and what its ops turned out to need."""

    __slots__ = ("func", "hash", "made_bytes", "seconds", "trust")

    def __init__(self, func: Any, number: int) -> None:
        self.func = func
        self.hash = number
        self.trust = TRUST_NEW
        self.made_bytes = 0
        self.seconds = -1.0  # what it took when it was proven; negative: it was not


class Cell:
    """One version of one storage's bytes."""

    __slots__ = (
        "__weakref__",
        "armed",
        "armed_at",
        "blank",
        "busy",
        "checksum",
        "cost",
        "exposed",
        "gone",
        "handles",
        "incoming",
        "known",
        "last_access",
        "listed",
        "lost",
        "maker",
        "managed",
        "module",
        "named_by",
        "names",
        "nbytes",
        "note",
        "pinned",
        "place",
        "recipe",
        "saved_in",
        "seq",
        "slot",
        "stale",
        "stamp",
        "strong",
        "unsettled",
        "versions",
    )

    this_pass: ClassVar[int] = 1  # counted by begin_pass()

    def __init__(self, known: Known, exposed: bool, clock: float) -> None:
        self.strong: Any = None  # our one reference to the storage
        self.known: Known | None = known
        self.versions: list[Version] = []
        self.recipe: Recipe | None = None
        self.named_by: dict[int, Any] = {}  # serial of a recipe that needs this cell -> weak reference to it
        self.nbytes = known.nbytes
        self.seq = -1
        self.saved_in = 0  # the pass that saved it last,
        self.place = -1  # and its place among the cells that this pass saved
        self.slot = -1
        self.armed = KEEP
        self.armed_at = 0  # index in the list of armed cells
        self.cost = 0.0
        self.last_access = clock
        self.checksum: int | None = None
        self.incoming: Any = None  # a storage that a read is under way into
        self.note: Any = None
        self.maker: str | None = None  # the op that made it, for reports
        self.module = 0  # where it was made, while the telemetry asks
        self.handles = 0
        self.names = 0
        self.stamp = 0
        self.gone = PRESENT
        self.listed = False
        self.stale = self.blank = self.unsettled = self.lost = self.busy = self.managed = self.pinned = False
        self.exposed = exposed

    def __del__(self) -> None:
        if self.slot >= 0:
            _end("slot", (self.slot, self.strong, self.incoming))

    def storage(self) -> Any:
        """The storage, if it is alive and has the bytes."""
        if self.gone != PRESENT:
            return None
        if self.strong is not None:
            return self.strong
        return self.known() if self.known is not None else None

    @property
    def save_index(self) -> int:
        """Among the cells that this pass saved, by their first save; -1: none of them."""
        return self.place if self.saved_in == Cell.this_pass else -1

    @property
    def present(self) -> bool:
        """The bytes are in memory."""
        return self.storage() is not None

    @property
    def stored(self) -> bool:
        """The bytes are in the tier."""
        return self.slot >= 0

    @property
    def fresh(self) -> bool:
        """No version counter moved since the cell was seen."""
        return all(version.twin._version == version.at for version in self.versions)

    @property
    def saved_fresh(self) -> bool:
        """The same for the counters that autograd itself would look at."""
        return all(version.twin._version == version.at for version in self.versions if version.saved)

    @property
    def alone(self) -> bool:
        """Nobody else can reach the storage, neither through a tensor nor through the storage object."""
        return self.strong is not None and _references(self.strong) == _ALONE

    @property
    def ours_alone(self) -> bool:
        """The bytes may leave."""
        return (
            self.gone == PRESENT
            and self.nbytes > 0
            and not (self.busy or self.pinned or self.unsettled or self.stale)
            and self.alone
            and self.strong.nbytes() == self.nbytes
        )

    @property
    def held(self) -> bool:
        """We hold the storage."""
        return self.strong is not None

    @property
    def use_count(self) -> int:
        storage = self.strong if self.strong is not None else (self.known() if self.known is not None else None)
        return 0 if storage is None else int(_use_count(storage._cdata))

    @property
    def arriving(self) -> bool:
        """A read of its bytes is under way."""
        return self.incoming is not None

    def version_of(self, tensor: torch.Tensor) -> Version | None:
        """The entry of the tensor's counter, if it is known."""
        return next((version for version in self.versions if same_counter(version.twin, tensor)), None)

    def unpacked(self, ref: Ref, storage: Any) -> torch.Tensor:
        """The view that autograd saved, under the counter that it watches, as autograd's own saved tensors are.

        So a write to it is one to the saved tensor, and its use in a graph of its own adds no counter to the cell.
        """
        tensor = ref.over(storage)
        version = ref.version
        if version not in self.versions:  # the bytes have been made again, or read back, since
            version = next((v for v in self.versions if v.saved), None)
        return tensor if version is None else under_counter(version.twin, tensor)

    def saved_under(self, tensor: torch.Tensor) -> bool:
        """Would autograd notice a write through this tensor?"""
        version = None if tensor.is_inference() else self.version_of(tensor)
        return tensor.is_inference() or (version is not None and version.saved)


class Ref:
    """A view of a cell: dtype, sizes, strides, offset. With `handle`, the cell's bytes are wanted while it lives."""

    __slots__ = ("_leaf", "cell", "conj", "dtype", "handle", "mutated", "neg", "offset", "sizes", "strides", "version")

    def __init__(self, tensor: torch.Tensor, cell: Cell, handle: bool) -> None:
        self.cell = cell
        self.dtype = tensor.dtype
        self.sizes = tensor.size()
        self.strides = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.mutated = False
        self.handle = handle
        self.version: Version | None = None  # of a handle: the counter under which it was saved
        self._leaf = weakref.ref(tensor) if handle and tensor.is_leaf else None

    @property
    def leaf(self) -> torch.Tensor | None:
        """Of a handle: the tensor itself, if it is a leaf and lives."""
        return None if self._leaf is None else self._leaf()

    def __del__(self) -> None:
        if self.handle:
            _end("handle", self.cell)

    def extent_bytes(self) -> int:
        """The bytes that the view reaches, from the start of its storage."""
        if 0 in self.sizes:
            return 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return int((last + 1) * self.dtype.itemsize)

    def over(self, storage: Any) -> torch.Tensor:
        """The view as a tensor over `storage`; its version counter is its own."""
        silence = quiet()
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.sizes, self.strides)
        if self.conj:
            tensor = torch._conj(tensor)
        if self.neg:
            tensor = torch._neg_view(tensor)
        del silence
        return tensor


class Accounted:
    """A recipe's op, with the budget kept before it runs: a replay is below the dispatch mode that sees other ops."""

    __slots__ = ("_func", "_recipe", "_run")

    def __init__(self, func: Any, recipe: Recipe, run: Callable[..., Any]) -> None:
        self._func, self._recipe, self._run = func, recipe, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._recipe, self._func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)

    def __eq__(self, other: object) -> bool:
        return self._func is (other._func if isinstance(other, Accounted) else other)

    def __hash__(self) -> int:
        return hash(self._func)

    def __str__(self) -> str:
        return str(self._func)

    __repr__ = __str__


class Recipe:
    """An op and its arguments, with tensors replaced by refs."""

    __slots__ = (
        "__weakref__",
        "_cost",
        "_func",
        "_run",
        "args",
        "env",
        "inputs",
        "kept",
        "kwargs",
        "made",
        "module",
        "ok",
        "reads_bytes",
        "rng",
        "room_bytes",
        "serial",
        "special",
        "stamp",
    )

    def __init__(self, func: Any, args: Any, kwargs: Any, inputs: tuple[Cell, ...], kind: Kind, run: Any) -> None:
        self._func, self._run = func, run
        self.args, self.kwargs, self.inputs = args, kwargs, inputs
        self.kept = kind
        self.rng: Any = None
        self.special: Any = None
        self.made: list[Any] = []  # weak references to the output cells, None where an output has no cell
        self.env = 0
        self._cost = 0.0
        self.ok = True
        self.stamp = 0
        self.serial = 0
        self.module = 0
        above = {cell: cell.recipe for cell in inputs if cell.recipe is not None}
        self.reads_bytes: int = sum(
            cell.nbytes for cell in above
        )  # of inputs that are made again themselves if need be
        # The most that an op of its chain reads and makes: its making takes at least that at once.
        self.room_bytes: int = max((recipe.room_bytes for recipe in above.values()), default=0)

    def note_made(self, cell: Cell) -> None:
        """The op made this cell, too."""
        self.made.append(weakref.ref(cell))
        self.reads_bytes += cell.nbytes
        self.room_bytes = max(self.room_bytes, self.reads_bytes)

    def __del__(self) -> None:
        if self.serial:
            _end("recipe", (self.serial, self.inputs))

    @property
    def func(self) -> Accounted:
        return Accounted(self._func, self, self._run)

    @property
    def cost(self) -> float:
        """Seconds."""
        return self._cost

    @cost.setter
    def cost(self, seconds: float) -> None:
        """As measured in the proof."""
        self._cost = self.kept.seconds = seconds

    def took(self, seconds: float) -> None:
        """As measured in the op's own run, or guessed."""
        self._cost = seconds

    @property
    def outputs(self) -> tuple[Cell | None, ...]:
        return tuple(ref() if ref is not None else None for ref in self.made)

    @property
    def kind(self) -> int:
        return self.kept.hash

    @property
    def trust(self) -> int:
        return self.kept.trust

    @trust.setter
    def trust(self, value: int) -> None:
        self.kept.trust = value


def can_evict(cell: Cell) -> bool:
    """The recipe can run and has proved itself (rule 7)."""
    recipe = cell.recipe
    return recipe is not None and recipe.ok and recipe.kept.trust == TRUST_YES and not cell.exposed
