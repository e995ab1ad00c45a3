"""What a head looks at, counted on text that the model has not learned from.

    windows of ids (N, T) ──recorded──▶ weights (L, H, T, T) each ──score_weights─▶ `HeadScore`
    marked sentences      ──recorded──▶ the word with most weight ─────────────────▶ `RelationScore`
    windows, head by head ──silenced──▶ nats without this head    ─────────────────▶ `LossChange`

A high score alone says little. An even look at all that is visible scores too, and a head that
always looks at the same place meets a verb or an earlier copy of a word now and then. So every
score stands beside what it would be without knowing the words.

N windows · B batch · T sequence · L layers · H heads · K d_head · D d_model
"""

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt.attention_maps import Attend, attending, entropy, finite, recorded
from minigpt.compilation import uncompiled
from minigpt.errors import UserError, require
from minigpt.evaluate import evaluating
from minigpt.layers.attention import causal_mask
from minigpt.model import MiniGPT
from minigpt.sentences import Sentence, best_fixed_place
from minigpt.tokenizer import Tokenizer

# Windows looked at unless a number of tokens is given.
N_WINDOWS = 16
# Ids that go through the model together.
_IDS_PER_PASS = 2048
_SENTENCES_PER_PASS = 20


def held_out_windows(ids: np.ndarray, context: int, n_tokens: int | None = None) -> Tensor:
    """Return windows of context ids and the one that follows, (N, T + 1), spread over a text.

    n_tokens   about how many to look at; None: 16 windows, or as many as there are
    The windows do not overlap. Raises UserError where there are not two of them: to know where a
    head looks whatever the words are takes a second text.
    """
    if n_tokens is not None and n_tokens < 2 * context:
        raise UserError(
            f"tokens is {n_tokens}: give at least {2 * context}, two windows of the model's context"
        )
    n_there = (len(ids) - 1) // context
    if n_there < 2:
        raise UserError(
            f"the text has {len(ids)} tokens: two windows of the model's context need at least "
            f"{2 * context + 1}, so choose another split"
        )
    n_windows = min(n_there, N_WINDOWS if n_tokens is None else n_tokens // context)
    # From one end of the text to the other: neighbours would tell of the same things.
    begins = [i * n_there // n_windows * context for i in range(n_windows)]
    windows = np.stack([ids[begin : begin + context + 1] for begin in begins])
    return torch.from_numpy(windows.astype(np.int64))


def is_punctuation(tokenizer: Tokenizer, ids: Tensor) -> Tensor:
    """Return which ids (…) are written with signs alone, such as , or @-@: no letter, no digit."""
    signs = [i for i in set(ids.flatten().tolist()) if _is_signs(tokenizer.decode([i]))]
    return torch.isin(ids, torch.tensor(signs, dtype=ids.dtype))


def _is_signs(text: str) -> bool:
    text = text.strip()  # nothing is left of blanks, line ends and specials
    # � stands for a part of a character, which may be a letter.
    return bool(text) and all(unicodedata.category(c)[0] in "PS" and c != "\ufffd" for c in text)


@dataclass(frozen=True, eq=False)  # == of tensors is no truth value
class HeadScore:
    """One score of every head, between 0 and 1, and what it would be without knowing the words."""

    measured: Tensor  # (L, H)
    position_only: Tensor
    """(L, H): each head with its own average weights over all other windows, same row and column,
    in place of those that it has here. What is left of a score then comes from positions alone."""
    even: float
    """What a look that is spread evenly over all visible positions gets."""
    n_rows: int
    """How many positions were counted: those that see both what is looked for and something
    else. All figures are means over these same rows."""


# The weight of a row on …
PLACES = {
    "previous_token": "the position before",
    "first_token": "the first position of the window",
    "itself": "the position that looks",
    "same_token": "earlier occurrences of the same token, summed",
    "induction": "what followed earlier occurrences of the same token, summed",
    "punctuation": "earlier punctuation, summed",
    "long_range": "positions more than an eighth of the window back, summed",
}


def looked_for(ids: Tensor, punctuation: Tensor) -> Tensor:
    """Return which positions each score of PLACES counts, row by row: (7, T, T) bool.

    ids, punctuation   (T,): one window, and which of its ids are punctuation
    A row that sees nothing of the kind, or nothing else, has no choice: it is all False.
    """
    size = len(ids)
    visible = causal_mask(size, size)
    earlier = visible.tril(-1)
    same = (ids[:, None] == ids) & earlier  # (T, T)
    followed = F.pad(same[:, :-1], (1, 0)) & earlier  # one column on, and still before the row
    first = torch.zeros_like(visible)
    first[:, 0] = True
    reach = max(1, size // 8)
    places = torch.stack(
        [
            earlier.triu(-1),
            first,
            torch.eye(size, dtype=torch.bool),
            same,
            followed,
            punctuation & earlier,
            visible.tril(-reach - 1),
        ]
    )  # (7, T, T)
    n_places, n_visible = places.sum(-1), visible.sum(-1)
    has_choice = (n_places > 0) & (n_places < n_visible)  # (7, T)
    return places & has_choice[..., None]


def score_weights(
    weights: Iterable[Tensor], ids: Tensor, punctuation: Tensor
) -> dict[str, HeadScore]:
    """Return the scores of PLACES and the entropy of the heads that gave these weights.

    weights            N of (L, H, T, T), one for each window
    ids, punctuation   (N, T): the windows, and which ids are punctuation

    A score is the weight on the places looked for, a mean over all rows that have a choice. The
    entropy is that of `attention_maps`, a share of an even look's; its position_only is the entropy
    of the head's average over all windows. Where no row counts, a score is NaN.
    """
    n_windows, size = ids.shape
    hits, spread, all_weights, n_rows = (torch.zeros(()) for _ in range(4))
    all_places = torch.zeros(len(PLACES), size, size)
    for of_window, window, signs in zip(weights, ids, punctuation, strict=True):
        places = looked_for(window, signs)
        # Two (T, T) tables, multiplied cell by cell and summed: one product for all heads.
        hits = hits + (of_window.flatten(2) @ places.flatten(1).T.float()).double()  # (L, H, 7)
        spread = spread + entropy(of_window)
        all_weights = all_weights + of_window
        all_places += places
        n_rows = n_rows + places.any(-1).sum(-1)  # (7,)
    # Σ over windows of places · Σ of the *other* windows' weights, without keeping them all.
    crossed = (all_weights.flatten(2) @ all_places.flatten(1).T).double()  # (L, H, 7)
    measured, position_only = hits / n_rows, (crossed - hits) / (n_windows - 1) / n_rows
    n_visible = torch.arange(1, size + 1)
    even = (all_places.sum(-1) / n_visible).sum(-1) / n_rows  # (7,)
    scores = {
        name: HeadScore(measured[..., i], position_only[..., i], float(even[i]), int(n_rows[i]))
        for i, name in enumerate(PLACES)
    }
    average = entropy(all_weights / n_windows)
    scores["entropy"] = HeadScore(spread / n_windows, average, 1.0, n_windows * (size - 1))
    return scores


@torch.no_grad()
def recorded_windows(model: MiniGPT, ids: Tensor) -> Iterator[Tensor]:
    """Yield the weights (L, H, T, T) of each window of ids (N, T), on the CPU.

    Raises UserError for a model that has diverged.
    """
    device = next(model.parameters()).device
    for window in ids:
        with evaluating(model), recorded(model) as weights:
            model.hidden(window[None].to(device))
        yield finite(torch.cat(weights).float().cpu(), "attention")


@dataclass(frozen=True, eq=False)
class RelationScore:
    """How often each head, at one word of a sentence, finds the other word of a pair."""

    accuracy: Tensor
    """(L, H): share of the sentences in which, of all earlier words, the target has the largest
    weight. As Clark et al. 2019, section 4.2: what special tokens get is left out."""
    of_two: Tensor
    """(L, H): share of the sentences in which the target has more weight than its rival, a tie
    counted half. Looking at the nearer of the two gets 0.5, and so does a coin."""
    p_place: Tensor
    p_rival: Tensor
    """(L, H): how likely a head no better than the fixed place, or no better than a coin between
    target and rival, would do this well. Exact sign tests, one-sided, over the sentences in which
    head and fixed place disagree, and over all. Sentences count as independent, which those of one
    template are not quite."""
    fixed_place: str
    fixed_accuracy: float
    """The best single place, chosen after the fact: `sentences.best_fixed_place`."""
    n_sentences: int
    n_skipped: int
    """Sentences left out, for a word outside the vocabulary or a context too short."""


@torch.no_grad()
def score_relation(
    model: MiniGPT, tokenizer: Tokenizer, sentences: Sequence[Sentence]
) -> RelationScore:
    """Return how often each head of a model finds the target of a sentence.

    The model reads <eos> and the sentence up to the word that looks. A word may be several ids: its
    last one looks, and what the ids of an earlier word get is added up.
    """
    config = model.config
    encoded = [(s, _encoded(tokenizer, s)) for s in sentences]
    kept = [
        (sentence, ids, word_of)
        for sentence, (ids, word_of) in encoded
        if tokenizer.unk_id not in ids and len(ids) <= config.context_length
    ]
    fixed = best_fixed_place([sentence for sentence, _, _ in kept])
    rows = _last_rows(model, [ids for _, ids, _ in kept], tokenizer.eos_id)
    shape = (len(kept), config.n_layers, config.n_heads)
    hits = torch.zeros(shape, dtype=torch.bool)
    lead = torch.zeros(shape)  # of the target over its rival
    for i, ((sentence, _, word_of), row) in enumerate(zip(kept, rows, strict=True)):
        # Word 0 takes what <eos> gets, and the last word is the one that looks: neither counts.
        words = row.new_zeros(*shape[1:], sentence.looker + 2).index_add(
            -1, torch.tensor(word_of), row
        )[..., 1:-1]  # (L, H, words before the looker)
        target = words[..., sentence.target]
        others = words.index_fill(-1, torch.tensor([sentence.target]), -math.inf)
        hits[i] = target > others.amax(-1)
        lead[i] = target - words[..., sentence.rival]
    at_place = torch.tensor(fixed.hits, dtype=torch.bool)[:, None, None]
    n_kept = len(kept)
    return RelationScore(
        hits.double().mean(0),
        ((lead > 0).double() + 0.5 * (lead == 0)).mean(0),
        sign_test((hits & ~at_place).sum(0), (~hits & at_place).sum(0)),
        sign_test((lead > 0).sum(0), (lead < 0).sum(0)),
        fixed.name,
        sum(fixed.hits) / n_kept if n_kept else math.nan,
        n_kept,
        len(sentences) - n_kept,
    )


def _encoded(tokenizer: Tokenizer, sentence: Sentence) -> tuple[list[int], list[int]]:
    """Return <eos> and the ids up to the looker, and of each id its word: 0 for <eos>, 1, 2, …"""
    ids, word_of = [tokenizer.eos_id], [0]
    for number, word in enumerate(sentence.words[: sentence.looker + 1], start=1):
        # A blank before a word is part of it to bpe and char, and nothing to the others.
        pieces = tokenizer.encode(word if number == 1 else f" {word}")
        ids += pieces
        word_of += [number] * len(pieces)
    return ids, word_of


def _last_rows(model: MiniGPT, texts: Sequence[list[int]], padding: int) -> Iterator[Tensor]:
    """Yield where the last position of each text looks, (L, H, its length)."""
    device = next(model.parameters()).device
    for start in range(0, len(texts), _SENTENCES_PER_PASS):
        batch = texts[start : start + _SENTENCES_PER_PASS]
        longest = max(map(len, batch))
        # Behind the text, where no position of it can see the padding.
        ids = torch.tensor([text + [padding] * (longest - len(text)) for text in batch])
        with evaluating(model), recorded(model) as weights:
            model.hidden(ids.to(device))
        for_all = finite(torch.stack(weights, dim=1).float().cpu(), "attention")  # (B, L, H, T, T)
        for maps, text in zip(for_all, batch, strict=True):
            yield maps[..., len(text) - 1, : len(text)]


def sign_test(wins: Tensor, losses: Tensor) -> Tensor:
    """Return the probability of at least so many wins, were each game a fair coin's toss.

    wins, losses   (…) counts; ties are left out. Exact: the binomial's upper tail.
    """
    tails = [
        sum(math.comb(n, k) for k in range(won, n + 1)) / 2**n
        for won, n in zip(wins.flatten().tolist(), (wins + losses).flatten().tolist(), strict=True)
    ]
    return torch.tensor(tails, dtype=torch.float64).view(wins.shape)


# 95 % of Student's t lie within ± this, for 1, 2, 3, … degrees of freedom.
_T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306),
    *(2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
)


def t_quantile(n_windows: int) -> float:
    """Return in how many standard errors around the mean of n windows the true one lies, at 95 %.

    Two windows tell little of how far windows differ, so for two it is 12.7; for many it is 1.96.
    By table, and from 17 windows on by an expansion (Abramowitz & Stegun 1964, equation 26.7.5).
    """
    freedom = n_windows - 1
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    return 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2


@contextmanager
def silenced(model: MiniGPT, layer: int, head: int) -> Iterator[None]:
    """Switch one head off inside the `with`: the values that it mixed become 0.

    The output projection then adds nothing on its behalf; its bias stays. Otherwise as `attending`.
    Raises UserError for a layer or head that the model does not have.
    """
    n_layers, n_heads = model.config.n_layers, model.config.n_heads
    require(
        0 <= layer < n_layers and 0 <= head < n_heads,
        f"head {layer}.{head} does not exist: the model has layers 0 to {n_layers - 1} and heads "
        f"0 to {n_heads - 1}",
    )

    def instead(number: int, before: Attend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
            mixed = before(q, k, v, dropout).clone()  # (B, H, T, K)
            mixed[:, head] = 0.0
            return mixed

        return attend if number == layer else before

    with attending(model, instead):
        yield


@dataclass(frozen=True, eq=False)
class LossChange:
    """What the loss of a text becomes when one head after the other is switched off."""

    loss: float
    """Nats per token with all heads."""
    change: Tensor
    """(L, H): nats per token more, or less, without this head."""
    error: Tensor
    """(L, H): standard error of the change, from how it differs between windows."""


def loss_changes(model: MiniGPT, windows: Tensor) -> LossChange:
    """Return what each head is worth on windows (N, T + 1) of held-out text.

    Every head costs a pass over all windows. Each is compared with the whole model on the same
    windows, so what makes a window hard for both drops out.
    """
    whole = window_nats(model, windows)  # (N,)
    changes = whole.new_zeros(model.config.n_layers, model.config.n_heads, len(windows))
    for layer, head in np.ndindex(*changes.shape[:2]):
        with silenced(model, layer, head):
            changes[layer, head] = window_nats(model, windows) - whole
    error = changes.std(-1) / math.sqrt(len(windows))
    return LossChange(float(whole.mean()), changes.mean(-1), error)


@torch.no_grad()
def window_nats(model: MiniGPT, windows: Tensor) -> Tensor:
    """Return the nats per token of each window (N, T + 1), (N,) float64 on the CPU.

    Raises UserError for a model that has diverged.
    """
    device = next(model.parameters()).device
    n_tokens = windows.size(1) - 1
    nats = []
    with evaluating(model), uncompiled():
        for batch in torch.split(windows, max(1, _IDS_PER_PASS // n_tokens)):
            ids = batch.to(device)
            _, of_each = model.output.nats(*model.states(ids[:, :-1], ids[:, 1:]))  # (B·T,)
            # First to the CPU: the graphics chip of a Mac has no float64.
            nats.append(of_each.view(-1, n_tokens).cpu().double().mean(1))
    return finite(torch.cat(nats), "loss")
