"""How the next token is picked: the settings of it, each with what it stands for.

In: numbers, from a flag or from Python. Out: a `Sampling`, or one line that says what is wrong.
`filters` has a function for each of them. A preset may have settings of its own, which suit the
models that it makes; a run keeps them.
"""

import math
from dataclasses import dataclass

from minigpt.errors import require

# Beyond it float32 has no logits left to tell words apart.
LARGEST = 1e6


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked from the distribution that the model gives."""

    temperature: float = 0.8
    """Below 1 the likely becomes likelier; 0 always takes the likeliest."""
    top_k: int | None = 50
    """Draw from the k likeliest tokens only; None: from all."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens whose probabilities reach p; default: from all."""
    min_p: float | None = None
    """Draw from tokens at least this many times as likely as the likeliest; default: from all."""
    typical_p: float | None = None
    """Draw from the tokens of the most usual surprise that together reach p; default: from all."""
    repetition_penalty: float | None = None
    """Above 1 makes what the text has already less likely: 1.2 is much."""
    presence_penalty: float | None = None
    """Taken from the logit of each token that was written already, once."""
    frequency_penalty: float | None = None
    """Taken from the logit of each token as often as it was written already."""
    no_repeat_ngram: int | None = None
    """Never write that many tokens in a row a second time."""
    seed: int = 1
    """The same seed gives the same text."""
    max_new_tokens: int = 100
    """Tokens to write at most."""
    min_new_tokens: int = 0
    """Tokens to write at least, before one that ends the text may come; stop strings always may."""

    def __post_init__(self) -> None:
        """Refuse values that no draw could follow."""
        self._require_counts()
        self._require_shares()
        self._require_penalties()

    def _require_counts(self) -> None:
        least = {"max_new_tokens": 1, "min_new_tokens": 0, "no_repeat_ngram": 1, "top_k": 1}
        hints = {"top_k": ", or none to pick among all tokens"}
        for name, smallest in least.items():
            value = getattr(self, name)
            require(
                value is None or value >= smallest,
                f"{name} is {value}: it must be at least {smallest}{hints.get(name, '')}",
            )
        require(
            self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens is {self.min_new_tokens}: it must be at most max_new_tokens, which is "
            f"{self.max_new_tokens}",
        )
        require(0 <= self.seed < 2**32, f"seed is {self.seed}: it must lie between 0 and 2^32 - 1")

    def _require_shares(self) -> None:
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature is {self.temperature}: it must be at least 0 (0: the likeliest token)",
        )
        for name in ("top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            require(
                value is None or 0 < value <= 1,
                f"{name} is {value}: it must be greater than 0 and at most 1",
            )

    def _require_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(
                value is None or abs(value) <= LARGEST,
                f"{name} is {value}: it must lie between {-LARGEST:,.0f} and {LARGEST:,.0f} (below "
                "0 it is a reward)",
            )
        penalty = self.repetition_penalty
        require(
            penalty is None or 1 / LARGEST <= penalty <= LARGEST,
            f"repetition_penalty is {penalty}: it must lie between {1 / LARGEST} and "
            f"{LARGEST:,.0f} (below 1 it is a reward)",
        )

    @property
    def greedy(self) -> bool:
        """Is the likeliest token taken every time, so that nothing is left to chance?"""
        return self.temperature == 0 or self.top_k == 1


USUAL = Sampling()
