"""Figures of a score: the same text in every unit, and beside what each of them may stand.

    Score ──figures──▶ dict, ready for JSON ──figure_rows──▶ rows of a table

A perplexity alone is no figure. It depends on the text, on how that was cut into tokens, on how far
the model could look back, and on the words that it was allowed to call `<unk>`; all of that stands
beside it here, and a sentence says what it may be compared with.

In: a run, a text as its model reads it, a `Score`. Out: `figures` and rows. Nothing is scored here.

T context
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.checkpoint import Run
from minigpt.config import TokenizerKind
from minigpt.corpus import Split
from minigpt.data import TokenStream
from minigpt.evaluate import Score, perplexity
from minigpt.unknown_words import UnknownCost

Rows = list[tuple[str, str]]


def figures(
    run: Run,
    split: Split | None,
    stream: TokenStream,
    score: Score,
    *,
    context: int,
    stride: int,
    unknown: UnknownCost | None = None,
) -> dict[str, Any]:
    """Return what there is to say about a score, with all that it depends on.

    split     None: the text is none of the run's own
    unknown   what it costs to name the words that are read as `<unk>`; None: it was not looked for,
              and a tokenizer that has `<unk>` has no figure that can be compared
    """
    tokenizer = run.tokenizer
    return {
        "run": str(run.path),
        "data": run.config.data,
        "split": split,
        "sha256": stream.sha256,
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "context": context,
        "stride": stride,
        "tokens": score.tokens,
        "words": score.words,
        "bytes": score.bytes,
        "unknown_share": stream.unknown_share,
        "unknown_words": None if unknown is None else unknown._asdict(),
        "convention": convention(run.config.data, tokenizer.kind, stream.unknown_share),
        **score_figures(score, tokenizer.kind, unknown),
    }


def score_figures(
    score: Score, kind: TokenizerKind, unknown: UnknownCost | None
) -> dict[str, float | None]:
    """Return a score in every unit, and as the figure that can be compared.

    That one counts words between blanks, or basic_english's own, each `<unk>` named (see
    `unknown_words`). None where that was not looked for, or cannot be: train does not have a word.
    """
    found: dict[str, float | None] = {
        "nats": score.nats,
        "token_perplexity": score.token_perplexity,
        "word_perplexity": score.word_perplexity,
        "bits_per_byte": score.bits_per_byte,
        "comparable_perplexity": None,
        "comparable_perplexity_at_least": None,
        "comparable_bits_per_byte": None,
    }
    naming = UnknownCost(0.0, 0, 0) if kind in ("bpe", "char") else unknown
    if naming is None:
        return found
    named = replace(score, nats=score.nats + naming.nats)
    value = perplexity(named.nats / (score.tokens if kind == "basic_english" else score.words))
    found["comparable_perplexity_at_least"] = value
    if not naming.n_unseen:
        found["comparable_perplexity"] = value
        if kind != "basic_english":  # which does not keep the text whose bytes these are
            found["comparable_bits_per_byte"] = named.bits_per_byte
    return found


def by_position(nats: NDArray[np.float64], tokens: NDArray[np.int64]) -> dict[str, list[Any]]:
    """Return tokens and perplexity at each position of a window, counted from 0.

    nats, tokens   (T,), as `nats_by_context` gives them
    """
    return {
        "tokens": tokens.tolist(),
        "perplexity": [
            perplexity(float(cost) / int(n)) if n else None
            for cost, n in zip(nats, tokens, strict=True)
        ],
    }


def by_context_length(
    nats: NDArray[np.float64], tokens: NDArray[np.int64]
) -> list[dict[str, int | float]]:
    """Return the same by how many ids could be looked back at: 1, 2, 3-4, 5-8, 9-16, …"""
    rows: list[dict[str, int | float]] = []
    first, longest = 1, len(tokens)
    while first <= longest:
        last = min(longest, 1 << (first - 1).bit_length())
        among = slice(first - 1, last)
        n_tokens = int(tokens[among].sum())
        if n_tokens:
            value = perplexity(float(nats[among].sum()) / n_tokens)
            rows.append({"from": first, "to": last, "tokens": n_tokens, "perplexity": value})
        first = last + 1
    return rows


def convention(data: str, kind: TokenizerKind, unknown_share: float) -> str:
    """Say which figures may stand beside one on this data, with this kind of tokenizer."""
    if kind in ("bpe", "char"):
        text = "total nats of the pieces over the count of words: beside other open vocabularies"
    elif kind == "basic_english":
        text = "another token stream (lower case, no blank lines): never beside published figures"
    elif unknown_share:
        text = "per token: not beside figures of the closed vocabulary"
    else:
        text = "closed vocabulary, <eos> for each line end, every token scored once"
        if data == "wikitext-2":
            text += ": beside published figures"
    if unknown_share:
        text += f"; {unknown_share:.1%} of the tokens but line ends became <unk>, which is easier"
    return text


def figure_rows(figures: Mapping[str, Any]) -> Rows:
    """Return figures as rows of a table, for people: those that a training ends with.

    No word is named there that is read as `<unk>`; `evaluation_table` shows what that costs.
    """
    if figures["tokenizer"] == "basic_english" or figures["unknown_share"]:
        comparable = []  # one <unk> for all rare words, or no capitals, would flatter both
    else:
        comparable = [
            ("", f"{figures['word_perplexity']:,.2f} per word"),
            ("bits per byte", f"{figures['bits_per_byte']:.4f}"),
        ]
    return [
        ("run", f"{figures['run']}, {figures['split']} of {figures['data']}"),
        ("perplexity", f"{figures['token_perplexity']:,.2f} per token"),
        *comparable,
        ("nats", f"{figures['nats']:,.1f}"),
        *condition_rows(figures),
    ]


def condition_rows(figures: Mapping[str, Any]) -> Rows:
    """Return the rows that say on what figures depend."""
    windows = "each window on its own" if figures["stride"] == figures["context"] else "overlapping"
    return [
        ("tokens", f"{figures['tokens']:,}"),
        ("words", f"{figures['words']:,} between blanks, line ends included"),
        ("<unk>", f"{figures['unknown_share']:.2%} of the tokens but line ends"),
        ("context", f"{figures['context']}, stride {figures['stride']}: {windows}"),
        ("tokenizer", f"{figures['tokenizer']}, {figures['vocab_size']:,} entries"),
        ("convention", str(figures["convention"])),
    ]


def names_words(figures: Mapping[str, Any]) -> bool:
    """Return whether a vocabulary was cut, and it is known what the words left out cost.

    Elsewhere `<unk>` has one meaning, and naming it is free.
    """
    unknown = figures["unknown_words"]
    if unknown is None:
        return False
    return bool(unknown["nats"] or unknown["n_unseen"] or figures["unknown_share"])


def peers(figures: Mapping[str, Any]) -> str:
    """Say beside what a perplexity stands in which each `<unk>` is named, or why beside nothing."""
    n_unseen = figures["unknown_words"]["n_unseen"]
    if n_unseen:
        return f"incomplete, {n_unseen:,} words are not in train and count as 0"
    closed = figures["tokenizer"] == "wikitext"
    beside = "the closed vocabulary" if closed else "other sizes of this vocabulary"
    return f"beside {beside}, each <unk> pays for its word"
