"""The classic route from text to numbers, under the names it had in torchtext.

In: lines of text. Out: words (`get_tokenizer`), numbers (`Vocab`).

    tokenizer = get_tokenizer("basic_english")
    words = map(tokenizer, WikiText2(split="train"))
    vocab = build_vocab_from_iterator(words, specials=["<unk>"])
    vocab.set_default_index(vocab["<unk>"])
    vocab(tokenizer("Homer wrote the Odyssey ."))

torchtext is archived and does not load beside a current torch. This is what it did, oddities
included, in plain Python that can be read; `minigpt.tokenizer` gives the same words faster.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from minigpt.errors import UserError, closest

Words = Callable[[str], list[str]]

# The twelve rules of basic_english, in the order in which they are applied. The order matters: a
# quotation mark is gone before <br /> is looked for. The second blank after an apostrophe has no
# effect; it is torchtext's.
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"'", " '  "),
        (r'"', ""),
        (r"\.", " . "),
        (r"<br />", " "),
        (r",", " , "),
        (r"\(", " ( "),
        (r"\)", " ) "),
        (r"!", " ! "),
        (r"\?", " ? "),
        (r";", " "),
        (r":", " "),
        (r"\s+", " "),
    )
]


def basic_english(line: str) -> list[str]:
    """Return the words of `line`, lower-cased, with the commonest punctuation marks apart."""
    line = line.lower()
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line.split()


def get_tokenizer(tokenizer: str | Words | None, language: str = "en") -> Words:
    """Return the function from a line to its words that `tokenizer` names.

    "basic_english" names the rules above, None names `str.split`, and a function is itself.
    Raises UserError for any other name and for basic_english in a language other than "en".
    """
    if tokenizer is None:
        return str.split
    if callable(tokenizer):
        return tokenizer
    if tokenizer != "basic_english":
        raise UserError(
            f"tokenizer {tokenizer} is not known{closest(str(tokenizer), ['basic_english'])}: "
            "take basic_english, None (split at blanks) or a function, such as that of a library"
        )
    if language != "en":
        raise UserError(f"language is {language}: basic_english has rules for en alone")
    return basic_english


def _text(token: str) -> str:
    """Return `token`, or raise TypeError: a number or a list must not pass for an unknown word."""
    if not isinstance(token, str):
        raise TypeError(f"{token!r} is no token: a token is text, not {type(token).__name__}")
    return token


class Vocab:
    """A list of tokens and the way back: token to index, index to token.

    A token that is not in it raises RuntimeError until `set_default_index` says what stands in;
    what is no text at all raises TypeError.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens: list[str] = []
        self._indices: dict[str, int] = {}
        self._default_index: int | None = None
        for token in tokens:
            if token in self:
                raise RuntimeError(f"Duplicate token found in tokens list: {token}")
            self.append_token(token)

    def _require_index(self, index: int, end: int, where: str = "") -> None:
        """Raise RuntimeError unless 0 ≤ index < end; a list would take −1 for its last."""
        if not 0 <= index < end:
            raise RuntimeError(
                f"Specified index {index}{where} is out of bounds for vocab of size {len(self)}"
            )

    def _require_new(self, token: str) -> None:
        """Raise RuntimeError, saying where it stands, for a token that is known already."""
        if token in self:
            raise RuntimeError(
                f"Token {token} already exists in the Vocab with index: {self._indices[token]}"
            )

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, token: str) -> bool:
        return _text(token) in self._indices

    def __getitem__(self, token: str) -> int:
        index = self._indices.get(_text(token), self._default_index)
        if index is None:
            raise RuntimeError(f"Token {token} not found and default index is not set")
        return index

    def __call__(self, tokens: Iterable[str]) -> list[int]:
        """Return the index of each of `tokens`. Raises RuntimeError for an unknown one.

        Raises TypeError for a text: its letters would silently be taken for tokens.
        """
        if isinstance(tokens, str):
            raise TypeError(f"{tokens!r} is a text: give the list of its tokens")
        return [self[token] for token in tokens]

    forward = __call__
    lookup_indices = __call__

    def lookup_token(self, index: int) -> str:
        """Return the token at `index`. Raises RuntimeError where there is none."""
        self._require_index(index, len(self))
        return self._tokens[index]

    def lookup_tokens(self, indices: Iterable[int]) -> list[str]:
        """Return the tokens at `indices`. Raises RuntimeError, saying where, if one has none."""
        indices = list(indices)
        for position, index in enumerate(indices):
            self._require_index(index, len(self), f" at position {position}")
        return [self._tokens[index] for index in indices]

    def get_stoi(self) -> dict[str, int]:
        """Return a copy of the table from token to index."""
        return dict(self._indices)

    def get_itos(self) -> list[str]:
        """Return a copy of the list of tokens."""
        return list(self._tokens)

    def set_default_index(self, index: int | None) -> None:
        """Let `index` stand for every token that is not in the vocabulary; None: raise again.

        Any whole number will do, whether a token has it or not.
        """
        self._default_index = None if index is None else operator.index(index)

    def get_default_index(self) -> int | None:
        """Return the index that stands for unknown tokens, or None."""
        return self._default_index

    def append_token(self, token: str) -> None:
        """Add `token` at the end. Raises RuntimeError where it is known already."""
        self._require_new(token)
        self._indices[token] = len(self._tokens)
        self._tokens.append(token)

    def insert_token(self, token: str, index: int) -> None:
        """Put `token` at `index` and move those behind it up by one.

        The default index stays the number it was, as in torchtext: set it after inserting.
        Raises RuntimeError for an index outside [0, len] and for a token that is known already.
        """
        self._require_index(index, len(self) + 1)
        self._require_new(token)
        self._tokens.insert(index, token)
        self._indices = {known: i for i, known in enumerate(self._tokens)}


def most_frequent_first(counts: Mapping[str, int]) -> list[str]:
    """Return the words of `counts`, the most frequent first, equally frequent ones by alphabet."""
    return sorted(counts, key=lambda word: (-counts[word], word))


def vocab(
    ordered_dict: Mapping[str, int],
    min_freq: int = 1,
    specials: Sequence[str] | None = None,
    special_first: bool = True,
) -> Vocab:
    """Return the vocabulary of `ordered_dict`, which maps words to counts, in its order.

    Words rarer than min_freq are left out; specials stay, before the words or behind them. A
    special that is among the words too keeps its special place.
    """
    specials = list(specials or [])
    kept = [word for word, n in ordered_dict.items() if n >= min_freq and word not in specials]
    return Vocab(specials + kept if special_first else kept + specials)


def build_vocab_from_iterator(
    iterator: Iterable[Iterable[str]],
    min_freq: int = 1,
    specials: Sequence[str] | None = None,
    special_first: bool = True,
    max_tokens: int | None = None,
) -> Vocab:
    """Return the vocabulary of the words that `iterator` gives, line by line.

    Words come most frequent first, then by alphabet; those rarer than min_freq are left out.
    Specials stand before them, or behind. A special that the text has too keeps its special place.
    Of all words the `max_tokens - len(specials)` most frequent are kept, counted before a special
    found in the text is taken out: on WikiText-2, which has its own <unk>, max_tokens=10000 with
    four specials gives 9,999 entries, here as in torchtext.

    Raises AssertionError where specials leave no room for words.
    """
    specials = list(specials or [])
    counts: Counter[str] = Counter()
    for words in iterator:
        counts.update(words)
    ranked = most_frequent_first(counts)
    if max_tokens is not None:
        if len(specials) >= max_tokens:
            raise AssertionError(
                "len(specials) >= max_tokens, so the vocab will be entirely special tokens."
            )
        ranked = ranked[: max_tokens - len(specials)]
    return vocab({word: counts[word] for word in ranked}, min_freq, specials, special_first)


class _Lines:
    """The lines of a split, each with its line end, as often as they are asked for."""

    def __init__(self, read: Callable[[], Iterator[str]]) -> None:
        self._read = read
        self._stream = self._ended()

    def _ended(self) -> Iterator[str]:
        return (line + "\n" for line in self._read())

    def __iter__(self) -> Iterator[str]:
        return self._ended()

    def __next__(self) -> str:
        return next(self._stream)


def WikiText2(  # noqa: N802, the classic name
    root: str | Path | None = None,
    split: str | Sequence[str] = ("train", "valid", "test"),
) -> _Lines | tuple[_Lines, ...]:
    """Return the lines of WikiText-2, each ending in its "\\n".

    split   one of "train", "valid" and "test", or several of them for as many results
    root    where torchtext would put its download; here, a folder that may have the files

    The text is found, or downloaded, as `minigpt.corpus` says. Raises UserError where it cannot be
    had and for a split of another name.
    """
    # corpus comes after this module in the reading order; only the call needs it.
    from minigpt.corpus import SPLITS, open_corpus

    if root in SPLITS and not Path(str(root)).exists():
        raise UserError(f'root is {root}: write WikiText2(split="{root}")')
    names = [split] if isinstance(split, str) else list(split)
    for name in names:
        if name not in SPLITS:
            raise UserError(
                f"split {name} is not known{closest(name, SPLITS)}: take train, valid or test"
            )
    # Under root itself, or where torchtext put its download.
    folders = (
        [] if root is None else [Path(root), Path(root, "datasets", "WikiText2", "wikitext-2")]
    )
    found = [folder for folder in folders if (folder / "wiki.train.tokens").is_file()]
    corpus = open_corpus(str(found[0]) if found else "wikitext-2")
    lines = tuple(_Lines(lambda name=name: corpus.lines(name)) for name in names)  # type: ignore[misc]
    return lines[0] if isinstance(split, str) else lines
