"""One row: a model made ready to write, where each matrix meets one vector at a time.

In: a model. Out: a copy for decoding, whose matrices are read faster or are smaller; or a step,
compiled from such a copy. A token at batch 1 reads every weight once, for one product each, so
it takes the time that the weights need to come from memory, and whatever is wasted beside that.

`compiled_step`   all of a step in a few loops over memory, run by all cores
`int8_weights`    a quarter of the bytes: w ≈ q s, with q a whole number from −127 to 127 and
                  s = max |w| / 127 over its row (Dettmers et al. 2022, section 2). Of weights
                  alone: the activations stay as they are, so there is no text to calibrate on.

B batch · T sequence · I in features · O out features · V vocabulary
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.errors import UserError, require
from minigpt.layers.attention import KeyValueCache
from minigpt.model import MiniGPT
from minigpt.output import FullSoftmax

# An id (1, 1) and the cache that it continues → logits (1, V)
Step = Callable[[Tensor, KeyValueCache | None], Tensor]

# Tokens from which on a compiled step saves more time than compiling takes (docs/experiments.md).
LONG_TEXT = 4_000

LARGEST = 127  # not −128: the scale is the same on both sides of 0
# So many rows meet the int8 matrix as it is; for more it pays to make float32 of it first.
FEW_ROWS = 16


class RowLinear(nn.Module):
    """x Wᵀ + b, where a compiler may see that it is one row only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take weight (O, I) and bias (O,): the same tensors, not copies."""
        super().__init__()
        self.weight: Tensor
        if isinstance(weight, nn.Parameter):
            self.register_parameter("weight", weight)
        else:
            self.register_buffer("weight", weight)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…, I) to (…, O)."""
        # A matrix times a vector, as MKL has it, uses one core, and not all of what that could
        # read. Written as a sum, it becomes a loop like any other: shared out, and fused with its
        # neighbours. Without a compiler it would first make all I · O products.
        if torch.compiler.is_compiling() and x.numel() == x.size(-1):
            y = self._one(x)
        else:
            y = self._many(x)
        return y if self.bias is None else y + self.bias

    def _one(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(dim=-1)

    def _many(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Int8Linear(RowLinear):
    """The same with W as whole numbers, a scale for each row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take weight (O, I) and bias (O,), and keep the whole numbers nearest to the weight."""
        weight = weight.detach().float()
        # A row of zeros has no scale of its own; any serves.
        scales = (weight.abs().amax(dim=1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        super().__init__((weight / scales[:, None]).round().to(torch.int8), bias)
        self.scales: Tensor
        self.register_buffer("scales", scales)  # (O,)

    def _one(self, x: Tensor) -> Tensor:
        return super()._one(x) * self.scales

    def _many(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        if x.device.type == "cpu" and rows.size(0) <= FEW_ROWS:
            # In bfloat16 this kernel is quick without a compiler too, but then what a text says
            # would depend on how many of its words are read at once.
            y = torch._weight_int8pack_mm(rows, self.weight, self.scales)
        else:
            y = rows @ (self.weight * self.scales[:, None]).T
        return y.view(*x.shape[:-1], self.weight.size(0))


def _with_products(model: MiniGPT, kind: type[RowLinear]) -> MiniGPT:
    """Return a copy of model, in evaluation mode, whose matrix products are of that kind.

    Only the structure is copied; whatever tensor stays as it is belongs to both.
    """
    shared = [*model.parameters(), *model.buffers()]
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared}).eval()
    for part in [*model.modules()]:
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, kind(child.weight, child.bias))
    if isinstance(model.output, FullSoftmax):
        # Of the table that reads only a row is needed, so that one stays.
        model.register_module("output", kind(model.output.table, model.output.bias))
    return model


def int8_weights(model: MiniGPT) -> MiniGPT:
    """Return a copy of model whose matrices are int8; norms, biases and word vectors are not.

    The full and the sampled softmax are matrices too, an adaptive one stays as it is.
    """
    return _with_products(model, Int8Linear)


def is_usual(ids: Tensor, cache: KeyValueCache | None) -> bool:
    """Is this what a step was compiled for: one id, inside a window that others have begun?

    To the compiler lengths of 0 and 1 are cases of their own, as is a cache that becomes full.
    """
    return ids.numel() == 1 and cache is not None and 2 <= cache.length < cache.capacity - 1


def compiled_step(model: MiniGPT) -> Step:
    """Return `model.next_logits`, compiled for one more id of one text.

    It shares the weights of the model, whose own layers are left alone. Compiling takes seconds; it
    is done here, so that every step that `is_usual` is quick.
    Raises UserError where torch.compile fails.
    """
    if not any(isinstance(part, RowLinear) for part in model.modules()):
        model = _with_products(model, RowLinear)
    step: Step = torch.compile(model.next_logits, dynamic=True)
    device = next(model.parameters()).device
    try:
        with torch.inference_mode():
            # Made here: to the compiler a tensor of inference mode is of another kind.
            cache = model.new_cache(1)
            ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
            model.next_logits(ids.repeat(1, min(2, cache.capacity)), cache)
            if is_usual(ids, cache):
                step(ids, cache)
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"torch.compile failed ({type(error).__name__}: {reason}): write with --compile off"
        ) from None
    return step


def choose_step(
    wish: str, model: MiniGPT, n_tokens: int, say: Callable[[str], None]
) -> Step | None:
    """Return a compiled step for a text of n_tokens if it is wanted, telling `say` what it does.

    wish   on, off, or auto: for long texts, and without one where torch.compile fails
    Raises UserError where it fails though it was wanted.
    """
    require(wish in ("auto", "on", "off"), f"compile is {wish}: write auto, on or off")
    if wish == "off" or (wish == "auto" and n_tokens < LONG_TEXT):
        return None
    say("compiling, which takes ten seconds and more; --compile off begins at once")
    try:
        return compiled_step(model)
    except UserError as error:
        if wish == "on":
            raise
        say(f"writing eagerly: {error}")
        return None
