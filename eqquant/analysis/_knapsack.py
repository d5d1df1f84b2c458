"""One option for each item, of least total loss within a budget: the multiple-choice knapsack problem."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


_CELLS = 1 << 15


def choose(
    costs: Sequence[Int[np.ndarray, " options"]], losses: Sequence[Float[np.ndarray, " options"]], budget: int
) -> list[int]:
    """The option of each item, by dynamic programming over the budget.

    The budget is cut into at most 32768 cells. Where that many suffice to count exactly (costs have a common divisor)
    the answer is the optimum. Otherwise costs are rounded up to whole cells, so the budget is kept, and what rounding
    leaves over is spent greedily. There must be room for the cheapest option of each item.
    """
    cheapest = [int(cost.min()) for cost in costs]
    extras = [cost - least for cost, least in zip(costs, cheapest, strict=True)]
    # No more can be spent than the dearest options take.
    room = min(budget - sum(cheapest), sum(int(extra.max()) for extra in extras))
    unit = max(math.gcd(*(int(e) for extra in extras for e in extra)), 1)
    unit *= max(math.ceil(room / unit / _CELLS), 1)
    cells = room // unit

    best = np.zeros(cells + 1)  # the least loss of the items so far, for each budget
    picks = []
    for extra, loss in zip(extras, losses, strict=True):
        options = np.full((len(loss), cells + 1), np.inf)
        for n, (more, lost) in enumerate(zip(extra, loss, strict=True)):
            need = -(-int(more) // unit)
            if need <= cells:
                options[n, need:] = best[: cells + 1 - need] + lost
        pick = np.argmin(options, axis=0)
        best = np.take_along_axis(options, pick[None], axis=0)[0]
        picks.append(pick.astype(np.int16))

    chosen, left = [], cells
    for extra, pick in zip(reversed(extras), reversed(picks), strict=True):
        chosen.append(int(pick[left]))
        left -= -(-int(extra[chosen[-1]]) // unit)
    return _spend(costs, losses, chosen[::-1], budget)


def _spend(
    costs: Sequence[Int[np.ndarray, " options"]],
    losses: Sequence[Float[np.ndarray, " options"]],
    chosen: list[int],
    budget: int,
) -> list[int]:
    """Better options, the largest gain first, for as long as one fits into what is left of the budget."""
    while True:
        left = budget - sum(int(cost[pick]) for cost, pick in zip(costs, chosen, strict=True))
        gains = [
            (float(loss[pick] - loss[option]), item, option)
            for item, (cost, loss, pick) in enumerate(zip(costs, losses, chosen, strict=True))
            for option in range(len(cost))
            if cost[option] - cost[pick] <= left and loss[option] < loss[pick]
        ]
        if not gains:
            return chosen
        _, item, option = max(gains)
        chosen = [*chosen[:item], option, *chosen[item + 1 :]]
