"""What stands behind `<unk>`: the words that a cut vocabulary left out, and what each would cost.

    unknown = UnknownWords(tokenizer, corpus.lines("train"))
    cost = unknown.cost(corpus.lines("valid"))
    perplexity((score.nats + cost.nats) / score.tokens)

A model that was given 10,000 words says `<unk>` for all others. That one symbol is easier to
predict than any of the words it stands for, so the fewer words a vocabulary has, the lower its
perplexity, whatever the model has learnt. To be comparable, the model must name the word:

    P(word) = P(<unk>) · q(word)   for the words that are read as <unk>

with q the share of `word` among all that reads as `<unk>` in train, the text's own `<unk>` one of
them. q sums to 1, so P is a probability over the whole word list again, whatever the cut. A word
that train does not have has q = 0 and no price: it is counted, and a figure that leaves it out is
a lower bound.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from minigpt.config import TokenizerKind
from minigpt.errors import UserError
from minigpt.text import basic_english
from minigpt.tokenizer import Tokenizer

_WORDS: dict[TokenizerKind, Callable[[str], list[str]]] = {
    "wikitext": str.split,
    "basic_english": basic_english,
}


class UnknownCost(NamedTuple):
    """What a text costs beyond its `<unk>`: to say which word each of them is."""

    nats: float
    """−Σ log q over the unknown words that train has."""
    n_unknown: int
    """Words that are read as `<unk>`, the text's own included."""
    n_unseen: int
    """Those of them that train does not have. Where there are any, `nats` is a lower bound."""


class UnknownWords:
    """The distribution q of the words of train that a tokenizer reads as `<unk>`."""

    def __init__(self, tokenizer: Tokenizer, train_lines: Iterable[str]) -> None:
        """Count what `tokenizer` reads as `<unk>` in train, and in nothing but train.

        Raises UserError for a kind that spells every word: bpe and char.
        """
        if tokenizer.kind not in _WORDS:
            raise UserError(
                f"tokenizer kind {tokenizer.kind} reads no word as <unk>: "
                "take a run of kind wikitext or basic_english"
            )
        self._tokenizer = tokenizer
        self._counts: Counter[str] = Counter()
        for line in train_lines:
            self._counts.update(self._unknown(line))
        self._total = self._counts.total()

    def __len__(self) -> int:
        """Return how many different words share the `<unk>`."""
        return len(self._counts)

    def share(self, word: str) -> float:
        """Return q(word), 0 for a word that train does not have or that has an entry of its own."""
        return self._counts[word] / self._total if self._counts[word] else 0.0

    def cost(self, lines: Iterable[str]) -> UnknownCost:
        """Return what it costs to name each unknown word of `lines`, read one after the other."""
        nats, n_unknown, n_unseen = 0.0, 0, 0
        for line in lines:
            for word in self._unknown(line):
                share = self.share(word)
                n_unknown += 1
                if share:
                    nats -= math.log(share)
                else:
                    n_unseen += 1
        return UnknownCost(nats, n_unknown, n_unseen)

    def _unknown(self, line: str) -> list[str]:
        """Return the words of `line` that have no entry, and each `<unk>` that it says itself."""
        tokenizer = self._tokenizer
        without_entry = (None, tokenizer.unk_id)
        words = _WORDS[tokenizer.kind](line)
        return [word for word in words if tokenizer.token_to_id(word) in without_entry]
