"""The author and the addresses of a release, from `[tool.memmgr.release]` of pyproject.toml alone.

scikit-build-core calls `dynamic_metadata` for the fields that pyproject.toml lists as dynamic.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def settings() -> dict[str, str]:
    """`author`, `email` and `address`; empty until they are known."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, str] = tomllib.load(file)["tool"]["memmgr"]["release"]
    return found


def address_of(path: str, *, raw: bool = False) -> str:
    """Where a file of the repository is shown, or its bytes are; empty without an address."""
    address = settings()["address"].rstrip("/")
    return f"{address}/{'raw' if raw else 'blob'}/main/{path}" if address else ""


def readme() -> str:
    """README with absolute links and the address, for a package index. Without an address it stays as it is."""

    def absolute(match: re.Match[str]) -> str:
        path = posixpath.normpath(match[2])
        return f"{match[1]}{address_of(path, raw=path.endswith(('.png', '.svg')))}{match[3]}"

    text, address = (ROOT / "README.md").read_text(), settings()["address"]
    return _LINK.sub(absolute, text).replace("git clone ADDRESS", f"git clone {address}") if address else text


def dynamic_metadata(field: str, config: dict[str, Any] | None = None, *rest: Any) -> Any:
    """The value of one field of the package's metadata."""
    release = settings()
    if field == "readme":
        return {"content-type": "text/markdown", "text": readme()}
    if field == "authors":
        author = {key: release[name] for key, name in (("name", "author"), ("email", "email")) if release[name]}
        return [author] if author else []
    if field == "urls":
        address = release["address"].rstrip("/")
        pages = {"Documentation": "blob/main/docs/README.md", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
        return {"Homepage": address} | {name: f"{address}/{page}" for name, page in pages.items()} if address else {}
    raise ValueError(field)


def missing() -> list[str]:
    """A sentence about each thing that a release still needs."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    found = [
        f"pyproject.toml, [tool.memmgr.release]: {name} is empty" for name, value in settings().items() if not value
    ]
    for name, line in (
        ("CITATION.cff", f"version: {version}"),
        ("tools/house/conda/meta.yaml", f'version = "{version}"'),
    ):
        if line not in (ROOT / name).read_text():
            found.append(f"{name}: the version is not {version}")
    author = settings()["author"]
    if author and f"name: {author}" not in (ROOT / "CITATION.cff").read_text():
        found.append(f"CITATION.cff: the author is not {author}")
    if f"## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md: no section {version}")
    for mark, says in (
        ("<!-- badges -->", "the badges' place is empty; `python tools/house/release.py --badges` prints them"),
        ("git clone ADDRESS", "`git clone ADDRESS` waits for the address"),
    ):
        if mark in (ROOT / "README.md").read_text() and settings()["address"]:
            found.append(f"README.md: {says}")
    return found


def badges() -> str:
    """The badges' line of README: the package, its Pythons, the licence."""
    shown = "https://img.shields.io/pypi"
    package = f"[![PyPI]({shown}/v/memmgr)](https://pypi.org/project/memmgr/)"
    return f"{package} ![Python]({shown}/pyversions/memmgr) ![licence]({shown}/l/memmgr)"


if __name__ == "__main__":
    if sys.argv[1:] == ["--badges"]:
        print(badges())
    else:
        print("\n".join(missing()) or "nothing is missing")
        sys.exit(bool(missing()))
