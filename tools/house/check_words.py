"""Checks the language of comments and docstrings; `make lint` runs it.

    python tools/house/check_words.py            # exit code 1 where one of the two checks fails
    python tools/house/check_words.py --show F   # the comments and docstrings of file F that count
    python tools/house/check_words.py --lower    # writes the counts to tools/house/words.txt where they have fallen

Rules: each `rule N` that a source or a document cites is a rule of docs/develop/rules.md.

Headless comments: a unit is a docstring (of a variable, too), or comment lines that follow each other. It counts if it
contains the word `what`, `whatever`, `who`, `whoever` or `whom`, or if it begins with `Of`, `Whether`, `In whose` or
`In which`: such a unit leaves the thing that it describes without a name. Text in backticks or double quotes does not
count. tools/house/words.txt holds the number of each folder. A number may only fall: the check fails if a folder has more, and
if it has fewer and the file was not lowered. docs/develop/style.md has the words to write instead.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTS = ROOT / "tools" / "house" / "words.txt"
RULES = ROOT / "docs" / "develop" / "rules.md"
FOLDERS = ["allocator/core", "allocator/cuda", "allocator/include", "allocator/pager"]
FOLDERS += ["examples", "memmgr", "policies", "tests", "tools"]
SOURCES = (".py", ".cpp", ".h", ".cu")
WORST = 10  # files that a run prints

QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")
HEADLESS = re.compile(r"\b(what|whatever|who|whoever|whom)\b", re.IGNORECASE)
OPENING = re.compile(r"(Of|Whether|In whose|In which)\b")
CITED = re.compile(r"\b[Rr]ules?\s+(\d+(?:(?:,\s*|,?\s+(?:and|or|to)\s+)\d+)*)")
# Strings come first, so that `//` in one does not begin a comment.
CPP = re.compile(
    r'R"([^(\s]*)\([\s\S]*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(?P<line>//[^\n]*)|(?P<block>/\*[\s\S]*?\*/)'
)


def is_headless(text: str) -> bool:
    """Tells if one unit counts."""
    text = QUOTED.sub("", text)
    return bool(HEADLESS.search(text) or OPENING.match(text))


def _joined(comments: Iterator[tuple[int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Joins comment lines that follow each other. Each comment: its line, whether it is alone on it, its text."""
    first, last, text = 0, -1, ""
    for line, alone, words in comments:
        if alone and line == last + 1:
            text, last = f"{text} {words}", line
            continue
        if last >= 0:
            yield first, text
        first, last, text = line, line, words
    if last >= 0:
        yield first, text


def _python(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, inspect.cleandoc(node.value.value)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from _joined(
        (t.start[0], not t.line[: t.start[1]].strip(), t.string.lstrip("#").strip())
        for t in tokens
        if t.type == tokenize.COMMENT
    )


def _cpp(source: str) -> Iterator[tuple[int, str]]:
    def lines() -> Iterator[tuple[int, bool, str]]:
        for found in CPP.finditer(source):
            if found["line"]:
                start = source.rfind("\n", 0, found.start()) + 1
                alone = not source[start : found.start()].strip()
                yield source.count("\n", 0, found.start()) + 1, alone, found["line"].lstrip("/").strip()

    yield from _joined(lines())
    for found in CPP.finditer(source):
        if found["block"]:
            yield source.count("\n", 0, found.start()) + 1, re.sub(r"\s*\n\s*\*?\s*", " ", found["block"][2:-2]).strip()


def units(path: Path) -> list[tuple[int, str]]:
    """The comments and docstrings of a file, each with its first line."""
    source = path.read_text()
    return sorted(_python(source) if path.suffix == ".py" else _cpp(source))


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SOURCES)


def counted() -> tuple[dict[str, int], Counter[str]]:
    """The number of headless units of each folder and of each file."""
    folders, files = {}, Counter[str]()
    for folder in FOLDERS:
        for path in sources(ROOT / folder):
            files[str(path.relative_to(ROOT))] = sum(is_headless(text) for _, text in units(path))
        folders[folder] = sum(n for file, n in files.items() if file.startswith(folder + "/"))
    return folders, files


def allowed() -> dict[str, int]:
    """The numbers of tools/house/words.txt."""
    pairs = (line.split() for line in COUNTS.read_text().splitlines())
    return {folder: int(number) for folder, number in pairs}


def differences(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """One sentence for each folder whose number is not the one in the file."""
    found = []
    for folder in sorted({*now, *before}):
        new, old = now.get(folder, 0), before.get(folder, 0)
        if new > old:
            found.append(
                f"{folder}: {new} headless comments, {old} allowed. Name the thing first (docs/develop/style.md)."
            )
        elif new < old:
            found.append(f"{folder}: {new} headless comments, {old} allowed. Run tools/house/check_words.py --lower.")
    return found


def unknown_rules(text: str, rules: set[int]) -> list[int]:
    """The numbers of rules that `text` cites and that do not exist."""
    cited = (int(number) for found in CITED.finditer(text) for number in re.findall(r"\d+", found[1]))
    return [number for number in cited if number not in rules]


def wrong_citations() -> list[str]:
    rules = {int(number) for number in re.findall(r"^(\d+)\. ", RULES.read_text(), re.MULTILINE)}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reports"]
    found = []
    for path in [*(p for folder in FOLDERS for p in sources(ROOT / folder)), *sorted(pages), ROOT / "README.md"]:
        for number in unknown_rules(path.read_text(), rules):
            found.append(f"{path.relative_to(ROOT)}: there is no rule {number} in docs/develop/rules.md")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="FILE", type=Path)
    parser.add_argument("--lower", action="store_true")
    args = parser.parse_args(argv)
    if args.show:
        for line, text in units(args.show):
            if is_headless(text):
                print(f"{args.show}:{line}: {' '.join(text.split())}")
        return 0
    now, files = counted()
    before = allowed()
    if args.lower:
        before = {folder: min(n, before.get(folder, n)) for folder, n in now.items()}
        COUNTS.write_text("".join(f"{folder} {n}\n" for folder, n in before.items()))
    wrong = wrong_citations() + differences(now, before)
    print(f"{sum(now.values())} headless comments. Most are in:")
    for file, number in files.most_common(WORST):
        print(f"{number:6} {file}")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
