"""First weights from counts: what one look at the text tells before any step is taken.

In: a fresh model and the ids of train. Out: the same model, whose output knows how frequent each
word is, and whose table knows which words keep the same company.

With random weights a model spends its first hundreds of steps on finding out just that, and what
it then knows of a word seen five times is little more than noise. Counting takes seconds:

    bias    the log of a word's share of the text, so that before the first step the model is
            the unigram model
    table   the singular vectors of the positive pointwise mutual information of words and their
            neighbours (Levy and Goldberg 2014, section 2 and equation 10): words that occur beside
            the same words get vectors of nearly the same direction

Training goes on from there: no weight is held.

V vocabulary · C words that are counted as neighbours · D d_model
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from minigpt.model import MiniGPT
from minigpt.output import FullSoftmax

# A neighbour stands at most so many places away, on either side.
REACH = 4
# Only the most frequent words count as neighbours: a rare one meets too few to tell anything.
N_NEIGHBOURS = 2_048
# Shares of neighbours are raised to this power, or rare ones would seem to tell the most (Levy,
# Goldberg and Dagan 2015, section 3.2).
SMOOTHING = 0.75
# Of a long text the beginning says enough; the pairs of 4 million words take a gigabyte.
MOST_IDS = 4_000_000
# Rows of the (V, C) matrix that are held at once.
_ROWS = 4_096


def begin_from_counts(model: MiniGPT, ids: NDArray[np.integer]) -> None:
    """Set the table of model, and its output's bias if it has one, to what the counts of ids say.

    ids   of train, and of nothing else
    The vectors are as long as random ones would be, so rates mean the same. The config has seen to
    it that the output is not the adaptive one, whose tables differ in width.
    """
    output, embedding = model.output, model.embedding
    assert isinstance(output, FullSoftmax)
    assert isinstance(embedding, nn.Embedding)
    words = np.asarray(ids[:MOST_IDS]).astype(np.int64)
    vectors = word_vectors(words, model.config.vocab_size, model.config.d_model)  # (V, D)
    with torch.no_grad():
        for table in (embedding.weight, output.table):  # tied, one table is set twice
            table.copy_(vectors * table.norm(dim=1).mean())
        if output.bias is not None:
            output.bias.copy_(log_shares(words, model.config.vocab_size))


def log_shares(ids: NDArray[np.int64], vocab_size: int) -> Tensor:
    """Return the log of each word's share of ids, (V,) float32.

    Half a sight is added for each word, so that one that never occurs is unlikely, not impossible.
    """
    counts = torch.from_numpy(np.bincount(ids, minlength=vocab_size)).double() + 0.5
    return (counts / counts.sum()).log().float()


def word_vectors(ids: NDArray[np.int64], vocab_size: int, d_model: int) -> Tensor:
    """Return a vector of length 1 for each word, (V, D) float32, by the company it keeps.

    U √S of the matrix U S Vᵀ ≈ PPMI (V, C), cut to its D largest singular values and then turned at
    random: attention heads and norms treat channels alike, so none should matter more. A word of
    which nothing is known gets a random vector.
    """
    n_neighbours = min(vocab_size, max(N_NEIGHBOURS, 2 * d_model))
    counts = _NeighbourCounts(ids, vocab_size, n_neighbours)
    # The right singular vectors and squared singular values of a tall matrix are the eigenvectors
    # and eigenvalues of this small square one.
    gram = torch.zeros(n_neighbours, n_neighbours)  # (C, C)
    for _, rows in counts.ppmi():
        gram += rows.T @ rows
    squares, axes = torch.linalg.eigh(gram)  # ascending
    size = min(d_model, n_neighbours)
    squares, axes = squares[-size:].clamp(min=1e-6), axes[:, -size:]
    # M V = U S, and S^½ of it is divided away again.
    scaled = axes * squares.pow(-0.25)  # (C, size)
    turned, _ = torch.linalg.qr(torch.randn(d_model, d_model))
    vectors = torch.empty(vocab_size, d_model)
    for first, rows in counts.ppmi():
        vectors[first : first + len(rows)] = rows @ scaled @ turned[:size]
    lengths = vectors.norm(dim=1, keepdim=True)
    unknown = (lengths < 1e-4).squeeze(1)
    vectors[unknown] = torch.randn(int(unknown.sum()), d_model)
    return nn.functional.normalize(vectors, dim=1)


class _NeighbourCounts:
    """How often each word stands near each of the C most frequent ones: most often never."""

    def __init__(self, ids: NDArray[np.int64], vocab_size: int, n_neighbours: int) -> None:
        """Count all pairs at most REACH places apart, in either order."""
        frequency = np.bincount(ids, minlength=vocab_size)
        neighbours = np.argsort(-frequency, kind="stable")[:n_neighbours]
        # Where a word stands among the neighbours; −1 for all that are none.
        place = np.full(vocab_size, -1, dtype=np.int64)
        place[neighbours] = np.arange(n_neighbours)
        places = place[ids]
        pairs = []
        for distance in range(1, REACH + 1):
            for words, beside in (
                (ids[:-distance], places[distance:]),
                (ids[distance:], places[:-distance]),
            ):
                counted = beside >= 0
                pairs.append(words[counted] * n_neighbours + beside[counted])
        # A pair is one number, so sorting brings equal ones together, ordered by word.
        keys, self._counts = np.unique(np.concatenate(pairs), return_counts=True)
        self._words, self._beside = np.divmod(keys, n_neighbours)
        self._shape = vocab_size, n_neighbours

    def ppmi(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first word, rows (at most _ROWS, C)) of the matrix, from the top.

        max(0, log(P(word, neighbour) / (P(word) Q(neighbour)))), 0 where they never met; Q is
        P^SMOOTHING, made to sum to 1.
        """
        vocab_size, n_neighbours = self._shape
        total = max(1, self._counts.sum())
        of_word = np.bincount(self._words, self._counts, vocab_size) / total
        of_neighbour = np.bincount(self._beside, self._counts, n_neighbours) ** SMOOTHING
        of_neighbour /= max(1.0, of_neighbour.sum())
        expected = of_word[self._words] * of_neighbour[self._beside]
        values = np.maximum(0.0, np.log(self._counts / total / expected)).astype(np.float32)
        for first in range(0, vocab_size, _ROWS):
            n_rows = min(_ROWS, vocab_size - first)
            begin, end = np.searchsorted(self._words, (first, first + n_rows))
            rows = torch.zeros(n_rows, n_neighbours)
            rows[
                torch.from_numpy(self._words[begin:end] - first),
                torch.from_numpy(self._beside[begin:end]),
            ] = torch.from_numpy(values[begin:end])
            yield first, rows
