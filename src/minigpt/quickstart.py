"""The whole way in five minutes: data, training, perplexity, text, attention, and what comes next.

In: a run folder to fill and how long to train. Out: the folder, and a story told line by line
through `say`; progress goes to stderr, as for `minigpt train`.
"""

import dataclasses
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from minigpt.attention_maps import attention_maps
from minigpt.checkpoint import Run
from minigpt.config import Config, TokenizerConfig, load_preset
from minigpt.corpus import available_offline, open_corpus
from minigpt.data import prepare
from minigpt.errors import UserError
from minigpt.evaluate import Score
from minigpt.events import Finished
from minigpt.figures import convention
from minigpt.generate import Wording, generate_text
from minigpt.report import Report
from minigpt.train import train

SECONDS_TO_DOWNLOAD = 20
WORDS_TO_SHOW = 60
TOKENS_TO_DRAW = 24

# A prompt, a text to look into and a longer training that suit what was learned.
_EXAMPLES = {
    "wikitext-2": ("The city", "The city was built in the north .", "wikitext2-10min"),
    "python-docs": (
        "Return a",
        "Return a list of the names in the module.",
        "modern --data python-docs",
    ),
}
_CLASSIC = "WikiText-2"
_BUILT_IN = "the documentation inside this Python (python-docs)"


def quickstart(out: Path, *, minutes: float, seed: int, say: Callable[[str], None]) -> bool:
    """Train, measure, write and draw, telling each through `say`; return whether it ran to its end.

    Raises UserError where `out` exists.
    """
    if out.exists():
        raise UserError(f"--out {out} exists: name a folder that does not")
    config = dataclasses.replace(load_preset("quickstart"), minutes=minutes, seed=seed)
    data, reason = _CLASSIC, ""
    if not _can_have(config.data):
        config = _built_in(config)
        data, reason = _BUILT_IN, f", since {_CLASSIC} is neither on this disk nor quickly fetched"
    say(f"Data: {data}{reason}.")
    say(f"Training for {minutes:g} minutes, into {out} …")
    run, finished = _train(config, out)
    if finished.valid is not None:  # else it was stopped before it came to that
        stream = prepare(open_corpus(run.config.data), "valid", run.tokenizer)
        rule = convention(run.config.data, run.tokenizer.kind, stream.unknown_share)
        say(f"\nPerplexity on valid, a text it has not learned from: {_figure(finished.valid)}")
        say(f"({rule})")
    text = _some_text(run)
    say(f"\nText that the model writes ({len(text.split())} words):\n\n{text}\n")
    picture = out / "attention.png"
    _draw(run, text, picture)
    say(f"Which word looks at which, in every head: {picture}")
    say(_next_commands(out, run.config.data))
    if finished.reason == "interrupted":
        say(f"Stopped before its time; go on with: minigpt train --resume {out}")
    say(f"All of this was learned from {data}.")
    return finished.reason != "interrupted"


def _built_in(config: Config) -> Config:
    """Return config for the built-in corpus, which is a twelfth of WikiText-2.

    In a text so small a word in ten of valid would be unknown, hence pieces of words, all of them
    scored, as their ids say nothing of how frequent they are; and it can be learned by heart within
    minutes, hence a look at valid now and then, to keep the best.
    """
    return dataclasses.replace(
        config,
        data="python-docs",
        tokenizer=TokenizerConfig("bpe", 4096),
        model=dataclasses.replace(config.model, output="full"),
        validations=6,
    )


def _can_have(corpus: str) -> bool:
    """Return whether a corpus is on the disk, or gets there within seconds."""
    if available_offline(corpus):
        return True
    arrived = threading.Event()

    def fetch() -> None:
        try:
            for _ in open_corpus(corpus).lines("valid"):
                break
        except Exception:  # no connection, a proxy, a full disk: it cannot be had, whatever it is
            return
        arrived.set()

    # A thread that is left behind does no harm: the download is atomic, and serves the next time.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_DOWNLOAD)
    return arrived.is_set()


def _train(config: Config, out: Path) -> tuple[Run, Finished]:
    """Train with the usual report; return the run and how it ended."""
    with Report(out, config) as report:
        run = train(config, out, report)
    assert report.finished is not None
    return run, report.finished


def _figure(score: Score) -> str:
    return f"{score.word_perplexity:.1f} per word, {score.bits_per_byte:.2f} bits per byte"


def _some_text(run: Run) -> str:
    """Return at least WORDS_TO_SHOW words of generated text, up to the end of a sentence."""
    sampling = dataclasses.replace(run.config.sampling, max_new_tokens=5 * WORDS_TO_SHOW)
    pieces = generate_text(run.model, run.tokenizer, "", sampling, Wording(stop_at_eos=False))
    return "".join(_whole_sentences(pieces)).strip()


def _whole_sentences(pieces: Iterable[str]) -> Iterable[str]:
    """Yield pieces until there are enough words and a sentence ends, or half as many again."""
    text = ""
    for piece in pieces:
        yield piece
        text += piece
        n_words = sum(any(map(str.isalpha, word)) for word in text.split())
        at_end = piece.rstrip().endswith((".", "!", "?"))
        if n_words >= WORDS_TO_SHOW * (1 if at_end else 1.5):
            return


def _draw(run: Run, text: str, picture: Path) -> None:
    """Draw where the model looks as it reads the beginning of its own text."""
    ids = run.tokenizer.encode_prompt(text)[: min(TOKENS_TO_DRAW, run.model.config.context_length)]
    attention_maps(run.model, ids, run.tokenizer.pieces(ids)).save_png(picture)


def _next_commands(out: Path, data: str) -> str:
    """Return what to type next, with what this shell needs to know first."""
    before = ""
    if shutil.which("minigpt") is None:  # as after `make run`, which knows where it put it
        before += f"  . {_relative(Path(sys.prefix) / 'bin' / 'activate')}\n"
    if folder := os.environ.get("MINIGPT_DATA"):
        before += f"  export MINIGPT_DATA={folder}\n"
    prompt, text, longer = _EXAMPLES[data]
    return f"""
Next:
{before}  minigpt generate {out} --prompt "{prompt}" --temperature 0.7
  minigpt attention {out} "{text}" --out attention.png
  minigpt evaluate {out} --split test
  minigpt train {longer} --minutes 10
  minigpt train mini --data my_text.txt --tokenizer.kind bpe
"""


def _relative(path: Path) -> Path:
    """Return path as seen from here, where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
