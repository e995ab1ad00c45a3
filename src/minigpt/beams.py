"""Beam search: the likeliest continuation of some ids, as far as a few candidates can find it.

In: a model and the ids of a prompt. Out: continuations, the best first. `transformer.beam_search`
is the paper's own, for sentences that end; here a cache goes with the beams, and the filters of the
user apply.

n beams · V vocabulary
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from minigpt.decoding import BY_LENGTH, BY_TOKEN, MOST_AT_ONCE, Reader, require_ids
from minigpt.errors import require
from minigpt.filters import NO_RULES, Text, TokenRules, filtered, wishes_of
from minigpt.model import MiniGPT
from minigpt.sampling import USUAL, Sampling


def beam_search(
    model: MiniGPT,
    prompt_ids: Sequence[int],
    sampling: Sampling = USUAL,
    rules: TokenRules = NO_RULES,
    *,
    n_beams: int = 4,
    length_penalty: float = 0.6,
) -> list[tuple[Text, float]]:
    """Return the n_beams best continuations of a prompt, each with its score, the best first.

    The likeliest first word need not begin the likeliest text, so the n_beams likeliest beginnings
    are kept at each step, until as many have ended. A score is log P / lp(n), lp(n) = ((5 + n) /
    6)^α with α = length_penalty and n new ids, the one that ends it among them (Wu et al. 2016,
    equation 14). With one beam this is greedy decoding.

    sampling   only what does not shape chance counts: lengths, penalties, n-grams. A penalty counts
               in the score too
    Texts that ended stand before those that were cut off at max_new_tokens.
    Raises UserError as `decoding.write` does, and for n_beams below 1 or
    above 1,024.
    """
    require(
        1 <= n_beams <= MOST_AT_ONCE,
        f"n_beams is {n_beams}: it must lie between 1 and {MOST_AT_ONCE:,}",
    )
    require(
        0 <= length_penalty < math.inf,
        f"length_penalty is {length_penalty}: it must be at least 0",
    )
    running = [(Text.of(prompt_ids), 0.0)]  # beginnings and their log P
    ended: list[tuple[Text, float]] = []  # texts and their scores
    require_ids(model, [running[0][0]], rules)
    wishes = wishes_of(replace(sampling, temperature=0.0), rules)

    def score(text: Text, total: float) -> float:
        n_ids = text.n_new + (text.ended == BY_TOKEN)
        return float(total / ((5 + n_ids) / 6) ** length_penalty)

    reader = Reader(model, 1, use_cache=True)
    for n_ids in range(len(prompt_ids), len(prompt_ids) + sampling.max_new_tokens):
        texts = [text for text, _ in running]
        log_probs = reader.next_logits([text.ids for text in texts], n_ids).log_softmax(dim=-1)
        # log P of a beginning and one more id is the sum of both, for all V ids at once.
        before = torch.tensor([[total] for _, total in running])
        totals = filtered(log_probs, texts, wishes) + before  # (n, V)
        # As many more than are kept as may end here.
        n_best = n_beams * (1 + len(rules.ends))
        best = totals.flatten().topk(min(n_best, totals.numel()))
        parents, grown = list[int](), list[tuple[Text, float]]()
        for rank, (i, total) in enumerate(
            zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ):
            parent, next_id = divmod(i, totals.size(1))
            if total == -math.inf or len(grown) == n_beams:
                break
            log_prob = float(log_probs[parent, next_id])
            text = _longer(texts[parent], next_id, log_prob, rules)
            if text.ended is None:
                parents.append(parent)
                grown.append((text, total))
            elif rank < n_beams:
                ended.append((text, score(text, total)))
        running = grown
        if len(ended) >= n_beams or not running:
            break
        reader.split(parents)
    for text, _ in running:
        text.ended = BY_LENGTH
    ended.sort(key=lambda found: -found[1])
    cut = sorted(((t, score(t, total)) for t, total in running), key=lambda found: -found[1])
    return (ended + cut)[:n_beams]


def _longer(text: Text, next_id: int, log_prob: float, rules: TokenRules) -> Text:
    """Return text with an id more, or, where that id ends it, ended."""
    if next_id in rules.ends:
        return replace(text, ended=BY_TOKEN)
    return replace(text, ids=[*text.ids, next_id], log_probs=[*text.log_probs, log_prob])
