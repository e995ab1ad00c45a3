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
# # 3 · Positions
#
# **Afterwards you know** what goes wrong without positions, why sines and cosines come in pairs,
# why a step of k positions is a rotation wherever you start, and what learned and rotary positions
# do differently.
#
# *Attention Is All You Need*, section 3.5 · before: [2 · Many heads](2_many_heads.ipynb) · next:
# [4 · Feed-forward, norms, residuals](4_feed_forward_norms_residuals.ipynb) ·
# [中文](../zh-CN/3_positions.ipynb)

# %%
import inspect
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown

from minigpt.config import ModelConfig
from minigpt.layers.attention import MultiHeadAttention, causal_mask
from minigpt.layers.positions import (
    LearnedPositions,
    NoRotation,
    PositionalEncoding,
    Rotary,
    sinusoidal_table,
)
from minigpt.model import MiniGPT

torch.manual_seed(1)
torch.set_printoptions(precision=4, sci_mode=False)
plt.rcParams.update(
    {
        "figure.dpi": 72,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "image.cmap": "Blues",
        "image.interpolation": "nearest",
    }
)


def show(part):
    """Display a part of minigpt as it stands in the package."""
    return Markdown(f"```python\n{inspect.getsource(part)}```")


# %% [markdown]
# ## What goes wrong without
#
# Notebook 1 ended with "dog bites man" and "man bites dog", which attention cannot tell apart. Does
# a causal mask help? It does break the symmetry: the first word sees one word, the second two. But
# what the *last* word gathers is still a mixture of a set. Exchange the first two words, and it
# notices nothing.

# %%
dog, bites, man = torch.randn(3, 16)
layer_1, layer_2 = (MultiHeadAttention(16, 4, dropout=0.0).eval() for _ in range(2))


def last_word(sentence, layers):
    """Return what the last position holds after the layers, each with its residual."""
    x = torch.stack(sentence).unsqueeze(0)
    for layer in layers:
        x = x + layer(x, x, x, causal_mask(3, 3))[0]
    return x[0, -1]


for layers in ((layer_1,), (layer_1, layer_2)):
    with torch.no_grad():
        one = last_word((dog, bites, man), layers)
        other = last_word((bites, dog, man), layers)
    print(f"{len(layers)} causal layers: the last word differs by {(one - other).abs().max():.1e}")

# %% [markdown]
# Look at the second line: **two** causal layers do notice. In the first layer *dog* has seen either
# itself alone or *bites* as well, so the second layer no longer mixes the same set of vectors.
# Causal models can in fact be trained without any positions (Haviv et al. 2022). It is a faint
# signal for a basic need, though: in an encoder there is not even that, and so the paper adds
# positions.
#
# ## The clock
#
# A single number, 0, 1, 2, …, would do in principle. But added to the embeddings it would outgrow
# the words, and divided by the length it would mean another thing in each text. You know a better
# way to write a number with bounded digits: a **binary counter**. Its last bit flips at every step,
# the one before it at every second step, and so on. Each bit is small; together they are unique.
#
# The paper's positions are a counter whose bits turn smoothly instead of flipping, like the hands
# of a clock, some fast and some slow:
#
# $$PE(pos, 2i) = \sin\left(pos / 10000^{2i/D}\right), \qquad
# PE(pos, 2i+1) = \cos\left(pos / 10000^{2i/D}\right)$$
#
# Channels 2i and 2i + 1 are the height and the breadth of hand number i.

# %%
show(sinusoidal_table)

# %%
d_model = 64
table = sinusoidal_table(128, d_model)
bits = (torch.arange(128)[:, None] >> torch.arange(8)) & 1

figure, (left, right) = plt.subplots(
    1, 2, figsize=(10, 4), width_ratios=(1, 4), layout="constrained"
)
left.imshow(bits, aspect="auto")
left.set(title="a binary counter", xlabel="bit", ylabel="position")
image = right.imshow(table, aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
right.set(title="sinusoidal_table(128, 64)", xlabel="channel: sine, cosine, sine, …")
figure.colorbar(image, ax=right)
plt.show()

# By hand: position 1, pair 0 has angle 1; position 0 has all angles 0.
assert math.isclose(table[1, 0].item(), math.sin(1), rel_tol=1e-6)
assert math.isclose(table[1, 1].item(), math.cos(1), rel_tol=1e-6)
assert table[0].tolist() == [0.0, 1.0] * 32

# %% [markdown]
# How slow is the slowest hand? The paper says that wavelengths go from 2π to 10000 · 2π. The second
# is a limit that no channel reaches: the last pair has 2i = D − 2, so for D = 512 it takes

# %%
exponents = torch.arange(0, 512, 2, dtype=torch.float64) / 512
wavelengths = 2 * math.pi * 10_000**exponents
print(f"shortest {wavelengths[0]:.2f}, longest {wavelengths[-1]:,.0f}", end=" ")
print(f"of 10000 · 2π = {20_000 * math.pi:,.0f} positions")
print("pairs that come round once within 128 positions:", int((wavelengths <= 128).sum()), "of 256")
assert round(wavelengths[-1].item()) == 60_611

# %% [markdown]
# ## Why sine *and* cosine
#
# A sine alone would be ambiguous, as sin 30° = sin 150°. With its cosine it is a point on a circle.
# That is what makes the paper's central claim true: *for any fixed offset k, PE(pos + k) can be
# represented as a linear function of PE(pos)*. Moving on by k turns each hand by an angle that
# depends on k alone. And turning a point by a fixed angle is a linear map, a rotation:
#
# $$\begin{pmatrix} \sin(\omega (p+k)) \\ \cos(\omega (p+k)) \end{pmatrix} =
# \begin{pmatrix} \cos \omega k & \sin \omega k \\ -\sin \omega k & \cos \omega k \end{pmatrix}
# \begin{pmatrix} \sin \omega p \\ \cos \omega p \end{pmatrix}$$
#
# (the two addition theorems from school). Four of the 32 hands, at positions 3 and 3 + 5, and at 20
# and 20 + 5: the arc from the blue hand to the orange one is the same in both rows.

# %%
pairs, offset = (0, 4, 8, 12), 5
figure, all_axes = plt.subplots(2, 4, figsize=(9, 4.8), layout="constrained")
for row, start in enumerate((3, 20)):
    for axes, pair in zip(all_axes[row], pairs, strict=True):
        axes.add_patch(plt.Circle((0, 0), 1, fill=False, color="#cccccc"))
        angle = 10_000 ** (-2 * pair / d_model)
        arc = torch.linspace(start * angle, (start + offset) * angle, 100)
        axes.plot(0.7 * arc.cos(), 0.7 * arc.sin(), color="#999999", linewidth=1)
        for position, color in ((start, "#145090"), (start + offset, "#e8710a")):
            height, breadth = table[position, 2 * pair : 2 * pair + 2].tolist()
            axes.plot((0, breadth), (0, height), color=color, linewidth=2.5)
        axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", xticks=[], yticks=[])
        axes.set_title(f"pair {pair}: {start} → {start + offset}", fontsize=10)
        axes.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# And now for all pairs and all positions at once. Build the matrix for "five further" from the
# formula, and apply it to the whole table.


# %%
def step_matrix(k, d_model):
    """Return the (D, D) rotation that takes PE(pos) to PE(pos + k), whatever pos is."""
    angles = k / 10_000.0 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    blocks = [
        torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]])
        for a in angles.tolist()
    ]
    return torch.block_diag(*blocks)


five_further = step_matrix(5, d_model)
torch.testing.assert_close(table[:-5] @ five_further.T, table[5:], atol=1e-6, rtol=0)
# A rotation: it changes no length and no angle. And steps add up.
torch.testing.assert_close(five_further @ five_further.T, torch.eye(d_model), atol=1e-6, rtol=0)
two, three = step_matrix(2, d_model), step_matrix(3, d_model)
torch.testing.assert_close(two @ three, five_further, atol=1e-6, rtol=0)
print(
    "largest error over all positions:",
    (table[:-5] @ five_further.T - table[5:]).abs().max().item(),
)

# %% [markdown]
# What is it good for? A head's query and key are linear maps of what it reads. So a head can learn,
# in W^Q, to look for "the position that is PE(mine − 1)", and the same weights do it at *every*
# position. Let us make such a head by hand: the query is the position turned back by one, the key
# is the position as it is.

# %%
one_back = step_matrix(-1, d_model)
q, k = table @ one_back.T, table
scores = 4 * q @ k.T / math.sqrt(d_model)
weights = scores.masked_fill(~causal_mask(128, 128), -math.inf).softmax(dim=-1)
looks_at = weights.argmax(dim=-1)
print("positions 1 … 9 look at", looks_at[1:10].tolist())
assert torch.equal(looks_at[1:], torch.arange(127))

# %% [markdown]
# ## Distance as a dot product
#
# With no map in between, the dot product of two positions is a sum of cosines (again the addition
# theorem, sin a sin b + cos a cos b = cos(a − b)):
#
# $$PE(a) \cdot PE(b) = \sum_i \cos(\omega_i (a - b))$$
#
# It depends on the distance alone. So the picture of all dot products has one colour per diagonal.

# %%
products = table @ table.T
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
image = left.imshow(products)
left.set(title="PE(a) · PE(b)", xlabel="b", ylabel="a")
figure.colorbar(image, ax=left)
distances = torch.arange(-60, 61)
right.plot(distances, products[60, :121], color="#145090")
right.set(title="the row of a = 60", xlabel="b − a")
plt.show()

for distance in range(128):
    diagonal = products.diagonal(distance)
    assert (diagonal - diagonal[0]).abs().max() < 1e-4
torch.testing.assert_close(products.diagonal(), torch.full((128,), d_model / 2))
torch.testing.assert_close(products, products.T)  # before and after look the same

# %% [markdown]
# Two things to take away. Near is similar, and similarity falls with distance, though not evenly.
# And the picture is symmetric: the bare dot product cannot tell *before* from *after*. The head
# that we made above could, since it has a rotation in W^Q. Positions alone give distances; the
# learned maps give directions.
#
# ## As large as the words
#
# Positions are added to the embeddings, and what is added must neither drown the words nor be
# drowned by them. Each pair is a point on a circle of radius 1, so every position has length
# √(D/2). Section 3.4 multiplies the embeddings by √D and gives no reason. Measure what that does:

# %%
model = MiniGPT(
    ModelConfig(vocab_size=1_000, context_length=128, d_model=512, position="sinusoidal")
)
words = model.embedding.weight.detach()
positions = model.positions.table
print(f"a position: length {positions.norm(dim=-1).mean():.2f} = √256")
print(f"a word:     length {words.norm(dim=-1).mean():.2f}")
print(f"√512 times: length {(words * model.embedding_scale).norm(dim=-1).mean():.2f}")
assert torch.allclose(positions.norm(dim=-1), torch.tensor(16.0))

# %% [markdown]
# The sines have length √(D/2), the words, multiplied, about √D: the same order, at a ratio of √2.
# Not multiplied, a word would be a sixteenth of its position.
#
# ## No last position
#
# A formula has no end. `PositionalEncoding` starts with max_len rows and makes more when a longer
# text comes. At position 100,000 its values must still be right, and there floating point lies in
# wait. A float32 has 24 bits, so near 100,000 neighbouring numbers are 2⁻⁷ ≈ 0.008 apart: an angle
# kept in float32 may be wrong by half of that, 0.004, and so may its sine. Computed in float64 and
# rounded once at the end, the table is as exact as float32 can say it.

# %%
encoding = PositionalEncoding(d_model=512, dropout=0.0, max_len=10)
ours = encoding(torch.zeros(1, 100, 512), offset=100_000)[0]  # positions 100,000 … 100,099

positions = torch.arange(100_000, 100_100, dtype=torch.float64)[:, None]
angles = positions / 10_000 ** (torch.arange(0, 512, 2, dtype=torch.float64) / 512)


def sines_and_cosines(angles):
    """Return sin, cos, sin, cos, … of each row of angles, in float64."""
    return torch.stack((angles.double().sin(), angles.double().cos()), dim=-1).flatten(1)


exact = sines_and_cosines(angles)
rounded_angles = sines_and_cosines(angles.float())
print(f"ours:                      off by {(ours - exact).abs().max():.1e}")
print(f"angles rounded to float32: off by {(rounded_angles - exact).abs().max():.1e}")
assert encoding.table.size(0) >= 100_100
assert (ours - exact).abs().max() < 1e-6
assert 0.003 < (rounded_angles - exact).abs().max() < 0.004

# %% [markdown]
# Be careful what to conclude. The *table* has no end. Whether a *model* that was trained on 128
# positions makes sense of position 5,000 is another question. The paper hoped so ("it may allow the
# model to extrapolate"); measured later, it does so badly (Press et al. 2022, figure 1).
#
# ## Two other ways
#
# **Learned positions** (GPT-2; the paper's table 3, row E, where they did as well): one free vector
# per position. The table ends, and the end is an error.

# %%
learned = LearnedPositions(context_length=16, d_model=64, dropout=0.0)
print("16 positions:", tuple(learned(torch.zeros(1, 16, 64)).shape))
try:
    learned(torch.zeros(1, 17, 64))
except RuntimeError as error:
    print("17 positions:", error)

# %% [markdown]
# **Rotary positions** (Su et al. 2021; Llama and most models since) draw the conclusion from the
# rotation. If what counts is that a step is a rotation, then do not add the clock to the words:
# *turn the queries and keys themselves*. The query at i is turned by i, the key at j by j; their
# dot product then sees only the difference of the two.

# %%
show(Rotary)

# %%
rotary = Rotary(d_head=64, context_length=128)
query, key = torch.randn(2, 64)
queries = rotary(query.expand(1, 1, 128, 64))[0, 0]  # the same query at each position
keys = rotary(key.expand(1, 1, 128, 64))[0, 0]
torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(128))  # only turned
for i, j in ((5, 2), (50, 47), (127, 124)):
    print(f"query at {i:3}, key at {j:3}: {(queries[i] @ keys[j]).item():.4f}")
    assert torch.isclose(queries[i] @ keys[j], queries[3] @ keys[0], atol=1e-3)

# %% [markdown]
# In one picture: scores between 64 positions that all hold the *same word*, so that only positions
# make a difference, with random W^Q and W^K.

# %%
word = torch.randn(64)
w_q, w_k = torch.randn(2, 64, 64) / math.sqrt(64)
learned_rows = torch.randn(64, 64) / math.sqrt(2)  # as large as the sines and cosines


def scores_of(x, turn):
    """Return the scores of x (T, D) with itself."""
    q, k = (turn((x @ w)[None, None])[0, 0] for w in (w_q, w_k))
    return q @ k.T / math.sqrt(64)


pictures = {
    "learned, at the start": scores_of(word + learned_rows, NoRotation()),
    "sinusoidal": scores_of(word + table[:64], NoRotation()),
    "rotary": scores_of(word.expand(64, 64), rotary),
}
figure, all_axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
for axes, (name, scores) in zip(all_axes, pictures.items(), strict=True):
    axes.imshow(scores, cmap="RdBu", vmin=-3, vmax=3)
    axes.set(title=name, xlabel="key at", ylabel="query at")
    spread = torch.stack([scores.diagonal(-distance).std() for distance in range(32)]).mean()
    print(f"{name:22} spread of scores at the same distance: {spread:.4f}")
plt.show()
assert spread < 1e-4  # the last one: rotary

# %% [markdown]
# Learned positions start as noise, and training has to find out what "near" means. Sinusoidal
# positions have the structure in them, but added to words and sent through W^Q and W^K it is mixed
# with the words and with the absolute position: a head must learn to take it out. Rotary scores
# depend on the distance by construction: one colour per diagonal, whatever the weights are.
#
# ## Exercises
#
# **1.** With D = 4 write PE(0), PE(1) and PE(2) by hand. Which of the two pairs tells 0 from 1?
# *Hint: the angles are pos and pos / 100.*
#
# <details><summary>Answer</summary>
#
# (0, 1, 0, 1), (0.841, 0.540, 0.010, 1.000), (0.909, −0.416, 0.020, 1.000). The fast pair tells
# neighbours apart; the slow one tells 0 from 100, by when the fast one has come round nearly 16
# times.
# </details>
#
# **2.** Find the matrix for "five further" without the formula: by least squares from the table.
# *Hint: `torch.linalg.lstsq(table[:-5], table[5:])`. What is its residual, and why may its solution
# differ from the rotation?*
#
# <details><summary>Answer</summary>
#
# The residual is a few millionths: a linear map exists, and the data alone find it. It need not be
# *the* rotation. Within 123 positions the slow hands hardly move, so the table has a rank of only
# 24 in float32 (`torch.linalg.matrix_rank`), and many matrices fit it equally well.
# </details>
#
# **3.** Why does rotary turn queries and keys, but not values?
# *Hint: what would a value turned by j mean, once it is mixed at position i?*
#
# <details><summary>Answer</summary>
#
# Where to look depends on the distance; what is found there should not. A turned value would arrive
# in a different direction from each position, and the output matrix, which does not know j, could
# not turn it back.
# </details>
#
# **4.** A key–value cache stores keys *after* they were turned. Why is that right with rotary
# positions, though later queries stand at ever new positions?
# *Hint: which of the two is turned by which position?*
#
# <details><summary>Answer</summary>
#
# A key is turned by its own position, which never changes. The distance arises only in the product
# with a query, and the query brings its own turn along.
# </details>
#
# ## What to read next in the code
#
# [`layers/positions.py`](../../src/minigpt/layers/positions.py), all of it; then `_make_positions`
# and `embedding_scale` in [`model.py`](../../src/minigpt/model.py).
