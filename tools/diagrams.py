"""Draw the Transformer from its code: each part on a real batch, written to docs/diagrams/*.svg.

    python tools/diagrams.py            draw all anew          (make docs does)
    python tools/diagrams.py --check    exit 1 and name those that no longer show the code

A part is built, called on a batch whose sizes are all different, and watched (diagram_trace). What
is drawn is what was seen (diagram_graph): rename an attribute or move a norm, and the picture
follows. What stands here is only which parts to draw, and on what.

    diagram_trace → _graph → _layout (with _measure, _lanes) → _ports → _routes → _svg
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diagram_graph import picture
from diagram_layout import lay_out
from diagram_measure import Layout
from diagram_notation import Letters, texts
from diagram_ports import set_ends
from diagram_svg import svg
from diagram_trace import Scope, Trace, trace
from minigpt.config import load_preset
from minigpt.layers.attention import (
    CausalSelfAttention,
    KeyValueCache,
    MultiHeadAttention,
    attention,
    causal_mask,
)
from minigpt.layers.feed_forward import PositionwiseFeedForward, SwiGLUFeedForward
from minigpt.layers.norm import LayerNorm, RMSNorm
from minigpt.layers.positions import PositionalEncoding, Rotary
from minigpt.model import MiniGPT
from minigpt.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, Transformer

OUT = Path(__file__).resolve().parents[1] / "docs" / "diagrams"
# The base model of the paper (table 3); its batch has T target positions and S source positions.
PAPER = {"B": 2, "T": 7, "S": 9, "D": 512, "H": 8, "K": 64, "F": 2_048, "V": 10_000}
N_LAYERS = 6
# Mini-GPT's own parts, at sizes that no preset has: fewer key heads than heads, a cache half full.
MODERN = {"B": 2, "T": 5, "S": 12, "D": 48, "H": 6, "G": 3, "K": 8, "F": 128, "L": 7, "C": 16}
TWO_SEQUENCES = {"T": "target", "S": "source"}


@dataclass(frozen=True)
class Subject:
    """A part of the code and the batch that it is drawn at work on."""

    call: Callable[..., Any]
    batch: tuple[Any, ...]
    sizes: dict[str, int]
    meaning: dict[str, str] = field(default_factory=dict)
    preset: str = ""

    @cached_property
    def trace(self) -> Trace:
        """What the part did with the batch."""
        return trace(self.call, *self.batch)

    def layout(self) -> Layout:
        """Return the picture with a place for everything."""
        layout = lay_out(picture(self.trace, is_composed), Letters(self.sizes))
        set_ends(layout)
        return layout

    def draw(self) -> str:
        """Return the SVG."""
        layout = self.layout()
        root = layout.picture.frame.scope
        batch = ", ".join(f"{letter} = {n}" for letter, n in self.sizes.items())
        parts = [texts(item, layout.letters)[0] for item in layout.picture.leaves()]
        description = (
            f"{root.doc} Drawn from the code on a batch with {batch}. "
            f"From the bottom to the top: {', '.join(parts)}."
        )
        title = root.kind + f" · preset {self.preset}" * bool(self.preset)
        return svg(layout, title, description, self.meaning)


def is_composed(scope: Scope) -> bool:
    """Tell whether a scope is opened: a module of model or transformer, which layers make up."""
    composed = ("minigpt.model", "minigpt.transformer")
    return scope.module is not None and type(scope.module).__module__ in composed


def floats(sizes: dict[str, int], axes: str) -> Tensor:
    """Return random numbers, one axis per letter."""
    return torch.randn([sizes[axis] for axis in axes])


def ids(sizes: dict[str, int], axes: str) -> Tensor:
    """Return random ids past the four specials, one axis per letter."""
    return torch.randint(4, sizes["V"], [sizes[axis] for axis in axes])


def subjects() -> dict[str, Callable[[], Subject]]:
    """Return what is drawn, by file name, in reading order; built only when called."""
    return {
        "attention": draw_attention,
        "multi_head_attention": draw_multi_head_attention,
        "feed_forward": lambda: draw_layer(PositionwiseFeedForward(PAPER["D"], PAPER["F"]), PAPER),
        "layer_norm": lambda: draw_layer(LayerNorm(PAPER["D"]), PAPER),
        "positional_encoding": lambda: draw_layer(PositionalEncoding(PAPER["D"]), PAPER),
        "encoder_layer": draw_encoder_layer,
        "decoder_layer": draw_decoder_layer,
        "encoder": draw_encoder,
        "decoder": draw_decoder,
        "transformer": draw_transformer,
        "causal_self_attention": draw_causal_self_attention,
        "rotary": lambda: draw_layer(Rotary(MODERN["K"], MODERN["C"]), MODERN, "BHTK"),
        "rms_norm": lambda: draw_layer(RMSNorm(MODERN["D"]), MODERN),
        "swiglu_feed_forward": lambda: draw_layer(
            SwiGLUFeedForward(MODERN["D"], MODERN["F"]), MODERN
        ),
        "post_norm_block": lambda: draw_block("mini"),
        "pre_norm_block": lambda: draw_block("modern"),
        "mini_gpt": lambda: draw_mini_gpt("mini"),
        "mini_gpt_modern": lambda: draw_mini_gpt("modern"),
    }


def draw_attention() -> Subject:
    """Equation 1, operation by operation."""
    s = PAPER
    visible = causal_mask(s["S"], s["S"])[-s["T"] :].expand(s["B"], s["H"], -1, -1)
    keys = floats(s, "BHSK"), floats(s, "BHSK")
    return Subject(attention, (floats(s, "BHTK"), *keys, visible), s)


def draw_multi_head_attention() -> Subject:
    """Section 3.2.2: queries of one sequence, keys and values of another."""
    s = PAPER
    mask = torch.ones(s["B"], s["T"], s["S"])
    batch = floats(s, "BTD"), floats(s, "BSD"), floats(s, "BSD"), mask
    return Subject(MultiHeadAttention(s["D"], s["H"]).eval(), batch, s)


def draw_layer(module: nn.Module, sizes: dict[str, int], axes: str = "BTD") -> Subject:
    """A layer of which one tensor goes in and one comes out."""
    return Subject(module.eval(), (floats(sizes, axes),), sizes)


def draw_encoder_layer() -> Subject:
    """One layer of the left half of figure 1."""
    layer = EncoderLayer(PAPER["D"], PAPER["H"], PAPER["F"]).eval()
    return Subject(layer, (floats(PAPER, "BSD"), _source_mask()), PAPER, TWO_SEQUENCES)


def draw_decoder_layer() -> Subject:
    """One layer of the right half of figure 1."""
    layer = DecoderLayer(PAPER["D"], PAPER["H"], PAPER["F"]).eval()
    return Subject(layer, _decoder_batch(), PAPER, TWO_SEQUENCES)


def draw_encoder() -> Subject:
    """The left half of figure 1, above the embedding."""
    encoder: Encoder = _paper_model().encoder
    return Subject(encoder, (floats(PAPER, "BSD"), _source_mask()), PAPER, TWO_SEQUENCES)


def draw_decoder() -> Subject:
    """The right half of figure 1, above the embedding."""
    decoder: Decoder = _paper_model().decoder
    return Subject(decoder, _decoder_batch(), PAPER, TWO_SEQUENCES)


def draw_transformer() -> Subject:
    """Figure 1."""
    return Subject(_paper_model(), (ids(PAPER, "BS"), ids(PAPER, "BT")), PAPER, TWO_SEQUENCES)


def draw_causal_self_attention() -> Subject:
    """Mini-GPT's attention with all that it can have, reading T words behind a cache."""
    s = MODERN
    module = CausalSelfAttention(
        s["D"],
        s["H"],
        s["G"],
        s["K"],
        bias=False,
        dropout=0.0,
        rotation=Rotary(s["K"], s["C"]),
        qk_norm_eps=1e-6,
    )
    cache = KeyValueCache(floats(s, "LBGCK"), floats(s, "LBGCK"))
    cache.advance(s["S"] - s["T"])
    meaning = {"T": "new words", "S": "words so far"}
    return Subject(module.eval(), (floats(s, "BTD"), cache), s, meaning)


def draw_mini_gpt(preset: str) -> Subject:
    """Mini-GPT with the parts and sizes of a preset."""
    model, sizes = _mini_gpt(preset)
    return Subject(model, (ids(sizes, "BT"),), sizes, preset=preset)


def draw_block(preset: str) -> Subject:
    """One block of a preset's Mini-GPT."""
    model, sizes = _mini_gpt(preset)
    return Subject(model.blocks[0], (floats(sizes, "BTD"),), sizes, preset=preset)


@cache
def _paper_model() -> Transformer:
    vocabulary = PAPER["V"]
    return Transformer(vocabulary, vocabulary, PAPER["D"], PAPER["H"], N_LAYERS, PAPER["F"]).eval()


def _source_mask() -> Tensor:
    return torch.ones(PAPER["B"], 1, PAPER["S"], dtype=torch.bool)


def _decoder_batch() -> tuple[Tensor, ...]:
    seen = causal_mask(PAPER["T"], PAPER["T"]).expand(PAPER["B"], -1, -1)
    return floats(PAPER, "BTD"), floats(PAPER, "BSD"), _source_mask(), seen


def _mini_gpt(preset: str) -> tuple[MiniGPT, dict[str, int]]:
    loaded = load_preset(preset)
    config = replace(loaded.model, vocab_size=loaded.tokenizer.vocab_size).resolved()
    sizes = {
        "B": 2,
        "T": 7,
        "D": config.d_model,
        "H": config.n_heads,
        "K": config.d_head,
        "F": config.d_ff,
        "V": config.vocab_size,
    }
    return MiniGPT(config).eval(), sizes


def main(arguments: list[str] | None = None) -> int:
    """Draw all, or with --check tell which are out of date."""
    parser = argparse.ArgumentParser(description="Draw the diagrams of docs/diagrams.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where stale")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the SVG files")
    options = parser.parse_args(arguments)
    stale = []
    for name, subject in subjects().items():
        path = options.out / f"{name}.svg"
        drawn = subject().draw()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale.append(path.name)
        if not options.check:
            options.out.mkdir(parents=True, exist_ok=True)
            path.write_text(drawn, encoding="utf-8", newline="\n")
    if options.check and stale:
        sys.stderr.write(f"no longer what the code is: {', '.join(stale)}; `make docs` redraws\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
