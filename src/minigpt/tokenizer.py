"""Text to ids and back, in four kinds.

| kind          | an id is                                | `<eos>` stands                     |
|---------------|-----------------------------------------|------------------------------------|
| basic_english | a word by the classic rules (`text`)    | after each line that has words     |
| wikitext      | a word between blanks                   | for each line end, blank lines too |
| bpe           | a run of bytes, learnt by merging pairs | after each document                |
| char          | a character, else each of its bytes     | after each document                |

In: text, or the lines of one. Out: ids. `vocabulary` says which ids there are; `spelling` puts
their text together again.

Each kind is an object of the `tokenizers` library, saved as tokenizer.json, which transformers
reads too. There basic_english differs in one letter (a Σ at the end of a word), and a special that
stands in the text is one to transformers, whatever stands beside it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import tokenizers

from minigpt.config import TokenizerConfig, TokenizerKind
from minigpt.errors import UserError
from minigpt.files import atomic_write
from minigpt.reading import read_text
from minigpt.spelling import (
    Bytes,
    PlainWords,
    Prose,
    Respelt,
    Spelling,
    bytes_of_letters,
    taken_apart,
)
from minigpt.tokenizer_file import MOST_BYTES, kind_of
from minigpt.vocabulary import (
    BOS,
    EOS,
    PAD,
    SPELT_UNKNOWN,
    UNK,
    Lines,
    batches,
    encode_batch,
    encode_documents,
    learn,
)

# What may stand beside a word for basic_english to see it as a word of its own.
_UNKNOWN_WORD = re.compile(r"(?<![^\s'.,()!?;:])<unk>(?![^\s'.,()!?;:])")
# How the char kind spells a byte, as an entry of its own.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# A piece of bpe that only WikiText's marks teach (` @-@ `; Ġ is a blank).
_MARK = "Ġ@-@"


class Tokenizer:
    """Text to ids and back. Made by `train` or `load`."""

    kind: TokenizerKind
    vocab_size: int
    eos_id: int
    unk_id: int | None  # what unseen words become; bpe and char have none
    bos_id: int | None
    pad_id: int | None
    special_ids: frozenset[int]  # not to be generated unasked: unk, pad and bos, in any spelling
    in_words: bool  # is a text that it writes put together from words, as a book has them?
    fingerprint: str  # sha256 of tokenizer.json

    def __init__(self, tokenizer_json: str) -> None:
        """Raise UserError where `tokenizer_json` is not a tokenizer of one of the four kinds."""
        self._json = tokenizer_json
        # First, for the library does whatever it says.
        self.kind = kind_of(tokenizer_json)
        try:
            self._library = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises no narrower class
            raise UserError(f"it is not a tokenizer.json ({error})") from None
        # The text's own "<eos>" is text: only this module ends a document.
        self._library.encode_special_tokens = True
        self.vocab_size = self._library.get_vocab_size()
        self._tokens = [self._library.id_to_token(i) or "" for i in range(self.vocab_size)]
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        self._by_words = self.kind in ("basic_english", "wikitext")
        self.in_words = self._by_words or (self.kind == "bpe" and _MARK in self._ids)
        needed = {"basic_english": (UNK, PAD, BOS, EOS), "wikitext": (UNK, EOS)}
        if "" in self._ids or not self._ids.keys() >= {*needed.get(self.kind, (EOS,))}:
            raise UserError(f"its ids have a gap, or {EOS} or {UNK} is missing among its tokens")
        self.eos_id = self._ids[EOS]
        self.unk_id = self._ids[UNK] if self._by_words else None
        has_four = self.kind == "basic_english"
        self.bos_id = self._ids[BOS] if has_four else None
        self.pad_id = self._ids[PAD] if has_four else None
        specials = (*SPELT_UNKNOWN, PAD, BOS) if has_four else SPELT_UNKNOWN
        self.special_ids = frozenset(self._ids[s] for s in specials if s in self._ids)
        self.fingerprint = hashlib.sha256(tokenizer_json.encode()).hexdigest()

    @classmethod
    def train(cls, config: TokenizerConfig, lines: Lines) -> "Tokenizer":
        """Learn the vocabulary of `lines`, which may be called twice. Same lines, same ids.

        Raises UserError where vocab_size has no room for what the kind cannot do without, and for
        more words than `load` would take.
        """
        library = learn(config, lines)
        spelt = library.to_str(pretty=True)
        if len(spelt.encode()) > MOST_BYTES:
            raise UserError(
                f"the vocabulary has {library.get_vocab_size():,} entries, more than "
                f"{MOST_BYTES:,} bytes of tokenizer.json: set tokenizer.vocab_size"
            )
        return cls(spelt)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Return what `save` wrote to `path`. Raises UserError where it is missing or damaged."""
        try:
            return cls(read_text(path, MOST_BYTES))
        except FileNotFoundError:
            raise UserError(f"tokenizer {path} does not exist: check the path") from None
        except (OSError, ValueError) as error:
            why = f"{error}: restore it from a copy"
            raise UserError(f"tokenizer {path} is damaged: {why}") from None

    def save(self, path: Path) -> None:
        """Write tokenizer.json to `path`, and the tokenizer_config.json of transformers beside."""
        named = {"unk_token": self.unk_id, "pad_token": self.pad_id, "bos_token": self.bos_id}
        config = {
            # Without a class, transformers picks one by the model's and re-splits the text.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS,
            **{name: self._tokens[i] for name, i in named.items() if i is not None},
        }
        with atomic_write(path.with_name("tokenizer_config.json")) as file:
            file.write(json.dumps(config, indent=2).encode())
        with atomic_write(path) as file:
            file.write(self._json.encode())

    def token_to_id(self, token: str) -> int | None:
        """Return the id of `token` as the vocabulary spells it, or None."""
        return self._ids.get(token)

    def id_of(self, word: str) -> int:
        """Return the id of a word that is one token. Raises UserError where it is none or several.

        For bpe "city" and " city" are two tokens.
        """
        known = self._ids.get(word)
        if known is not None:
            return known
        ids = self.encode(word)
        if len(ids) != 1 or ids[0] == self.unk_id:
            what = "not in the vocabulary" if self._by_words else f"{len(ids)} tokens, not one"
            raise UserError(
                f"token {word!r} is {what}: `minigpt tokenize RUN TEXT` shows those of a text"
            )
        return ids[0]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt: as `encode_lines` gives them, but with no `<eos>` at its end.

        A line end inside is the line end of the kind. No text raises.
        """
        *whole, last = text.split("\n")
        if not self._by_words:
            # Line by line, as in training: "\n\n" must not become a piece that was never seen.
            return list(chain(*self._encode_batch([*(line + "\n" for line in whole), last])))
        *ended, rest = self._encode_batch([*whole, last])
        return [*chain(*(self._with_eos(ids) for ids in ended)), *rest]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that was typed as in a book: `encode`, where that knows it all.

        WikiText knows "band 's" and not "band's": the signs are set apart, as they are in the text
        that was learned, but of words that the wikitext kind knows as they stand. For a bpe that
        learned it, a line has the blank at either end that it has there.
        """
        if self.kind == "basic_english" or not self.in_words:
            return self.encode(text)
        known = self._ids if self.kind == "wikitext" else {}
        *whole, last = (
            " ".join(
                part
                for word in line.split()
                for part in ([word] if word in known else taken_apart(word))
            )
            for line in text.split("\n")
        )
        if self.kind == "bpe":
            whole = [f" {line} " if line else " " for line in whole]
            last = f" {last}" if last else ""
        return self.encode("\n".join([*whole, last]))

    def encode_lines(self, lines: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of each line, `<eos>` included where the kind has it: what a model is fed.

        lines   without their "\\n". bpe and char put it back, and end a document before a WikiText
                title, at a line `<|endoftext|>`, and with the text: with a list of `<eos>` alone.
        """
        if not self._by_words:
            yield from encode_documents(self._library, map(_mended, lines))
            return
        for batch in batches(lines):
            yield from map(self._with_eos, self._encode_batch(batch))

    def decode(self, ids: Iterable[int], *, raw: bool = False) -> str:
        """Return the text of `ids`; exactly the text that was encoded for bpe and char.

        Words are put together as people write them (`spelling.Prose`), and their `<eos>` is the
        line end that it stands for; other specials are left out. `raw` spells every one, and joins
        words by blanks, as they stand in the training text.
        """
        speller = self._speller(raw=raw, exact=raw or not self._by_words)
        return "".join([*map(speller.add, ids), speller.rest()])

    def speller(self, after: Iterable[int] = (), *, raw: bool = False) -> "Speller":
        """Return what turns ids into text one by one, as people write it unless `raw`.

        Joined, it is what `decode` returns, but for a bpe that learned WikiText: there `decode`
        is exact, and this puts words together all the same.

        after   ids that the text begins with and that were shown already: whether a word stands
                behind a blank depends on what it follows
        """
        speller = self._speller(raw=raw, exact=raw)
        for i in after:
            speller.pass_over(i)
        speller.rest()
        return speller

    def _speller(self, *, raw: bool, exact: bool) -> "Speller":
        # To bpe and char an <unk> is text of the corpus like any other, which comes back as it was.
        hidden_ids = self.special_ids if self._by_words and not raw else frozenset()
        line_end_id = None if raw else self.eos_id
        return Speller(self._tokens, self._spelling(exact), line_end_id, hidden_ids)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return one printable piece for each id; blanks and line ends show as ␣ and ⏎."""
        return [self._piece(i) for i in ids]

    def n_spelt_unknown(self, line: str) -> int:
        """Return how many ids of `line` are `<unk>` because the text itself says so."""
        if UNK not in line.lower():
            return 0
        if self.kind == "wikitext":
            return line.split().count(UNK)
        if self.kind == "basic_english":
            line = line.lower().replace('"', "").replace("<br />", " ")
            return len(_UNKNOWN_WORD.findall(line))
        return 0

    def _piece(self, i: int) -> str:
        token = self._tokens[i]
        if self.kind == "bpe" and i != self.eos_id:
            text = self._library.decode([i])
            token = token if "\ufffd" in text else text  # part of a character: GPT-2's stand-ins
        token = token.replace(" ", "␣").replace("\n", "⏎")
        return token if token.isprintable() else repr(token)[1:-1]

    def _spelling(self, exact: bool) -> Spelling:
        """Return what puts the text of this kind's tokens together, or leaves words as they are."""
        if self.kind == "bpe":
            pieces = Bytes(bytes_of_letters)
            return Respelt(pieces) if self.in_words and not exact else pieces
        if self.kind == "char":
            return Bytes(_bytes_of_char)
        return PlainWords() if exact else Prose(sentence_case=self.kind == "basic_english")

    def _with_eos(self, ids: list[int]) -> list[int]:
        if ids or self.kind == "wikitext":
            ids.append(self.eos_id)
        return ids

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        # No text may raise, but the library takes no lone surrogates (they come from file names).
        texts = [*map(_mended, texts)]
        if self.kind == "basic_english":
            # The library lowers each letter by itself: only here does a final Σ become ς.
            texts = [text.lower() for text in texts]
        return encode_batch(self._library, texts)


class Speller:
    """Ids to text, one by one: what a model has said can be shown at once."""

    def __init__(
        self,
        tokens: Sequence[str],
        spelling: Spelling,
        line_end_id: int | None,
        hidden_ids: frozenset[int],
    ) -> None:
        """Take the parts of a tokenizer that this needs; `Tokenizer.speller` does it."""
        self._tokens, self._spelling = tokens, spelling
        self._line_end_id, self._hidden_ids = line_end_id, hidden_ids

    def add(self, i: int) -> str:
        """Return the text that id i adds: "" where it comes with a later one's.

        An id may be part of a character, or a sign that depends on what comes next.
        """
        if i == self._line_end_id:
            return self._spelling.end_line()
        return "" if i in self._hidden_ids else self._spelling.add(self._tokens[i])

    def pass_over(self, i: int) -> None:
        """Take id i for shown: what was no known word stands there all the same."""
        if i in self._hidden_ids:
            self._spelling.add(self._tokens[i])
        else:
            self.add(i)

    def rest(self) -> str:
        """Return what was held back for an id that did not come."""
        return self._spelling.rest()


def _bytes_of_char(token: str) -> bytes:
    """Return what an entry of the kind char stands for: a character, or a byte written <0xAB>."""
    return bytes([int(token[3:5], 16)]) if _BYTE.fullmatch(token) else token.encode()


def _mended(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
