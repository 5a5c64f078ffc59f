"""Writes build/compile_commands.json: clangd reads there how each file of allocator/ is compiled (`make clangd`)."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    site = Path(torch.__file__).parents[1]
    torch_include = site / "torch" / "include"
    system = [torch_include, torch_include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    system += sorted(site.glob("nvidia/*/include"))
    flags = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Wno-unused-parameter", f"-I{ROOT / 'allocator/include'}"]
    flags += [f"-I{ROOT / 'allocator/pager'}"]
    for folder in system:
        flags += ["-isystem", str(folder)]
    files = [str(path) for path in sorted((ROOT / "allocator").rglob("*.cpp"))]
    commands = [{"directory": str(ROOT), "file": file, "arguments": [*flags, "-c", file]} for file in files]
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "compile_commands.json").write_text(json.dumps(commands, indent=1))


if __name__ == "__main__":
    main()
