"""Compiles extension.cpp, the extension of test_extensions.py."""

import sysconfig
from pathlib import Path

import torch
from memdev.build import torch_library


def library() -> Path:
    include = [Path(torch.__file__).parent / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    flags = [*(f"-I{path}" for path in include), "-ltorch_python"]
    return torch_library("memmgr_test_extension", Path(__file__).with_name("extension.cpp"), [], flags)
