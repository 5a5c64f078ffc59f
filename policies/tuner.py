"""The net under `auto`'s model: measured passes decide how far it is believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BIASES: tuple[float, ...] = (1.0, float("inf"), 0.0, 3.0, 0.3)
"""`Auto.bias` values in the order in which they are tried: the model, evict only, offload only, and two between."""


@dataclass(frozen=True, slots=True)
class PassSample:
    """One finished pass.

    Attributes:
        bias: what `Auto.bias` was.
        seconds: the pass's time, wall or device.
    """

    bias: float
    seconds: float


def next_bias(
    samples: Sequence[PassSample], *, biases: Sequence[float] = BIASES, tries: int = 2, margin: float = 0.01
) -> float:
    """The bias of the next pass: each is tried, then the fastest stays; the model wins ties within `margin`.

    Args:
        samples: passes of *one* signature under *one* budget, oldest first, without the first (measured) pass. The
            caller forgets the old ones when the budget, the shapes or the link change.
        biases: ladder; the first is the default. Two suffice where probing has to be short: (1, inf).
        tries: passes per bias; the fastest of them counts, since disturbances only ever add.
        margin: what another bias has to gain, as a share, to beat the default.

    Returns:
        A member of `biases`.

    Known limitations: passes that differ in work (data-dependent models) need more tries; probing costs `tries` passes
    of each losing bias, a bias more than twice as slow as the best so far is tried once only.
    """
    best: dict[float, float] = {}
    count: dict[float, int] = {}
    for sample in samples:
        best[sample.bias] = min(best.get(sample.bias, float("inf")), sample.seconds)
        count[sample.bias] = count.get(sample.bias, 0) + 1
    fastest = min((best[b] for b in biases if b in best), default=float("inf"))
    for bias in biases:
        done = count.get(bias, 0)
        if done == 0 or (done < tries and best[bias] <= 2.0 * fastest):
            return bias
    winner = min(biases, key=lambda b: best[b])
    return biases[0] if best[biases[0]] * (1.0 - margin) <= best[winner] else winner
