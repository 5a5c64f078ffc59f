"""Takes stock: torch's memory on the device before the allocator is in place, and its holders."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from memmgr.native._pager import Pager, ResidentCell, StorageInfo

    Inventory: TypeAlias = "Pager | Census"


class Census:
    """An inventory that walks over all objects of the process once, however often it is asked (8 ms of 400,000 objects)."""

    def __init__(self, native: Pager) -> None:
        kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, *_gathering(), *loader_kinds())
        self._found = native.objects_of(kinds)
        self.gradient_bytes = native.gradient_bytes
        self.gradient_info = native.gradient_info
        self.storage_info = native.storage_info
        self.reducer_storages = native.reducer_storages

    def objects_of(self, types: tuple[type, ...]) -> list[Any]:
        """Those of the walk that are of these types, or of subtypes."""
        return [thing for thing in self._found if issubclass(type(thing), types)]

    def loaders(self) -> list[Any]:
        """DataLoaders that are gone over, or were."""
        return self.objects_of(loader_kinds())


def live_tensors(known: Iterable[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """The plain tensors on the device (with its number) among these.

    Known limitation: tensors that only C++ holds (a graph's saved tensors) are not seen.
    """
    found: list[torch.Tensor] = []
    device = torch.device(device)
    for thing in known:
        if type(thing) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            continue
        try:
            if thing.device != device or thing.layout != torch.strided:
                continue
            found.append(thing)
        except (RuntimeError, NotImplementedError):
            continue  # a tensor without storage
    return found


def has_graph(tensor: torch.Tensor) -> bool:
    """The tensor keeps the graph that made it."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view whose base was written to, for one
        return False


def live_nodes(known: Iterable[torch.Tensor]) -> list[Any]:
    """The nodes of every autograd graph that one of these tensors belongs to."""
    seen: set[int] = set()
    found: list[Any] = []  # ids are compared, so the wrappers must live
    nodes: list[Any] = []
    for thing in known:
        try:
            nodes.append(thing.grad_fn)
        except RuntimeError:
            continue
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        nodes.extend(next_node for next_node, _ in node.next_functions)
    return found


def raw_saved(node: Any) -> list[tuple[str, list[Any]]]:
    """(attribute, saved variables) of a node, without unpacking anything; released ones are left out."""
    found = []
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:
            continue  # released already
        found.append((name, [s for s in (value if isinstance(value, tuple | list) else (value,)) if s is not None]))
    return found


def saved_without_hooks(known: Iterable[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """The tensors on the device that the graphs of these tensors hold; Python does not see most of them otherwise.

    Known limitation: nodes that are written in C++ outside torch do not show the tensors that they save.
    """
    device = torch.device(device)
    found: list[torch.Tensor] = []
    for node in live_nodes(known):
        for _, saved in raw_saved(node):
            tensors: list[Any] = [getattr(s, "data", None) for s in saved]  # with hooks: their result
            found += [t for t in tensors if type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)]
    return [t for t in found if t.device == device and t.layout == torch.strided]


class Stock:
    """The bytes that were there before: they count against the budget until they are freed.

    Args:
        native: the pager.
        tensors: all there are on the device, as far as they can be found.
    """

    def __init__(self, native: Any, tensors: Iterable[torch.Tensor]) -> None:
        self._finalizers: list[Any] = []
        self.bytes = 0
        seen: set[int] = set()
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue
            key = storage._cdata
            info = native.storage_info(tensor)
            if key in seen or info is None or info["counted"]:
                continue  # the memory of our arena is counted there
            seen.add(key)
            size = storage.nbytes()
            if size == 0:
                continue
            self.bytes += size
            finalizer = weakref.finalize(storage, native.add_outside, -size)
            finalizer.atexit = False
            self._finalizers.append(finalizer)

    def close(self) -> int:
        """Stops watching. Returns the bytes that are still there."""
        left = 0
        for finalizer in self._finalizers:
            watched = finalizer.detach()
            left -= watched[2][0] if watched else 0
        self._finalizers.clear()
        return left


def model_states(
    modules: Iterable[Any] = (), optimizers: Iterable[Any] = ()
) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """(kind, owner, tensor): parameters and buffers of these modules, without their children's, and optimizers' states.

    An owner that is half made, or that another thread changes during the walk, is read as it is then.
    """
    for module in modules:
        for kind, table in (("parameters", "_parameters"), ("buffers", "_buffers")):
            for tensor in list(module.__dict__.get(table, {}).values()):
                if isinstance(tensor, torch.Tensor):
                    yield kind, module, tensor
    for optimizer in optimizers:
        for state in list(getattr(optimizer, "state", {}).values()):
            if isinstance(state, dict):
                for value in _tensors_of(state):
                    yield "optimizer states", optimizer, value


def _tensors_of(state: dict[Any, Any]) -> list[torch.Tensor]:
    """A parameter's state; LBFGS keeps lists."""
    values = [each for value in list(state.values()) for each in (value if isinstance(value, list) else (value,))]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _gathering() -> tuple[type, ...]:
    """FSDP2's class of parameters, where it is in use."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param"), "FSDPParam", None)
    return () if kind is None else (kind,)


def loader_kinds() -> tuple[type, ...]:
    """DataLoader's iterator class, if torch.utils.data is imported."""
    kind = getattr(sys.modules.get("torch.utils.data.dataloader"), "_BaseDataLoaderIter", None)
    return () if kind is None else (kind,)


def _gathered(native: Inventory) -> list[tuple[torch.Tensor | None, list[torch.Tensor]]]:
    """For each parameter of FSDP2: this rank's shard, and the gathered tensors that are not yet freed."""
    kinds = _gathering()
    if not kinds:
        return []
    found = native.objects_of(kinds)
    return [(getattr(one, "_sharded_param_data", None), list(getattr(one, "all_gather_outputs", ()))) for one in found]


def _bucket_storages(native: Inventory, module: Any) -> list[int]:
    """Addresses; of gradients, too, which others have taken by then."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return []
    reducer = getattr(module, "reducer", None)
    return native.reducer_storages(reducer) if reducer is not None else []


def holders(
    native: Inventory,
    device: torch.device | str,
    top: int = 5,
    rest: Iterable[ResidentCell] = (),
) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """The holders of the resident bytes: by kind, and the largest modules by class name.

    Args:
        rest: all that is there: autograd has saved those that Python does not see.

    Returns:
        ({kind: bytes}, [(module class, bytes)] largest first). Kinds: parameters, gradients, optimizer state, buffers,
        gathered parameters (FSDP2's), gradient buckets (DDP's), saved for backward, other tensors.
    """
    kinds: dict[str, int] = defaultdict(int)
    modules: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    device = torch.device(device)

    def take(tensor: Any, kind: str) -> int:
        if tensor is None or tensor.device != device:
            return 0
        return count(native.storage_info(tensor), kind)

    def count(info: StorageInfo | None, kind: str) -> int:
        if info is None or info["storage"] in seen:
            return 0
        seen.add(info["storage"])
        kinds[kind] += info["held_bytes"]
        return info["held_bytes"]

    everything = native.objects_of((torch.nn.Module,))
    for shard, gathered in _gathered(
        native
    ):  # until they are resharded, gathered tensors are the modules' parameters, and the shards are not
        take(shard, "parameters")
        for tensor in gathered:
            take(tensor, "gathered parameters")
    for kind, module, tensor in model_states(everything):
        modules[type(module).__name__] += take(tensor, kind)
    for kind, _, tensor in model_states((), native.objects_of((torch.optim.Optimizer,))):
        take(tensor, kind)
    known = native.objects_of((torch.Tensor,))
    for tensor in known:
        count(native.gradient_info(tensor), "gradients")
    for tensor in live_tensors(known, device):
        take(tensor, "other tensors")
    buckets = {key for module in everything for key in _bucket_storages(native, module)}
    kinds["gradient buckets"] += sum(cell["bytes"] for cell in rest if cell["storage"] in buckets - seen)
    seen |= buckets
    kinds["saved for backward"] += sum(cell["bytes"] for cell in rest if cell["storage"] not in seen)
    kinds = {kind: size for kind, size in kinds.items() if size}
    ranked = sorted(((name, size) for name, size in modules.items() if size), key=lambda item: -item[1])
    return kinds, ranked[:top]


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements; of a sparse one, for which torch has no answer, those that it stores."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


_LBFGS_BESIDE = 3  # direction, gradient and the last one, besides its history

# The bytes of a parameter's state in units of the parameter, for optimizers that have not made it yet.
_MOMENTS = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adagrad": 1,
    "RMSprop": 1,
    "Adadelta": 2,
    "Rprop": 2,
    "ASGD": 1,
}


def has_sparse_gradients(native: Inventory) -> bool:
    """Tells if an optimizer has a parameter whose gradient is sparse."""
    parameters = (
        parameter
        for thing in native.objects_of((torch.optim.Optimizer,))
        for group in getattr(thing, "param_groups", [])
        for parameter in group["params"]
    )
    return any(one.grad is not None and one.grad.is_sparse for one in parameters)


def missing_states(
    native: Inventory, device: torch.device | str, *, gradients: bool = True, history: bool = True
) -> int:
    """Bytes of gradients, unless they are left out, and of optimizer state that the first complete step will add.

    LBFGS adds to its history in each of its iterations. `history`: all of it counts, and else one iteration.

    An optimizer that has made the state of some parameters shows how much the others will take. Known limitation: one of
    another library that has made none yet is taken to need none.
    """
    missing = 0
    device = torch.device(device)
    wanted: dict[int, torch.Tensor] = {}
    for thing in native.objects_of((torch.optim.Optimizer,)):
        made: list[tuple[int, int]] = []  # of each parameter: its bytes, its state's
        for group in getattr(thing, "param_groups", []):
            for parameter in group["params"]:
                if not parameter.requires_grad or parameter.device != device:
                    continue
                wanted[id(parameter)] = parameter
                state = thing.state.get(parameter) or {}
                there = sum(size_of(v) for v in _tensors_of(state) if v.numel() > 1)
                made.append((parameter.nbytes, there))
        units = float(_MOMENTS.get(type(thing).__name__, 0))
        if any(group.get("amsgrad") for group in thing.param_groups):
            units += 1
        if any(group.get("momentum") for group in thing.param_groups):
            units += 1
        seen = [there / nbytes for nbytes, there in made if nbytes and there]
        if seen and (len(seen) > 1 or units == 0):
            units = max(seen)  # the state of some is the measure for all; the last one may be half made
        if isinstance(thing, torch.optim.LBFGS):  # its first parameter has the states of all, until its history is full
            tensors = 2 * (thing.param_groups[0]["history_size"] if history else 1) + _LBFGS_BESIDE
            missing += max(0, tensors * sum(nbytes for nbytes, _ in made) - sum(there for _, there in made))
            continue
        missing += sum(max(0, int(units * nbytes) - there) for nbytes, there in made)
    return missing + sum(p.nbytes for p in wanted.values() if gradients and not native.gradient_bytes(p))


def states_below(native: Inventory) -> int:
    """Bytes of parameters, buffers, gradients and optimizer states that are not in memory."""
    found: dict[int, int] = {}
    owners = native.objects_of((torch.nn.Module,)), native.objects_of((torch.optim.Optimizer,))
    states = [tensor for _, _, tensor in model_states(*owners)]
    for tensor in states:
        for info in (native.storage_info(tensor), native.gradient_info(tensor)):
            if info is not None:
                found[info["storage"]] = info["bytes"] - info["held_bytes"]
    return sum(found.values())


_ONE_TENSORS, _LIST_TENSORS = 3, 5


def step_bytes(native: Inventory, device: torch.device | str) -> int:
    """Bytes that an optimizer takes besides its state while it steps: two tensors of its largest parameter's size, or, where it
    works on lists of tensors (on accelerators, as torch's do unless told otherwise), one of each."""
    return _steps(native, device)[0]


def update_bytes(native: Inventory, device: torch.device | str) -> int:
    """Bytes of an optimizer's largest op, the states that it works on included: parameter, gradient, moments."""
    return _steps(native, device)[1]


def _steps(native: Inventory, device: torch.device | str) -> tuple[int, int]:
    device = torch.device(device)
    most = update = 0
    for thing in native.objects_of((torch.optim.Optimizer,)):
        for group in getattr(thing, "param_groups", []):
            sizes = [p.nbytes for p in group["params"] if p.requires_grad and p.device == device]
            lists = group.get("foreach")
            lists = device.type != "cpu" and not group.get("fused") if lists is None else lists
            largest = max(sizes, default=0)
            most = max(most, sum(sizes) if lists else 2 * largest)
            # One at a time none reads and writes more than three of its tensors; lists are cut into slices of one or more.
            update = max(update, (_LIST_TENSORS if lists or group.get("fused") else _ONE_TENSORS) * largest)
    return most, update
