"""Tokens to text as people write it, a piece at a time: what a model has said can be shown at once.

In: tokens, one by one. Out: what each adds to the text; joined, the pieces are the text of them
all, whoever stops where. A piece is never part of a character.

    The band @-@ leader 's " first " tour , in 1990 – 91   →   The band-leader's "first" tour, in …

Words were cut apart from their punctuation before a model learned them (WikiText by the Moses
tokenizer, which marks what stood inside a word: ` @-@ `, ` @,@ `, ` @.@ `), so they are put
together again by rules. The rules read forward only and know no grammar: a single quote after an
`s` is taken for a genitive, a double one opens and closes by turns in a line.
"""

import codecs
import re
from collections.abc import Callable
from typing import Protocol

# Bits of a word that Moses cuts off ('s), and those that basic_english leaves behind a lone '.
_ENDINGS = ("s", "t", "m", "d", "re", "ve", "ll")
_ENDING = re.compile(f"'(?:{'|'.join(_ENDINGS)})", re.IGNORECASE)
_INSIDE = re.compile(r"@(.{1,3})@")  # what stood inside a word, as WikiText marks it
_TO_THE_LEFT = {*",.;:!?)]}%°′″", "..", "...", "....", "’", "”"}
_TO_THE_RIGHT = {*"([{$£€¥₤#", "‘", "“"}
_BETWEEN = {"/", "⁄"}
_IN_NUMBERS = {"–", ":"}  # between two numbers, that is; elsewhere they are like other signs
_ENDS_SENTENCE = {".", "!", "?"}


# Control characters as pictures of themselves (U+2400 …), but line ends and tabs.
_PICTURES = {point: 0x2400 + point for point in range(0x20) if chr(point) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
# What turns the direction of writing over, so that a line reads otherwise than it is.
_PICTURES |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def harmless(text: str) -> str:
    """Return text as a terminal may be given it: what would command it can be seen instead.

    A model may have learned such characters, and a stranger's may have been made to write them.
    """
    return text.translate(_PICTURES)


class Spelling(Protocol):
    """Puts the text of some tokens together."""

    def add(self, token: str) -> str:
        """Return the text that one more token adds; it may come with a later one."""

    def end_line(self) -> str:
        """Return the text that the end of a line adds."""

    def rest(self) -> str:
        """Return what was held back for a token that did not come."""


class PlainWords:
    """Words as they are, with a blank between them."""

    def __init__(self) -> None:
        self._blank = ""

    def add(self, token: str) -> str:
        """Return the word behind a blank, unless it is the first."""
        piece, self._blank = self._blank + token, " "
        return piece

    def end_line(self) -> str:
        """Return a line break, which wants no blank on either side."""
        self._blank = ""
        return "\n"

    def rest(self) -> str:
        """Return nothing: no word waits."""
        return ""


class Prose:
    """Words of the kinds wikitext and basic_english, written as in a book."""

    def __init__(self, *, sentence_case: bool) -> None:
        """Make the first word of a sentence begin with a capital, and "i" one, if told to."""
        self._sentence_case = sentence_case
        # A dash or colon after a number: the next word tells whether 1990–91 or a pause was meant.
        self._held = ""
        self._begin()

    def _begin(self) -> None:
        """Stand at the begin of a line, with nothing left open."""
        self._before = ""  # the last word, "" at the begin of a line
        self._glued = True  # does the next word follow without a blank?
        self._quoted = {'"': False, "'": False}
        self._new_sentence = True

    def add(self, token: str) -> str:
        """Return the text of the word, with the blank before it where one belongs."""
        if self._held and _is_number(token):
            held, self._held, self._glued = self._held, "", True
            return held + self._written(token)
        held = self.rest()
        if token in _IN_NUMBERS and _is_number(self._before):
            self._held = token
            return held
        return held + self._written(token)

    def _written(self, token: str) -> str:
        inside = _INSIDE.fullmatch(token)
        word = inside[1] if inside else token
        to_left, to_right = (True, True) if inside else self._sides(token)
        blank = "" if self._glued or to_left else " "
        self._before, self._glued = token, to_right
        return blank + self._cased(word)

    def _sides(self, token: str) -> tuple[bool, bool]:
        """Return whether a token clings to what stands before it, and to what comes after."""
        before = self._before
        if token in self._quoted:
            return self._quote(token)
        if token in _BETWEEN:
            return True, True
        if token == "=":  # == a heading ==
            return before == "=", False
        if token in _TO_THE_RIGHT:
            return False, True
        if token in _TO_THE_LEFT:
            return True, False
        unit_of_heat = before == "°" and token in {"C", "F", "c", "f"}
        ending = bool(_ENDING.fullmatch(token)) or (before == "'" and token in _ENDINGS)
        return unit_of_heat or ending, False

    def _quote(self, token: str) -> tuple[bool, bool]:
        """Return the sides of a quotation mark, which opens or closes."""
        # basic_english has all of them alone: there most belong to it's and the like.
        is_word = self._before[-1:].isalnum()
        genitive = is_word and (self._sentence_case or self._before[-1:] in "sxz")
        if token == "'" and genitive and not self._quoted[token]:
            return True, False
        self._quoted[token] = not self._quoted[token]
        opens = self._quoted[token]
        return not opens, opens

    def _cased(self, word: str) -> str:
        """Return the word with a capital where a sentence begins."""
        if not self._sentence_case:
            return word
        begins = self._new_sentence and word[:1].isalnum()
        if begins or word in _ENDS_SENTENCE:
            self._new_sentence = word in _ENDS_SENTENCE
        return word[0].upper() + word[1:] if begins or word == "i" else word

    def end_line(self) -> str:
        """Return a line break, behind what was held back."""
        rest = self.rest()
        self._begin()
        return rest + "\n"

    def rest(self) -> str:
        """Return the sign that waited for a number."""
        held, self._held = self._held, ""
        return self._written(held) if held else ""


_SHORTENED = "mr|mrs|ms|dr|st|prof|gen|col|capt|lt|sgt|jr|sr|vs"  # keep their full stop
_PARTS = re.compile(
    rf"""
    (?P<inside> (?<=[0-9])[.,](?=[0-9]) | (?<=\w)-(?=\w) )
    | {_ENDING.pattern}\b
    | \b(?:{_SHORTENED})\. | \b(?:[a-z]\.){{2,}} | \.{{2,}}
    | \w+ | [^\w\s]
    """,
    re.VERBOSE | re.IGNORECASE,
)


def taken_apart(word: str) -> list[str]:
    """Return a word as WikiText has it: "well-known," is well, @-@, known and a comma.

    What `Prose` puts together, for prompts that are typed as in a book. What WikiText has already
    comes back as it is.
    """
    if word == "<unk>" or _INSIDE.fullmatch(word):
        return [word]
    return [f"@{found[0]}@" if found["inside"] else found[0] for found in _PARTS.finditer(word)]


class Bytes:
    """Tokens that spell bytes of UTF-8, as bpe and char have them: the exact text comes back.

    What is no character becomes U+FFFD, and only once it is known that it will not become one.
    """

    def __init__(self, bytes_of: Callable[[str], bytes]) -> None:
        """Take what says which bytes a token stands for."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: str) -> str:
        """Return the characters that are whole now."""
        return self._decoder.decode(self._bytes_of(token))

    def end_line(self) -> str:
        """Return nothing: a line break is a character of the text."""
        return ""

    def rest(self) -> str:
        """Return U+FFFD for a character that was begun, if one was."""
        return self._decoder.decode(b"", final=True)


class Respelt:
    """Pieces of words, as `Bytes` joins them, whose words `Prose` puts together.

    For a bpe that learned WikiText: its words stand apart from their punctuation there too.
    """

    def __init__(self, exact: Spelling) -> None:
        """Take what joins the pieces."""
        self._exact = exact
        self._prose = Prose(sentence_case=False)
        self._word = ""  # begun, and ended by the blank to come
        self._goes_on = False  # was the begin of the word given away already?

    def add(self, token: str) -> str:
        """Return the text of the words that are whole now."""
        return self._read(self._exact.add(token))

    def _read(self, text: str) -> str:
        pieces = []
        for part in re.split(r"([ \n])", text):
            if part not in (" ", "\n"):
                self._word += part
                continue
            pieces.append(self._ended_word())
            if part == "\n":
                pieces.append(self._prose.end_line())
        return "".join(pieces)

    def _ended_word(self) -> str:
        word, self._word = self._word, ""
        goes_on, self._goes_on = self._goes_on, False
        if goes_on or not word:
            return word
        return self._prose.add(word)

    def end_line(self) -> str:
        """Return what was held back: a document ends, of which the line break was a character."""
        rest = self.rest()
        self._prose, self._goes_on = Prose(sentence_case=False), False
        return rest

    def rest(self) -> str:
        """Return the word that was begun; more of it may follow."""
        piece = self._read(self._exact.rest())
        begun = bool(self._word) or self._goes_on
        piece += self._ended_word() + self._prose.rest()
        self._goes_on = begun
        return piece


def byte_letters() -> dict[str, int]:
    """Return which byte each letter of a byte-level token stands for, as GPT-2 spells them.

    Printable bytes of Latin-1 stand for themselves; the others, in order, are U+0100 and on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTE_LETTERS = byte_letters()


def bytes_of_letters(token: str) -> bytes:
    """Return the bytes of a byte-level token; one that was added whole, " <unk>", is its own."""
    if all(letter in _BYTE_LETTERS for letter in token):
        return bytes(_BYTE_LETTERS[letter] for letter in token)
    return token.encode()


def _is_number(word: str) -> bool:
    return word[:1].isdigit() and word[-1:].isdigit()
