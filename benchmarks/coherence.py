"""Measure how much written text is like real text: 200 prompts, continued by a model and in truth.

    python benchmarks/coherence.py RUN --try temperature=0.7,0.8,0.9 --try top_k=none,50
    python benchmarks/coherence.py RUN --split test --out docs/results/coherence/NAME.json

Each prompt is the beginning of a long line of the split, evenly spread; the model goes on for as
many ids as the line really does, at the settings that stand for all prompts. Both are shown as
`generate` shows text, and measured alike:

repeated 4-grams   share of words in a row, four long, that the continuation had already
distinct 2-grams   how many pairs of words are different, of all pairs in all continuations
5-gram perplexity  under a Kneser-Ney model of train (`ngram`), of the ids but `<unk>`, which is
                 easy to guess and which no model writes
unknown, artefacts   of 1,000 words: `<unk>`; marks of the tokenizer and blanks before punctuation
balanced           share of texts, prompt and all, whose quotes and brackets open and close
sentence words     words in a sentence, on average
names that recur   share of capitalised words inside sentences that stand twice in a continuation

Without --try the settings are the run's own; --try lays a grid over them and prints a row for each,
on valid. Test is looked at once, at the settings that were chosen.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minigpt.checkpoint import Run
from minigpt.corpus import Split, open_corpus
from minigpt.data import prepare
from minigpt.decoding import write
from minigpt.errors import UserError, require
from minigpt.filters import Text
from minigpt.generate import Wording
from minigpt.machine import matrix_rates, set_threads
from minigpt.prompt_loop import obey
from minigpt.run_folder import write_json
from minigpt.sampling import USUAL, Sampling
from minigpt.tokenizer import Tokenizer
from ngram import NGrams
from setting import command, machine

N_PROMPTS, N_PROMPT_IDS, N_NEW_IDS = 200, 50, 100
ARTEFACT = re.compile(r"@.@| [,.;:!?)\]]|[(\[] ")
WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
Figures = dict[str, float]


def openings(run: Run, split: Split) -> list[tuple[list[int], list[int]]]:
    """Return the beginning of each chosen line, and how it goes on."""
    tokenizer = run.tokenizer
    length = N_PROMPT_IDS + N_NEW_IDS
    lines = list(tokenizer.encode_lines(open_corpus(run.config.data).lines(split)))
    if tokenizer.kind in ("bpe", "char"):  # there a line is a list of its own as well
        lines = [ids for ids in lines if tokenizer.eos_id not in ids]
    long = [ids for ids in lines if len(ids) > length and _has_words(tokenizer, ids)]
    require(len(long) >= N_PROMPTS, f"{split} has {len(long)} lines of {length} ids: too few")
    chosen = (long[at * len(long) // N_PROMPTS] for at in range(N_PROMPTS))
    return [(ids[:N_PROMPT_IDS], ids[N_PROMPT_IDS:length]) for ids in chosen]


def _has_words(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    return any(map(str.isalpha, tokenizer.decode(ids[:N_PROMPT_IDS])))


def continued(run: Run, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    """Return what the model writes after each prompt, each with draws of its own."""
    texts = [Text.of(prompt, sample) for sample, prompt in enumerate(prompts)]
    rules = Wording(stop_at_eos=False).rules(run.tokenizer)
    for _ in write(run.model, texts, replace(sampling, max_new_tokens=N_NEW_IDS), rules):
        pass
    return [text.new_ids for text in texts]


def figures(
    tokenizer: Tokenizer,
    judge: NGrams,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> Figures:
    """Return what is measured of continuations."""
    shown, whole, nats, n_ids = list[str](), list[str](), 0.0, 0
    for prompt, ids in zip(prompts, continuations, strict=True):
        speller = tokenizer.speller(prompt)
        shown.append("".join([*map(speller.add, ids), speller.rest()]))
        whole.append(tokenizer.decode([*prompt, *ids]))
        known = np.array([i != tokenizer.unk_id for i in ids])
        nats -= judge.log_probs(np.array([*prompt, *ids]))[len(prompt) :][known].sum()
        n_ids += int(known.sum())
    words = [WORD.findall(text) for text in shown]
    pairs = [pair for found in words for pair in itertools.pairwise(found)]
    n_words = sum(map(len, words))
    names = [n for found in words for n in recurring(found)]
    n_unknown = sum(map(len, continuations)) - n_ids
    return {
        "repeated_4_grams": float(np.mean([repeated(found, 4) for found in words])),
        "distinct_2_grams": len(set(pairs)) / len(pairs),
        "5_gram_perplexity": float(np.exp(nats / n_ids)),
        "unknown_per_1000_words": 1000 * n_unknown / n_words,
        "artefacts_per_1000_words": 1000 * sum(len(ARTEFACT.findall(t)) for t in shown) / n_words,
        "balanced": float(np.mean([balanced(text) for text in whole])),
        "sentence_words": n_words / max(1, sum(found.count(".") for found in words)),
        "names_that_recur": sum(names) / max(1, len(names)),
    }


def repeated(words: Sequence[str], n: int) -> float:
    """Return the share of the n words in a row that came before (Welleck et al. 2020, rep-n)."""
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def balanced(text: str) -> bool:
    """Do quotes and brackets open before they close, and close before a line ends?"""
    for line in text.split("\n"):
        depth = 0
        for sign in line:
            depth += (sign in "([") - (sign in ")]")
            if depth < 0:
                return False
        if depth or line.count('"') % 2:
            return False
    return True


def recurring(words: Sequence[str]) -> list[bool]:
    """Return of each capitalised word that begins no sentence whether it stands there twice."""
    names = [
        word
        for before, word in itertools.pairwise(words)
        if word[:1].isupper() and len(word) > 1 and before not in '.!?"='
    ]
    return [names.count(name) > 1 for name in names]


def grid(wishes: Sequence[str], start: Sampling) -> list[Sampling]:
    """Return the settings that --try asks for: each combination of its values."""
    choices = []
    for wish in wishes:
        name, equals, values = wish.partition("=")
        require(bool(equals and values), f"--try is {wish}: write NAME=VALUE,VALUE")
        choices.append([f"/{name} {value}" for value in values.split(",")])
    found = []
    for lines in itertools.product(*choices):
        sampling = start
        for line in lines:
            sampling, _ = obey(line, sampling)
        found.append(sampling)
    return found


def told(name: str, found: Figures, real: Figures) -> str:
    """Return figures in a row, with what they are of real text's."""
    perplexity = found["5_gram_perplexity"] / real["5_gram_perplexity"]
    return (
        f"{name:<58} rep-4 {found['repeated_4_grams']:.4f} distinct-2 "
        f"{found['distinct_2_grams']:.3f} 5-gram {found['5_gram_perplexity']:7.1f} "
        f"({perplexity:.2f}) balanced {found['balanced']:.2f} sentence "
        f"{found['sentence_words']:.1f} names {found['names_that_recur']:.2f} unknown "
        f"{found['unknown_per_1000_words']:.1f} artefacts {found['artefacts_per_1000_words']:.1f}"
    )


def changed(sampling: Sampling) -> str:
    """Return what a setting has that the usual one has not."""
    usual = asdict(USUAL)
    parts = [f"{k} {v}" for k, v in asdict(sampling).items() if v != usual[k]]
    return ", ".join(parts) or "as usual"


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of real text and of each setting."""
    run = Run.open(options.run)
    tokenizer, start = run.tokenizer, replace(run.config.sampling, seed=options.seed)
    both = openings(run, options.split)
    prompts, truth = [p for p, _ in both], [ids for _, ids in both]
    train = prepare(open_corpus(run.config.data), "train", tokenizer).ids
    judge = NGrams(np.asarray(train, dtype=np.int64), tokenizer.vocab_size)
    real = figures(tokenizer, judge, prompts, truth)
    print(told("real text", real, real), flush=True)
    rows = []
    for sampling in grid(options.tries, start):
        found = figures(tokenizer, judge, prompts, continued(run, prompts, sampling))
        print(told(changed(sampling), found, real), flush=True)
        rows.append({"sampling": asdict(sampling), **found})
    return {"split": options.split, "prompts": N_PROMPTS, "real": real, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    """Measure the run that is named, print what comes out and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--split", choices=("valid", "test"), default="valid")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="NAME=V,V")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    try:
        set_threads(options.threads)
        result = measured(options)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    if options.out:
        words = sys.argv[1:] if argv is None else argv
        about = machine(matrix_rates(torch.device("cpu")))
        write_json(options.out, {"command": command("coherence.py", words), **result, **about})


if __name__ == "__main__":
    main()
