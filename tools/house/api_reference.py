"""Writes docs/api.md from the public docstrings: `memmgr`, `memmgr.integrations`, the keys of `memmgr.stats()`.

    python tools/house/api_reference.py           # writes it
    python tools/house/api_reference.py --check   # exit code 1 if it is out of date

It reads the sources and imports nothing, so no optional package has to be there.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields):")
ENTRY = re.compile(r"([\w, .*]+): (.*)")
HEAD = """# API reference

<!-- Made by tools/house/api_reference.py from the docstrings: change those, then `make api`. -->

What `import memmgr` and `memmgr.integrations` give. `memmgr.policies` is described in [policies.md](policies.md) and
[writing_a_policy.md](writing_a_policy.md).
"""
KEYS = """## Keys of `memmgr.stats()`

A counter never falls until the next budget opens; a gauge may.

"""
CALLED_BY_FRAMEWORKS = ("_", "on_", "collect", "describe")  # beginnings of names; not for the user
Definition = ast.ClassDef | ast.FunctionDef


def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def value_of(module: ast.Module, name: str) -> ast.expr:
    """The value that a module assigns to a name."""
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(node, "value", None)
            assert isinstance(value, ast.expr)
            return value
    raise KeyError(name)


def public(package: str) -> Iterator[tuple[str, Definition]]:
    """The definitions that a package exports, by its `__all__` and the table of their homes."""
    module = parsed(f"{package}/__init__.py")
    homes = ast.literal_eval(value_of(module, "_HOMES"))
    for name in ast.literal_eval(value_of(module, "__all__")):
        if name in homes:
            body = parsed(f"{package}/{homes[name].replace('.', '/')}.py").body
            yield name, next(n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)


def signature(name: str, function: ast.FunctionDef) -> str:
    """The signature of a call: without `self`, and without parameters that begin with an underscore."""
    given = function.args
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    plain = [(a, d) for a, d in zip(given.args, defaults, strict=True) if a.arg not in ("self", "cls")]
    parts = [_argument(a, d) for a, d in plain]
    keywords = [_argument(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if a.arg[0] != "_"]
    if given.vararg or keywords:
        parts.append("*" + (given.vararg.arg if given.vararg else ""))
    parts += keywords + ([f"**{given.kwarg.arg}"] if given.kwarg else [])
    result = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    line = f"{name}({', '.join(parts)}){result}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    said = f"{argument.arg}: {ast.unparse(argument.annotation)}" if argument.annotation else argument.arg
    return said if default is None else f"{said} = {ast.unparse(default)}"


def markdown(docstring: str) -> str:
    """Google style as Markdown: a paragraph is one line, a section a list."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.splitlines()
        heading = SECTION.fullmatch(lines[0])
        if heading:
            entries = "\n".join(lines[1:])
            listed = heading[1] not in ("Returns", "Yields")
            pieces = re.split(r"\n(?=    \S)", "\n" + entries) if listed else [entries]
            items = [" ".join(piece.split()) for piece in pieces if piece.strip()]
            shown = [ENTRY.sub(r"`\1`: \2", item, count=1) if listed else item for item in items]
            out.append(f"**{heading[1]}**\n\n" + "\n".join(f"- {item}" if listed else item for item in shown))
        elif all(line.startswith("    ") for line in lines):
            out.append("```python\n" + "\n".join(line[4:] for line in lines) + "\n```")
        else:
            out.append(" ".join(line.strip() for line in lines))
    # Code that is interrupted by an empty line is one block.
    return "\n\n".join(out).replace("\n```\n\n```python\n", "\n\n")


def described(name: str, node: Definition, level: str = "##") -> Iterator[str]:
    """One name: signature, docstring, and the methods that a user calls."""
    if isinstance(node, ast.FunctionDef):
        shown, methods = signature(name, node), []
    else:
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
        special = {n.name: n for n in methods if n.name in ("__new__", "__init__")}
        # Exceptions, and objects that our functions return, are not constructed by the user.
        called = special.keys() == {"__init__"}
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        shown = signature(name, special["__init__"]) if called else f"class {name}({bases})"
    yield f"{level} `{name}`\n\n```python\n{shown}\n```\n\n{markdown(ast.get_docstring(node) or '')}\n"
    for method in methods:
        if not method.name.startswith(CALLED_BY_FRAMEWORKS) and ast.get_docstring(method):
            yield from described(f"{name}.{method.name}", method, level + "#")


def figures() -> Iterator[str]:
    """The keys of `memmgr.stats()`, as memmgr/observe/figures.py has them."""
    table = value_of(parsed("memmgr/observe/figures.py"), "FIGURES")
    assert isinstance(table, ast.Tuple)
    yield "| key | kind | |\n|---|---|---|\n"
    for call in table.elts:
        assert isinstance(call, ast.Call)
        name, kind, meaning = [ast.literal_eval(argument) for argument in call.args[:3]]
        yield f"| `{name}` | {kind} | {meaning}. |\n"
    yield "| `escapes.FILE:LINE` | counter | how often that place in the program handed an address out for good. |\n"


def page() -> str:
    """All of it."""
    parts = [HEAD, "# `memmgr`\n", *(part for name, node in public("memmgr") for part in described(name, node))]
    parts += [KEYS + "".join(figures())]
    parts += ["# `memmgr.integrations`\n"]
    parts += [part for name, node in public("memmgr/integrations") for part in described(name, node)]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        same = PAGE.is_file() and PAGE.read_text() == page()
        print("docs/api.md is up to date" if same else "docs/api.md is stale: make api", file=sys.stderr)
        return 0 if same else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
