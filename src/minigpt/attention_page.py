"""Attention as one page that carries all it shows, and as plain numbers.

In: a `Selection` of heads. Out: the text of an HTML page which loads nothing from anywhere (its
form is attention.html), the same page framed for a notebook, or an object for JSON. Nothing is
written here; `AttentionMaps` does that.

L layers · H heads · T sequence
"""

import html
import json
import math
from base64 import b64encode
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from minigpt.attention_picture import Selection, printable
from minigpt.errors import UserError

# Weights that a page may hold, some 22 MB, beyond which browsers give up; and a JSON file, some 30
# MB, which take a dozen times as much memory while they are written.
MOST_IN_PAGE, MOST_IN_JSON = 2**24, 2**22


def page(selection: Selection) -> str:
    """Return an HTML page on which the reader chooses a head and points at its weights.

    Raises UserError for more weights than a page can hold.
    """
    _refuse_too_many(selection, MOST_IN_PAGE)
    row, column = selection.first
    data = {
        "tokens": [printable(token) for token in selection.tokens],
        "layers": list(selection.layers),
        "heads": list(selection.heads),
        "n_layers": selection.of[0],
        "n_heads": selection.of[1],
        "shown": (selection.layers[row], selection.heads[column]),
        "packed": packed(selection.weights),
    }
    form = resources.files("minigpt").joinpath("attention.html").read_text(encoding="utf-8")
    # Within a script element only `<` can do harm: `</script>` ends it, `<!--` changes its rules.
    # Whatever is not ASCII, line separators and lone surrogates too, is spelt out by json.dumps.
    return form.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"))


def framed(page: str, n_tokens: int) -> str:
    """Return a page about n_tokens as a frame within another page, closed off on both sides."""
    height = min(840, 420 + 42 * n_tokens)  # pixels; from ten tokens on, cells shrink instead
    # Without allow-same-origin the script reaches neither the notebook nor other pages in it.
    return (
        f'<iframe title="Which word looks at which" sandbox="allow-scripts" '
        f'style="width: 100%; height: {height}px; border: 0" srcdoc="{html.escape(page)}"></iframe>'
    )


def packed(weights: Tensor) -> str:
    """Return the visible half of weights (L, H, T, T) in base 64, two bytes to a weight.

    Heads one after the other, of each the rows, of row i its first i + 1 columns; a weight w is the
    whole number next to 65535 w, lower byte first.
    """
    size = weights.size(-1)
    rows, columns = torch.tril_indices(size, size)
    whole = (weights[..., rows, columns] * 65535).round().clamp(0, 65535)
    return b64encode(whole.numpy().astype("<u2").tobytes()).decode("ascii")


def numbers(selection: Selection, entropy: Tensor) -> dict[str, Any]:
    """Return an object for JSON: tokens, names of the heads, their entropy and weights.

    entropy   (L, H) of the selection; NaN, which JSON does not have, becomes None
    Weights are nested by layer, head, row and column, to six digits.
    Raises UserError for more weights than a file should hold.
    """
    _refuse_too_many(selection, MOST_IN_JSON)
    spread = entropy.double().round(decimals=6).tolist()
    return {
        "tokens": list(selection.tokens),
        "n_layers": selection.of[0],
        "n_heads": selection.of[1],
        "layers": list(selection.layers),
        "heads": list(selection.heads),
        "entropy": [[None if math.isnan(e) else e for e in row] for row in spread],
        "weights": selection.weights.double().round(decimals=6).tolist(),
    }


def _refuse_too_many(selection: Selection, most: int) -> None:
    n_weights = selection.weights.numel()
    if n_weights > most:
        raise UserError(
            f"the text has {len(selection.tokens)} tokens, which makes {n_weights:,} weights in "
            f"{len(selection.layers)} layers of {len(selection.heads)} heads, over "
            f"{most:,}: choose a layer or a head, or a shorter text"
        )
