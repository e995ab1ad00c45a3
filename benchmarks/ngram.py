"""A 5-gram model with Kneser-Ney smoothing: a judge of text that is nobody's relative.

In: the ids of a text to learn. Out: log p of each id of another text, given the four before it.

    p_n(w | h) = max(c(h w) − D, 0) / c(h) + D · N(h ·) / c(h) · p_{n−1}(w | h without its first)

Interpolated Kneser-Ney (Chen and Goodman 1998, section 4.1.6): in the highest order c counts; below
it c is the number of ids that an n-gram was seen behind. N(h ·) is the number of ids seen behind h,
and D = n_1 / (n_1 + 2 n_2), of those seen once and twice (a half where none was seen once). Below
single ids all are alike.

Grams are numbers: one of n ids is the pair of the one of its first n − 1 and its last id, looked up
in a sorted table. So millions of them are an array, and nothing is hashed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
ORDER = 5


@dataclass
class Table:
    """The grams of one length, in the order of their keys."""

    keys: Ids
    """Sorted: number of the gram of all but the last id, times vocab_size, plus the last id."""
    counts: NDArray[np.float64]
    """What c is in this order."""
    totals: NDArray[np.float64]
    """For each history (a gram one shorter): the sum of counts of the grams that it begins."""
    n_following: NDArray[np.float64]
    """For each history: how many ids were seen behind it."""
    discount: float

    def find(self, keys: Ids) -> Ids:
        """Return the number of each gram, −1 where it was never seen."""
        at = np.searchsorted(self.keys, keys)
        at[at == len(self.keys)] = 0
        return np.where(self.keys[at] == keys, at, -1)


class NGrams:
    """The model."""

    def __init__(self, ids: Ids, vocab_size: int, order: int = ORDER) -> None:
        """Learn ids (N,), each below vocab_size; N at least `order`."""
        self.vocab_size, self.order = vocab_size, order
        ids = np.asarray(ids, dtype=np.int64)
        # Of each length n: the number of the gram that begins at each place, and one place of each.
        numbers, places = [np.zeros(len(ids) + 1, dtype=np.int64)], list[Ids]()
        keys = list[Ids]()
        for n in range(1, order + 1):
            found = numbers[-1][: len(ids) - n + 1] * vocab_size + ids[n - 1 :]
            distinct, first, number = np.unique(found, return_index=True, return_inverse=True)
            keys.append(distinct)
            places.append(first)
            numbers.append(number)
        self.tables = list[Table]()
        for n in range(1, order + 1):
            n_grams = len(keys[n - 1])
            if n == order:
                counts = np.bincount(numbers[n], minlength=n_grams)
            else:  # behind how many ids: each longer gram tells of one, that of its place
                counts = np.bincount(numbers[n][places[n] + 1], minlength=n_grams)
            self.tables.append(_table(keys[n - 1], counts.astype(float), vocab_size))

    def log_probs(self, ids: Ids) -> NDArray[np.float64]:
        """Return log p (N,) of each of ids, given those before it; the first given nothing."""
        ids = np.asarray(ids, dtype=np.int64)
        chance = np.full(len(ids), 1 / self.vocab_size)
        for n in range(1, min(self.order, len(ids)) + 1):
            # The number of the history of n − 1 ids before each place; −1 where it was never seen.
            history = np.zeros(len(ids), dtype=np.int64)
            history[: n - 1] = -1
            for back in range(n - 1, 0, -1):
                keys = history[n - 1 :] * self.vocab_size + ids[n - 1 - back : len(ids) - back]
                seen = history[n - 1 :] >= 0
                history[n - 1 :] = np.where(seen, self.tables[n - 1 - back].find(keys), -1)
            chance = _mixed(self.tables[n - 1], history, ids, chance, self.vocab_size)
        return np.log(chance)


def _table(keys: Ids, counts: NDArray[np.float64], vocab_size: int) -> Table:
    """Return the table of grams with these keys and counts."""
    histories = keys // vocab_size
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    return Table(
        keys,
        counts,
        np.bincount(histories, weights=counts),
        np.bincount(histories, weights=counts > 0),
        once / (once + 2 * twice) if once else 0.5,
    )


def _mixed(
    table: Table,
    history: Ids,
    ids: Ids,
    chance: NDArray[np.float64],
    vocab_size: int,
) -> NDArray[np.float64]:
    """Return the chances of this order, given those of the order below."""
    # A gram at the very end of what was learned has no follower: a history without a row.
    known = (history >= 0) & (history < len(table.totals))
    h = np.where(known, history, 0)
    total = np.where(known, table.totals[h], 0.0)
    known &= total > 0
    number = table.find(h * vocab_size + ids)
    count = np.where(number >= 0, table.counts[number], 0.0)
    own = np.maximum(count - table.discount, 0.0)
    left = table.discount * table.n_following[h] * chance
    return np.where(known, (own + left) / np.where(known, total, 1.0), chance)
