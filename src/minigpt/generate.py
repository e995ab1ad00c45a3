"""Generation: a model and the start of a text go in, the rest comes out, a word at a time.

    prompt ──encode──▶ ids ──`decoding.write`──▶ next ids ──`Speller`──▶ pieces of text, whole
    characters only ──`StopStrings`──▶ what is shown

`generate_text` writes one text and shows it as it grows; `continuations` writes many at once;
`best_continuations` searches for the likeliest.
Nothing here knows of files.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from minigpt.beams import beam_search
from minigpt.decoding import MOST_AT_ONCE, write
from minigpt.errors import require
from minigpt.filters import Text, TokenRules
from minigpt.model import MiniGPT
from minigpt.one_row import Step
from minigpt.sampling import USUAL, Sampling
from minigpt.tokenizer import Tokenizer

SAMPLE_LENGTH = 60  # tokens of a text that a report shows
BY_STRING = "stop string"  # why a text ended, beside the reasons that `decoding` has


class StopStrings:
    """Lets text through, piece by piece, up to the stop string that is complete first.

    Text that may be the beginning of a stop string is held back until it is known not to be, so
    the result does not depend on where one piece ends and the next begins.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Return the text that is free now; nothing comes after a stop string."""
        if self.found:
            return ""
        held = self._held + piece
        found = [(held.index(s) + len(s), held.index(s)) for s in self._stop if s in held]
        if found:
            self.found, self._held = True, ""
            return held[: min(found)[1]]
        beginnings = (n for s in self._stop for n in range(1, len(s)) if held.endswith(s[:n]))
        n_free = len(held) - max(beginnings, default=0)
        self._held = held[n_free:]
        return held[:n_free]

    def rest(self) -> str:
        """Return what was held back, since nothing comes any more."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class Wording:
    """What a text is to be made of, and where it ends."""

    stop: Sequence[str] = ()
    """Strings that end the text and are cut off."""
    raw: bool = False
    """Show <eos> and other specials as they are, and let them be drawn."""
    banned: Collection[int] = ()
    """Ids never drawn, beside the tokenizer's specials: those are out too, apart from <eos>, unless
    raw."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of some ids."""
    stop_at_eos: bool | None = None
    """End at <eos>? None: yes where it ends a text (bpe, char), no for the word kinds, where it is
    a line end like any other and shows as a line break."""

    def __post_init__(self) -> None:
        """Refuse a stop string that stands everywhere."""
        require(all(self.stop), "a stop string is empty: it would end the text before it begins")

    def rules(self, tokenizer: Tokenizer) -> TokenRules:
        """Return the same in terms of ids."""
        usual: Collection[int] = () if self.raw else tokenizer.special_ids
        banned = {*usual, *self.banned}
        by_kind = tokenizer.kind in ("bpe", "char")
        stops = by_kind if self.stop_at_eos is None else self.stop_at_eos
        return TokenRules(banned, self.bias, (tokenizer.eos_id,) if stops else ())


USUAL_WORDING = Wording()


@dataclass
class Continuation:
    """What a model wrote after a prompt."""

    prompt: str
    text: str
    ids: list[int]
    """The new ones; those of a stop string too, which the text is without."""
    log_probs: list[float]
    """log p of each, as the model gave it, before any filter."""
    ended: str
    """Why: "length", "end of text" or "stop string"."""
    score: float | None = None
    """Its score among beams, if it was found so."""


class _Draft:
    """A text that is being written, as it is to be shown."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, sample: int, wording: Wording) -> None:
        require(
            isinstance(prompt, str) and _is_unicode(prompt),
            f"the prompt is {prompt!r:.60}: give text, in UTF-8",
        )
        # An empty prompt starts as a line or a document does.
        self.text = Text.of(tokenizer.encode_prompt(prompt) or [tokenizer.eos_id], sample)
        self.prompt, self.shown = prompt, list[str]()
        # Begun with the prompt: whether a blank stands before a word depends on what it follows.
        self._speller = tokenizer.speller(self.text.ids, raw=wording.raw)
        self._stop_strings = StopStrings(wording.stop)
        # A blank that a prompt in words ends in is the one before the first word.
        self._has_blank = tokenizer.in_words and not wording.raw and prompt[-1:].isspace()

    def grow(self) -> str:
        """Return what the newest id shows, and end the text where a stop string is complete."""
        piece = self._speller.add(self.text.ids[-1])
        if self._has_blank and piece:
            piece, self._has_blank = piece.removeprefix(" "), False
        piece = self._stop_strings.add(piece)
        if self._stop_strings.found:
            self.text.ended = BY_STRING
        self.shown.append(piece)
        return piece

    def close(self) -> str:
        """Return what is left to show when the text has ended."""
        piece = self._stop_strings.add(self._speller.rest()) + self._stop_strings.rest()
        self.shown.append(piece)
        return piece

    def finished(self) -> Continuation:
        """Return all of it."""
        text = self.text
        assert text.ended is not None
        return Continuation(
            self.prompt, "".join(self.shown), text.new_ids, text.log_probs, text.ended
        )


def generate_text(
    model: MiniGPT,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling = USUAL,
    wording: Wording = USUAL_WORDING,
    *,
    step: Step | None = None,
) -> Iterator[str]:
    """Return the text that follows `prompt`, piece by piece; the prompt itself is not in it.

    An empty prompt starts from <eos>. The step is `write`'s.
    """
    draft = _Draft(tokenizer, prompt, 0, wording)
    grown = write(model, [draft.text], sampling, wording.rules(tokenizer), step=step)

    def pieces() -> Iterator[str]:
        yield from (draft.grow() for rows in grown for _ in rows)
        yield draft.close()

    return filter(None, pieces())


def continuations(
    model: MiniGPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling = USUAL,
    wording: Wording = USUAL_WORDING,
    *,
    n_samples: int = 1,
    step: Step | None = None,
) -> list[Continuation]:
    """Return n_samples texts after each prompt, all written at once: those of the first come first.

    Sample i (from 0) of any prompt is what `generate_text` writes for the seed i further on.
    """
    require(
        1 <= n_samples <= MOST_AT_ONCE,
        f"n_samples is {n_samples}: it must lie between 1 and {MOST_AT_ONCE:,}",
    )
    drafts = [_Draft(tokenizer, p, i, wording) for p in prompts for i in range(n_samples)]
    texts = [draft.text for draft in drafts]
    if texts:
        for rows in write(model, texts, sampling, wording.rules(tokenizer), step=step):
            for row in rows:
                drafts[row].grow()
    for draft in drafts:
        draft.close()
    return [draft.finished() for draft in drafts]


def best_continuations(
    model: MiniGPT,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling = USUAL,
    wording: Wording = USUAL_WORDING,
    *,
    n_beams: int = 4,
    length_penalty: float = 0.6,
) -> list[Continuation]:
    """Return the likeliest texts after a prompt that `beam_search` finds, the best first.

    A stop string cuts a text that was found; the search knows nothing of it.
    """
    start = _Draft(tokenizer, prompt, 0, wording).text.ids
    rules = wording.rules(tokenizer)
    beams = beam_search(
        model, start, sampling, rules, n_beams=n_beams, length_penalty=length_penalty
    )
    found = []
    for beam, score in beams:
        draft = _Draft(tokenizer, prompt, 0, wording)
        for i in beam.new_ids:
            draft.text.ids.append(i)
            draft.grow()
        draft.close()
        draft.text.log_probs, draft.text.ended = beam.log_probs, draft.text.ended or beam.ended
        found.append(replace(draft.finished(), score=score))
    return found


def _is_unicode(text: str) -> bool:
    """Is text made of characters alone, without halves of them or bytes that were none?"""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Sample:
    """A text as the model goes on from a prompt, for people to judge it by."""

    prompt: str
    text: str


def samples(
    model: MiniGPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str] = ("", "The"),
    sampling: Sampling = USUAL,
) -> list[Sample]:
    """Return what the model writes after each prompt, always with the same seed, unselected."""
    short = replace(sampling, max_new_tokens=SAMPLE_LENGTH, min_new_tokens=0)
    written = continuations(model, tokenizer, prompts, short)
    return [Sample(one.prompt, one.text) for one in written]
