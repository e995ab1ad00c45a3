"""One batch on its way through Mini-GPT, watched.

In: four sentences of WikiText-2, below. Out: a `Walk`, all that the tables of `walkthrough` show.

Nothing is computed a second time for the page. The package's own functions run, from the text to
the generated sentence, and `Watch` notes the tensors that their lines make. The model is `mini` at
its full size; only the text, and with it vocabulary and window, is small, and training is a few
dozen steps.

B batch · T sequence · D d_model · H heads · K d_head · F d_ff · V vocabulary · L layers
"""

import functools
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.attention_maps import recorded
from minigpt.checkpoint import Run
from minigpt.config import Config, load_preset
from minigpt.corpus import open_corpus
from minigpt.data import Batch, prepare
from minigpt.decoding import generate, window_start
from minigpt.evaluate import Score, evaluate, evaluating
from minigpt.events import Event, Stepped, ignore
from minigpt.layers.attention import CausalSelfAttention, attention
from minigpt.layers.feed_forward import PositionwiseFeedForward
from minigpt.layers.norm import LayerNorm
from minigpt.layers.positions import PositionalEncoding
from minigpt.model import MiniGPT, Objective, PostNormBlock
from minigpt.output import FullSoftmax
from minigpt.sampling import Sampling
from minigpt.train import optimizer_step, train
from minigpt.training_state import TrainingState, new_training

# From WikiText-2 (Merity et al. 2016), article "Gold dollar", by the authors of Wikipedia, licensed
# CC BY-SA. The first line is learned from, the second only scored.
LEARNED = (
    " The gold dollar or gold one @-@ dollar piece was a coin struck as a regular issue by the "
    "United States Bureau of the Mint from 1849 to 1889 . The coin had three types over its "
    "lifetime , all designed by Mint Chief Engraver James B. Longacre . The Type 1 issue had the "
    "smallest diameter of any United States coin ever minted . \n"
)
HELD_OUT = (
    " A gold dollar had been proposed several times in the 1830s and 1840s , but was not initially "
    "adopted . \n"
)
# No two are equal, nor equal to any size of the model: a size tells its letter.
N_ROWS, N_WORDS, N_STEPS = 3, 12, 48
PROMPT = "the gold"

# The functions whose lines the page shows.
WATCHED = (
    MiniGPT.hidden,
    PositionalEncoding.forward,
    PostNormBlock.forward,
    CausalSelfAttention.forward,
    attention,
    LayerNorm.forward,
    PositionwiseFeedForward.forward,
    FullSoftmax.forward,
    Objective.forward,
)


@dataclass(frozen=True)
class Made:
    """A tensor that a line of a function made, or that it was given (line 0)."""

    line: int
    name: str
    value: Tensor


@dataclass
class Watch:
    """Notes, for each function that it watches, what the first call of it was given and made."""

    functions: tuple[Callable[..., Any], ...]
    made: dict[str, list[Made]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all calls inside the `with`; the functions themselves are not changed."""
        codes = {_code(function): function.__qualname__ for function in self.functions}

        def on_call(frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
            name = codes.get(frame.f_code)
            if name is None or name in self.made:
                return None
            self.made[name] = made = [Made(0, n, t) for n, t in _tensors(frame).items()]
            seen = _tensors(frame)
            line = frame.f_lineno

            def on_line(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
                nonlocal line, seen
                now = _tensors(frame)
                made.extend(Made(line, n, t) for n, t in now.items() if t is not seen.get(n))
                if event == "return":
                    results = arg if isinstance(arg, tuple) else (arg,)
                    known = {id(entry.value) for entry in made}
                    made.extend(
                        Made(line, "return", result)
                        for result in results
                        if isinstance(result, Tensor) and id(result) not in known
                    )
                seen, line = now, frame.f_lineno
                return on_line

            return on_line

        before = sys.gettrace()
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(before)


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


def _tensors(frame: FrameType) -> dict[str, Tensor]:
    return {name: value for name, value in frame.f_locals.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Reading:
    """What it took to write one word."""

    n_cached: int
    read: list[int]
    chosen: int


@dataclass(frozen=True)
class Walk:
    """Everything that the page shows, in the order in which it happened."""

    config: Config
    run: Run  # what training left, its last weights
    fresh: TrainingState
    batch: Batch
    made: dict[str, list[Made]]
    weights: Tensor  # (B, H, T, T), of the fresh model's first block
    logits: Tensor  # (B, T, V), of the fresh model
    step: tuple[float, float]  # loss and gradient norm of the first step
    losses: list[float]
    scores: dict[str, Score]
    readings: list[Reading]

    @property
    def letters(self) -> dict[int, str]:
        """The letter of each size. Raises ValueError where two sizes are equal."""
        model = self.config.model
        letters = {
            self.config.batch_size: "B",
            model.context_length: "T",
            model.d_model: "D",
            model.n_heads: "H",
            model.d_head: "K",
            model.d_ff: "F",
            model.vocab_size: "V",
            self.config.batch_size * model.context_length: "B·T",
            1: "1",
        }
        if len(letters) != 9:
            raise ValueError(f"two sizes are equal, so no letter is certain: {letters}")
        return letters


@functools.cache
def walk(n_steps: int = N_STEPS) -> Walk:
    """Go all the way once: read, learn for n_steps, score, write, look."""
    with tempfile.TemporaryDirectory() as folder, _own_cache(Path(folder) / "cache"):
        data = Path(folder)
        for split, text in (("train", LEARNED), ("valid", HELD_OUT), ("test", HELD_OUT)):
            (data / f"wiki.{split}.tokens").write_text(text, encoding="utf-8")
        state = new_training(_config(data, n_steps), data / "fresh", ignore, overwrite=False)
        batch = state.batches[0]
        watch = Watch(WATCHED)
        with torch.no_grad(), evaluating(state.model), watch.watching():
            # Mini-GPT runs the fast form; inside `recorded` the taught equation, line by line.
            with recorded(state.model) as weights:
                logits = state.model(batch.inputs)
            state.objective(batch.inputs, batch.targets)
        step = optimizer_step(state, batch)
        losses: list[float] = []

        def on_event(event: Event) -> None:
            if isinstance(event, Stepped):
                losses.append(event.loss)

        train(state.config, data / "run", on_event)
        # Three sentences are learned by heart, and what scored best on others was saved before.
        run = Run.open(data / "run", which="last")
        learned = prepare(open_corpus(str(data)), "train", run.tokenizer)
        streams = {"learned": learned, "held out": state.valid}
        return Walk(
            config=state.config,
            run=run,
            fresh=state,
            batch=batch,
            made=watch.made,
            weights=weights[0].detach(),
            logits=logits,
            step=step,
            losses=losses,
            scores={n: evaluate(run.model, s, run.tokenizer.eos_id) for n, s in streams.items()},
            readings=_readings(run),
        )


def _config(data: Path, n_steps: int) -> Config:
    preset = load_preset("mini")
    return replace(
        preset,
        data=str(data),
        minutes=None,
        steps=n_steps,
        batch_size=N_ROWS,
        validations=1,
        device="cpu",
        threads=1,
        compile="off",
        precision="float32",
        model=replace(preset.model, context_length=N_WORDS),
    )


@contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """Keep the ids of this little text out of the user's cache."""
    before = os.environ.get("MINIGPT_CACHE")
    os.environ["MINIGPT_CACHE"] = str(folder)
    try:
        yield
    finally:
        del os.environ["MINIGPT_CACHE"]
        if before is not None:
            os.environ["MINIGPT_CACHE"] = before


def _readings(run: Run, n_new: int = 16) -> list[Reading]:
    """Generate greedily from PROMPT and note what each word cost."""
    read: list[list[int]] = []
    ids = run.tokenizer.encode(PROMPT)

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        read.append(args[0][0].tolist())

    hook = run.model.embedding.register_forward_pre_hook(note)
    try:
        new_ids = list(generate(run.model, ids, Sampling(temperature=0, max_new_tokens=n_new)))
    finally:
        hook.remove()
    readings = []
    for now, new_id in zip(read, new_ids, strict=True):
        start = window_start(len(ids), run.config.model.context_length)
        readings.append(Reading(len(ids) - start - len(now), now, new_id))
        ids.append(new_id)
    return readings
