"""The whole Transformer: each part equals PyTorch's, and the whole learns what it must."""

import copy
import inspect
import itertools
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from minigpt.errors import UserError
from minigpt.layers.attention import MultiHeadAttention, ScaledDotProductAttention
from minigpt.layers.positions import sinusoidal_table
from minigpt.transformer import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    PostNorm,
    PreNorm,
    Transformer,
    beam_search,
    greedy_decode,
    label_smoothing_loss,
    look_ahead_mask,
    make_residuals,
    padding_mask,
    paper_rate,
)
from tiny import B, D, F, H, L, T, V, randomised

S, W = 13, 97  # source length; V words there, W in the target
PAD, BOS, EOS = 1, 2, 3
PLACEMENTS = pytest.mark.parametrize("placement", ["post", "pre"])


def ids(*shape: int, vocab_size: int, seed: int = 2, n_padded: int = 0):
    """Return words, no special among them; rows 0 … n_padded − 1 end in 1, 2, … ids of padding."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(4, vocab_size, shape, generator=generator)
    for row in range(n_padded):
        drawn[row, shape[1] - 1 - row :] = PAD
    return drawn


def as_torchs(module, pick, prefix=""):
    """Return what `pick` takes of each parameter of ours, under the names of PyTorch's layers."""
    if isinstance(module, Encoder | Decoder):
        parts = {f"layers.{i}.": layer for i, layer in enumerate(module.layers)}
        parts |= {"norm.": module.norm}
    elif isinstance(module, EncoderLayer | DecoderLayer):
        parts = {"self_attn.": module.self_attention}
        if isinstance(module, DecoderLayer):
            parts |= {"multihead_attn.": module.cross_attention}
        parts |= {"linear1.": module.feed_forward.widen, "linear2.": module.feed_forward.narrow}
        parts |= {f"norm{i}.": around.norm for i, around in enumerate(module.residuals, start=1)}
    elif isinstance(module, MultiHeadAttention):
        three = (module.query, module.key, module.value)
        return {
            f"{prefix}in_proj_weight": torch.cat([pick(part.weight) for part in three]),
            f"{prefix}in_proj_bias": torch.cat([pick(part.bias) for part in three]),
            f"{prefix}out_proj.weight": pick(module.output.weight),
            f"{prefix}out_proj.bias": pick(module.output.bias),
        }
    else:
        return {prefix + name: pick(parameter) for name, parameter in module.named_parameters()}
    names: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        names |= as_torchs(part, pick, prefix + name)
    return names


def same_weights(ours, theirs) -> None:
    """Give theirs the weights of ours, all of them random, biases and norms too."""
    randomised(ours)
    theirs.load_state_dict(as_torchs(ours, lambda parameter: parameter.detach()))


def assert_same(mine, reference, pairs, inputs) -> None:
    """Compare outputs, then the gradients of inputs and of every weight of the (ours, theirs)."""
    assert_close(mine, reference, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(mine) / mine.numel() ** 0.5
    of_mine = torch.autograd.grad(mine, inputs, upstream, retain_graph=True)
    assert_close(of_mine, torch.autograd.grad(reference, inputs, upstream, retain_graph=True))
    mine.backward(upstream)
    of_weights = {f"{i}.{n}": g for i, (ours, _) in enumerate(pairs) for n, g in grads(ours)}
    reference.backward(upstream)
    expected = {
        f"{i}.{n}": p.grad
        for i, (_, theirs) in enumerate(pairs)
        for n, p in theirs.named_parameters()
    }
    assert set(of_weights) == set(expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert_close(of_weights[name], gradient, atol=1e-5, rtol=1e-5, msg=name)


def grads(ours):
    return as_torchs(ours, lambda parameter: parameter.grad).items()


@pytest.mark.parametrize("masked", [True, False])
@PLACEMENTS
def test_encoder_layer_equals_torchs(placement, masked):
    torch.manual_seed(1)
    ours = EncoderLayer(D, H, F, 0.0, placement)
    theirs = nn.TransformerEncoderLayer(
        D, H, F, dropout=0.0, batch_first=True, norm_first=placement == "pre"
    )
    same_weights(ours, theirs)
    source = ids(B, S, vocab_size=V, n_padded=3)
    x = torch.randn(B, S, D, requires_grad=True)
    mine = ours(x, padding_mask(source, PAD) if masked else None)
    reference = theirs(x, src_key_padding_mask=source == PAD if masked else None)
    assert_same(mine, reference, [(ours, theirs)], (x,))


def test_both_placements_have_a_name_and_stand_with_their_equation():
    """The code of one beside the text of the other confuses (annotated-transformer#92)."""
    torch.manual_seed(1)
    x, sublayer = torch.randn(B, S, D), randomised(nn.Linear(D, D))
    post, pre = (randomised(make_residuals(kind, 1, D, 0.5)).eval()[0] for kind in ("post", "pre"))
    assert PostNorm.__doc__.startswith("LayerNorm(x + Dropout(Sublayer(x)))   — section 3.1: the p")
    assert_close(PostNorm.forward(post, x, sublayer), post.norm(x + sublayer(x)))
    assert PreNorm.__doc__.startswith("x + Dropout(Sublayer(LayerNorm(x)))   — GPT-2 ")
    assert_close(PreNorm.forward(pre, x, sublayer), x + sublayer(pre.norm(x)))
    assert (type(post), type(pre)) == (PostNorm, PreNorm)
    for kind in ("post", "pre"):
        part = PostNorm if kind == "post" else PreNorm
        layer = DecoderLayer(D, H, F, 0.0, kind)
        assert {type(residual) for residual in layer.residuals} == {part}


@pytest.mark.parametrize("masked", [True, False])
@PLACEMENTS
def test_decoder_layer_equals_torchs(placement, masked):
    torch.manual_seed(1)
    ours = DecoderLayer(D, H, F, 0.0, placement)
    theirs = nn.TransformerDecoderLayer(
        D, H, F, dropout=0.0, batch_first=True, norm_first=placement == "pre"
    )
    same_weights(ours, theirs)
    source, target = ids(B, S, vocab_size=V, n_padded=3), ids(B, T, vocab_size=W, n_padded=2)
    x = torch.randn(B, T, D, requires_grad=True)
    memory = torch.randn(B, S, D, requires_grad=True)
    if masked:
        mine = ours(x, memory, padding_mask(source, PAD), look_ahead_mask(target, PAD))
        reference = theirs(
            x,
            memory,
            tgt_mask=torch.ones(T, T, dtype=torch.bool).triu(1),
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
    else:
        mine, reference = ours(x, memory), theirs(x, memory)
    assert_same(mine, reference, [(ours, theirs)], (x, memory))


@PLACEMENTS
def test_the_stacks_equal_torchs(placement):
    """nn.Transformer ends each stack with a norm: ours only where the layers leave a bare sum."""
    torch.manual_seed(1)
    model = Transformer(V, W, D, H, L, F, 0.0, norm_placement=placement)
    first = placement == "pre"
    layer = nn.TransformerEncoderLayer(D, H, F, dropout=0.0, batch_first=True, norm_first=first)
    theirs = nn.Transformer(
        D,
        H,
        num_decoder_layers=L,
        dim_feedforward=F,
        dropout=0.0,
        batch_first=True,
        norm_first=first,
        # Its own would warn that it cannot pack these layers' padded batches.
        custom_encoder=nn.TransformerEncoder(layer, L, nn.LayerNorm(D), enable_nested_tensor=False),
    )
    if placement == "post":
        theirs.encoder.norm = theirs.decoder.norm = None
    pairs = [(model.encoder, theirs.encoder), (model.decoder, theirs.decoder)]
    for ours, reference in pairs:
        same_weights(ours, reference)
    source, target = ids(B, S, vocab_size=V, n_padded=3), ids(B, T, vocab_size=W, n_padded=2)
    x = torch.randn(B, S, D, requires_grad=True)
    y = torch.randn(B, T, D, requires_grad=True)
    memory = model.encoder(x, padding_mask(source, PAD))
    mine = model.decoder(y, memory, padding_mask(source, PAD), look_ahead_mask(target, PAD))
    reference = theirs(
        x,
        y,
        tgt_mask=torch.ones(T, T, dtype=torch.bool).triu(1),
        src_key_padding_mask=source == PAD,
        tgt_key_padding_mask=target == PAD,
        memory_key_padding_mask=source == PAD,
    )
    assert_same(mine, reference, pairs, (x, y))


def make_model(placement="post", dropout=0.0, **changes) -> Transformer:
    torch.manual_seed(3)
    model = Transformer(V, W, D, H, L, F, dropout, norm_placement=placement, **changes)
    return randomised(model).eval()


@pytest.fixture(params=["post", "pre"])
def model(request) -> Transformer:
    return make_model(request.param)


@torch.no_grad()
def test_the_whole_is_its_parts(model):
    source, target = ids(B, S, vocab_size=V, n_padded=3), ids(B, T, vocab_size=W, n_padded=2)
    x = model.source_embedding.weight[source] * math.sqrt(D) + sinusoidal_table(S, D)
    y = model.target_embedding.weight[target] * math.sqrt(D) + sinusoidal_table(T, D)
    memory = model.encoder(x, padding_mask(source, PAD))
    y = model.decoder(y, memory, padding_mask(source, PAD), look_ahead_mask(target, PAD))
    logits = y @ model.output.weight.T + model.output.bias
    assert logits.shape == (B, T, W)
    assert_close(model(source, target), logits)
    assert_close(model.decode(target, model.encode(source), source), logits)


def test_the_masks_say_who_is_hidden():
    target = torch.tensor([[5, 7, PAD]])
    assert padding_mask(target, PAD).tolist() == [[[True, True, False]]]
    assert look_ahead_mask(target, PAD).tolist() == [
        [[True, False, False], [True, True, False], [True, True, False]]
    ]


@torch.no_grad()
def test_no_position_sees_a_later_word(model):
    source, target = ids(B, S, vocab_size=V), ids(B, T, vocab_size=W)
    before = model(source, target)
    for at in range(1, T):
        changed = target.clone()
        changed[:, at:] = (changed[:, at:] - 4 + 17) % (W - 4) + 4
        after = model(source, changed)
        assert_close(after[:, :at], before[:, :at], atol=1e-5, rtol=1e-5)
        assert not torch.isclose(after[:, at:], before[:, at:]).all(dim=-1).any()


@torch.no_grad()
def test_every_position_sees_all_of_the_source(model):
    source, target = ids(B, S, vocab_size=V), ids(B, T, vocab_size=W)
    before = model(source, target)
    for at in range(S):
        changed = source.clone()
        changed[:, at] = (changed[:, at] - 4 + 17) % (V - 4) + 4
        assert not torch.isclose(model(changed, target), before).all(dim=-1).any()


@torch.no_grad()
def test_padding_changes_nothing(model):
    source, target = ids(B, S, vocab_size=V), ids(B, T, vocab_size=W)
    longer = torch.cat((source, source.new_full((B, 3), PAD)), dim=1)
    longer_target = torch.cat((target, target.new_full((B, 2), PAD)), dim=1)
    expected = model(source, target)
    assert_close(model(longer, longer_target)[:, :T], expected, atol=1e-5, rtol=1e-5)
    assert_close(model.encode(longer)[:, :S], model.encode(source), atol=1e-5, rtol=1e-5)


@PLACEMENTS
def test_a_source_of_padding_alone_leaves_the_target_to_itself(placement):
    model = make_model(placement)
    source, target = ids(B, S, vocab_size=V), ids(B, T, vocab_size=W)
    source[2] = PAD
    with torch.autograd.set_detect_anomaly(True):  # raises where a NaN is only passing through
        logits = model(source, target)
        label_smoothing_loss(logits, target).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with torch.no_grad():
        other = source.clone()
        other[3] = 7
        assert_close(model(other, target)[2], logits[2])
        # It is as if there were no cross-attention but its bias.
        for layer in model.decoder.layers:
            layer.cross_attention.output.weight.zero_()
        assert_close(model(source, target)[2], logits[2])


def test_dropout_is_for_training_alone():
    model = make_model(dropout=0.3)
    source, target = ids(B, S, vocab_size=V), ids(B, T, vocab_size=W)
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))
    # Writing switches it off.
    first, again = (greedy_decode(model, source, BOS, EOS, T) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first, greedy_decode(model.eval(), source, BOS, EOS, T))


@pytest.mark.parametrize("write", [greedy_decode, beam_search])
@pytest.mark.parametrize("frozen", [None, "encoder", "decoder.layers.0.feed_forward", ""])
def test_writing_leaves_every_mode_as_it_was(write, frozen):
    model = make_model().train()
    if frozen is not None:
        model.get_submodule(frozen).eval()
    before = {name: part.training for name, part in model.named_modules()}
    write(model, ids(1, S, vocab_size=V), BOS, EOS, 2)
    assert {name: part.training for name, part in model.named_modules()} == before
    with torch.no_grad():
        model.output.bias[7] = math.nan
    with pytest.raises(UserError, match="not finite"):
        write(model, ids(1, S, vocab_size=V), BOS, EOS, 2)
    assert {name: part.training for name, part in model.named_modules()} == before


def test_dropout_falls_on_what_a_sublayer_adds_and_on_the_embedding_sums():
    """With everything dropped, x goes on alone (section 5.4)."""
    x = torch.randn(B, T, D)
    pre, post = (randomised(kind(D, 1.0)).train() for kind in (PreNorm, PostNorm))
    assert torch.equal(pre(x, lambda x: x + 1), x)
    assert torch.equal(post(x, lambda x: x + 1), post.norm(x))
    model, seen = make_model(dropout=1.0).train(), []
    for stack in (model.encoder, model.decoder):
        stack.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(ids(B, S, vocab_size=V), ids(B, T, vocab_size=W))
    assert [tuple(x.shape) for x in seen] == [(B, S, D), (B, T, D)]
    assert all((x == 0).all() for x in seen)


def test_one_dropout_is_that_of_every_part():
    parts = list(make_model(dropout=0.3).modules())
    rates = [part.p for part in parts if isinstance(part, nn.Dropout)]
    rates += [part.dropout for part in parts if isinstance(part, ScaledDotProductAttention)]
    # Of a layer: 2 or 3 residuals, 1 or 2 attentions, 1 between the two maps; and the positions.
    assert rates == [0.3] * (L * (2 + 1 + 1) + L * (3 + 2 + 1) + 1)


def test_it_compiles_in_one_piece():
    model = make_model()
    source, target = ids(B, S, vocab_size=V, n_padded=3), ids(B, T, vocab_size=W, n_padded=2)

    def loss(source, target):
        return label_smoothing_loss(model(source, target[:, :-1]), target[:, 1:])

    expected = loss(source, target)
    torch.compiler.reset()
    assert_close(torch.compile(loss, fullgraph=True, backend="eager")(source, target), expected)


def test_the_defaults_are_the_papers():
    """Table 3, row "base"; ε of section 5.4; equation 3's warm-up; the beam of section 6.1."""
    base = {"d_model": 512, "n_heads": 8, "d_ff": 2_048, "dropout": 0.1, "norm_placement": "post"}
    for call, expected in [
        (EncoderLayer, base),
        (DecoderLayer, base),
        (Transformer, {**base, "n_layers": 6, "share_embeddings": False}),
        (Transformer, {"pad_id": 1, "max_len": 5_000}),  # of this project and its tutorials
        (label_smoothing_loss, {"smoothing": 0.1, "pad_id": 1}),
        (paper_rate, {"d_model": 512, "warmup_steps": 4_000}),
        (greedy_decode, {"max_len": None}),
        (beam_search, {"n_beams": 4, "length_penalty": 0.6, "max_len": None}),
    ]:
        parameters = inspect.signature(call).parameters
        assert {name: parameters[name].default for name in expected} == expected


def test_a_deep_copy_is_a_model_of_its_own(model):
    source, target = ids(B, S, vocab_size=V), ids(B, T, vocab_size=W)
    before = model(source, target)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(source, target), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(source, target), before)
    assert (twin(source, target) == 0).all()


def test_three_tables_are_one_if_asked():
    model = Transformer(V, V, D, H, L, F, share_embeddings=True)
    apart = Transformer(V, V, D, H, L, F)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, apart)]
    assert sizes[1] - sizes[0] == 2 * V * D
    assert model.output.weight is model.source_embedding.weight
    assert model.target_embedding.weight is model.source_embedding.weight
    twin = copy.deepcopy(model)
    assert twin.output.weight is twin.source_embedding.weight
    source, target = ids(B, S, vocab_size=V), ids(B, T, vocab_size=V, seed=5)
    label_smoothing_loss(model(source, target[:, :-1]), target[:, 1:]).backward()
    # The softmax teaches all words but padding's; those of the source learn more.
    assert (model.output.weight.grad.abs().sum(dim=1) > 0).all()


def root_mean_square(x):
    return x.square().mean().sqrt().item()


def test_fresh_words_are_of_the_order_of_the_sines():
    torch.manual_seed(1)
    sines = root_mean_square(sinusoidal_table(1_000, 512))
    assert sines == pytest.approx(1 / math.sqrt(2))
    for shared in (True, False):
        model = Transformer(V, V, 512, 8, 1, F, share_embeddings=shared)
        for table in (model.source_embedding, model.target_embedding):
            words = root_mean_square(table.weight * math.sqrt(512))
            assert words / sines == pytest.approx(math.sqrt(2), abs=0.02)


def test_other_fresh_weights_keep_the_variance():
    torch.manual_seed(1)
    for name, parameter in Transformer(V, W, 128, 8, 1, 512).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        elif "embedding" not in name:
            expected = math.sqrt(2 / sum(parameter.shape))
            assert root_mean_square(parameter) == pytest.approx(expected, rel=0.03), name
            assert parameter.abs().max() <= math.sqrt(3) * expected, "equation 16 is uniform"


def test_a_fresh_norm_divides_by_what_the_docstring_says():
    """`PostNorm` names the size of the sums in a fresh base model."""
    torch.manual_seed(1)
    model, sizes = Transformer(V, W).eval(), []
    for part in model.modules():
        if isinstance(part, PostNorm):
            part.norm.register_forward_pre_hook(lambda _, x: sizes.append(x[0].std().item()))
    with torch.no_grad():
        model(ids(B, S, vocab_size=V), ids(B, T, vocab_size=W))
    assert len(sizes) == 6 * 2 + 6 * 3
    assert "between 1.1 and 1.5 in a fresh base model" in PostNorm.__doc__
    assert (round(min(sizes), 1), round(max(sizes), 1)) == (1.1, 1.5)


def test_post_norm_damps_the_gradient_and_pre_norm_does_not():
    """What the two docstrings say of a deep decoder that has learned nothing yet."""

    def share_of_the_lowest(placement):
        torch.manual_seed(1)
        model = Transformer(V, W, D, H, 12, F, 0.0, norm_placement=placement)
        target = ids(B, T, vocab_size=W)
        logits = model(ids(B, S, vocab_size=V), target[:, :-1])
        label_smoothing_loss(logits, target[:, 1:]).backward()
        lowest, *_, topmost = (
            layer.feed_forward.narrow.weight.grad.norm().item() for layer in model.decoder.layers
        )
        return lowest / topmost

    assert share_of_the_lowest("post") < 0.1
    assert share_of_the_lowest("pre") > 0.5


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_label_smoothing_equals_torchs(smoothing):
    torch.manual_seed(1)
    logits = torch.randn(B, T, W, requires_grad=True)
    for targets in (ids(B, T, vocab_size=W, n_padded=2), ids(B, T, vocab_size=W)):
        mine = label_smoothing_loss(logits, targets, smoothing, PAD)
        expected = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=smoothing
        )
        assert_close(mine, expected)
        flat = label_smoothing_loss(logits.flatten(0, 1), targets.flatten(), smoothing, PAD)
        assert torch.equal(flat, mine)
        (grad,), (reference,) = (torch.autograd.grad(x, logits) for x in (mine, expected))
        assert_close(grad, reference, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_word_may_be_impossible(smoothing):
    """Without smoothing it costs nothing; with it, its share is infinite, here as in PyTorch."""
    logits, targets = torch.randn(B, T, W), ids(B, T, vocab_size=W, n_padded=2)
    logits[..., 0] = -math.inf
    logits.requires_grad_()
    mine = label_smoothing_loss(logits, targets, smoothing)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=smoothing
    )
    assert_close(mine, expected)
    assert mine.isfinite() == (smoothing == 0)
    if smoothing == 0:
        (grad,), (reference,) = (torch.autograd.grad(x, logits) for x in (mine, expected))
        assert_close(grad, reference, atol=1e-7, rtol=1e-5)


def test_label_smoothing_of_nothing_is_nothing():
    logits = torch.randn(B, T, W, requires_grad=True)
    loss = label_smoothing_loss(logits, torch.full((B, T), -100), 0.1, pad_id=-100)
    assert loss == 0
    loss.backward()
    assert (logits.grad == 0).all()


def test_label_smoothing_wants_no_certainty():
    """The best that can be done with ε = 0.1 gives the target 0.9 and its share of the rest."""
    right = 0.9 + 0.1 / W
    logits = torch.full((1, 1, W), math.log((1 - right) / (W - 1)))
    targets = torch.tensor([[7]])
    losses = []
    for p in (right - 0.01, right, right + 0.01, 0.9999):
        logits[:] = math.log((1 - p) / (W - 1))
        logits[..., 7] = math.log(p)
        losses.append(label_smoothing_loss(logits, targets).item())
    assert min(losses) == losses[1]
    assert losses[3] > losses[2] > losses[1]


def test_the_rate_is_equation_3():
    rates = [paper_rate(step) for step in range(1, 9_001)]
    assert max(rates) == rates[3_999] == pytest.approx(512**-0.5 * 4_000**-0.5)
    assert rates[1] == pytest.approx(2 * rates[0])
    assert rates[0] == pytest.approx(512**-0.5 * 4_000**-1.5)
    assert rates[7_999] == pytest.approx(rates[3_999] / math.sqrt(2))
    assert paper_rate(17, 31, 13) == pytest.approx(31**-0.5 * 17**-0.5)


# Writing: greedily and by beam search.


@torch.no_grad()
def test_one_beam_is_greedy(model):
    source = ids(16, S, vocab_size=V)
    lengths = {T}
    while lengths <= {0, T}:  # until some end, after a few words
        model.output.bias[EOS] += 0.1
        greedy = greedy_decode(model, source, BOS, EOS, max_len=T)
        lengths = {*((greedy != PAD) & (greedy != EOS)).sum(dim=1).tolist()}
    assert T in lengths
    for row in range(len(source)):
        ((best, _),) = beam_search(model, source[row : row + 1], BOS, EOS, max_len=T, n_beams=1)
        assert best == [i for i in greedy[row].tolist() if i not in (PAD, EOS)]


@pytest.mark.parametrize("write", [greedy_decode, beam_search])
def test_writing_stops_when_it_can_and_remembers_nothing_to_learn_from(model, write):
    learning = []
    model.output.register_forward_hook(lambda _, inputs, output: learning.append(output))
    with torch.no_grad():
        model.output.bias[EOS] = 1e4
    write(model, ids(1, S, vocab_size=V), BOS, EOS)
    # Of four beams one ends after a word, its three rivals and a fourth after two.
    assert len(learning) == (1 if write is greedy_decode else 2)
    assert not any(output.requires_grad for output in learning)


def model_of(p):
    """Return a model that gives the words the same probabilities whatever came before."""
    model = tiny_model(0)
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias[:] = torch.tensor(p).log()
    return model


def test_only_the_n_beams_best_may_end():
    """<eos> comes third of four: two beams pass it by, three take it."""
    model, source = model_of([0.3, 1e-9, 0.05, 0.15, 0.5]), ids(1, S, vocab_size=V)
    outputs = beam_search(model, source, BOS, EOS, 1, n_beams=2)
    assert [words for words, _ in outputs] == [[4], [0]]
    assert_close([score for _, score in outputs], [math.log(0.5), math.log(0.3)])
    outputs = beam_search(model, source, BOS, EOS, 1, n_beams=3)
    assert [words for words, _ in outputs] == [[], [4], [0]]


@torch.no_grad()
def test_rows_of_a_batch_are_written_each_on_its_own(model):
    source = ids(B, S, vocab_size=V, n_padded=4)
    lengths = {T}
    while lengths == {T}:  # until some end early
        model.output.bias[EOS] += 0.3
        written = greedy_decode(model, source, BOS, EOS, T)
        lengths = {*(written != PAD).sum(dim=1).tolist()}
    assert len(lengths) > 1
    assert written.size(1) == max(lengths)
    for row in range(B):
        alone = greedy_decode(model, source[row : row + 1], BOS, EOS, T)[0]
        assert written[row, : len(alone)].tolist() == alone.tolist()
        assert (written[row, len(alone) :] == PAD).all()
        assert EOS not in alone[:-1]


def test_the_paper_writes_input_length_and_50(model):
    source = ids(2, S, vocab_size=V, n_padded=2)  # 12 and 11 words
    with torch.no_grad():
        model.output.bias[EOS] = -1e4
        model.output.bias[PAD] = 1e4  # never written, however likely
    written = greedy_decode(model, source, BOS, EOS)
    assert written.shape == (2, 12 + 50)
    assert (written != PAD).all()
    outputs = beam_search(model, source[1:], BOS, EOS, n_beams=2)
    assert [len(words) for words, _ in outputs] == [11 + 50] * 2
    assert all(PAD not in words for words, _ in outputs)


TINY = 5  # <unk>, <pad>, <bos>, <eos> and one word: four that can be written


def tiny_model(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return randomised(Transformer(V, TINY, D, H, L, F, 0.0)).eval()


@torch.no_grad()
def every_output(model, source, max_len, alpha):
    """Return all there is to write, with scores: log P / ((5 + n) / 6)^α, <eos> counted."""
    ended, cut = [], []
    for n in range(1, max_len + 1):
        for words in itertools.product([0, 2, 3, 4], repeat=n):
            if EOS in words[:-1] or (words[-1] != EOS and n < max_len):
                continue
            target = torch.tensor([[BOS, *words]])
            log_probs = model(source, target[:, :-1]).log_softmax(dim=-1)
            log_p = log_probs.gather(-1, target[:, 1:, None]).sum().item()
            score = log_p * (6 / (5 + n)) ** alpha
            where = ended if words[-1] == EOS else cut
            where.append(([i for i in words if i != EOS], score))
    return [*sorted(ended, key=lambda o: -o[1]), *sorted(cut, key=lambda o: -o[1])]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_with_enough_beams_the_search_misses_nothing(alpha):
    source = ids(1, S, vocab_size=V)
    for seed in range(3):
        model = tiny_model(seed)
        expected = every_output(model, source, 3, alpha)
        assert len(expected) == 1 + 3 + 9 + 27
        outputs = beam_search(
            model, source, BOS, EOS, 3, n_beams=len(expected), length_penalty=alpha
        )
        assert sorted(words for words, _ in outputs) == sorted(words for words, _ in expected)
        assert_close([s for _, s in outputs], [s for _, s in expected], atol=1e-4, rtol=1e-4)
        assert outputs[0][0] == expected[0][0]


def test_a_beam_finds_what_greed_misses():
    gains = []
    for seed in range(8):
        model, source = tiny_model(seed), ids(1, S, vocab_size=V)
        one, four = (
            max(
                score
                for _, score in beam_search(
                    model, source, BOS, EOS, 4, n_beams=n, length_penalty=0.0
                )
            )
            for n in (1, 4)
        )
        gains.append(four - one)
    assert min(gains) > -1e-5
    assert max(gains) > 1e-3


def test_a_higher_penalty_asks_for_longer_outputs():
    lengths = []
    for alpha in (0.0, 5.0):
        best = [
            beam_search(
                tiny_model(seed),
                ids(1, S, vocab_size=V),
                BOS,
                EOS,
                4,
                n_beams=99,
                length_penalty=alpha,
            )[0][0]
            for seed in range(5)
        ]
        lengths.append(sum(map(len, best)))
    assert lengths[0] < lengths[1]


# A user's mistakes, each of which is one line.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 50, "n_heads": 7}, "d_model 50 is not a multiple of n_heads 7"),
        ({"n_layers": 0}, "n_layers is 0: it must be at least 1"),
        ({"n_layers": -2}, "n_layers is -2"),
        ({"d_ff": 0}, "d_ff is 0"),
        ({"d_model": -D}, f"d_model is -{D}"),
        ({"n_heads": 0}, "n_heads is 0"),
        ({"max_len": 0}, "max_len is 0"),
        ({"norm_placement": "middle"}, "norm_placement is middle: take post or pre"),
        ({"pad_id": V}, f"pad_id is {V}: .* {V} and {W} entries"),
        ({"pad_id": -1}, "pad_id is -1"),
        ({"share_embeddings": True}, f"one vocabulary: .* is {V}, target_vocab_size {W}"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Transformer(V, W, **{"d_model": D, "n_heads": H, "n_layers": 1, "d_ff": F, **changes})


def test_ids_that_do_not_fit_are_refused(model):
    source, target = ids(B, S, vocab_size=V), ids(B, T, vocab_size=W)
    outside, negative = source.clone(), target.clone()
    outside[3, 5], negative[1, 2] = V, -1
    cases = [
        (outside, target, f"source has the id {V}: its vocabulary goes from 0 to {V - 1}"),
        (source, negative, f"target has the id -1: its vocabulary goes from 0 to {W - 1}"),
        (source.float(), target, r"source is torch.float32 of shape \(5, 13\)"),
        (source[0], target, r"source is torch.int64 of shape \(13,\)"),
        (source[:, :0], target, r"source is torch.int64 of shape \(5, 0\)"),
        (source, target[:, :0], r"target is torch.int64 of shape \(5, 0\)"),
        (source, target[:3], r"of shapes \(3, 11\), \(5, 13, 42\) and \(5, 13\)"),
    ]
    for bad_source, bad_target, message in cases:
        with pytest.raises(UserError, match=message):
            model(bad_source, bad_target)
    with pytest.raises(UserError, match="the memory of this source"):
        model.decode(target, model.encode(source[:, 1:]), source)


def test_losses_and_rates_that_make_no_sense_are_refused():
    logits, targets = torch.randn(B, T, W), ids(B, T, vocab_size=W)
    with pytest.raises(UserError, match=r"smoothing is 1.5"):
        label_smoothing_loss(logits, targets, 1.5)
    with pytest.raises(UserError, match=r"logits are of shape \(5, 10, 97\), targets \(5, 11\)"):
        label_smoothing_loss(logits[:, 1:], targets)
    with pytest.raises(UserError, match=f"targets has the id {W}"):
        label_smoothing_loss(logits, targets.masked_fill(targets == targets[0, 0], W))
    with pytest.raises(UserError, match="step is 0: steps are counted from 1"):
        paper_rate(0)
    with pytest.raises(UserError, match="warmup_steps 0"):
        paper_rate(1, 512, 0)


@pytest.mark.parametrize("write", [greedy_decode, beam_search])
def test_writing_refuses_what_it_cannot_do(model, write):
    source = ids(1, S, vocab_size=V)
    for arguments, message in [
        ((source, BOS, EOS, 0), "max_len is 0: it must be at least 1"),
        ((source, W, EOS, T), f"target has the id {W}"),
        ((source, BOS, W, T), f"eos_id is {W}"),
        ((source, BOS, PAD, T), "eos_id is 1: .* other than pad_id"),
        ((source[:, :0], BOS, EOS, T), r"shape \(1, 0\)"),
    ]:
        with pytest.raises(UserError, match=message):
            write(model, *arguments)
    with torch.no_grad():
        model.output.bias[7] = math.nan
    with pytest.raises(UserError, match="not finite: its training has diverged"):
        write(model, source, BOS, EOS, T)
    assert not model.training


def test_beam_search_refuses_what_it_cannot_do(model):
    source = ids(2, S, vocab_size=V)
    with pytest.raises(UserError, match=r"shape \(2, 13\): beam_search takes one sequence"):
        beam_search(model, source, BOS, EOS)
    with pytest.raises(UserError, match="n_beams is 0"):
        beam_search(model, source[:1], BOS, EOS, n_beams=0)
    with pytest.raises(UserError, match=r"length_penalty is -0.5"):
        beam_search(model, source[:1], BOS, EOS, length_penalty=-0.5)


# What it must learn.

N_WORDS, LONGEST = 11, 5


def sequences(n, generator, *, backwards: bool, held_out: bool):
    """Return sources of 2 … LONGEST words and, as targets, the same words, or backwards.

    A sequence whose words add up to a multiple of 5 is held out: no training batch has it. Single
    words are none: two of the eleven would then never be seen without company.
    """
    words = torch.randint(4, 4 + N_WORDS, (6 * n, LONGEST), generator=generator)
    lengths = torch.randint(2, LONGEST + 1, (6 * n, 1), generator=generator)
    places = torch.arange(LONGEST)
    words = words.masked_fill(places >= lengths, 0)
    mine = (words.sum(dim=1) % 5 == 0) == held_out
    words, lengths = words[mine][:n], lengths[mine][:n]
    order = (lengths - 1 - places).clamp(min=0) if backwards else places.expand(len(words), -1)
    target = torch.full((len(words), LONGEST + 2), PAD)
    target[:, 0] = BOS
    target[:, 1:-1] = words.gather(1, order).masked_fill(places >= lengths, PAD)
    target[torch.arange(len(words)), lengths[:, 0] + 1] = EOS
    return words.masked_fill(places >= lengths, PAD), target


@pytest.mark.parametrize("backwards", [False, True], ids=["copy", "reverse"])
def test_it_learns_a_sequence_task_without_a_mistake(backwards):
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    model = Transformer(4 + N_WORDS, 4 + N_WORDS, 32, 4, 2, 64, 0.0)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    faultless = 0  # new sequences in a row that were right before they were learned from
    for step in range(1, 1_001):
        for group in optimizer.param_groups:
            group["lr"] = 0.35 * paper_rate(step, 32, warmup_steps=40)
        source, target = sequences(128, generator, backwards=backwards, held_out=False)
        inputs, targets = target[:, :-1], target[:, 1:]
        logits = model(source, inputs)
        loss = label_smoothing_loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mistakes = (logits.argmax(dim=-1) != targets) & (targets != PAD)
        faultless = 0 if mistakes.any() else faultless + len(source)
        if faultless >= 5_000:
            break
    source, target = sequences(
        500, torch.Generator().manual_seed(99), backwards=backwards, held_out=True
    )
    assert len(source) == 500
    assert {*(source != PAD).sum(dim=1).tolist()} == set(range(2, LONGEST + 1))
    written = greedy_decode(model, source, BOS, EOS)
    assert torch.equal(written, target[:, 1:])
    for row in range(7):
        words = [i for i in target[row].tolist() if i not in (PAD, BOS, EOS)]
        outputs = beam_search(model, source[row : row + 1], BOS, EOS, n_beams=3)
        assert outputs[0][0] == words


def test_half_precision_writes_the_likeliest_word_of_its_logits():
    """Rounded log-probabilities of thousands of words tie by the dozen, and the first would win."""
    torch.manual_seed(1)
    model = Transformer(V, 10_007, D, H, 1, F, 0.0).eval().bfloat16()
    source = ids(B, S, vocab_size=V)
    written = greedy_decode(model, source, BOS, EOS, max_len=1)[:, 0]
    with torch.no_grad():
        logits = model(source, torch.full((B, 1), BOS))[:, -1].float()
    logits[:, model.pad_id] = -math.inf
    assert torch.equal(written, logits.argmax(dim=-1))


def test_a_banned_word_is_not_written_and_no_sign_of_divergence():
    torch.manual_seed(1)
    model = Transformer(V, W, D, H, 1, F, 0.0).eval()
    source = ids(B, S, vocab_size=V)
    first = greedy_decode(model, source, BOS, EOS, max_len=1)[:, 0]
    with torch.no_grad():
        model.output.bias[first] = -math.inf
    second = greedy_decode(model, source, BOS, EOS, max_len=1)[:, 0]
    assert not torch.isin(second, first).any()
    (best, _), *_ = beam_search(model, source[:1], BOS, EOS, max_len=1, n_beams=1)
    assert [*best, EOS][0] == second[0]
