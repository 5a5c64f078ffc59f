"""FILE.py:FUNCTION, checked by reading the file: nothing is executed, and torch is not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from memmgr.config.did_you_mean import meant
from memmgr.tools.common.usage_error import UsageError, cannot_read


def is_model_folder(path: Path) -> bool:
    """A folder with the config.json of a model, instead of a file."""
    return (path / "config.json").is_file()


def step_function(what: str) -> tuple[Path, str]:
    """The file and the function that FILE.py:FUNCTION names.

    Raises `UsageError`: there is no such file, it is not Python, or its text defines no such name.
    """
    text, _, name = what.rpartition(":")
    path = Path(text)
    if path.suffix != ".py":
        raise UsageError(f"{what!r} is neither FILE.py:FUNCTION nor a folder with a config.json")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise cannot_read(path, error) from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"{path}{line}: not Python that can be read: {said}") from None
    names = list(_defined(tree.body))
    if name not in names and "*" not in names:
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        near = meant(name, functions)
        there = f"; it has {', '.join(functions)}" if functions else "; it has no function"
        raise UsageError(f"{path} has no function {name!r}{near or there}")
    return path, name


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements outside of functions define; `*` where only running them would tell."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id
                elif isinstance(inner, ast.Name) and inner.id in ("globals", "exec", "setattr"):
                    yield "*"
                elif isinstance(inner, ast.FunctionDef | ast.ClassDef):
                    yield inner.name
                elif isinstance(inner, ast.Import | ast.ImportFrom):
                    yield from (alias.asname or alias.name.partition(".")[0] for alias in inner.names)
