"""Attention: PyTorch's results to 1e-5 on both paths, and nobody sees what is hidden."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from minigpt.errors import UserError
from minigpt.layers.attention import (
    CausalSelfAttention,
    KeyValueCache,
    MultiHeadAttention,
    ScaledDotProductAttention,
    attention,
    causal_mask,
    fast_causal_attention,
    merge_heads,
    one_piece_causal_attention,
    split_heads,
    taught_causal_attention,
)
from minigpt.layers.positions import NoRotation, Rotary
from tiny import randomised

B, T, S, H, K, D = 2, 7, 13, 3, 5, 15  # T positions ask, S answer


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def qkv(n_queries: int = T, n_keys: int = S, heads: int = H, key_heads: int = H):
    return (
        torch.randn(B, heads, n_queries, K, requires_grad=True),
        torch.randn(B, key_heads, n_keys, K, requires_grad=True),
        torch.randn(B, key_heads, n_keys, K, requires_grad=True),
    )


def random_mask(*shape: int) -> torch.Tensor:
    mask = torch.rand(shape) < 0.5
    mask[..., 0] = True  # PyTorch's module gives NaN for a row that sees nothing
    return mask


def multi_head(dropout: float = 0.0) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Return ours and PyTorch's with the same weights."""
    ours = randomised(MultiHeadAttention(D, H, dropout))
    theirs = nn.MultiheadAttention(D, H, dropout, batch_first=True)
    three = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in three]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in three]))
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    return ours.eval(), theirs.eval()


def test_the_equation_is_pytorchs():
    q, k, v = qkv()
    visible = random_mask(T, S)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    mixed, weights = attention(q, k, v, visible)
    assert_close(mixed, expected, atol=1e-5, rtol=0)
    assert weights.shape == (B, H, T, S)
    assert_close(weights.sum(-1), torch.ones(B, H, T))
    assert (weights[..., ~visible] == 0).all()
    upstream = torch.randn_like(mixed)
    ours = torch.autograd.grad(mixed, (q, k, v), upstream)
    theirs = torch.autograd.grad(expected, (q, k, v), upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_row_that_sees_nothing_gives_zeros_and_no_nan(dropout):
    q, k, v = qkv()
    mask = random_mask(T, S)
    mask[3] = False
    output, weights = ScaledDotProductAttention(dropout)(q, k, v, mask)
    assert (weights[:, :, 3] == 0).all()
    assert (output[:, :, 3] == 0).all()
    assert_close(weights.sum(-1), mask.any(-1).float().expand(B, H, T))
    with torch.autograd.set_detect_anomaly(True):  # raises where a NaN is only passing through
        output, weights = ScaledDotProductAttention(dropout)(q, k, v, mask)
        (output.square().sum() + weights.square().sum()).backward()
    for tensor in (q, k, v):
        assert tensor.grad.isfinite().all()
    assert (q.grad[:, :, 3] == 0).all()
    assert (q.grad[:, :, 2] != 0).any()


def test_a_whole_sentence_of_padding_passes_through_the_heads():
    ours, _ = multi_head()
    x = torch.randn(B, T, D, requires_grad=True)
    mask = torch.ones(B, 1, 1, T)
    mask[1] = 0
    output, weights = ours(x, x, x, mask)
    assert (weights[1] == 0).all()
    assert_close(output[1], ours.output.bias.expand(T, D))
    output.sum().backward()
    assert x.grad.isfinite().all()


def test_weights_are_returned_before_dropout_and_used_after():
    q, k, v = qkv()
    module = ScaledDotProductAttention(dropout=0.4)
    torch.manual_seed(2)
    output, weights = module(q, k, v)
    torch.manual_seed(2)
    assert_close(output, functional.dropout(weights, 0.4) @ v)
    assert_close(weights.sum(-1), torch.ones(B, H, T))
    assert torch.equal(weights, module.eval()(q, k, v)[1])
    assert_close(module(q, k, v)[0], weights @ v)


def test_no_mask_hides_nothing():
    q, k, v = qkv()
    module = ScaledDotProductAttention().eval()
    _, weights = module(q, k, v)
    assert (weights > 0).all()
    for mask in (torch.ones(T, S), torch.ones(1, 1, 1, S, dtype=torch.int64)):
        assert torch.equal(module(q, k, v, mask)[1], weights)


@pytest.mark.parametrize(
    "shape", [(S,), (1, S), (T, 1), (T, S), (1, T, S), (1, H, T, S), (B, 1, 1, S)]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_any_mask_of_0_and_1_that_broadcasts_is_taken(shape, dtype):
    q, k, v = qkv()
    mask = random_mask(*shape)
    output, weights = ScaledDotProductAttention(0.0)(q, k, v, mask.to(dtype))
    expected, their_weights = attention(q, k, v, mask.expand(B, H, T, S))
    assert torch.equal(output, expected)
    assert torch.equal(weights, their_weights)


@pytest.mark.parametrize("shape", [(S, T), (T, S + 1), (B, 1, S, T), (1, B, H, T, S), (T, 0)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(UserError, match=rf"mask has shape \({shape[0]}, .*broadcasts to \({B}, "):
        ScaledDotProductAttention()(*qkv(), torch.ones(shape))


def test_a_mask_that_may_be_per_text_or_per_head_is_refused():
    """With as many texts as heads (H, T, S) broadcasts, to each head the mask of a text."""
    q, k, v = (x[:1].expand(H, -1, -1, -1) for x in qkv())
    for first in (B, H):
        mask = random_mask(first, T, S)
        with pytest.raises(
            UserError, match=rf"\({first}, 7, 13\), which .* unsqueeze it to \(B, 1"
        ):
            ScaledDotProductAttention()(q, k, v, mask)
    per_text = random_mask(H, T, S)
    _, weights = ScaledDotProductAttention(0.0)(q, k, v, per_text.unsqueeze(1))
    for text in range(H):
        assert (weights[text][:, ~per_text[text]] == 0).all()
    # The heads' own module knows which it is; without heads there is no question.
    ours = MultiHeadAttention(D, H, 0.0)
    x, y = torch.randn(H, T, D), torch.randn(H, S, D)
    assert torch.equal(ours(x, y, y, per_text)[1], ours(x, y, y, per_text.unsqueeze(1))[1])
    _, weights = ScaledDotProductAttention(0.0)(q[:, 0], k[:, 0], v[:, 0], per_text)
    assert (weights[~per_text] == 0).all()


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(T, T).masked_fill(~causal_mask(T, T), float("-inf")),  # as nn.Transformer has
        torch.ones(T, T).tril() * -1e9,
        torch.full((T, T), float("nan")),
        torch.arange(T * T).view(T, T),
    ],
)
def test_a_mask_that_is_to_be_added_is_refused(mask):
    with pytest.raises(UserError, match="numbers other than 0 and 1: give 0 where"):
        ScaledDotProductAttention()(*qkv(T, T), mask)
    ours, _ = multi_head()
    x = torch.randn(B, T, D)
    with pytest.raises(UserError, match="numbers other than 0 and 1"):
        ours(x, x, x, mask)
    with pytest.raises(UserError, match=r"mask has shape \(2, 1, 13, 7\)"):
        ours(x, x, x, torch.ones(B, S, T))


@pytest.mark.parametrize("kind", ["none", "self", "cross", "per text", "per head", "causal"])
def test_multi_head_attention_is_pytorchs(kind):
    ours, theirs = multi_head()
    query = torch.randn(B, T, D, requires_grad=True)
    if kind in ("self", "causal"):
        key = value = query
    else:
        key = torch.randn(B, S, D, requires_grad=True)
        value = torch.randn(B, S, D, requires_grad=True)
    n_keys = key.size(1)
    masks = {
        "none": None,
        "self": random_mask(T, n_keys),
        "cross": random_mask(T, n_keys).int(),  # 0 and 1 serve as well
        "per text": random_mask(B, T, n_keys),
        "per head": random_mask(B, H, T, n_keys).float(),
        "causal": torch.ones(T, n_keys).tril(),
    }
    mask = masks[kind]
    output, weights = ours(query, key, value, mask)
    hidden = None
    if mask is not None:  # PyTorch says True where nobody may look, and has one mask a head
        per_head = mask == 0
        if mask.dim() == 3:
            per_head = per_head[:, None]
        hidden = per_head.expand(B, H, T, n_keys).reshape(B * H, T, n_keys)
    expected, their_weights = theirs(
        query, key, value, attn_mask=hidden, average_attn_weights=False
    )
    assert output.shape == (B, T, D)
    assert weights.shape == (B, H, T, n_keys)
    assert_close(output, expected, atol=1e-5, rtol=0)
    assert_close(weights, their_weights, atol=1e-5, rtol=0)
    upstream = torch.randn(B, T, D)
    (mine,) = torch.autograd.grad(output, query, upstream)
    (other,) = torch.autograd.grad(expected, query, upstream)
    assert_close(mine, other, atol=1e-5, rtol=0)


def test_the_classic_call_works_positionally():
    x = torch.randn(B, T, 512)
    output, attention_weights = MultiHeadAttention()(x, x, x, torch.ones(T, T).tril())
    assert output.shape == (B, T, 512)
    assert attention_weights.shape == (B, 8, T, T)
    q, k, v = qkv()
    assert len(ScaledDotProductAttention(0.1)(q, k, v, None)) == 2


@pytest.mark.parametrize(("d_model", "n_heads"), [(15, 4), (0, 3), (15, 0)])
def test_heads_that_do_not_share_out_the_width_are_refused(d_model, n_heads):
    with pytest.raises(UserError, match=f"d_model {d_model} .* n_heads {n_heads}"):
        MultiHeadAttention(d_model, n_heads)


@pytest.mark.parametrize(("n_texts", "n_queries", "n_keys"), [(0, T, S), (B, 0, S), (B, T, 0)])
def test_nothing_asked_or_nothing_there_is_no_error(n_texts, n_queries, n_keys):
    ours, _ = multi_head()
    key = torch.randn(n_texts, n_keys, D)
    output, weights = ours(torch.randn(n_texts, n_queries, D), key, key)
    assert output.shape == (n_texts, n_queries, D)
    assert weights.shape == (n_texts, H, n_queries, n_keys)
    if n_keys == 0:
        assert_close(output, ours.output.bias.expand_as(output))


def test_heads_split_and_merge():
    x = torch.randn(B, T, D)
    heads = split_heads(x, H)
    assert heads.shape == (B, H, T, K)
    assert torch.equal(heads[:, 1], x[..., K : 2 * K])  # a head is K neighbouring channels
    assert torch.equal(merge_heads(heads), x)


def test_without_positions_attention_sees_a_set():
    ours, _ = multi_head()
    x, order = torch.randn(B, T, D), torch.randperm(T)
    shuffled = x[:, order]
    assert_close(ours(shuffled, shuffled, shuffled)[0], ours(x, x, x)[0][:, order])


def test_a_causal_mask_hides_what_comes_later():
    assert causal_mask(3, 3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert causal_mask(1, T).all()


SHAPES = [(T, T, 3, 3), (T, S, 3, 3), (1, S, 3, 3), (T, T, 6, 2), (T, S, 6, 2), (1, S, 6, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_fast_equals_taught(shape):
    q, k, v = qkv(*shape)
    fast = fast_causal_attention(q, k, v)
    slow, weights = taught_causal_attention(q, k, v)
    assert_close(fast, slow, atol=1e-5, rtol=0)
    assert weights.shape == (B, shape[2], shape[0], shape[1])
    upstream = torch.randn_like(fast)
    ours = torch.autograd.grad(fast, (q, k, v), upstream)
    theirs = torch.autograd.grad(slow, (q, k, v), upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("limit", [T - 1, T])
def test_in_bfloat16_one_piece_equals_blocks(monkeypatch, limit):
    """Up to the limit in one piece, beyond it in PyTorch's blocks: the same to 8 bits."""
    monkeypatch.setattr("minigpt.layers.attention.ONE_PIECE_AT_MOST", limit)
    q, k, v = qkv(T, T)
    expected, _ = taught_causal_attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        fast = fast_causal_attention(q, k, v)
    assert fast.dtype == torch.bfloat16
    in_one_piece = "FlashAttention" not in type(fast.grad_fn).__name__
    assert in_one_piece == (limit == T)
    assert_close(fast.float(), expected, atol=0.03, rtol=0)
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad(fast, (q, k, v), upstream.bfloat16())
    theirs = torch.autograd.grad(expected, (q, k, v), upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=0.06, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", ["fast", "taught", "bfloat16"])
def test_a_query_sees_itself_and_the_past_alone(path, shape):
    n_queries, n_keys, *_ = shape

    def run(k, v):
        if path == "taught":
            return taught_causal_attention(q, k, v)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=path == "bfloat16"):
            return fast_causal_attention(q, k, v)

    with torch.no_grad():
        q, k, v = qkv(*shape)
        before = run(k, v)
        for at in range(n_keys):
            later_k, later_v = k.clone(), v.clone()
            later_k[:, :, at] += 3
            later_v[:, :, at] -= 2
            changed = (run(later_k, later_v) != before).flatten(0, 1).any(0).any(-1)
            positions = torch.arange(n_keys - n_queries, n_keys)
            assert changed.tolist() == (positions >= at).tolist()


def test_neighbouring_query_heads_share_a_key_head():
    q, k, v = qkv(T, S, heads=6, key_heads=2)
    mixed, _ = taught_causal_attention(q, k, v)
    for head in range(6):
        alone, _ = taught_causal_attention(
            q[:, head : head + 1], k[:, head // 3, None], v[:, head // 3, None]
        )
        assert_close(mixed[:, head, None], alone)


def test_attention_dropout_is_the_same_chance_on_all_paths():
    q, k, _ = qkv(T, T)
    v = torch.ones(B, H, T, K)
    taught = lambda *args: taught_causal_attention(*args)[0]  # noqa: E731
    for run in (fast_causal_attention, one_piece_causal_attention, taught):
        draws = torch.stack([run(q, k, v, 0.5) for _ in range(400)])
        # Kept weights are doubled, so that the mean stays what it was; without dropout it is 1.
        assert draws.float().std() > 0.3
        assert_close(draws.float().mean(), torch.tensor(1.0), atol=0.03, rtol=0)


def self_attention(*, key_heads: int = 1, dropout: float = 0.0) -> CausalSelfAttention:
    module = CausalSelfAttention(
        D,
        H,
        key_heads,
        6,
        bias=True,
        dropout=dropout,
        rotation=Rotary(6, S),
        qk_norm_eps=1e-6,
    )
    return randomised(module).eval()


@settings(max_examples=25, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda p: sum(p) <= S),
    key_heads=st.sampled_from([1, 3]),
)
def test_reading_in_pieces_with_a_cache_is_reading_at_once(pieces, key_heads):
    module = self_attention(key_heads=key_heads)
    x = torch.randn(B, sum(pieces), D)
    cache = KeyValueCache(torch.zeros(1, B, key_heads, S, 6), torch.zeros(1, B, key_heads, S, 6))
    outputs = []
    for piece in x.split(pieces, dim=1):
        outputs.append(module(piece, cache, 0))
        cache.advance(piece.size(1))
    assert_close(torch.cat(outputs, dim=1), module(x), atol=1e-5, rtol=0)
    cache.reset()
    assert_close(module(x, cache, 0), module(x), atol=1e-5, rtol=0)


def test_a_cache_says_when_it_is_full():
    cache = KeyValueCache(torch.zeros(2, B, H, 4, K), torch.zeros(2, B, H, 4, K))
    assert cache.capacity == 4
    _, k, v = qkv(1, 3)
    keys, values = cache.append(1, k, v)
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    assert cache.length == 0  # the other layer has not stored its part yet
    cache.advance(3)
    with pytest.raises(ValueError, match="holds 4 positions, 6 are too many"):
        cache.append(0, k, v)


def test_self_attention_drops_out_in_training_alone():
    module = self_attention(dropout=0.5)
    x = torch.randn(B, T, D)
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def test_the_parts_that_were_not_asked_for_are_not_there():
    plain = CausalSelfAttention(
        D, H, H, K, bias=False, dropout=0.0, rotation=NoRotation(), qk_norm_eps=None
    )
    assert {name for name, _ in plain.named_parameters()} == {
        f"{part}.weight" for part in ("query", "key", "value", "output")
    }
    twin = copy.deepcopy(plain)
    x = torch.randn(B, T, D)
    twin.query.weight.data.zero_()
    assert not torch.equal(plain(x), twin(x))
