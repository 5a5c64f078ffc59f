"""A hook of mkdocs: README and CONTRIBUTING become pages of the site, and links out of docs/ lead somewhere.

A link to a file that is no page, such as a source, becomes its text: with an address (`release.py`) it leads there.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from release import address_of

ROOT = Path(__file__).resolve().parents[2]
ADDED = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages outside of docs/, and their names in the site."""

_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```[\s\S]*?^```$)", re.MULTILINE)


def turned(text: str, page: str) -> str:
    """The page's Markdown with links that work in the site. `page`: its path in the repository, as "docs/faq.md"."""
    here = posixpath.dirname(page)
    in_site = posixpath.relpath(here, "docs") if here.startswith("docs") else "."

    def turn(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(here, target))
        if path in ADDED or path.startswith("docs/"):
            there = ADDED.get(path) or posixpath.relpath(path, "docs")
            return f"{words}({posixpath.relpath(there, in_site)}{anchor})"
        address = address_of(path)
        return f"{words}({address})" if address else words.strip("[]")

    parts = _FENCED.split(text)
    return "".join(part if index % 2 else _LINK.sub(turn, part) for index, part in enumerate(parts))


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for source, name in ADDED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns the links of one page."""
    names = {name: source for source, name in ADDED.items()}
    return turned(markdown, names.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
