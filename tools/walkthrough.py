"""The figures of docs/walkthrough: what `batch_walk` noted, as tables.

In: the name of a section. Out: `section(name)`, a piece of Markdown, in English or Chinese.
"""

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batch_walk import LEARNED, N_STEPS, N_WORDS, PROMPT, Walk, walk
from minigpt.attention_maps import attention_maps
from minigpt.evaluate import windows
from minigpt.layers.attention import causal_mask
from minigpt.layers.positions import PositionalEncoding
from minigpt.text import basic_english

_CHINESE = {
    "line": "行",
    "what it made": "得到",
    "shape": "形状",
    "here": "此处",
    "values": "数值",
    "given": "传入",
    "word": "词",
    "id": "编号",
    "position": "位置",
    "inputs": "读入",
    "targets": "要预测",
    "channel": "通道",
    "looks at": "看向",
    "layer": "层",
    "head": "头",
    "entropy": "熵",
    "after": "在此之后：",
    "target": "目标",
    "logit": "logit",
    "probability": "概率",
    "nats": "奈特",
    "tokens": "词元数",
    "loss": "损失",
    "norm": "梯度范数",
    "perplexity": "困惑度",
    "optimizer": "优化器",
    "tensors": "张量数",
    "parameters": "参数量",
    "step": "步",
    "text": "文本",
    "learned": "学过的三句",
    "held out": "没见过的一句",
    "in the cache": "缓存中已有",
    "read now": "这次读入",
    "chosen": "选出",
}

Say = Callable[[str], str]
Section = Callable[[Walk, Say], str]


def section(name: str, language: str = "en", n_steps: int = N_STEPS) -> str:
    """Return the piece of Markdown called `name`, in "en" or "zh-CN".

    Raises KeyError for a name that is none of SECTIONS.
    """
    write = SECTIONS[name]
    return write(walk(n_steps), functools.partial(_said, chinese=language != "en"))


def _said(english: str, chinese: bool) -> str:
    return _CHINESE[english] if chinese else english


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def shape(sizes: Sequence[int], letters: Mapping[int, str]) -> str:
    """Return sizes as letters, (B, T, D), as far as they have one."""
    names = [letters.get(size, str(size)) for size in sizes]
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})" if names else "()"


def values(tensor: Tensor) -> str:
    """Return in a few words what is in a tensor."""
    if tensor.dtype == torch.bool:
        return f"{int(tensor.sum())} / {tensor.numel()} True"
    if not tensor.is_floating_point():
        first = tensor.flatten()[:5].tolist()
        return ", ".join(map(str, first)) + (" …" if tensor.numel() > len(first) else "")
    tensor = tensor.detach().double()
    if tensor.numel() == 1:
        return f"{tensor.item():.3f}"
    finite = tensor[tensor.isfinite()]
    mean = round(finite.mean().item(), 2) + 0.0  # -0.00 would look like a figure
    spread = f"{mean:.2f} ± {finite.std(correction=0):.2f}"
    hidden = tensor.numel() - finite.numel()
    return spread + (f", {hidden} × −∞" if hidden else "")


def _made(of: str) -> Section:
    """Return the section that shows what the lines of one function made."""

    def write(walk: Walk, said: Say) -> str:
        rows: dict[tuple[int, str], list[Any]] = {}
        for made in walk.made[of]:
            # A loop comes by the same line again: its first time is shown, and how often it came.
            row = rows.setdefault((made.line, made.name), [made.value, 0])
            row[1] += 1
        return table(
            [said("line"), said("what it made"), said("shape"), said("here"), said("values")],
            [
                (
                    line or said("given"),
                    f"`{name}`" + (f" × {times}" if times > 1 else ""),
                    shape(value.shape, walk.letters),
                    " × ".join(map(str, value.shape)) or "1",
                    values(value),
                )
                for (line, name), (value, times) in rows.items()
            ],
        )

    return write


def _sizes(walk: Walk, _said: Say) -> str:
    sizes = {letter: size for size, letter in walk.letters.items() if letter.isalpha()}
    return table([*sizes, "L"], [[*sizes.values(), walk.config.model.n_layers]])


def _words(_walk: Walk, _said: Say) -> str:
    words = " ".join(basic_english(LEARNED))
    return f"```text\n{textwrap.fill(LEARNED.strip(), 88)}\n\n{textwrap.fill(words, 88)}\n```"


def _vocabulary(walk: Walk, said: Say) -> str:
    tokenizer, size = walk.run.tokenizer, walk.run.tokenizer.vocab_size
    shown = [*range(9), size - 1]
    pieces = dict(zip(shown, tokenizer.pieces(shown), strict=True))
    cells = [f"`{piece}`" for piece in pieces.values()]
    return table([said("id"), *map(str, pieces)], [(said("word"), *cells)])


def _batch(walk: Walk, said: Say) -> str:
    pieces = walk.run.tokenizer.pieces
    inputs, targets = walk.batch.inputs[0].tolist(), walk.batch.targets[0].tolist()
    return table(
        [said("position"), said("inputs"), said("targets")],
        [
            (i, f"`{pieces([read])[0]}` ({read})", f"`{pieces([wanted])[0]}` ({wanted})")
            for i, (read, wanted) in enumerate(zip(inputs, targets, strict=True))
        ],
    )


def _sines(walk: Walk, said: Say) -> str:
    positions = walk.fresh.model.positions
    shown = positions.table[:5].tolist() if isinstance(positions, PositionalEncoding) else []
    width = walk.config.model.d_model
    channels = [0, 1, 2, 3, width // 2, width // 2 + 1, width - 2, width - 1]
    return table(
        [f"{said('position')} \\ {said('channel')}", *map(str, channels)],
        [(i, *(f"{row[channel]:.2f}" for channel in channels)) for i, row in enumerate(shown)],
    )


def _mask(_walk: Walk, _said: Say) -> str:
    rows = causal_mask(6, 6).tolist()
    drawn = "\n".join(" ".join("■" if visible else "·" for visible in row) for row in rows)
    return f"```text\n{drawn}\n```"


def _matrix(weights: Tensor, words: Sequence[str], said: Say, n_words: int = 8) -> str:
    """Return the first n_words rows of weights (T, T), the future left blank."""
    return table(
        [said("looks at"), *(f"`{word}`" for word in words[:n_words])],
        [
            (f"`{words[i]}`", *(f"{float(w):.2f}" for w in weights[i, : i + 1]), *[""] * rest)
            for i, rest in zip(range(n_words), range(n_words - 1, -1, -1), strict=True)
        ],
    )


def _fresh_weights(walk: Walk, said: Say) -> str:
    words = walk.run.tokenizer.pieces(walk.batch.inputs[0].tolist())
    return _matrix(walk.weights[0, 0], words, said)


def _seen(walk: Walk, said: Say) -> str:
    run = walk.run
    ids = run.tokenizer.encode(LEARNED)[:N_WORDS]
    maps = attention_maps(run.model, ids, run.tokenizer.pieces(ids))
    entropy = maps.entropy()  # (L, H)
    layer, head = divmod(int(entropy.argmin()), entropy.size(1))
    title = f"{said('layer')} {layer}, {said('head')} {head}, {said('entropy')} {entropy.min():.2f}"
    return f"{title}\n\n{_matrix(maps.weights[layer, head], maps.tokens, said)}"


def _likeliest(walk: Walk, said: Say) -> str:
    pieces, last = walk.run.tokenizer.pieces, N_WORDS - 1
    logits = walk.logits[0, last]
    probabilities, top = logits.softmax(dim=-1), logits.topk(5).indices.tolist()
    wanted = int(walk.batch.targets[0, last])
    shown = [*top, *([wanted] if wanted not in top else [])]
    (read,) = pieces([int(walk.batch.inputs[0, last])])
    return table(
        [f"{said('after')} `{read}`", said("logit"), said("probability")],
        [
            (
                f"`{pieces([i])[0]}`" + (f" ← {said('target')}" if i == wanted else ""),
                f"{logits[i]:.2f}",
                f"{probabilities[i]:.4f}",
            )
            for i in shown
        ],
    )


def _loss(walk: Walk, said: Say) -> str:
    made = {entry.name: entry.value for entry in walk.made["Objective.forward"]}
    nats, size = float(made["nats"]), walk.config.model.vocab_size
    count = walk.batch.targets.numel()
    return table(
        [said("nats"), said("tokens"), said("loss"), said("perplexity"), f"ln {size}"],
        [
            (
                f"{nats:.2f}",
                count,
                f"{nats / count:.3f}",
                f"{math.exp(nats / count):,.0f}",
                f"{math.log(size):.3f}",
            )
        ],
    )


def _optimizers(walk: Walk, said: Say) -> str:
    rows = []
    for optimizer in walk.fresh.optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = sum(parameter.numel() for parameter in parameters)
        rows.append((f"`{type(optimizer).__name__}`", len(parameters), f"{numbers:,}"))
    loss, norm = walk.step
    header = table([said("optimizer"), said("tensors"), said("parameters")], rows)
    return f"{header}\n\n{said('loss')}: {loss:.3f} · {said('norm')}: {norm:.2f}"


def _training(walk: Walk, said: Say) -> str:
    n_steps = len(walk.losses)
    shown = sorted({0, 1, 2, 4, 8, 16, 24, 32, 40, n_steps - 1} & set(range(n_steps)))
    return table(
        [said("step"), *map(str, shown)],
        [
            (said("loss"), *(f"{walk.losses[i]:.2f}" for i in shown)),
            (said("perplexity"), *(f"{math.exp(walk.losses[i]):,.1f}" for i in shown)),
        ],
    )


def _scores(walk: Walk, said: Say) -> str:
    return table(
        [said("text"), said("tokens"), said("nats"), said("loss"), said("perplexity")],
        [
            (
                said(name),
                score.tokens,
                f"{score.nats:.1f}",
                f"{score.loss:.2f}",
                f"{score.token_perplexity:,.1f}",
            )
            for name, score in walk.scores.items()
        ],
    )


def _windows(walk: Walk, _said: Say) -> str:
    cut = windows(walk.scores["held out"].tokens, N_WORDS, N_WORDS)
    return table(["begin", "scored_from", "end"], cut)


def _generation(walk: Walk, said: Say) -> str:
    pieces = walk.run.tokenizer.pieces
    rows = [
        (r.n_cached, " ".join(pieces(r.read)), f"`{pieces([r.chosen])[0]}`") for r in walk.readings
    ]
    written = walk.run.tokenizer.decode([reading.chosen for reading in walk.readings])
    header = [said("in the cache"), said("read now"), said("chosen")]
    return f"{table(header, rows)}\n\n> {PROMPT} **{written}**"


SECTIONS: dict[str, Section] = {
    "sizes": _sizes,
    "words": _words,
    "vocabulary": _vocabulary,
    "batch": _batch,
    "hidden": _made("MiniGPT.hidden"),
    "positions": _made("PositionalEncoding.forward"),
    "sines": _sines,
    "heads": _made("CausalSelfAttention.forward"),
    "mask": _mask,
    "attention": _made("attention"),
    "fresh weights": _fresh_weights,
    "block": _made("PostNormBlock.forward"),
    "norm": _made("LayerNorm.forward"),
    "feed forward": _made("PositionwiseFeedForward.forward"),
    "logits": _made("FullSoftmax.forward"),
    "likeliest": _likeliest,
    "objective": _made("Objective.forward"),
    "loss": _loss,
    "optimizers": _optimizers,
    "training": _training,
    "windows": _windows,
    "scores": _scores,
    "generation": _generation,
    "seen": _seen,
}
