"""Which entries a tokenizer has: learnt from lines of text, for each of the four kinds.

In: a `TokenizerConfig` and lines of training text. Out: an object of the `tokenizers` library, its
ids the most frequent first, then by alphabet (basic_english: its four specials, then the words).

Words are counted here, not by the library: its own trainer would move the `<unk>` that WikiText
has in its text.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from minigpt.config import TokenizerConfig
from minigpt.errors import UserError
from minigpt.text import basic_english, most_frequent_first

Lines = Callable[[], Iterable[str]]

UNK, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"
# bpe and char have no unknown text. But WikiText writes <unk> where a rare word stood, and a model
# that spells it in pieces cannot be kept from it: it gets one id, with and without its blank.
SPELT_UNKNOWN = (f" {UNK}", UNK)
DOCUMENT_MARK = "<|endoftext|>"
_TITLE = re.compile(r" ?= (?!= ).*(?<! =) = ?")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# A batch is what the library spreads over all cores; a longer line is cut (text8 is one line of
# 100 MB, and the library needs a hundred times the memory of what it reads at once).
_BATCH_CHARACTERS = 1 << 19
_CUT = re.compile(r"(?<=\w) (?=\w)")
# Merges are learnt in a time that grows with the square of a word: a megabyte without a blank, as
# Chinese may be, would take an hour.
_LONGEST_WORD = 1_000
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD}}}(?=\S)")


def learn(config: TokenizerConfig, lines: Lines) -> Tokenizer:
    """Return the tokenizer that `config` describes, learnt from `lines`, called once or more.

    Raises UserError where vocab_size has no room for what the kind cannot do without, and for a
    line with half a character (a surrogate).
    """
    return {
        "basic_english": _learn_basic_english,
        "wikitext": _learn_wikitext,
        "bpe": _learn_bpe,
        "char": _learn_char,
    }[config.kind](config.vocab_size, lambda: map(_whole, lines()))


def _whole(line: str) -> str:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"a line to learn from has half a character ({line[error.start]!a}): read the text as "
            "UTF-8"
        ) from None
    return line


def _learn_basic_english(vocab_size: int, lines: Lines) -> Tokenizer:
    """Return the four specials and the most frequent words, vocab_size in all (0: every word)."""
    specials = [UNK, PAD, BOS, EOS]
    counts = Counter(word for line in lines() for word in basic_english(line))
    words = [word for word in most_frequent_first(counts) if word not in specials]
    # torchtext would count <unk> among the words too, and end with one entry less.
    kept = words[: vocab_size - len(specials)] if vocab_size else words
    library = _word_level([*specials, *kept])
    # The twelve rules as five; a test holds that they give the same words. The order matters: a
    # quotation mark is gone before <br /> is looked for.
    library.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace('"', ""),
            normalizers.Replace("<br />", " "),
        ]
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f;:]+"), "removed"),
            pre_tokenizers.Split(Regex(r"['.,()!?]"), "isolated"),
        ]
    )
    return library


def _learn_wikitext(vocab_size: int, lines: Lines) -> Tokenizer:
    """Return the words between blanks, `<eos>` (one a line) and `<unk>` among them by frequency.

    When cut, `<unk>` also stands for all that was left out. A text that has none gets it as its
    last id, so that words unseen in training have somewhere to go.
    """
    counts = Counter({UNK: 0, EOS: 0})
    for line in lines():
        counts.update(line.split())
        counts[EOS] += 1
    words = [word for word in most_frequent_first(counts) if word not in (UNK, EOS)]
    for word in words[vocab_size - 2 :] if vocab_size else []:
        counts[UNK] += counts.pop(word)
    library = _word_level(most_frequent_first(counts))
    # What Python's str.split takes for white space: \x1c-\x1f are none to the library.
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f]+"), "removed")
    return library


def _word_level(tokens: list[str]) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    return Tokenizer(models.WordLevel(vocab, unk_token=UNK))


def _learn_bpe(vocab_size: int, lines: Lines) -> Tokenizer:
    """Return byte-level BPE with GPT-2's split (Radford et al. 2019, section 2.2).

    vocab_size counts the 256 bytes, the merges, `<eos>`, and two for `<unk>` where the text has it.
    Merges stay in the order in which they were learnt; ids go by frequency.
    """
    says_unknown = any(UNK in line for line in lines())
    added = (EOS, *SPELT_UNKNOWN) if says_unknown and vocab_size >= 256 + 3 else (EOS,)
    learner = _byte_level([], [], ())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    parts = (
        part
        for line in lines()
        for text in re.split(f" ?{UNK}", line + "\n")
        for book in _cut(text)  # a line may be one
        for part in _with_short_words(book)
    )
    learner.train_from_iterator(parts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    merges = [(left, right) for left, right in learnt["merges"]]
    # GPT-2's split never puts "<", "eos" and ">" into one piece: no merge can spell a special.
    first = _byte_level([*learnt["vocab"], *added], merges, added)
    counts = Counter(chain.from_iterable(encode_documents(first, lines())))
    by_token = {token: counts[i] for token, i in first.get_vocab().items()}
    return _byte_level(most_frequent_first(by_token), merges, added)


def _with_short_words(text: str) -> Iterator[str]:
    """Yield `text` in parts, none of them with a word longer than _LONGEST_WORD."""
    start = 0
    if len(text) > _LONGEST_WORD:
        for word in _LONG_WORD.finditer(text):
            yield text[start : word.end()]
            start = word.end()
    yield text[start:]


def _byte_level(
    tokens: list[str], merges: list[tuple[str, str]], added: Iterable[str]
) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    library = Tokenizer(models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    _add(library, added)
    return library


def _learn_char(vocab_size: int, lines: Lines) -> Tokenizer:
    """Return the characters of the text, the 256 bytes that spell all others, and `<eos>`.

    vocab_size (0: no limit) counts them all; the most frequent characters are kept.
    """
    counts = Counter(dict.fromkeys([*_BYTES, EOS], 0))
    for text in marked(lines()):
        if text == DOCUMENT_MARK:
            counts[EOS] += 1
        else:
            spelt, *others = text.split(UNK)
            counts.update(chain(spelt, *others, [UNK] * len(others)))
    added = (EOS, UNK) if UNK in counts else (EOS,)
    room = vocab_size - len(_BYTES) - len(added)
    if vocab_size and room < 1:
        raise UserError(
            f"tokenizer.vocab_size is {vocab_size}: char needs at least "
            f"{len(_BYTES) + len(added) + 1} (256 bytes, {' and '.join(added)}, a character)"
        )
    characters = [c for c in most_frequent_first(counts) if len(c) == 1]
    for character in characters[room:] if vocab_size else []:
        n = counts.pop(character)
        for byte in character.encode():
            counts[_BYTES[byte]] += n
    vocab = {token: i for i, token in enumerate(most_frequent_first(counts))}
    library = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    _add(library, added)
    return library


def _add(library: Tokenizer, tokens: Iterable[str]) -> None:
    """Have `tokens`, which have their ids already, read as one piece each; `<eos>` by no text."""
    library.encode_special_tokens = True
    for token in tokens:
        library.add_tokens([AddedToken(token, normalized=False, special=token == EOS)])


def is_title(earlier: str, line: str, later: str) -> bool:
    """Return whether line is a WikiText title: ` = Title = ` between two blank lines.

    Without the blank ones it might be a formula: WikiText-2 has 29 of these in its 600 articles.
    """
    return bool(_TITLE.fullmatch(line)) and not earlier.strip() and not later.strip()


def marked(lines: Iterable[str]) -> Iterator[str]:
    """Yield `lines`, each with its line end, and a bare `<|endoftext|>` where a document ends.

    It ends before a WikiText title (a line ` = Title = ` between two blank ones), at a line
    `<|endoftext|>` of its own, and with the text.
    """
    ended = chain(lines, [""])
    earlier, line = "", next(ended)
    has_text = False
    for later in ended:
        if has_text and is_title(earlier, line, later):
            yield DOCUMENT_MARK
        is_mark = line.strip() == DOCUMENT_MARK
        yield DOCUMENT_MARK if is_mark else line + "\n"
        has_text = not is_mark and (has_text or bool(line.strip()))
        earlier, line = line, later
    if has_text:
        yield DOCUMENT_MARK


def batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield `lines` in lists of about as much text as the library should see at once."""
    batch: list[str] = []
    n_characters = 0
    for line in lines:
        if batch and n_characters + len(line) > _BATCH_CHARACTERS:
            yield batch
            batch, n_characters = [], 0
        batch.append(line)
        n_characters += len(line) + 1
    yield batch


def encode_batch(library: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text."""
    if len(texts) == 1:
        parts = (library.encode(part, add_special_tokens=False) for part in _cut(texts[0]))
        return [[i for part in parts for i in part.ids]]
    return [line.ids for line in library.encode_batch_fast(texts, add_special_tokens=False)]


def encode_documents(library: Tokenizer, lines: Iterable[str]) -> Iterator[list[int]]:
    """Yield the ids of each line and its line end, and `<eos>` alone where a document ends."""
    eos = library.get_vocab()[EOS]
    for batch in batches(marked(lines)):
        ids_of = iter(encode_batch(library, [text for text in batch if text != DOCUMENT_MARK]))
        for text in batch:
            yield [eos] if text == DOCUMENT_MARK else next(ids_of)


def _cut(text: str) -> list[str]:
    """Return `text` in parts that the library can hold, cut between words where there are any.

    Each kind begins a new piece at a blank between two words, so that no id changes.
    """
    parts, start = [], 0
    while len(text) - start > _BATCH_CHARACTERS:
        end = start + _BATCH_CHARACTERS
        blank = _CUT.search(text, end - _BATCH_CHARACTERS // 2, end)
        end = blank.start() if blank else end
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]
