"""Measure what a vocabulary costs and what it is worth: the table of notebook 6.

Train one run for each vocabulary, all else the same (one after the other):

    minigpt train mini --out runs/basic10k --epochs 0.5 --validations 1 --seed 1 --threads 1 \\
        --compile on --precision bfloat16
    minigpt train mini --out runs/wtall …the same… --tokenizer.kind wikitext \\
        --tokenizer.vocab-size 0                       (and 5000, 10000, 20000)

Then score them, and time steps of models of these sizes, in one sitting:

    python benchmarks/vocabulary.py measure runs/wt5k runs/wt10k runs/wt20k runs/wtall \\
        runs/basic10k --out docs/results/vocabulary/wikitext2.json
    python benchmarks/vocabulary.py speed --threads 1 --precision bfloat16 --compile on \\
        --out docs/results/vocabulary/wikitext2.json

The same for the model of another preset, with 8,000 pieces of words for basic_english:

    minigpt train wikitext2-10min --out runs/bpe8k --tokenizer.kind bpe \\
        --tokenizer.vocab-size 8000 --model.output full
    python benchmarks/vocabulary.py speed --preset wikitext2-10min …and so on…

Both parts write into one file and leave the other's figures alone, so that they can be done, or
done again, one by one; a run is found by its tokenizer. Nothing is looked at but valid. The tests
hold notebooks and prose to the file.

measure   perplexity per token, and comparable: each `<unk>` pays for its word (`unknown_words`),
          the nats of pieces are shared out over the words that they make
speed     median seconds of a step, in turns: each round takes one step of each model, and a ratio
          is the median of the rounds' ratios, so that a noisy machine troubles all alike. Memory is
          the peak of a child process that takes two eager steps, over what it held before it built
          its model (Linux). Ids are drawn by Zipf's law: no cost depends on which they are.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from minigpt.checkpoint import Run
from minigpt.compilation import compile_blocks
from minigpt.config import Config, TokenizerConfig, load_preset
from minigpt.corpus import open_corpus
from minigpt.data import Batch, fit_tokenizer, prepare
from minigpt.evaluate import evaluate, perplexity
from minigpt.events import ignore
from minigpt.info import sizes
from minigpt.machine import choose_precision, matrix_rates, set_threads
from minigpt.model import MiniGPT, Objective
from minigpt.optim import make_optimizers
from minigpt.report import versions
from minigpt.run_folder import read_json, write_json
from minigpt.train import optimizer_step
from minigpt.training_state import TrainingState
from minigpt.unknown_words import UnknownWords
from setting import command, machine, peak_bytes

ALL_WORDS = 33_278
VOCABULARIES = [
    *(("wikitext", size) for size in (5_000, 10_000, 20_000, ALL_WORDS)),
    ("basic_english", 10_000),
]
BPE = ("bpe", 8_000)
REFERENCE = 10_000  # the size that speeds are compared with
MEGABYTE = 1e6
Row = dict[str, Any]


def measured(run: Run) -> Row:
    """Return the figures of a run on valid: disjoint windows, every token once, float32."""
    corpus, tokenizer = open_corpus(run.config.data), run.tokenizer
    stream = prepare(corpus, "valid", tokenizer)
    score = evaluate(run.model, stream, tokenizer.eos_id)
    n_hidden, naming_nats = 0, 0.0
    if tokenizer.unk_id is not None:  # else it spells every word
        unknown = UnknownWords(tokenizer, corpus.lines("train"))
        cost = unknown.cost(corpus.lines("valid"))
        if cost.n_unseen:
            raise SystemExit(f"{cost.n_unseen} words of valid are not in train: no figure compares")
        n_hidden, naming_nats = len(unknown), cost.nats
    whole = score.nats + naming_nats
    per_word = perplexity(whole / score.words)
    return {
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "n_hidden_words": n_hidden,
        "unknown_share": stream.unknown_share,
        "n_parameters": sizes(run.config, tokenizer.vocab_size).n_parameters,
        "tokens": score.tokens,
        "nats": score.nats,
        "naming_nats": naming_nats,
        "token_perplexity": score.token_perplexity,
        # Where a token is a word the two are one; the classic's tokens are no words of the text's.
        "comparable_perplexity": (
            per_word if tokenizer.unk_id is None else perplexity(whole / score.tokens)
        ),
        "word_perplexity": per_word,
        "report": run.report,
    }


def training_state(config: Config, vocab_size: int) -> TrainingState:
    """Return what `optimizer_step` works with, for a fresh model of that many entries."""
    torch.manual_seed(config.seed)
    model = MiniGPT(config.model.resolved(vocab_size)).train()
    if config.compile == "on":
        compile_blocks(model)
    none = cast(Any, None)  # a step knows nothing of text
    return TrainingState(
        config=config,
        run_dir=none,
        tokenizer=none,
        model=model,
        objective=Objective(model),
        optimizers=make_optimizers(model, config.optim, config.precision),
        batches=none,
        valid=none,
        device=torch.device("cpu"),
        rates={},
        on_event=ignore,
    )


def zipf_batch(config: Config, vocab_size: int) -> Batch:
    """Return a batch of ids, the one of rank r drawn with probability ~ 1 / r."""
    shares = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    shape = (config.batch_size, config.model.context_length)
    ids = torch.multinomial(shares, 2 * math.prod(shape), replacement=True).view(2, *shape)
    return Batch(ids[0], ids[1])


def model_for(config: Config, kind: str) -> Config:
    """Return config as the tokenizer needs it: pieces are not numbered by how frequent they are."""
    if kind != "bpe":
        return config
    return replace(config, model=replace(config.model, output="full"))


def words_per_token(config: Config, kind: str, size: int) -> float:
    """Return how many words of train, line ends among them, a token stands for."""
    size = 0 if size == ALL_WORDS else size
    corpus, wish = open_corpus(config.data), TokenizerConfig(cast(Any, kind), size)
    stream = prepare(corpus, "train", fit_tokenizer(corpus, wish))
    return stream.n_words / len(stream.ids)


def step_seconds(configs: dict[int, Config], rounds: int) -> dict[int, list[float]]:
    """Return the seconds of `rounds` steps of a model of each size, taken in turns."""
    vocab_sizes = sorted(configs)
    states = {size: training_state(configs[size], size) for size in vocab_sizes}
    batches = {size: zipf_batch(configs[size], size) for size in vocab_sizes}
    seconds: dict[int, list[float]] = {size: [] for size in vocab_sizes}
    warm_up = 2  # the first compiles, the second fills the allocator
    for turn in range(warm_up + rounds):
        for size in vocab_sizes:
            began_at = time.perf_counter()
            optimizer_step(states[size], batches[size])
            if turn >= warm_up:
                seconds[size].append(time.perf_counter() - began_at)
        print(".", end="", flush=True)
    print()
    return seconds


def step_bytes(config: Config, vocab_size: int) -> int:
    """Return the peak memory of two eager steps over that of this process before its model.

    To be called once, in a process of its own: the peak is that of its whole life.
    """
    batch = zipf_batch(config, vocab_size)
    # A step of a small model first: libraries load and allocate on first use, whatever the size.
    small = replace(config, model=replace(config.model, n_layers=1, d_model=32, n_heads=2, d_ff=32))
    optimizer_step(training_state(small, 53), zipf_batch(small, 53))
    before = peak_bytes()
    state = training_state(config, vocab_size)
    for _ in range(2):  # the first fills the optimizers
        optimizer_step(state, batch)
    return peak_bytes() - before


def child_bytes(row: Row, options: argparse.Namespace, precision: str) -> float:
    """Return `step_bytes` as child processes measure it: the median of three."""
    argv = ["memory", row["tokenizer"], str(row["vocab_size"]), "--preset", options.preset]
    argv += ["--precision", precision, "--threads", str(options.threads)]
    ask = [sys.executable, __file__, *argv]
    return statistics.median(int(subprocess.check_output(ask)) for _ in range(3))


def load(path: Path) -> dict[str, Any]:
    """Return what the file holds so far."""
    return read_json(path) if path.is_file() else {"rows": []}


def merged(rows: list[Row], new: Row) -> list[Row]:
    """Return rows with the figures of `new` laid over the row of its tokenizer, in order."""
    found = {named(row): row for row in rows}
    found[named(new)] = {**found.get(named(new), {}), **new}
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != "wikitext", key[1]))]


def named(row: Row) -> tuple[str, int]:
    """Return the vocabulary that a row is about."""
    return row["tokenizer"], row["vocab_size"]


def with_speed(rows: list[Row], seconds: dict[int, list[float]], config: Config) -> list[Row]:
    """Return rows with the speed of the model of their size."""
    n_tokens = config.batch_size * config.model.context_length
    found = []
    for row in rows:
        steps = seconds[row["vocab_size"]]
        ratios = [beside / own for own, beside in zip(steps, seconds[REFERENCE], strict=True)]
        median = statistics.median(steps)
        speed = {
            "step_seconds": median,
            "tokens_per_second": n_tokens / median,
            "words_per_second": n_tokens / median * words_per_token(config, *named(row)),
            "speed_ratio": statistics.median(ratios),
        }
        found.append({**row, **speed})
    return found


def measure(options: argparse.Namespace) -> None:
    """Score the runs that are named and lay their figures into the file."""
    set_threads(options.threads)
    result = load(options.out)
    for path in options.runs:
        row = measured(Run.open(path))
        result["rows"] = merged(result["rows"], row)
        print(f"{row['tokenizer']} {row['vocab_size']:,}: {row['token_perplexity']:.2f} per token")
        print(f"  {row['comparable_perplexity']:.2f} comparable", flush=True)
        result["measure"] = {
            "command": command("vocabulary.py", sys.argv[1:]),
            "versions": versions(),
        }
        write_json(options.out, result)


def speed(options: argparse.Namespace) -> None:
    """Time and weigh steps of models of the sizes in the file and lay that into it."""
    set_threads(options.threads)
    result = load(options.out)
    wanted = VOCABULARIES if options.preset == "mini" else [*VOCABULARIES[:-1], BPE]
    for kind, size in wanted:
        result["rows"] = merged(result["rows"], {"tokenizer": kind, "vocab_size": size})
    rates = matrix_rates(torch.device("cpu"))
    precision = choose_precision(options.precision, rates)
    config = replace(load_preset(options.preset), precision=precision, compile=options.compile)
    configs = {row["vocab_size"]: model_for(config, row["tokenizer"]) for row in result["rows"]}
    seconds = step_seconds(configs, options.rounds)
    result["rows"] = with_speed(result["rows"], seconds, config)
    for row in result["rows"]:
        size = row["vocab_size"]
        row["step_megabytes"] = child_bytes(row, options, precision) / MEGABYTE
        cost = sizes(configs[size], size)
        row["n_parameters"] = cost.n_parameters
        row["estimated_megabytes"] = sum(cost.training_bytes.values()) / MEGABYTE
        print(f"{size:,}: {row['step_seconds']:.3f} s a step, {row['step_megabytes']:.0f} MB")
    result["speed"] = {
        "command": command("vocabulary.py", sys.argv[1:]),
        "preset": options.preset,
        "precision": precision,
        "compile": options.compile,
        "rounds": options.rounds,
        "reference": REFERENCE,
        **machine(rates),
    }
    write_json(options.out, result)


def memory(options: argparse.Namespace) -> None:
    """Print the bytes of a step, for `speed` to read."""
    set_threads(options.threads)
    config = replace(load_preset(options.preset), precision=options.precision, compile="off")
    print(step_bytes(model_for(config, options.kind), options.vocab_size))


def main(argv: list[str] | None = None) -> None:
    """Do one of the parts that the docstring above describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    scored = parts.add_parser("measure", help="score trained runs on valid")
    scored.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    timed = parts.add_parser("speed", help="time and weigh steps of models of these sizes")
    timed.add_argument("--rounds", type=int, default=13)
    timed.add_argument("--compile", choices=("on", "off"), default="off")
    weighed = parts.add_parser("memory", help="what speed calls in a process of its own")
    weighed.add_argument("kind")
    weighed.add_argument("vocab_size", type=int)
    for part, do in ((scored, measure), (timed, speed), (weighed, memory)):
        part.add_argument("--threads", type=int, default=0)
        part.set_defaults(do=do)
    for part in (timed, weighed):
        part.add_argument("--preset", default="mini", help="whose model is timed and weighed")
        part.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    for part in (scored, timed):
        part.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args(argv)
    options.do(options)


if __name__ == "__main__":
    main()
