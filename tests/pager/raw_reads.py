"""Ways to read a tensor's bytes outside of ops, in which an absent tensor comes back."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch


def saved(t: torch.Tensor, new: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(t, buffer, _use_new_zipfile_serialization=new)
    buffer.seek(0)
    return torch.load(buffer)


def safetensors(t: torch.Tensor) -> torch.Tensor:
    library = pytest.importorskip("safetensors.torch")
    return library.load(library.save({"t": t}))["t"]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda t: t.tolist(),
    "repr": repr,
    "item": lambda t: t.flatten()[7].item(),
    "bool": lambda t: bool((t == t).all()),
    "deepcopy": copy.deepcopy,
    "deepcopy of a buffer": lambda t: copy.deepcopy({"state": [t]})["state"][0],
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": saved,
    "save, the old format": lambda t: saved(t, False),
    "safetensors": safetensors,
    "storage item": lambda t: t.untyped_storage()[5],
    "storage list": lambda t: t.untyped_storage().tolist(),
    "storage copy": lambda t: torch.UntypedStorage(t.nbytes).copy_(t.untyped_storage()).tolist()[:9],
    "set_": lambda t: torch.empty(0).set_(t.untyped_storage())[2].item(),
    "sparse": lambda t: torch.sparse_coo_tensor(
        torch.arange(len(t))[None], t, t.shape, check_invariants=False
    ).to_dense(),
}


def same(got: Any, want: Any) -> bool:
    return torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
