"""`make stub`: writes memmgr/native/_pager.pyi and memmgr/common/constants.py from the descriptions in the pager's module."""

from __future__ import annotations

import keyword
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from memmgr.native import binding

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "memmgr" / "native" / "_pager.pyi"
CONSTANTS = ROOT / "memmgr" / "common" / "constants.py"
WIDTH = 120


def documented(text: str, indent: str) -> str:
    """A docstring: the first sentence, and the others below it where one line is too short for all."""
    if len(indent) + len(text) + 6 <= WIDTH:
        return f'{indent}"""{text}"""\n'
    first, _, rest = text.partition(". ")
    lines = textwrap.wrap(rest, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f'{indent}"""{first}.\n\n' + "\n".join(lines) + f'\n{indent}"""\n'


def stub(module: Any) -> str:
    """The functions and the dicts that they return, as types."""
    functions = [f for f in module._functions() if not f["name"].startswith("_")]
    types = [row for row in module._types() if row[0] != "DescribedFunction"]
    hints = " ".join(f"{f['parameters']} {f['result']}" for f in functions)
    enums = [name for name, *_ in module._enums() if re.search(rf"\b{name}\b", hints)]
    text = f'''"""The pager's module, as it describes itself. Written by `make stub`."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch

from memmgr.common.constants import {", ".join(sorted(enums))}

Addressed = torch.Tensor | int
"""A tensor, or a storage's `_cdata`."""

class Pin:
    """{module.Pin.__doc__}"""
'''
    for name, meaning, *fields in types:
        text += f"\nclass {name}(TypedDict):\n{documented(meaning, '    ')}\n"
        text += "".join(f"    {key}: {hint}\n" for key, hint in zip(fields[::2], fields[1::2], strict=True))
    text += '\nclass Pager:\n    """The functions of the module; `allocator/pager/python` binds them."""\n'
    for f in functions:
        parameters = f["parameters"].replace("'", '"')
        text += f"\n    def {f['name']}(self{parameters}) -> {f['result']}:\n{documented(f['doc'], ' ' * 8)}"
    return text


def constants(module: Any) -> str:
    """The constants that C++ has, too."""
    text = '''"""The constants that the pager's C++ has, too. Written by `make stub` from allocator/pager/base/constants.def."""

import enum
'''
    for name, meaning, *words in module._enums():
        assert not any(keyword.iskeyword(word.upper()) for word in words)
        text += f"\n\nclass {name}(enum.IntEnum):\n{documented(meaning, '    ')}\n"
        text += "".join(f"    {word.upper()} = {value}\n" for value, word in enumerate(words))
    text += "\n\n"
    for name, value in module._numbers().items():
        text += f"{name} = {value!r}\n".replace("'", '"')
    return text


def main() -> None:
    module = binding.load()
    for file, text in ((STUB, stub(module)), (CONSTANTS, constants(module))):
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)
            print(f"{file.relative_to(ROOT)} is new", file=sys.stderr)


if __name__ == "__main__":
    main()
