"""The variables that keep tensors alive: `the list losses of train.py`, found from the tensors upwards.

Python's garbage collector lists the objects that refer to an object. The search goes from a tensor through containers and
objects up to a global variable of a module, a local variable of a running function, a class or a closure. Such a path is an
answer. So are objects that only they themselves refer to: a reference cycle. Tensors that no object of Python refers to are
looked for among those that autograd has saved.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import time
import types
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from .memory_inventory import has_graph, live_nodes, raw_saved
from .slowness import CYCLE
from .source_lines import show, skipped_folders

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

SECONDS = 3.0
"""The time after which no further tensor is looked for."""
_DEPTH = 12
_WIDTH = 2000
"""Objects of one level of a search; more are the referrers of something that everything refers to."""
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)


@dataclass(frozen=True)
class _Root:
    """A place that is a variable: its name, and the code that has it."""

    name: str
    place: str


class Keepers:
    """Finds the keepers of tensors, for one explanation.

    Known limitations: a tensor with several keepers has the nearest one. References that C++ code holds are not seen, those
    of autograd excepted; neither are the tensors that a node of an extension saves. Below Python 3.13, where a tracer is
    active (a debugger), no function's variables are known.

    Args:
        native: the pager.
        storages: the tensors that will be asked for, by the addresses of their storages.
    """

    def __init__(self, native: Pager, storages: Collection[int]) -> None:
        self._native = native
        self._found: dict[int, str] = {}
        self._bounded: set[int] = set()
        if not storages:
            return
        if gc.get_freeze_count():
            gc.unfreeze()  # no search finds objects that `gc.freeze` has put aside
        self._until = time.monotonic() + SECONDS
        with contextlib.suppress(Exception):  # an object of the program may do anything when its attributes are read
            self._find(storages)

    def _find(self, storages: Collection[int]) -> None:
        self._globals, self._locals = _globals(), _locals()
        everything: list[torch.Tensor] = self._native.objects_of((torch.Tensor,))
        wanted = [one for one in everything if self._storage(one) in storages]
        # Objects of this search refer to tensors, too.
        self._own = {id(everything), id(wanted)}
        self._own |= {id(vars(module)) for name, module in list(sys.modules.items()) if name.startswith("memmgr.")}
        paths = self._paths(wanted)
        for tensor in wanted:
            if id(tensor) in paths:
                self._found.setdefault(self._storage(tensor), f"in {paths[id(tensor)]}")
        if left := set(storages) - self._found.keys():
            self._find_saved([one for one in everything if has_graph(one)], left)

    def _storage(self, tensor: torch.Tensor) -> int:
        info = self._native.storage_info(tensor)
        return info["storage"] if info is not None else 0

    def of(self, storage: int) -> str:
        """The keeper of a tensor in words, as in `kept in ...`; empty: not known."""
        return self._found.get(storage, "")

    def is_bounded(self, storage: int) -> bool:
        """Tells if a deque with a length keeps it, so that it leaves the deque one day."""
        return storage in self._bounded

    # -- autograd --

    def _find_saved(self, with_graph: list[torch.Tensor], storages: set[int]) -> None:
        """Finds storages that a graph has saved, by the tensors of Python that keep graphs."""
        holders: dict[int, torch.Tensor] = {}
        self._own |= {id(with_graph), id(holders)}
        for tensor in self._referred(with_graph):
            if time.monotonic() > self._until:
                break
            for saved in self._saved_by(tensor):
                if (storage := self._storage(saved)) in storages:
                    holders.setdefault(storage, tensor)
        paths = self._paths(list({id(tensor): tensor for tensor in holders.values()}.values()))
        for storage, tensor in holders.items():
            found = paths.get(id(tensor), "")
            several = found.startswith(("the ", CYCLE))
            of = f"{'tensors in ' * several}{found}" if found else "a graph whose holder is not known"
            self._found[storage] = f"by autograd, for {of}"

    def _referred(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that a variable or an object refers to, autograd's own left out."""
        held = {id(tensor) for tensor in tensors} & set(self._locals)
        for referrer in self._referrers(tensors):
            held.update(id(one) for one in gc.get_referents(referrer))
        found = [tensor for tensor in tensors if id(tensor) in held]
        self._own.add(id(found))
        return found

    @staticmethod
    def _saved_by(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for node in live_nodes([tensor]):
            for _, saved in raw_saved(node):
                yield from (one.data for one in saved if isinstance(getattr(one, "data", None), torch.Tensor))

    # -- objects of Python --

    def _paths(self, targets: list[torch.Tensor]) -> dict[int, str]:
        """By the ids of the targets, the nearest variable that leads to each; those that have none are left out."""
        above: dict[int, list[Any]] = {}  # by the id of an object: those that refer to it
        alive: list[Any] = list(targets)  # ids are compared, so the objects must live
        seen = {id(one) for one in targets}
        level: list[Any] = list(targets)
        self._own |= {id(targets), id(above), id(alive), id(level)}
        found: dict[int, str] = {}
        for _ in range(_DEPTH):
            left = [one for one in targets if id(one) not in found]
            self._own.add(id(left))
            for one in left:
                with contextlib.suppress(Exception):  # objects of the program are looked at for its names
                    if path := self._path(one, above, with_bounded=False) or self._path(one, above):
                        found[id(one)] = path
                        if _only_in_deques(one, above):
                            self._bounded.add(self._storage(one))
            if len(found) == len(targets) or not 0 < len(level) <= _WIDTH or time.monotonic() > self._until:
                break
            level = self._next(level, above, seen)
            alive += level
        if not level:  # all referrers are known
            for one in targets:
                if id(one) not in found and (path := _cycle(one, above, alive)):
                    found[id(one)] = path
        return found

    def _next(self, level: list[Any], above: dict[int, list[Any]], seen: set[int]) -> list[Any]:
        """Notes the referrers of these objects. Returns those that are no variable and were not seen before."""
        wanted = {id(one) for one in level}
        found: list[Any] = []
        self._own.add(id(found))
        for referrer in self._referrers(level):
            children = {id(one): one for one in gc.get_referents(referrer) if id(one) in wanted}
            for key in children:
                if key not in above:
                    above[key] = []
                    self._own.add(id(above[key]))
                above[key].append(referrer)
            is_root = any(self._root(referrer, child) for child in children.values())
            if children and not is_root and id(referrer) not in seen:
                seen.add(id(referrer))
                found.append(referrer)
        return found

    def _path(self, target: torch.Tensor, above: dict[int, list[Any]], *, with_bounded: bool = True) -> str:
        """A variable that leads to the target, in words; empty: there is none. `with_bounded`: over a deque with a length,
        too.
        """
        if id(target) in self._locals:
            return _text(self._locals[id(target)], target, {})
        below: dict[int, Any] = {}  # by the id of an object: the one that it refers to, one step nearer to the target
        queue: deque[Any] = deque([target])
        while queue:
            child = queue.popleft()
            for referrer in above.get(id(child), ()):
                if id(referrer) in below or referrer is target or (_is_bounded(referrer) and not with_bounded):
                    continue
                below[id(referrer)] = child
                root = self._root(referrer, child)
                if root is not None:
                    return _text(root, referrer, below)
                queue.append(referrer)
        return ""

    def _root(self, one: Any, child: Any) -> _Root | None:
        return self._locals.get(id(one)) or self._globals.get(id(one)) or _root_of(one, child)

    def _referrers(self, things: list[Any]) -> list[Any]:
        """Objects that refer to these. A node of autograd is none: the tensors that have its graph are looked for instead."""
        found = [
            one
            for one in gc.get_referrers(*things)
            if id(one) not in self._own and not _is(one, (FrameType, torch.autograd.graph.Node))
        ]
        self._own.add(id(found))
        return found


def _only_in_deques(one: Any, above: dict[int, list[Any]], depth: int = 4) -> bool:
    """Tells if deques with a length are all that keeps an object, in tuples or objects for example."""
    keeping = above.get(id(one), ())
    return bool(keeping and depth) and all(
        _is_bounded(at) if _is(at, deque) else _only_in_deques(at, above, depth - 1) for at in keeping
    )


def _is_bounded(one: Any) -> bool:
    return _is(one, deque) and one.maxlen is not None


def _cycle(target: torch.Tensor, above: dict[int, list[Any]], alive: list[Any]) -> str:
    """The reference cycle that keeps a tensor, in words; empty: there is none, or something else refers to it as well.

    Args:
        target: the tensor.
        above: by the id of an object, those that refer to it.
        alive: the objects of the search, each once.
    """
    keeping: dict[int, Any] = {}
    queue: deque[Any] = deque([target])
    while queue:
        for referrer in above.get(id(queue.popleft()), ()):
            if id(referrer) not in keeping and referrer is not target:
                keeping[id(referrer)] = referrer
                queue.append(referrer)
    within = Counter(id(child) for one in (*keeping.values(), target) for child in gc.get_referents(one))
    ours = Counter(id(one) for each in above.values() for one in each)
    ours.update(map(id, alive))
    referrer = None
    keeping[0] = object()  # nothing else refers to it, as to those of a cycle
    others = {key: sys.getrefcount(one) - within[key] - ours[key] for key, one in keeping.items()}
    del keeping[0]
    if not keeping or any(others[key] > others[0] for key, one in keeping.items() if not _is(one, torch.Tensor)):
        return ""
    objects = [one for one in keeping.values() if not _is(one, (*_CONTAINERS, types.CellType))]
    one = next(iter(objects or keeping.values()))
    name = f"{one.__qualname__}()" if _is(one, types.FunctionType) else type(one).__qualname__
    return f"{CYCLE} of `{name}`, which gc.collect() frees"


def _globals() -> dict[int, _Root]:
    """The variables of modules, and of the code that runs, by the ids of the dicts that have them."""
    found = {
        id(names := _attribute(module, "__dict__")): _Root("", _place(names))
        for module in list(sys.modules.values())
        if _is(module, types.ModuleType)
    }
    for frame in _frames():
        found.setdefault(id(frame.f_globals), _Root("", show(frame.f_code.co_filename)))
    return found


def _place(names: dict[str, Any]) -> str:
    """Names a module by its dict: a look at its attributes might import others. Python takes the file from `__main__` where a
    script has ended, and not its loader.
    """
    file = names.get("__file__") or _attribute(names.get("__loader__"), "path")
    return show(file) if type(file) is str else str(names.get("__name__", "a module"))


def _locals() -> dict[int, _Root]:
    """The objects that variables of running functions refer to, by their ids; the innermost function's come first."""
    found: dict[int, _Root] = {}
    for frame in _frames():
        is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
        if not is_function or (sys.version_info < (3, 13) and sys.gettrace() is not None):
            continue  # the variables of a module are its globals
        place = f"{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}()"
        variables = frame.f_locals
        for name, value in list(variables.items()):
            found.setdefault(id(value), _Root(name, place))
        if sys.version_info < (3, 13):
            variables.clear()  # Python keeps this copy, which would keep the tensors alive
    return found


def _frames() -> Iterator[FrameType]:
    """The frames of the program, this thread's first."""
    mine = sys._getframe()
    others = [frame for frame in sys._current_frames().values() if frame is not mine]
    for frame in (mine, *others):
        at: FrameType | None = frame
        while at is not None:
            if not at.f_code.co_filename.startswith((*skipped_folders(), "<frozen")):
                yield at
            at = at.f_back


def _root_of(one: Any, child: Any) -> _Root | None:
    """The object as a variable's owner: a class, a closure or a generator, where that is how it refers to the child."""
    if _is(one, type) and _is(child, dict):
        return _Root(one.__qualname__, one.__module__)
    if _is(one, types.FunctionType) and child is one.__closure__:
        return _Root("", f"the closure {one.__qualname__}()")
    if _is(one, types.GeneratorType):
        return _Root("", f"the generator {one.__qualname__}()")
    return None


def _text(root: _Root, at: Any, below: dict[int, Any]) -> str:
    """A path in words: "the list `trainer.losses` of train.py"."""
    name, last, container = root.name, "", ""
    if _is(at, types.FunctionType):
        closure = below[id(at)]
        cell = below[id(closure)]
        number = next(i for i, one in enumerate(closure) if one is cell)
        name, at = at.__code__.co_freevars[number], below[id(cell)]
    owner: Any = None  # of the dict that `at` is, where that has its attributes
    while id(at) in below:
        child = below[id(at)]
        name, container = name + last, ""
        if _is(at, dict) and not name:
            last = next((str(key) for key, value in list(at.items()) if value is child), "...")
        elif _is(at, dict) and owner is not None:
            last = next((f".{key}" for key, value in list(at.items()) if value is child), "...")
        elif _is(at, _CONTAINERS):
            container, last = type(at).__name__, _item(at, child)
        else:
            last = _part(at, child)
        owner = at if _is(child, dict) and _has_attributes_in(at, child) else None
        at = child
    return f"the {container} `{name}` of {root.place}" if container else f"`{name}{last}` of {root.place}"


def _item(at: Any, child: Any) -> str:
    keys = [key for key, value in list(at.items()) if value is child] if _is(at, dict) else []
    return f"[{keys[0]!r}]" if keys and isinstance(keys[0], str | int) else "[...]"


def _part(at: Any, child: Any) -> str:
    """The part of an expression that leads from an object, which is no container, to one that it refers to."""
    if _is(at, types.GeneratorType):
        variables = {} if at.gi_frame is None else at.gi_frame.f_locals
        return next((name for name, value in variables.items() if value is child), "...")
    if _has_attributes_in(at, child):
        return ""
    return next((f".{name}" for name in _attributes(at) if _attribute(at, name) is child), "...")


def _has_attributes_in(at: Any, child: Any) -> bool:
    """The dict has the object's attributes."""
    if _is(at, type):
        return _is(child, dict)
    return not _is(at, types.FunctionType) and _attribute(at, "__dict__") is child


def _attributes(at: Any) -> list[str]:
    slots = [name for kind in type(at).__mro__ for name in _words(kind.__dict__.get("__slots__", ()))]
    return [*(_attribute(at, "__dict__") or {}), *slots]


def _words(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _attribute(at: Any, name: str) -> Any:
    """Runs no `__getattr__` of the object's class, nor a property in place of its dict."""
    try:
        return object.__getattribute__(at, name)
    except Exception:
        return None


def _is(one: Any, kinds: type | tuple[type, ...]) -> bool:
    """As isinstance, without a look at the object: a proxy's attributes may do anything."""
    return issubclass(type(one), kinds)
