"""Matrix products: which ones a training step makes, and how fast the machine makes each alone.

In: a run of `train`, watched. Out: `Product`s with how often each occurs, their FLOPs, and the
seconds that each takes when nothing else is done.

Counted are those that the step really makes, eagerly, by watching what PyTorch is asked to do
(compiling changes what lies between products, not the products): forward and backward, and, marked
as such, those of the optimizer.

Under a causal mask half of each product of attention is of use, (T + 1) / 2T, whichever way it is
computed: as one operation, whose products are two forward and, since it computes the weights anew,
five backward; or in one piece, as stacks of products, two forward and four backward. A product is
timed as it is made, whole, and the same share of its FLOPs and of its seconds is counted.

B batch · T sequence · S what it looks back at · H heads · K d_head
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # a tensor's shape and its strides


@dataclass(frozen=True)
class Product:
    """One matrix product, or a stack of them: (…, m, k) times (…, k, n)."""

    left: Layout
    right: Layout
    dtype: torch.dtype
    share: float = 1.0
    """How much of it is of use: the visible part under a mask."""
    of_optimizer: bool = False
    """Was it made between the passes, by an optimizer?"""

    @property
    def flops(self) -> float:
        """A multiplication and an addition are two."""
        *stack, m, k = self.left[0]
        n = self.right[0][-1]
        return 2.0 * torch.Size(stack).numel() * m * k * n * self.share

    @property
    def name(self) -> str:
        """Its sizes, for people: m × k × n, and how many of them in a stack."""
        *stack, m, k = self.left[0]
        many = f"{stack[0]} · " if stack else ""
        return f"{many}{m} × {k} × {self.right[0][-1]}"


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, `counts` says how often each matrix product was asked for.

    context   T of a decoder: stacks of products to, from or with a (T, T) are then its attention's,
              whose mask hides the later half. None: nothing is masked but what says so itself.
    """

    def __init__(self, context: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Product] = Counter()
        self._context, self._in_optimizer = context, False
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Begin to count, and to listen for optimizers."""
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._of_optimizer(True)),
            register_optimizer_step_post_hook(lambda *_: self._of_optimizer(False)),
        ]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        """End both."""
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _of_optimizer(self, claim: bool) -> None:
        self._in_optimizer = claim

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the product, if it is one, and let it happen."""
        name = func.name().removeprefix("aten::").removesuffix(".out")
        if name in ("mm", "bmm"):
            self._note(args[0], args[1])
        elif name in ("addmm", "baddbmm", "addbmm"):
            self._note(args[1], args[2])
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            self._note_attention(*args[:3], causal=_given(args, kwargs, 4, "is_causal"))
        elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            self._note_attention(
                *args[1:4], causal=_given(args, kwargs, 7, "is_causal"), backward=True
            )
        return func(*args, **(kwargs or {}))

    def _note(self, left: Tensor, right: Tensor) -> None:
        """Note a product, or a stack of them, which may be attention's."""
        sizes, share = (*left.shape[-2:], right.size(-1)), 1.0
        if self._context and left.dim() == 3 and not self._in_optimizer:
            # (T, T) are scores and weights, made or used, and their gradients.
            share = visible_share(self._context) if sizes.count(self._context) >= 2 else 1.0
        layouts = _layout(left), _layout(right)
        self.counts[Product(*layouts, left.dtype, share, self._in_optimizer)] += 1

    def _note_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, backward: bool = False
    ) -> None:
        """Note the products of one attention of q (B, H, T, K), k and v (B, H, S, K)."""
        *stack, n_queries, d_head = q.shape
        n_stack, n_keys, d_value = torch.Size(stack).numel(), k.size(-2), v.size(-1)
        share = visible_share(n_queries) if causal else 1.0
        t_k_s, t_s_k = (n_queries, d_head, n_keys), (n_queries, n_keys, d_value)
        s_t_k = (n_keys, n_queries, d_head)
        # Forward: QKᵀ and its weights times V. Backward: QKᵀ anew, dO Vᵀ; dS K; dSᵀ Q, Pᵀ dO.
        made = [t_k_s, t_k_s, t_s_k, s_t_k, s_t_k] if backward else [t_k_s, t_s_k]
        for rows, inner, columns in made:
            left = torch.empty((n_stack, rows, inner), device="meta")
            right = torch.empty((n_stack, inner, columns), device="meta")
            self.counts[Product(_layout(left), _layout(right), q.dtype, share)] += 1


def visible_share(n_positions: int) -> float:
    """Return the share of a square that a causal mask leaves: 1, 2, … T of T positions."""
    return (n_positions + 1) / (2 * n_positions)


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


def _given(args: Any, kwargs: Any, place: int, name: str) -> bool:
    """Return an argument that may stand in its place or carry its name."""
    return bool(args[place] if len(args) > place else (kwargs or {}).get(name, False))


def flops(counts: Mapping[Product, int]) -> float:
    """Return the FLOPs of all."""
    return sum(product.flops * count for product, count in counts.items())


class Bench:
    """Products with operands of their own, ready to be timed again and again."""

    def __init__(self, products: Iterable[Product]) -> None:
        self._operands = {product: _operands(product) for product in products}

    def seconds(self, calls: int = 3) -> dict[Product, float]:
        """Return the seconds of each product alone, the fastest of a few calls: its useful share.

        It writes where it wrote before: a step that asks for fresh memory each time pays for more
        than its products.
        """
        found = {}
        for product, (left, right, out) in self._operands.items():
            multiply = torch.mm if left.dim() == 2 else torch.bmm
            took = []
            for _ in range(calls):
                began_at = time.perf_counter()
                multiply(left, right, out=out)
                took.append(time.perf_counter() - began_at)
            found[product] = product.share * min(took)
        return found


def _operands(product: Product) -> tuple[Tensor, Tensor, Tensor]:
    left, right = (
        torch.empty_strided(*layout, dtype=product.dtype).normal_()
        for layout in (product.left, product.right)
    )
    shape = (*product.left[0][:-1], product.right[0][-1])
    return left, right, torch.empty(shape, dtype=product.dtype)
