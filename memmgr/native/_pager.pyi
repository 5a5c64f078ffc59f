"""The pager's module, as it describes itself. Written by `make stub`."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch

from memmgr.common.constants import Escape, Lines, Order, Purpose

Addressed = torch.Tensor | int
"""A tensor, or a storage's `_cdata`."""

class Pin:
    """Keeps the bytes of storages in memory, where they are, while it lives (rule 9: scoped)."""

class PeriodInfo(TypedDict):
    """A period that ended.

    `hash`: of its ops. `before`: of the ops of the period before it, 0 if that was not recorded. `ran_short`: its plan
    left malloc to choose victims, or `lacked_bytes` of its blocks' places had no memory. `left_plan`: the hash of the
    plan that it left before its end, 0 for none. `left_at`: the first op that differs, from 0; the number of its ops if
    it ended first.
    """

    hash: int
    before: int
    ops: int
    followed: bool
    ran_short: bool
    lacked_bytes: int
    left_plan: int
    left_at: int
    trials: int
    overflow: bool

class TimelineColumns(TypedDict):
    """A period in columns, as bytes; `allocator/pager/plan/timeline.h` explains them."""

    names: list[str]
    op: bytes
    first_touch: bytes
    seconds: bytes
    before: bytes
    scratch: bytes
    other: bytes
    module: bytes
    ordinal: bytes
    flags: bytes
    bits: bytes
    deaths: bytes
    sizes: bytes
    fixed: bytes
    prior: bytes
    hashes: bytes
    turn: int

class Link(TypedDict):
    """The tier's rates as measured. The processor's is either way."""

    write_seconds_per_byte: float
    read_seconds_per_byte: float
    cpu_seconds_per_byte: float

class CandidateColumns(TypedDict):
    """Cells that can be evicted now, in columns as bytes: int64 serials and sizes, float64 seconds, bool."""

    serials: bytes
    sizes: bytes
    stale_seconds: bytes
    cost_seconds: bytes
    chain_seconds: bytes
    recomputable: bytes
    clean: bytes
    offloadable: bytes

class CellInfo(TypedDict):
    """One cell.

    `residency`: a word of Absence. `trusted`: the recipe may run again. `op`: the recipe's op. `evicted_for`: a word of
    EvictedFor, the cause of its last eviction. `evicted_in_pass`: so many backwards had ended by then.
    """

    nbytes: int
    residency: str
    pins: int
    escaped: bool
    recipe: bool
    trusted: bool
    op: str
    depth: int
    clean: bool
    needed: int
    holders: int
    small: bool
    orphan: bool
    evicted_for: str
    evicted_in_pass: int

class FailedOp(TypedDict):
    """The op that found no room.

    `name`: empty if the request came from no op. `need_bytes`: what it reads and makes, or its request alone, and what
    stays. `read_bytes`: of its arguments. `result_bytes`: of its largest result.
    """

    name: str
    need_bytes: int
    read_bytes: int
    result_bytes: int

class LivingCell(TypedDict):
    """A large cell.

    `storage`: its storage's address; 0: recipes alone need the cell, or it was alive at the peak. `purpose`: a Purpose.
    `op`: the op that made it; empty: none. `line`: the number of its source line; 0: not recorded. `birth`: the pass.
    `backward`: made in one.
    """

    serial: int
    storage: int
    bytes: int
    absent: bool
    purpose: int
    op: str
    module: int
    line: int
    birth: int
    backward: bool

class SurvivingPlace(TypedDict):
    """Bytes that a source line in a module has made."""

    line: int
    module: int
    bytes: int

class Survivors(TypedDict):
    """Cells of one op that have outlived the pass after that of their birth. `births`: the passes."""

    op: str
    births: list[int]
    bytes: int
    absent_bytes: int
    places: list[SurvivingPlace]

class GrownCell(TypedDict):
    """A cell that its op makes anew from its own earlier result, larger each time.

    `bytes`: those that it has grown by. `since`, `last`: the passes of the first one and of this one. `growths`: the
    passes in which it grew.
    """

    op: str
    bytes: int
    absent: bool
    line: int
    module: int
    since: int
    last: int
    growths: int

class RecordedLine(TypedDict):
    """A source line. `caller`: of a line of a library, the number of the program's own line that led there; 0: none."""

    file: str
    line: int
    function: str
    caller: int

class StorageInfo(TypedDict):
    """A storage. `storage`: its address. `held_bytes`: in memory. `counted`: by the budget already."""

    storage: int
    held_bytes: int
    bytes: int
    counted: bool

class PassPeaks(TypedDict):
    """The high-water marks of a pass, in bytes: with memmgr, and as it would be without."""

    resident: int
    unmanaged: int

class EventRow(TypedDict):
    """A sum of events. `what`: a word of Event. `op`: None if it is not known."""

    what: str
    op: str | None
    module: int
    count: int
    bytes: int
    seconds: float

class EventList(TypedDict):
    """Events since the last call. `unlisted`: events that found no entry."""

    sums: list[EventRow]
    unlisted: int

class WatchedCell(TypedDict):
    """A cell, as the stream has it.

    `state`: resident, evicted or offloaded. `copy`: in the tier. `fixed`: it cannot be evicted now. `handles`:
    references to its storage. `age_seconds`: since its last touch. `storage`: its address. `line`: the number of the
    source line that made it; 0: not recorded.
    """

    bytes: int
    state: str
    copy: bool
    fixed: bool
    handles: int
    op_seconds: float
    age_seconds: float
    recomputable: bool
    op: str | None
    module: int
    storage: int
    line: int

class ModuleShare(TypedDict):
    """Bytes of cells: resident, of these fixed, and absent."""

    resident: int
    fixed: int
    absent: int

class WatchedCells(TypedDict):
    """The largest cells, the largest first, and the shares of the modules by number."""

    cells: list[WatchedCell]
    modules: dict[int, ModuleShare]

class MemoryMap(TypedDict):
    """The address space up to the last block that has memory.

    `columns`: bytes for each state, in the order of Stretch.
    """

    span_bytes: int
    columns: list[list[int]]

class ResidentCell(TypedDict):
    """`storage`: its storage's address; 0: the storage has ended."""

    storage: int
    bytes: int

class ProbeSeconds(TypedDict):
    """A write and a read of the tier, and the processor time of both."""

    write: float
    read: float
    cpu: float

class Pager:
    """The functions of the module; `allocator/pager/python` binds them."""

    def open(self, *, limit: int, folder: str | None, disk_bytes: int, throttle: int, small_bytes: int, may_evict: bool, may_offload: bool, torture: bool, verify: bool, prefetch: bool, order: Order, window: bool, device: str, driver: str | None, host_bytes: int) -> None:
        """Opens a budget."""

    def close(self) -> None:
        """Restores all cells, leaves ordinary tensors and closes the budget."""

    def adopt(self, tensor: Addressed, /) -> int:
        """The bytes of the tensor's cell, which is made if need be; 0: it has none."""

    def adopt_all(self, tensors: list[torch.Tensor], stay: bool = False) -> int:
        """Adopts these tensors, gradients of leaves among them and the cells of earlier budgets.

        The result is their bytes. `stay`: these, and storages that are adopted later, keep their addresses.
        """

    def move_in(self, tensors: list[torch.Tensor], exported: list[Any]) -> int:
        """Moves tensors from the memory of torch's own allocator to the pool's, if nothing else refers to their storages and they are not exported.

        The result is their bytes.
        """

    def settle(self) -> int:
        """Evicts cells beyond the limit. The result is the bytes that are still beyond it."""

    def set_errors(self, make: Callable[..., Any], wrong: type[BaseException], torchs: type[BaseException]) -> None:
        """`make` returns the exception for out of memory, of its text.

        `wrong` is the class for wrong bytes, `torchs` torch's for out of memory.
        """

    def read_clock(self, address: int, /) -> None:
        """The clock is the function at this address. For tests."""

    def count_ticks(self, step: int, /) -> None:
        """Each look at the clock advances it by `step`; 0: the machine's clock. For tests."""

    def set_link(self, seconds_per_byte: float, cpu_seconds_per_byte: float = -1.0) -> None:
        """The rates of the tier, one way, and of the processor time for it."""

    def set_slice_bytes(self, most: int, /) -> None:
        """The limit of a slice until the budget ends. For tests."""

    def use_plugin(self, table: int, /) -> None:
        """The address of the table of CUDA's allocator."""

    def see_this_thread(self, on: bool, /) -> bool:
        """Whether the ops of this thread are seen (rule 12). The result is what was before."""

    def making_states(self, on: bool, /) -> None:
        """An optimizer makes its states in this thread, or has made them."""

    def add_pending(self, run: Callable[..., Any], tensors: list[torch.Tensor]) -> bool:
        """True: `run` waits.

        It is called without arguments before a thread reads or writes one of the tensors. Only `run` may hold these
        under the names that are passed here.
        """

    def let_slices_wait(self, on: bool, /) -> None:
        """Whether slices may wait. Waiting ones go on to wait."""

    def any_away(self, tensors: list[torch.Tensor], /) -> bool:
        """True: one of the tensors is absent."""

    def forsake_file(self, path: str | os.PathLike[str], /) -> None:
        """Reads the cells that are mapped from this file. Called before the file is overwritten."""

    def finish_pending(self, quietly: bool = False) -> None:
        """Runs all waiting slices. quietly: an error is raised where the result is used."""

    def name(self, tensor: Addressed, /) -> int | None:
        """The number that replaces the address in comparisons; None: that is the address, which any holder of the tensor may take..


        """

    def names_differ(self) -> bool:
        """True: a living storage has another name than its address."""

    def escape(self, tensor: Addressed, why: Escape) -> bool:
        """The address was handed out for good (rule 9)."""

    def pin(self, tensors: Sequence[Addressed], *, written: bool = False, region: bool = False, held: bool = False) -> Pin:
        """Restores the storages and keeps them there.

        held: the pin outlives this call. region: of a compiled graph that runs in this thread.
        """

    def pin_number(self, tensor: torch.Tensor, /) -> Pin | None:
        """None: the tensor is no cell."""

    def pin_item(self, storage: Addressed, /) -> Pin:
        """For a read of one element of the storage."""

    def beat(self, store: Any = None, key: str = "", seconds: float = 0.0) -> bool:
        """True: a thread that needs no GIL now reports to the store that this process runs.

        Without arguments: it ends.
        """

    def beats(self) -> int:
        """How many reports the store has confirmed."""

    def pin_reducer(self, reducer: Any, gradients: bool) -> Pin | None:
        """Pins the storages that DDP's reducer reads outside of ops; None: it waits for no gradient."""

    def reducer_storages(self, reducer: Any, /) -> list[int]:
        """The storages of the reducer's buckets, and of the gradients of its parameters."""

    def moves_gradients(self, reducer: Any, /) -> bool:
        """True: it is about to make its buckets anew and to copy gradients into them."""

    def call_foreign(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function in C++ that is not torch's and is not bound by pybind11."""

    def note_profiler(self, on: bool, /) -> None:
        """A profiler begins or ends to ask for addresses."""

    def guard(self, functions: list[Any], libraries: list[str]) -> int:
        """Guards the functions that pybind11 has bound in these libraries. The result is how many are newly guarded."""

    def unguard_all(self) -> None:
        """Functions of extensions are as they were, and none is watched."""

    def watch_foreign_calls(self) -> None:
        """Watches ops and autograd functions of extensions."""

    def libraries_that_use_torch(self) -> list[str]:
        """Paths of the loaded libraries that name c10's symbols."""

    def reducers_listen(self, begin: bool, /) -> None:
        """A backward with reducers that wait begins or ends."""

    def begin_capture(self) -> None:
        """A graph is about to be captured."""

    def end_capture(self) -> None:
        """Its capture has ended."""

    def page_kernel(self, function: Any, *, key: str, name: str, args: str, repeats: bool) -> bool:
        """Makes the launches of a compiled graph's kernel ops.

        `args` has a letter for each argument (ARGUMENT_READ, ...). `repeats`: the same arguments make the same bytes,
        and its numbers are integers. False: the function is not from Inductor's binding.
        """

    def paged_run(self, run: Callable[..., Any], *, key: str, name: str, args: str, repeats: bool) -> Callable[..., Any]:
        """A function that launches a Triton kernel by `run`, each launch as an op.

        `args` has a letter for each leading argument (ARGUMENT_READ, ...); later tensors are written. `repeats`: as of
        page_kernel, and the key is this kernel's alone.
        """

    def page_buffers(self, function: Any, /) -> bool:
        """Makes the buffers that compiled graphs allocate by this function cells.

        False: it is no function of C with positional arguments.
        """

    def in_launch(self, tensor: Addressed, /) -> bool:
        """Whether this thread launches a Triton kernel, or runs one again.

        The tensor then stays where it is until the launch ends.
        """

    def page_alignment_check(self, function: Any, /) -> bool:
        """The function that copies inputs whose address is not aligned reads no address of an absent tensor.

        False: it is no function of C with one argument.
        """

    def unpage_kernels(self) -> None:
        """All kernels and functions of compiled graphs run as they did before."""

    def call_graph(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], forward: bool) -> Any:
        """Calls a compiled graph that is paged launch by launch. `forward`: it is that of a training."""

    def objects_of(self, types: tuple[type, ...], libraries: list[str] | None = None) -> list[Any]:
        """The objects of these types that the garbage collector tracks, and the functions that pybind11 has bound in these libraries..


        """

    def next_period(self, noted: bool, /) -> PeriodInfo:
        """Ends a period. `timeline()` has its columns."""

    def seek_loops(self, on: bool, /) -> None:
        """Whether turns of loops without a backward are periods."""

    def wait_for_loop(self) -> bool:
        """Waits without the GIL until a turn of a loop needs a plan. False: the budget ends."""

    def end_wait_for_loop(self) -> None:
        """Ends the wait for a loop."""

    def take_loop(self) -> PeriodInfo | None:
        """The turn that needs a plan; None: there is none."""

    def turn_period(self) -> None:
        """An outermost backward begins."""

    def timeline(self) -> TimelineColumns:
        """The period that ended last."""

    def link(self) -> Link:
        """The tier's rates as measured."""

    def add_plan(self, *, hashes: bytes, departures: bytes, writes: bytes, reads: bytes, groups: bytes, kept: bytes) -> None:
        """A plan for periods with these hashes. The others: rows of three int64."""

    def cuts(self, lists: list[list[Any]], /) -> list[int]:
        """Where an optimizer's step on these lists is cut: the first index of each slice, and the end; empty: it is not.

        Of tensors or None, all of one length.
        """

    def candidates(self) -> CandidateColumns:
        """The cells that can be evicted now, the one that was touched last first."""

    def set_ranking(self, serials: bytes, ways: bytes) -> None:
        """The cells to evict next, the first one first: int64 serials, and a uint8 of Way for each."""

    def wait_for_pressure(self) -> None:
        """Waits without the GIL until an order is wanted, or until end_wait_for_pressure()."""

    def end_wait_for_pressure(self) -> None:
        """No order is wanted any more."""

    def check_graph(self) -> str:
        """The equation of cells/check_graph.h that does not hold, or an empty text."""

    def miscount(self, nbytes: int, /) -> None:
        """Makes long_pinned_bytes wrong, for the test that such a fault is found."""

    def set_graph_checks(self, share: float, /) -> None:
        """Checks the graph after ops, in this share of the time.

        From the first call on, ranks of locks are checked, too.
        """

    def take_away(self, tensor: Addressed, turn: int = -1) -> int:
        """Evicts a cell: the cheaper way, offloaded at an odd turn, or evicted at an even one.

        The result is its bytes.
        """

    def read_ahead(self, tensor: Addressed, /) -> bool:
        """True: the read has begun, or none is needed. For tests."""

    def describe(self, tensor: Addressed, /) -> CellInfo | None:
        """The tensor's cell; None: it has none."""

    def cells(self) -> list[CellInfo]:
        """All cells."""

    def set_purpose(self, tensors: list[torch.Tensor], purpose: Purpose) -> None:
        """What the program has these tensors for."""

    def stats(self) -> dict[str, int]:
        """Figures."""

    def device_stats(self) -> dict[str, int]:
        """Figures of the device's memory; empty on the CPU."""

    def note_refused(self) -> None:
        """The request of this thread that found no room is part of the floor."""

    def refusal(self) -> str:
        """The allocator's text of the request of this thread that found no room; empty once it was read."""

    def failed_op(self) -> FailedOp:
        """The op of this thread that found no room, once."""

    def drain(self) -> None:
        """Drops references that wait, and ends works and transfers that are done."""

    def leave_out(self, rules: int, /) -> None:
        """Stream rules (a mask) that are not kept. For tests."""

    def check(self) -> None:
        """Raises an error if an invariant of the arena is broken."""

    def living(self) -> list[LivingCell]:
        """The large cells, with their origins."""

    def living_at_peak(self) -> list[LivingCell]:
        """The large cells at the peak of the last logged pass."""

    def survivors(self, mark: int, /) -> list[Survivors]:
        """Cells that outlive the pass after that of their birth, by op, where they were born in several passes.

        States are left out. An op with `mark` passes of birth is marked: further cells of it have lines.
        """

    def grown(self, mark: int, /) -> list[GrownCell]:
        """Cells that have grown so often or more.

        The op of one that did so in as many passes is marked: further cells of it have lines.
        """

    def take_lines(self, lines: Lines, log: bool, folders: tuple[str, ...], libraries: tuple[str, ...]) -> None:
        """Which ops are recorded with their source lines, whether births are logged, the folders whose functions are no line, and those whose lines have the program's own line beside them..


        """

    def source_lines(self) -> list[RecordedLine]:
        """The recorded lines by number; the first stands for none."""

    def passes_ended(self) -> int:
        """Backwards of this process."""

    def around(self, original: Callable[..., Any], enter: Callable[..., Any]) -> Callable[..., Any]:
        """A callable in the place of `original`, without a frame of its own: it calls `enter` with its arguments first.

        A callable result of `enter` is called with the result and the error at the end, any other is kept until then.
        """

    def sleeps_in(self, function: Callable[..., Any], /) -> None:
        """A thread whose innermost frame runs this function sleeps until another thread, or a peer, wakes it."""

    def sets_gradients_in(self, function: Callable[..., Any], /) -> None:
        """A thread that has this function among its frames sets gradients."""

    def others_wait(self) -> bool:
        """True: every other thread waits for a thread or a peer."""

    def raise_in(self, thread: int, exception: type[BaseException], package: str) -> bool:
        """Raises the exception in the thread if a function of the package runs there. True: it did."""

    def gradients_of(self, tensors: list[torch.Tensor], /) -> list[torch.Tensor]:
        """The gradients of the leaves among them, if others_wait()."""

    def gradient_info(self, tensor: torch.Tensor, /) -> StorageInfo | None:
        """`storage_info` of its gradient; None, too, while another thread puts gradients in place."""

    def gradient_bytes(self, tensor: torch.Tensor, /) -> int:
        """0, too, while another thread puts gradients in place."""

    def set_detail(self, on: bool, /) -> None:
        """Whether events are recorded by op and module."""

    def set_learning(self, on: bool, /) -> None:
        """Whether set_module is called for every module."""

    def set_module(self, number: int, /) -> None:
        """The module whose forward runs in this thread."""

    def ops_astray(self) -> int:
        """Ops since the last call whose module is not known."""

    def end_pass(self) -> PassPeaks:
        """Ends a pass in this thread."""

    def drain_events(self) -> EventList:
        """Takes the events."""

    def watch_cells(self, limit: int, /) -> WatchedCells:
        """Describes the largest cells, and sums over all by module."""

    def memory_map(self, columns: int, /) -> MemoryMap:
        """Describes the address space."""

    def storage_info(self, tensor: torch.Tensor, /) -> StorageInfo | None:
        """None: it has no storage on the device."""

    def written_arguments(self, op: str, overload: str) -> list[str]:
        """The arguments that a call of this op may write, by the pager's tables."""

    def resident_cells(self) -> list[ResidentCell]:
        """The resident cells that are not small."""

    def add_outside(self, delta: int, /) -> None:
        """Bytes that are on the device, and not of the pool."""

    def set_limit(self, limit_bytes: int, /) -> None:
        """The limit of the open budget from now on. `settle` evicts cells beyond it."""

    def resident(self) -> int:
        """Bytes on the device."""

    def arena_stats(self) -> dict[str, int]:
        """The pool's figures."""

    def tier_stats(self) -> dict[str, int]:
        """The tier's figures; empty without a tier."""

    def tier_probe(self, size: int, /) -> ProbeSeconds | None:
        """Writes and reads so many bytes; None: there is no room for it."""

    def tier_inject(self, *, write: int = 0, after_writes: int = 0, read: int = 0, after_reads: int = 0) -> None:
        """Lets writes and reads of the tier fail with these errors (errno). For tests."""
