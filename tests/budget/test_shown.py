"""The text that a budget shows, at a prompt and in a notebook."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import memmgr
from memmgr.observe.advice import advice
from memmgr.observe.error_text import rank_error
from memmgr.policies import parse_policy


class Table(HTMLParser):
    """A table's rows, and the text above it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.caption = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] == "caption":
            self.caption += data
        else:
            self.rows[-1].append(data)


def test_at_a_prompt() -> None:
    budget = memmgr.budget("12GB", device="cpu", quiet=True)
    assert repr(budget) == "<memmgr.budget: 12 GB, policy auto, on cpu, not opened yet>"
    with budget:
        assert repr(budget) == "<memmgr.budget: 12 GB, policy auto, on cpu, open>"
    assert repr(budget) == "<memmgr.budget: 12 GB, policy auto, on cpu, closed>"
    other = memmgr.budget(None, device="cpu", policy="lru+offload", quiet=True)
    with other:
        assert repr(budget).endswith("closed>"), "another one is open"
        assert repr(other) == "<memmgr.budget: no limit, policy lru+offload, on cpu, open>"
    assert "12 GiB" in repr(memmgr.budget("12GiB", device="cpu"))


def test_in_a_notebook(beyond: Callable[[str], int]) -> None:
    budget = memmgr.budget(beyond("2GB"), device="cpu", quiet=True)
    assert Table(budget._repr_html_()).rows == []
    w = torch.randn(64, 64, requires_grad=True)
    with budget:
        w.mm(w).tanh().sum().backward()
        inside = Table(budget._repr_html_())
    after = Table(budget._repr_html_())
    shown = dict(after.rows)
    assert shown["passes"] == "1" and shown["budget"].endswith(" GB") and shown["time"].split()[1] in ("us", "ms", "s")
    assert "now" in dict(map(tuple, inside.rows)) and "now" not in shown
    assert inside.caption.endswith("open") and after.caption.endswith("closed")


def test_sizes_are_in_the_units_of_the_user(capfd: pytest.CaptureFixture[str]) -> None:
    w = torch.randn(64, 64, requires_grad=True)
    with memmgr.budget("3GiB", device="cpu") as budget:
        w.mm(w).tanh().sum().backward()
        assert not re.findall("[kMGT]B", budget._repr_html_())
    stats = budget.stats() | {"recompute_seconds": 1.0, "wall_seconds": 4.0, "unmanaged_peak_bytes": 2**33}
    trouble = {
        "rank": 1,
        "error": "BudgetError",
        "text": "",
        "floor_bytes": 2**30,
        "enough_bytes": 2**31,
        "budget_bytes": 2**29,
    }
    said = [capfd.readouterr().err, *advice(stats, binary=True), str(rank_error(trouble, 0, binary=True))]
    assert "of 3 GiB" in said[0] and "would remove" in said[2] and "512 MiB" in said[-1]
    assert not re.findall("[kMGT]B", "".join(said)), said


def test_names_are_text_not_html() -> None:
    policy = replace(parse_policy("auto"), name="<script>")
    assert "<script>" not in memmgr.budget("1GB", device="cpu", policy=policy)._repr_html_()


def test_a_share_of_an_accelerator_is_not_asked_for_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is asked nothing before the budget opens, so its share is all that can be said."""
    from memmgr.api import budget as budgets

    monkeypatch.setattr(budgets.devices, "resolve", lambda device, allocator: torch.device("cuda"))
    assert "80% of the device, policy auto, on cuda" in repr(memmgr.budget("80%"))


def test_an_explanation_is_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    with memmgr.budget(None, device="cpu", quiet=True):
        for _ in range(3):
            model(torch.randn(256, 256)).sum().backward()
        found = memmgr.explain()
    assert repr(found) == str(found) and "Explanation(" not in repr(found)
    assert max(map(len, str(found).splitlines())) <= 120
    html = found._repr_html_()
    tables = [Table(text + "</table>") for text in html.split("</table>")[:-1]]
    assert len(tables) == 6 and tables[0].caption.startswith("now: ")
    assert tables[0].rows[0][1:4]  # the second heading is empty == ["tensors", "kind", "name"]
    names = {row[4] for row in tables[0].rows[1:]}
    assert "0.weight" in names, names
    assert "&lt;" in replace(found, leak_texts=("a <leak>",))._repr_html_()
