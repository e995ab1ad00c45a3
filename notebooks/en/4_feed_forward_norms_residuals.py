# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · Feed-forward, norms, residuals
#
# **Afterwards you know** what happens to a position between two attentions, why nothing deep trains
# without residuals, and why the paper's norm stands behind the sum and GPT-2's in front of the
# part.
#
# *Attention Is All You Need*, sections 3.1, 3.3 and 5.4 · before: [3 ·
# Positions](3_positions.ipynb) · next: [5 · Encoder and decoder](5_encoder_decoder.ipynb) ·
# [中文](../zh-CN/4_feed_forward_norms_residuals.ipynb)

# %%
import inspect
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from torch import nn
from torch.nn import functional as F

from minigpt.config import ModelConfig
from minigpt.layers.attention import MultiHeadAttention
from minigpt.layers.feed_forward import PositionwiseFeedForward
from minigpt.layers.norm import LayerNorm, RMSNorm
from minigpt.model import MiniGPT, PostNormBlock, PreNormBlock
from minigpt.transformer import EncoderLayer

torch.manual_seed(1)
torch.set_printoptions(precision=4, sci_mode=False)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})
POST, PRE = "#e8710a", "#145090"  # one colour each, in all pictures


def show(part):
    """Display a part of minigpt as it stands in the package."""
    return Markdown(f"```python\n{inspect.getsource(part)}```")


# %% [markdown]
# ## Feed-forward: each position alone
#
# Attention only mixes: its output is an average of values. What computes something *new* from the
# mixture is two matrices with a bend in between:
#
# $$\mathrm{FFN}(x) = \max(0,\; x W_1 + b_1)\, W_2 + b_2 \qquad (2)$$

# %%
show(PositionwiseFeedForward)

# %% [markdown]
# *Position-wise* means: the same function at each position, and none sees another. Two tests of it.
# Shuffle the positions, and the outputs are shuffled alike. Change one position, and no other
# moves.

# %%
feed_forward = PositionwiseFeedForward(d_model=64, d_ff=256, dropout=0.0)
x = torch.randn(1, 10, 64)
order = torch.randperm(10)
torch.testing.assert_close(feed_forward(x[:, order]), feed_forward(x)[:, order])

changed = x.clone()
changed[0, 3] += 1.0
moved = (feed_forward(changed) - feed_forward(x)).abs().amax(dim=-1)[0] > 1e-6
print("positions that move:", moved.nonzero().flatten().tolist())
assert moved.nonzero().flatten().tolist() == [3]

# %% [markdown]
# The first test held for attention, too (notebook 1); the second does not. This is the division of
# labour in a block: **attention moves things between positions, feed-forward works on them in
# place.**
#
# And this is where most of the parameters are. In the base model of the paper, with D = 512 and
# F = 2,048, one encoder layer:

# %%
layer = EncoderLayer(d_model=512, n_heads=8, d_ff=2_048)
n_all = sum(parameter.numel() for parameter in layer.parameters())
for name, part in (("attention", layer.self_attention), ("feed-forward", layer.feed_forward)):
    n_part = sum(parameter.numel() for parameter in part.parameters())
    print(f"{name:12} {n_part:9,} of {n_all:,} parameters, {n_part / n_all:.1%}")
assert n_part == 2 * 512 * 2_048 + 2_048 + 512
assert 0.66 < n_part / n_all < 0.67

# %% [markdown]
# ## What one channel does
#
# Take one of the F channels. Row c of W₁ is a direction, b its threshold. If x points that way far
# enough, the channel is *on*, by as much as it exceeds the threshold; else it gives exactly 0. What
# it then writes is its column of W₂, times that amount. So the whole network is a sum of
# independent little rules: **if x looks like this, add that** (Geva et al. 2021 read them as keys
# and values of a memory).

# %%
with torch.no_grad():
    amounts = feed_forward.widen(x[0, 0]).relu()  # (F,): how much each channel is on
    columns = feed_forward.narrow.weight.T  # (F, D): what each channel writes
    on = amounts.nonzero().flatten()
    written = sum(amounts[channel] * columns[channel] for channel in on)
    torch.testing.assert_close(written + feed_forward.narrow.bias, feed_forward(x)[0, 0])
print(f"{len(on)} of 256 channels are on; the others add nothing at all")

# %% [markdown]
# Without the bend the two matrices would be one: W₂ W₁, and the widening to F channels in vain.
# With it, each channel is a hinge, and hinges build any shape. Two make |x|. Four make a bump: the
# first turns the line up, the second makes it level, the third turns it down, the fourth makes it
# level again.

# %%
line = torch.linspace(-3, 3, 200)
torch.testing.assert_close(line.relu() + (-line).relu(), line.abs())

hinges = [(1.0, 2.0), (-1.0, 1.0), (-1.0, -1.0), (1.0, -2.0)]  # what it adds, where it bends
parts = [amount * (line + shift).relu() for amount, shift in hinges]
bump = sum(parts)
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for part in parts:
    axes.plot(line, part, color="#bbbbbb", linewidth=1)
axes.plot(line, bump, color=PRE, linewidth=2.5)
axes.set(ylim=(-2.2, 3.2), xlabel="x", title="four hinges (grey) and their sum")
plt.show()
assert bump[0] == 0
assert bump[-1].abs() < 1e-5
assert torch.isclose(bump.max(), torch.tensor(1.0))

w_1, w_2 = feed_forward.widen.weight, feed_forward.narrow.weight
torch.testing.assert_close(x @ w_1.T @ w_2.T, x @ (w_2 @ w_1).T)  # no bend: one matrix

# %% [markdown]
# ## LayerNorm by hand
#
# Take the vector (1, 2, 3, 6). Its mean is 3; the deviations are −2, −1, 0, 3; their squares 4, 1,
# 0, 9 sum to 14; the variance is 14 / 4 = 3.5. Divide the deviations by √3.5 = 1.871.

# %%
x = torch.tensor([1.0, 2.0, 3.0, 6.0])
by_hand = torch.tensor([-2.0, -1.0, 0.0, 3.0]) / math.sqrt(3.5)
norm = LayerNorm(4)
print([round(number, 4) for number in norm(x).tolist()])
torch.testing.assert_close(norm(x), by_hand, atol=1e-5, rtol=0)
torch.testing.assert_close(norm(x), nn.LayerNorm(4)(x))

# %%
show(LayerNorm)

# %% [markdown]
# **The trap**: `x.std()` divides by D − 1 (Bessel's correction, for samples of something larger).
# Written with it, the layer trains, and is not LayerNorm; nor is the one of The Annotated
# Transformer, which adds ε to the deviation besides. The error is a factor √((D − 1) / D): grave in
# the example above, 0.1 % at D = 512, and enough that weights of another code base, loaded here,
# give other answers.

# %%
for width in (4, 64, 512):
    x = torch.randn(1_000, width)
    with_bessel = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
    ratio = (with_bessel / LayerNorm(width)(x)).median().item()
    print(f"D {width:3}   with Bessel's correction / LayerNorm = {ratio:.4f}")
    assert math.isclose(ratio, math.sqrt((width - 1) / width), rel_tol=1e-3)

# %% [markdown]
# What a norm is for: whatever size comes in, the same size goes out. Ten times the vector gives the
# same result, and every result has length √D (times what the model has learned in `weight`). And it
# looks at one position of one text only: not at the batch, like batch norm, nor at other positions.
#
# RMSNorm leaves the centring out and divides by the root of the mean square. One property is
# lost (adding a constant to all channels now changes the result), and nobody misses it.

# %%
x = torch.randn(5, 64)
rms = RMSNorm(64)
torch.testing.assert_close(rms(x), nn.RMSNorm(64, eps=1e-5)(x))
for name, norm in (("LayerNorm", LayerNorm(64)), ("RMSNorm", rms)):
    scaled = (norm(10 * x) - norm(x)).abs().max().item()
    shifted = (norm(x + 10) - norm(x)).abs().max().item()
    print(f"{name:9} length {norm(x).norm(dim=-1).mean():.2f},", end=" ")
    print(f"changes by {scaled:.4f} when scaled by 10, by {shifted:.4f} when shifted by 10")
    assert scaled < 1e-3

# %% [markdown]
# ## Residuals, or: why deep stacks learn at all
#
# Stack feed-forward networks up to 32 deep, and ask how large the gradient is that reaches the
# bottom. Once as they are, y = f(x), and once with the residual of the paper, y = x + f(x).


# %%
def gradient_at_the_bottom(depth, residual):
    """Return the size of the gradient at the input of `depth` networks."""
    torch.manual_seed(1)
    x = torch.randn(1, 16, 64, requires_grad=True)
    y = x
    for _ in range(depth):
        part = PositionwiseFeedForward(d_model=64, d_ff=256, dropout=0.0)
        y = y + part(y) if residual else part(y)
    (gradient,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), x)
    return gradient.norm().item()


depths = (1, 2, 4, 8, 16, 32)
bare = [gradient_at_the_bottom(depth, residual=False) for depth in depths]
residual = [gradient_at_the_bottom(depth, residual=True) for depth in depths]
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(depths, residual, "o-", color=PRE, label="x + f(x)")
axes.plot(depths, bare, "o-", color=POST, label="f(x)")
axes.set(yscale="log", xlabel="depth", title="gradient at the bottom")
axes.legend(frameon=False)
plt.show()
print(f"32 deep: {residual[-1]:.0f} with residuals, {bare[-1]:.0e} without")
assert bare[-1] < 1e-12
assert residual[-1] > 1

# %% [markdown]
# Without residuals, each network multiplies the gradient by some fraction, and 32 fractions
# multiply to nothing. With them, the derivative of x + f(x) is 1 + f′(x): along the 1 the gradient
# of the loss reaches every layer, unweakened. That path through the whole model is the **residual
# stream**; the parts read from it and add to it.
#
# Attention needs the stream for a second reason, which is less well known. An average of averages
# is more even than an average. Stack attentions without residuals, and watch how similar the
# positions become to each other (1: all the same direction).


# %%
@torch.no_grad()
def similarity(residual, n_layers=8):
    """Return the mean cosine between two positions after each attention."""
    torch.manual_seed(1)
    x = torch.randn(1, 16, 64)
    similarities = []
    for _ in range(n_layers):
        layer = MultiHeadAttention(64, 8, dropout=0.0)
        for part in (layer.query, layer.key, layer.value, layer.output):
            nn.init.zeros_(part.bias)  # a bias is the same at all positions: it would help to cheat
        x = (x if residual else 0) + layer(x, x, x)[0]
        directions = F.normalize(x[0], dim=-1)
        cosines = directions @ directions.T
        similarities.append(((cosines.sum() - 16) / (16 * 15)).item())
    return similarities


for residual in (False, True):
    print("residual  " if residual else "no residual", [round(s, 3) for s in similarity(residual)])
assert similarity(residual=False)[1] > 0.99
assert similarity(residual=True)[-1] < 0.5

# %% [markdown]
# After *two* layers all sixteen positions say the same thing, whatever words they stand for (Dong
# et al. 2021 prove that it must be so). "Attention is all you need" is a good title. It is not all
# you need.
#
# ## Where the norm stands
#
# The paper: LayerNorm(x + Sublayer(x)), after the sum, **post-norm**. GPT-2 and nearly all since:
# x + Sublayer(LayerNorm(x)), **pre-norm**, and one norm more at the very end. Side by side:

# %%
show(PostNormBlock)

# %%
show(PreNormBlock)

# %% [markdown]
# Read the two `forward`s as a path from bottom to top. In post-norm the stream itself passes
# through every norm. In pre-norm nothing stands in its way; the norms sit on the branches. Two
# measurements on fresh stacks of encoder layers show what follows: how large each layer's gradient
# is, and how much each layer changes the stream.


# %%
def measure(placement, n_layers):
    """Return, for each layer of a fresh stack, its gradient and how much it turns the stream."""
    torch.manual_seed(1)
    layers = nn.ModuleList(
        EncoderLayer(64, 8, 256, dropout=0.0, norm_placement=placement) for _ in range(n_layers)
    )
    last_norm = LayerNorm(64) if placement == "pre" else nn.Identity()
    output = nn.Linear(64, 50)
    for parameter in [*layers.parameters(), *output.parameters()]:
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    x, targets = torch.randn(8, 16, 64), torch.randint(50, (128,))
    changes = []
    for layer in layers:
        before = x
        x = layer(x)
        # 1 − cosine: 0 for a layer that leaves the direction of the stream as it was
        changes.append((1 - F.cosine_similarity(before, x, dim=-1).mean()).item())
    F.cross_entropy(output(last_norm(x)).flatten(0, 1), targets).backward()
    gradients = [layer.feed_forward.narrow.weight.grad.norm().item() for layer in layers]
    return gradients, changes


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
measured = {}
for placement, color in (("post", POST), ("pre", PRE)):
    for n_layers, style in ((6, "o-"), (24, ".--")):
        gradients, changes = measured[placement, n_layers] = measure(placement, n_layers)
        numbers = range(1, n_layers + 1)
        label = f"{placement}-norm, {n_layers} layers"
        left.plot(numbers, gradients, style, color=color, label=label)
        right.plot(numbers, changes, style, color=color)
left.set(xlabel="layer", title="gradient of its second matrix", ylim=(0, None))
right.set(xlabel="layer", title="how far it turns the stream", ylim=(0, None))
left.legend(frameon=False, fontsize=8)
plt.show()

for placement in ("post", "pre"):
    few, many = (measured[placement, n_layers][0][-1] for n_layers in (6, 24))
    print(f"{placement}-norm: gradient of the last layer {few:.2f} of 6 layers, {many:.2f} of 24")
assert measured["post", 24][0][-1] > 0.9 * measured["post", 6][0][-1]
assert measured["pre", 24][0][-1] < 0.7 * measured["pre", 6][0][-1]

# %% [markdown]
# Left: look at the *last* layer of each stack. In pre-norm its gradient is smaller in the deeper
# one, 0.41 with 6 layers and 0.23 with 24; in post-norm it is not, 0.86 and 1.11. That is what the
# theorem of Xiong et al. (2020) is about: near the output, the gradient falls about as 1/√L in
# pre-norm and stays in post-norm, so that full steps from the very first are too large for a deep
# post-norm model. The paper's cure is the warm-up of section 5.3. Of the lower layers the picture
# says no such thing: the first pre-norm layer has about 1.0 in both stacks, and of six post-norm
# layers the lowest have the largest gradients, about 1.5.
#
# Right: the price of pre-norm. The stream grows with each sum and is never made small again, so
# each further layer turns it less. In post-norm it is the other way round: the lowest layer turns
# it by 0.19, those from the fifth on by about 0.3 to 0.5.
#
# Now the experiment: the table task of notebook 2, eight layers, the same constant learning rate,
# with and without a warm-up.

# %%
n_symbols, n_positions = 7, 12
table = torch.randint(n_symbols, (n_symbols, n_symbols), generator=torch.Generator().manual_seed(0))


def losses_of(placement, n_warm_up, n_steps=200, rate=5e-3):
    """Train eight layers; return the loss of each step."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    model = MiniGPT(
        ModelConfig(
            vocab_size=n_symbols,
            context_length=n_positions,
            d_model=32,
            n_heads=4,
            d_ff=64,
            n_layers=8,
            norm="layer",
            norm_placement=placement,
            feed_forward="relu",
            bias=True,
            tie_embeddings=False,
        )
    )
    for parameter in model.blocks.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)  # the paper's code; Mini-GPT itself starts smaller
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    losses = []
    for step in range(1, n_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / max(n_warm_up, 1))
        ids = torch.randint(n_symbols, (32, n_positions), generator=generator)
        answers = table[ids[:, :1].expand(-1, n_positions - 1), ids[:, :-1]]
        loss = F.cross_entropy(model(ids)[:, 1:].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
final = {}
for placement, color in (("post", POST), ("pre", PRE)):
    for n_warm_up, style in ((0, "-"), (100, ":")):
        losses = losses_of(placement, n_warm_up)
        final[placement, n_warm_up] = sum(losses[-20:]) / 20
        label = f"{placement}-norm, {f'warm-up of {n_warm_up}' if n_warm_up else 'no warm-up'}"
        axes.plot(losses, style, color=color, label=label)
axes.set(xlabel="step", ylabel="loss")
axes.legend(frameon=False)
plt.show()
print({name: round(loss, 2) for name, loss in final.items()})
assert final["post", 0] > 1.2  # it has learned next to nothing
assert final["post", 100] < 1.0
assert max(final["pre", 0], final["pre", 100]) < 0.3

# %% [markdown]
# Post-norm without warm-up learns next to nothing; with it, it does. Pre-norm does not care. So:
#
# - **Why the paper's norm stands where it stands.** The paper gives no reason. What it buys: the
#   output of each layer has the same size, and no layer's voice is drowned by those before it. With
#   six layers and a warm-up it trains well.
# - **Why GPT-2 moved it.** Its paper gives no reason either, but it has up to 48 layers. With
#   pre-norm the way down the stream is free, training no longer hangs on the warm-up, and the
#   price, layers that say less the deeper they lie, is one that many layers can pay. The stream
#   leaves such a stack at any size, hence the one more norm at its end.
#
# ## Dropout
#
# Section 5.4: dropout on the output of each sublayer, *before* it is added, and on the sum of
# embeddings and positions, with which the stream begins. What is dropped becomes 0; the rest is
# divided by 1 − p, so that the expected value stays. From there on it never falls on the stream
# itself: a part that falls silent is a lesson, a hole in the stream is a loss. (Of dropout on the
# attention weights 5.4 says nothing. The classic codes have it, and so has `MultiHeadAttention`
# here.)

# %%
dropout = nn.Dropout(0.1)
x = torch.ones(100_000)
print(
    "values:",
    sorted({round(v, 4) for v in dropout(x).tolist()}),
    " mean:",
    dropout(x).mean().item(),
)
assert abs(dropout(x).mean().item() - 1) < 0.01
assert torch.equal(dropout.eval()(x), x)  # evaluation: nothing is dropped

# %% [markdown]
# ## Exercises
#
# **1.** What are the three outputs of a ReLU network with W₁ = (1, −1)ᵀ, b₁ = (0, 0), W₂ = (1, 1),
# b₂ = −1 for x = −2, 0, 3? Which function is it?
# *Hint: two hinges.*
#
# <details><summary>Answer</summary>
#
# 1, −1, 2: it is |x| − 1.
# </details>
#
# **2.** LayerNorm (weight 1, bias 0, ε = 0) of (0, 0, 0, 4)? And RMSNorm?
# *Hint: mean 1, deviations −1, −1, −1, 3.*
#
# <details><summary>Answer</summary>
#
# Variance 12 / 4 = 3: (−0.577, −0.577, −0.577, 1.732). RMSNorm: the mean square is 16 / 4 = 4, so
# (0, 0, 0, 2). A zero stays a zero there.
# </details>
#
# **3.** Why can a norm behind the last sum of a pre-norm model not be left out?
# *Hint: look at the size of x after 24 layers.*
#
# <details><summary>Answer</summary>
#
# The stream has grown with every sum (in `measure`, to some five times its size). The logits would
# grow with it, and the softmax would be sure of itself before it has learned anything.
# </details>
#
# **4.** GPT-2 starts the matrices that write into the stream smaller by a factor of √(2L). Why that
# number?
# *Hint: how many parts add to the stream, and how does the size of a sum of independent things
# grow?*
#
# <details><summary>Answer</summary>
#
# 2L parts, two for each block. A sum of n independent terms of size s has size s√n; with s divided
# by √(2L), what is added in all is about as large as one part, whatever the depth. `_initialise` in
# [`model.py`](../../src/minigpt/model.py) does it.
# </details>
#
# ## What to read next in the code
#
# [`layers/feed_forward.py`](../../src/minigpt/layers/feed_forward.py),
# [`layers/norm.py`](../../src/minigpt/layers/norm.py), and the two blocks in
# [`model.py`](../../src/minigpt/model.py).
