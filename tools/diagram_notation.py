"""What is written in a picture: shapes with letters, operations as the paper writes them.

Letters come from the sizes of the batch, and only where they are certain: a number that two letters
share stays a number. What an operation is called comes from the operation and from the names that
the code has for its operands.
"""

import math
from collections.abc import Mapping

from diagram_graph import NEGATIONS, Item
from diagram_trace import Op, Value

# What each letter of a shape stands for (the whole package uses one letter for one size).
MEANING = {
    "B": "batch",
    "T": "sequence",
    "S": "keys",
    "D": "d_model",
    "H": "heads",
    "G": "key heads",
    "K": "d_k",
    "F": "d_ff",
    "V": "vocabulary",
    "L": "layers",
    "C": "context",
}
SIGNS = {"add": "+", "sub": "−", "mul": "×", "div": "÷"}
WORDS = {"masked_fill": "mask", "scaled_dot_product_attention": "attention"}

FEW = 3  # operations of a function that are named on its box


class Letters:
    """The sizes of a batch by their letters."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """Take sizes, letter → number, of which only the unambiguous ones are used."""
        numbers = list(sizes.values())
        self.sizes = sizes
        self._letters = {
            n: letter for letter, n in sizes.items() if numbers.count(n) == 1 and n > 1
        }

    def shape(self, shape: tuple[int, ...]) -> tuple[str, str]:
        """Return a shape in letters and in numbers: "B·T·D" and "2 × 7 × 512"."""
        if not shape:
            return "scalar", ""
        letters = "·".join(self._letters.get(n, str(n)) for n in shape)
        return letters, " × ".join(f"{n:,}" for n in shape)

    def used(self, shapes: list[tuple[int, ...]]) -> list[str]:
        """Return the letters that occur in shapes, in the order of the sizes."""
        found = {self._letters[n] for shape in shapes for n in shape if n in self._letters}
        return [letter for letter in self.sizes if letter in found]

    def number(self, number: float) -> str:
        """Return a constant as it is read: √d_model for the root of a size, else the number."""
        if math.isinf(number):
            return "∞" if number > 0 else "−∞"
        square = round(number * number)
        letter = self._letters.get(square)
        if letter and math.isclose(math.sqrt(square), number, rel_tol=1e-9):
            return f"√{MEANING[letter]}"
        return f"{number:g}".replace("-", "−")


def texts(item: Item, letters: Letters) -> tuple[str, str]:
    """Return the two lines that an item shows: what it is here, and what kind of thing it is."""
    if item.op is not None:
        return _op_texts(item.op, letters)
    if item.kind in ("input", "output"):
        return item.name or item.kind, ""
    if item.scope.module is None and not item.name:
        inside = " · ".join(op.function for op in item.ops)
        return item.scope.kind, inside if len(item.ops) <= FEW else ""
    if item.times > 1:
        members = item.name.rpartition(".")[0]
        return f"{members}.0–{item.times - 1}", item.scope.kind
    return item.name or item.scope.kind, item.scope.kind if item.name else ""


def sign(item: Item) -> str:
    """Return the sign of an op that joins two tensors element by element, else ""."""
    op = item.op
    if op is None or op.function not in SIGNS or len(_heard(op)) < 2:
        return ""
    return "⊙" if op.function == "mul" else SIGNS[op.function]


def joins_equals(item: Item) -> bool:
    """Tell whether all that enters item is of one rank, as in a matrix product or a whole part."""
    return item.kind == "box" or (item.op is not None and item.op.function in ("matmul", "cat"))


def _heard(op: Op) -> list[Value]:
    """Return the operands that come from the batch, not from weights."""
    return [value for value in op.operands if _from_batch(value)]


def _from_batch(value: Value) -> bool:
    if value.maker is None:
        return value.is_input
    return any(_from_batch(operand) for operand in value.maker.operands)


def _op_texts(op: Op, letters: Letters) -> tuple[str, str]:
    said = [_said(v, name) for v, name in zip(op.operands, op.names, strict=True)]
    if op.function == "matmul":
        # The paper's matrices are capitals.
        return " ".join(s.upper() if len(s.rstrip("ᵀ")) == 1 else s for s in said), "matmul"
    if op.function == "masked_fill":
        return "mask", f"{letters.number(op.constants[0])} where {said[1]}"
    if op.function in SIGNS and len(op.operands) == 1 and op.constants:
        number = letters.number(op.constants[0])
        exact = f"{op.constants[0]:.4g}"
        return f"{SIGNS[op.function]} {number}", f"{SIGNS[op.function]} {exact}" * ("√" in number)
    if op.function in SIGNS and len(_heard(op)) == 1:
        # Without a name for what came before, the sign alone says that something is done to it.
        return f" {SIGNS[op.function]} ".join(said).removeprefix("·").strip(), ""
    return WORDS.get(op.function, op.function), ""


def _said(value: Value, name: str) -> str:
    """Return an operand as a formula has it: q, kᵀ for the transpose of k, ¬visible."""
    if name:
        return name
    op = value.maker
    if op is None:
        return value.name or "·"
    inner = _said(op.operands[0], op.names[0]) if op.operands else "·"
    if op.function in ("transpose", "T", "mT"):
        return inner + "ᵀ"
    if op.function in NEGATIONS:
        return "¬" + inner
    # A view is its operand; so is dropout, to a formula.
    return inner if op.is_view or op.function == "dropout" else "·"


# Widths in em of a sans-serif that is wide for its kind (DejaVu Sans), by groups of characters and
# rounded up, so that no browser's font is wider.
_WIDTHS = {
    "ijlI|.,:;'· ": 0.34,
    "()[]ft/-": 0.40,
    "rs-": 0.53,
    "czvxykJL_?¬": 0.64,
    "abdeghnopquTFEPSZKXYB0123456789∞ᵀ√": 0.71,
    "mw": 0.98,
    "MQOGHNUDCARV": 0.87,
    "W": 1.0,
    "×÷+−⊙=<>→": 0.84,
}
_WIDTH = {character: width for group, width in _WIDTHS.items() for character in group}


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return how wide text is at most, in pixels, set in a sans-serif of `size` pixels."""
    return sum(_WIDTH.get(c, 1.0) for c in text) * size * (1.12 if bold else 1.0)
