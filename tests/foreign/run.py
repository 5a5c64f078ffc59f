"""Runs other people's test suites plain and with everything evicted after every op, and compares outcomes and bits.

    make test-foreign                                       # all suites, then the table in docs/compatibility.md
    make test-foreign FOREIGN_ARGS="--suite peft timm"      # some of them
    make test-foreign FOREIGN_ARGS="--limit 20"             # at most so many tests of each
    make test-foreign FOREIGN_ARGS="--table"                # only the table, of the results that are there

A suite's packages and sources go to build/foreign/SUITE. A run that was interrupted goes on where it was. Tests that are not
the same run once more both ways, the plain run on memory that malloc fills: tests that differ without memmgr judge nothing.
Exit code 1 where a difference is left that `exclusions.py` has no reason for.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "foreign"
sys.path.insert(0, str(HERE.parent))

from foreign.exclusions import DIFFERENT, NOT_RUN  # noqa: E402
from foreign.settings import Settings, ended, lines  # noqa: E402
from foreign.suites import SUITES, Suite  # noqa: E402

PASSES = ("plain", "leaving", "plain again", "leaving again")
SECONDS = {"plain": 120, "leaving": 400}  # for one test, then it hangs
BROKEN = ("failed", "crashed", "hung")


def _pip(*args: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "pip", *args, "--quiet", "--disable-pip-version-check"], check=True)


def prepare(suite: Suite) -> None:
    """Installs its packages beside the project's, and unpacks its tests where its wheel does not bring them."""
    folder = BUILD / suite.name
    folder.mkdir(parents=True, exist_ok=True)
    site, source = folder / "site", folder / "source"
    if suite.packages and not site.exists():
        _pip("install", "--no-deps", "--target", str(folder / "site.part"), *suite.packages)
        (folder / "site.part").rename(site)
    if suite.sdist and not source.exists():
        name = f"{suite.sdist}=={version(suite.sdist)}" if _is_installed(suite.sdist) else suite.sdist
        part = folder / "source.part"
        shutil.rmtree(part, ignore_errors=True)
        _pip("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(part), name)
        (archive,) = part.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(part, filter="data")
        (top,) = (path for path in part.iterdir() if path.is_dir())
        for path in suite.paths:
            if (tests := top / Path(path).parts[0]).is_dir():
                (tests / "__init__.py").touch()  # its files import each other relatively
        top.rename(source)
        shutil.rmtree(part)


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def versions(suite: Suite) -> str:
    """The versions of the packages that the suite tests, or of torch."""
    found = {d.metadata["Name"]: d.version for d in distributions(path=[str(BUILD / suite.name / "site")])}
    shown = suite.shown or ("torch",)
    return ", ".join(f"{name} {found.get(name) or version(name).partition('+')[0]}" for name in shown)


def results(suite: Suite, which: str) -> Path:
    return BUILD / suite.name / f"{which.replace(' ', '-')}.jsonl"


def run(suite: Suite, which: str, limit: int, only: list[str] | None = None) -> None:
    """Until every test has an end: a test that ends its process, or hangs, gets one here."""
    path = results(suite, which)
    mode = which.partition(" ")[0]
    settings = Settings(str(path), mode == "leaving", limit, only, [e.pattern for e in NOT_RUN.get(suite.name, ())])
    folder = BUILD / suite.name
    given = folder / "settings.json"
    given.write_text(json.dumps(asdict(settings)))
    where = folder / "source" if (folder / "source" / suite.paths[0]).exists() else HERE
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMMGR_")} | {
        "FOREIGN": str(given),
        "PYTHONPATH": os.pathsep.join(str(path) for path in (HERE.parent, folder / "site", folder / "source")),
        "MEMMGR_PAGER_SMALL": str(suite.small),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_SUPPRESS_ERRORS": "0",
        **({"MALLOC_PERTURB_": "85"} if which == "plain again" else {}),
        **suite.variables,
    }
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "foreign.plugin"]
    command += ["-c", str(HERE / "foreign.ini"), f"--rootdir={where}", f"--confcutdir={where}", *suite.arguments]
    command += [str(where / part) for part in suite.paths]
    while True:
        with open(folder / "output.txt", "ab") as output:
            process = subprocess.Popen(
                command, env=environment, cwd=where, stdout=output, stderr=output, start_new_session=True
            )
            try:
                hung = _watch(process, path, f"{suite.name}, {which}", SECONDS[mode])
            finally:
                _end(process)
        begun, done = [line["id"] for line in lines(path) if "id" in line], ended(path)
        cut = [name for name in dict.fromkeys(begun) if name not in done]
        if not cut:
            if process.returncode not in (0, 1, 5):
                raise RuntimeError(f"pytest ended with {process.returncode}: see {folder / 'output.txt'}")
            return
        outcome = "hung" if hung else "crashed"
        for name in cut:
            text = f"no end after {SECONDS[mode]} s" if hung else f"the process ended with {process.returncode}"
            with open(path, "a") as file:
                file.write("\n" + json.dumps({"id": name, "outcome": outcome, "text": text, "entries": []}) + "\n")


def _watch(process: subprocess.Popen[bytes], path: Path, title: str, seconds: float) -> bool:
    """Shows progress. True where the file has not grown for too long."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.5)
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
            _progress(title, path)
        elif time.monotonic() - since > seconds:
            return True
    _progress(title, path, end="\n")
    return False


def _progress(title: str, path: Path, end: str = "") -> None:
    if not sys.stdout.isatty() and not end:
        return
    done = ended(path)
    chosen = [line["chosen"] for line in lines(path) if "chosen" in line]
    broken = sum(line["outcome"] in BROKEN for line in done.values())
    text = f"{title}: {len(done)} of {chosen[-1] if chosen else '?'}, {broken} failed"
    print(f"\r\033[K{text}" if sys.stdout.isatty() else text, end=end, flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its ranks: they have a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass
class Verdict:
    """The results of a suite's passes.

    Attributes:
        begun: tests that began plain, skipped ones aside.
        plain_failures: tests that fail without memmgr, and say nothing.
        varying: tests whose outcome or bits vary without memmgr, and that have no difference besides.
        same: tests with the same outcome and bits.
        entries: calls whose bits were compared.
        evicted: cells that left, of all tests.
        known: test -> the reason of exclusions.py for its difference.
        different: test -> the difference.
    """

    begun: int = 0
    plain_failures: int = 0
    varying: int = 0
    same: int = 0
    entries: int = 0
    evicted: int = 0
    known: dict[str, str] = field(default_factory=dict)
    different: dict[str, str] = field(default_factory=dict)


def difference(plain: dict[str, Any], leaving: dict[str, Any], again: dict[str, Any] | None = None) -> str:
    """Between two runs of one test; empty: none. Entries that a second plain run has otherwise are left out."""
    if plain["outcome"] != leaving["outcome"]:
        return f"{plain['outcome']}, then {leaving['outcome']}: {leaving['text']}"
    a, b = plain["entries"], leaving["entries"]
    if len(a) != len(b):
        return f"other bits: {len(a)} entries became {len(b)}"
    varying = {i for i, (x, y) in enumerate(zip(a, again["entries"], strict=False)) if x != y} if again else set()
    found = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y and i not in varying]
    if not found:
        return ""
    return f"other bits: {len(found)} of {len(a)} entries, entry {found[0]} the first: {a[found[0]].rpartition(':')[0]}"


def suspects(suite: Suite) -> list[str]:
    plain, leaving = ended(results(suite, "plain")), ended(results(suite, "leaving"))
    passed = [name for name, line in plain.items() if line["outcome"] == "passed"]
    return [name for name in passed if name in leaving and difference(plain[name], leaving[name])]


def judge(suite: Suite) -> Verdict:
    """A difference counts where the two plain runs have the same outcome and as many entries, in the entries that agree."""
    plain, leaving, plain_again, leaving_again = (ended(results(suite, which)) for which in PASSES)
    verdict = Verdict()
    for name, line in plain.items():
        if line["outcome"] == "skipped":
            continue
        verdict.begun += 1
        if line["outcome"] != "passed":
            verdict.plain_failures += 1
            continue
        if name not in leaving:
            continue
        verdict.evicted += leaving[name].get("evicted", 0)
        verdict.entries += len(line["entries"])
        second = plain_again.get(name)
        comparable = second is None or (
            second["outcome"] == line["outcome"] and len(second["entries"]) == len(line["entries"])
        )
        how = difference(line, leaving[name], second) if comparable else ""
        if not difference(line, leaving[name]):
            verdict.same += 1
        elif not how:
            verdict.varying += 1
        elif reason := next((e.reason for e in DIFFERENT.get(suite.name, ()) if re.search(e.pattern, name)), ""):
            verdict.known[name] = reason
        else:
            third = leaving_again.get(name)
            seldom = " (not in its second run)" if third is not None and not difference(line, third, second) else ""
            verdict.different[name] = how + seldom
    return verdict


def run_all(suite: Suite, limit: int) -> Verdict:
    """Runs the suite plain, then the tests that passed with every cell evicted, then those that differ both ways again."""
    run(suite, "plain", limit)
    plain = ended(results(suite, "plain"))
    run(suite, "leaving", 0, [test for test, line in plain.items() if line["outcome"] == "passed"])
    if again := suspects(suite):
        run(suite, "plain again", 0, again)
        run(suite, "leaving again", 0, again)
    return judge(suite)


def table() -> str:
    """The table of all suites that have results."""
    from foreign.page import section

    rows = {}
    for name, suite in SUITES.items():
        if results(suite, "leaving").exists():
            rows[name] = (suite, versions(suite), judge(suite))
    return section(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=sorted(SUITES), metavar="NAME", help=", ".join(SUITES))
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="at most so many tests of each suite")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--table", action="store_true", help="write the table of the results that are there")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: a suite's processes end with this one
    good = True
    for name in () if args.table else args.suite or SUITES:
        suite = SUITES[name]
        finished = BUILD / name / "finished"
        if args.fresh or finished.exists():
            for which in PASSES:
                results(suite, which).unlink(missing_ok=True)
            finished.unlink(missing_ok=True)
        prepare(suite)
        verdict = run_all(suite, args.limit or suite.limit)
        finished.touch()
        print(
            f"{name}: {verdict.begun} begun, {verdict.same} same, {verdict.plain_failures} fail plain, "
            f"{verdict.varying} vary plain, {len(verdict.known)} known, {len(verdict.different)} different"
        )
        for test, how in verdict.different.items():
            print(f"  {test}: {how.strip().splitlines()[0][:100]} ... {how.strip().splitlines()[-1][-300:]}")
        good = good and not verdict.different
    if args.table or not args.suite:
        from foreign.page import write

        write(table())
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
