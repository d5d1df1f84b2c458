"""The multiple-choice knapsack problem: one option per item, least loss within a budget."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int


_MAX_CELLS = 1 << 15


def choose_options(
    costs: Sequence[Int[np.ndarray, " options"]], losses: Sequence[Float[np.ndarray, " options"]], budget: int
) -> list[int]:
    """Returns the chosen option of each item, by dynamic programming over the budget.

    Divides the budget into at most 32768 cells. If all costs are whole numbers of cells (multiples of their common
    divisor), the result is optimal. Otherwise it rounds costs up to whole cells, which stays within the budget, and
    spends the rest greedily. The budget must cover the cheapest option of each item.
    """
    cheapest = [int(cost.min()) for cost in costs]
    extras = [cost - min_cost for cost, min_cost in zip(costs, cheapest, strict=True)]
    # The most expensive options bound the spending.
    spendable = min(budget - sum(cheapest), sum(int(extra.max()) for extra in extras))
    unit = max(math.gcd(*(int(e) for extra in extras for e in extra)), 1)
    unit *= max(math.ceil(spendable / unit / _MAX_CELLS), 1)
    cells = spendable // unit

    best = np.zeros(cells + 1)  # the least loss of the items so far, for each number of cells
    picks = []
    for extra, loss in zip(extras, losses, strict=True):
        options = np.full((len(loss), cells + 1), np.inf)
        for n, (extra_cost, option_loss) in enumerate(zip(extra, loss, strict=True)):
            need = -(-int(extra_cost) // unit)
            if need <= cells:
                options[n, need:] = best[: cells + 1 - need] + option_loss
        pick = np.argmin(options, axis=0)
        best = np.take_along_axis(options, pick[None], axis=0)[0]
        picks.append(pick.astype(np.int16))

    chosen, remaining = [], cells
    for extra, pick in zip(reversed(extras), reversed(picks), strict=True):
        chosen.append(int(pick[remaining]))
        remaining -= -(-int(extra[chosen[-1]]) // unit)
    return _spend_remainder(costs, losses, chosen[::-1], budget)


def _spend_remainder(
    costs: Sequence[Int[np.ndarray, " options"]],
    losses: Sequence[Float[np.ndarray, " options"]],
    chosen: list[int],
    budget: int,
) -> list[int]:
    """Returns the choice after upgrades with the rest of the budget, the largest gain first."""
    while True:
        remaining = budget - sum(int(cost[pick]) for cost, pick in zip(costs, chosen, strict=True))
        gains = [
            (float(loss[pick] - loss[option]), item, option)
            for item, (cost, loss, pick) in enumerate(zip(costs, losses, chosen, strict=True))
            for option in range(len(cost))
            if cost[option] - cost[pick] <= remaining and loss[option] < loss[pick]
        ]
        if not gains:
            return chosen
        _, item, option = max(gains)
        chosen = [*chosen[:item], option, *chosen[item + 1 :]]
