"""Rounds: programs that repeat themselves only after several backwards."""

import tracemalloc
from collections.abc import Iterable

import pytest
from budget import models
from torch import nn

from memmgr.runtime import plans
from memmgr.runtime.rounds import MOST_OPS, TIMES, Rounds

from .planned import sizes, trained, under

__all__ = ["sizes"]  # a fixture

pytestmark = pytest.mark.filterwarnings("error:memmgr")

OPS = {"A": 30, "B": 20, "b": 20, "C": 10}


def followed(rounds: Rounds, backwards: Iterable[str], ops: int = 1, planned: str = "") -> list[str]:
    """The periods of a program that runs these ops between one end of a backward and the next."""
    found = []
    period = ""
    for one in backwards:
        period += one
        if rounds.ends():
            rounds.ended(hash(period), ops * sum(OPS[c] for c in period), period in planned)
            found.append(period)
            period = ""
    return found


def test_one_backward_is_a_period_where_each_is_like_the_other() -> None:
    assert set(followed(Rounds(), "A" * 40)) == {"A"}


@pytest.mark.parametrize("round_", ["ABBB", "AB", "CBA", "BC", "ABBBBBBB"])
def test_a_round_begins_with_what_is_longest(round_: str) -> None:
    found = followed(Rounds(), round_ * (TIMES + 6))
    begins = max(range(len(round_)), key=lambda i: OPS[round_[i]])
    merged = [period for period in found if len(period) > 1]
    assert len(merged) >= 5 and set(merged) == {round_[begins:] + round_[:begins]}
    assert all(len(period) == 1 for period in found[: len(found) - len(merged)])


def test_periods_that_do_with_plans_of_their_own_stay() -> None:
    rounds = Rounds()
    assert set(followed(rounds, "AB" * 20, planned="AB")) == {"A", "B"}
    assert followed(rounds, "AB" * 20, planned="A")[-1] == "AB"


def test_passes_that_differ_at_the_end_of_an_epoch_make_no_round_of_it() -> None:
    """A loader that reads ahead gets no batch at an epoch's last step, and two at its first. The passes between follow a plan,
    and a period of the whole epoch would end that."""
    assert "AAAABC" not in followed(Rounds(), "AAAABC" * 3 * TIMES, planned="A")
    assert "AAAABC" in followed(Rounds(), "AAAABC" * 3 * TIMES)


def test_a_smaller_batch_now_and_then_changes_nothing() -> None:
    found = followed(Rounds(), ("ABBB" * 5 + "ABBb") * 4)
    assert found.count("ABBb") == 4
    assert all(len(period) == 4 for period in found[4 * TIMES :])


def test_after_a_shorter_round_they_begin_elsewhere() -> None:
    found = followed(Rounds(), "ABBB" * 8 + "ABB" + "ABBB" * 8)
    assert found[-10:] == [*["ABBB"] * 2, "ABBA", *["BBBA"] * 7]


def test_what_only_looked_like_a_round_has_to_come_oftener() -> None:
    rounds = Rounds()
    followed(rounds, "AB" * TIMES + "CBBCAC" + "AB" * TIMES)
    assert rounds.backwards == 1
    followed(rounds, "AB" * TIMES)
    assert rounds.backwards == 2


def test_a_round_that_no_plan_fits_is_none_for_longer() -> None:
    rounds = Rounds()
    assert followed(rounds, "AB" * (TIMES + 1))[-1] == "AB"
    rounds.refuse()
    assert set(followed(rounds, "AB" * (2 * TIMES))) == {"A", "B"}
    assert followed(rounds, "AB")[-1] == "AB"


def test_looking_for_one_costs_no_more_however_long_the_run() -> None:
    rounds = Rounds()
    for _ in range(10_000):
        if followed(rounds, "AB")[-1] == "AB":
            rounds.refuse()
    tracemalloc.start()
    followed(rounds, "AB" * 10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 10, "it goes through all that the run has done"


def test_a_round_of_too_many_ops_is_none() -> None:
    assert set(followed(Rounds(), "AB" * 20, ops=MOST_OPS // 40)) == {"A", "B"}


class Accumulated(models.Training):
    """A step for four micro-batches."""

    def __init__(self) -> None:
        mlp = models.mlp(6, 64, 512)
        super().__init__(mlp.model, mlp.loss)

    def step(self) -> float:
        value = sum(self.one() for _ in range(4))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def one(self) -> float:
        loss = self.loss()
        loss.backward()
        return loss.item()


class InTurn(models.Training):
    """Two networks, each with an optimizer."""

    def __init__(self) -> None:
        self.nets = [models.mlp(depth, 64, 512) for depth in (6, 8)]
        super().__init__(nn.ModuleList(net.model for net in self.nets), self.nets[0].loss)

    def step(self) -> float:
        return sum(net.step() for net in self.nets)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(
    ("make", "backwards", "policy"),
    [
        (Accumulated, 4, "evict"),
        (InTurn, 2, "evict"),
        # Auto plans for five and ten seconds, and rounds are found before any plan is made.
        pytest.param(InTurn, 2, "auto", marks=pytest.mark.slow),
        pytest.param(Accumulated, 4, "auto", marks=pytest.mark.slow),
    ],
)
def test_a_plan_spans_a_round(
    make: type[models.Training], backwards: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training of a fraction of a second: the ninth plan would wait until planning has not taken too much of it."""
    monkeypatch.setattr(plans, "FREE_PLANS", 1 << 30)
    got, figures, limit = under(make, 0.6, policy, steps=18)
    assert got == trained(make, 18)
    before, last = figures[16], figures[17]
    assert last["passes"] - before["passes"] == last["planned_passes"] - before["planned_passes"] == backwards
    assert last["short_periods"] == before["short_periods"]
    assert last["resident_bytes.peak"] <= limit
