"""Runs `child.py` in a process of its own and watches its memory from outside, with `/proc`."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forkserver

CHILD = Path(__file__).with_name("child.py")
SAMPLE_SECONDS = 0.003


@dataclass
class Seen:
    """The figures of a child process.

    Attributes:
        rss_bytes: its resident set, code left out, over that at "start", at the highest sample between "start" and "end".
        samples: how many were taken, and `gap_seconds` the longest time between two.
        result: the child's own report: stats, losses, the digest of the parameters, the error that it met.
        text: its standard error.
    """

    rss_bytes: int
    samples: int
    gap_seconds: float
    result: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def stats(self) -> dict[str, Any]:
        """`memmgr.stats()` at the child's end."""
        stats: dict[str, Any] = self.result["stats"]
        return stats


def _rss(status: int) -> int:
    """Anonymous pages and shared memory: pages of files are code, which is mapped in as it runs."""
    text = os.pread(status, 4096, 0).decode()
    return sum(int(text.partition(f"{kind}:")[2].split(None, 1)[0]) << 10 for kind in ("RssAnon", "RssShmem"))


def watch(spec: dict[str, Any], env: dict[str, str] | None = None, seconds: float = 300.0) -> Seen:
    """Runs the child as `spec` says (see `child.py`) and samples its resident set every 3 ms.

    The child waits after "start" until the first sample is taken, so that nothing is missed.
    """
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("MEMMGR_BUDGET", "MEMMGR_CONF"))}
    settings.update(env or {}, PYTHONUNBUFFERED="1", PYTHONWARNINGS="default")
    child = forkserver.Popen(
        [sys.executable, str(CHILD), json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=settings,
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    deadline = time.monotonic() + seconds
    try:
        line = child.stdout.readline()
        assert line.strip() == b"start", f"the child did not start: {line!r} {child.stderr.read().decode()[-3000:]}"
        status = os.open(f"/proc/{child.pid}/status", os.O_RDONLY)
        start = peak = _rss(status)
        child.stdin.write(b"go\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        samples, gap, last, output = 0, 0.0, time.monotonic(), b""
        while b"\nend\n" not in b"\n" + output:
            peak = max(peak, _rss(status))
            now = time.monotonic()
            samples, gap, last = samples + 1, max(gap, now - last), now
            part = child.stdout.read()
            if part == b"":
                break  # it has ended: see the exit status
            output += part or b""
            assert now < deadline, f"the child took more than {seconds} s"
            time.sleep(SAMPLE_SECONDS)
        os.close(status)
        with contextlib.suppress(BrokenPipeError):  # it has ended: see the exit status
            child.stdin.write(b"bye\n")
            child.stdin.close()
        os.set_blocking(child.stdout.fileno(), True)
        output += child.stdout.read()
        text = child.stderr.read().decode()
        assert child.wait(60) == 0, f"the child failed: {text[-4000:]}"
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    results = [json.loads(part) for part in output.split(b"\n") if part.startswith(b"{")]
    assert len(results) == 1, f"the child reported {len(results)} results: {text[-3000:]}"
    return Seen(peak - start, samples, gap, results[0], text)
