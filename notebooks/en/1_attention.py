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
# # 1 · Attention from dot products
#
# **Afterwards you know** why attention is a weighted average, why its scores are divided by √d_k,
# and why the mask comes before the softmax and not after it.
#
# *Attention Is All You Need*, section 3.2.1, equation 1 · next:
# [2 · Many heads](2_many_heads.ipynb) · [中文](../zh-CN/1_attention.ipynb)
#
# Every statement that can be computed is computed in the cell below it. Change the numbers and run
# it again: that is what the cells are for.

# %%
import inspect
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from torch.nn import functional as F

from minigpt.layers.attention import ScaledDotProductAttention, attention, causal_mask

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
# ## A dictionary that does not have to decide
#
# You know look-ups: a query meets keys; one key matches; its value comes back. Attention is such a
# look-up in which *every* key matches a little, and what comes back is a mixture of all values.
#
# For that, "matches" must become a number. Describe each word by two properties, *how much of an
# animal* and *how much of a drink* it is, and multiply them pair by pair:
# the sum is large where both words are strong in the same property. That is the dot product.

# %%
words = ["the", "cat", "drank", "milk"]
vectors = torch.tensor(
    [
        [0.0, 0.0],  # the: neither
        [2.0, 0.0],  # cat: an animal
        [0.0, 1.0],  # drank: has to do with drinks
        [0.0, 2.0],  # milk: a drink
    ]
)
print("cat · cat  =", (vectors[1] @ vectors[1]).item())  # 2·2 + 0·0
print("cat · milk =", (vectors[1] @ vectors[3]).item())  # 2·0 + 0·2
print("drank · milk =", (vectors[2] @ vectors[3]).item())  # 0·0 + 1·2

# %% [markdown]
# The next word is *it*, and it wants to know which animal it stands for. So its query says
# "animal": (2, 0). One dot product with each key gives the **scores**. To become shares of a whole
# they must be positive and sum to 1, which is what **softmax** does: raise e to each, divide by the
# sum. On paper: e⁴ ≈ 54.6 and e⁰ = 1, so *cat* gets 54.6 / (54.6 + 3) = 0.948.

# %%
query = torch.tensor([2.0, 0.0])
scores = vectors @ query
weights = scores.exp() / scores.exp().sum()
print("scores ", scores.tolist())
print("weights", [round(weight, 3) for weight in weights.tolist()])
assert torch.allclose(weights, scores.softmax(dim=0))
assert math.isclose(weights[1].item(), math.exp(4) / (math.exp(4) + 3), rel_tol=1e-6)

# %% [markdown]
# The answer is the average of the **values**, weighted by these shares. Keys and values are two
# different things: a key says *when to listen to me*, a value says *what I tell*. Let the values be
# anything, say one number per word.

# %%
values = torch.tensor([10.0, 20.0, 30.0, 40.0])
answer = weights @ values
print(f"answer {answer:.2f}")
assert values.min() <= answer <= values.max()

# %% [markdown]
# The answer lies between the smallest and the largest value, and always will: a weighted average
# cannot leave the range of what it averages. **Attention never makes anything up; it mixes.** What
# makes something new of the mixture is the feed-forward network, in
# [notebook 4](4_feed_forward_norms_residuals.ipynb).
#
# Two properties of softmax are worth keeping. Only *differences* of scores count: the same number
# added to all of them changes nothing. And each difference becomes a *ratio*: a score that is
# higher by 1 gets e ≈ 2.718 times the weight, wherever the two stand.

# %%
scores = torch.tensor([1.0, 2.0, 5.0])
weights = scores.softmax(dim=0)
assert torch.allclose(weights, (scores + 100).softmax(dim=0))
print("weight of the second over that of the first:", (weights[1] / weights[0]).item())
assert torch.isclose(weights[1] / weights[0], torch.tensor(math.e))

# %% [markdown]
# ## The equation
#
# All queries at once are the rows of a matrix Q, all keys those of K, all values those of V. Then
# one matrix product holds every score, and the whole thing is one line of the paper:
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V
# \qquad (1)$$
#
# This is that line in Mini-GPT, taken from the source as you read this. Three things in it are
# still unexplained, and the rest of this notebook takes them one by one: the division by √d_k,
# `visible`, and the row that sees nothing.

# %%
show(attention)

# %% [markdown]
# Is it right? PyTorch has the same function, in compiled code. The two must agree, in what they
# return and in the gradients that flow back, for any sizes. (The sizes are different primes, so
# that no exchange of two axes could pass unseen.)

# %%
n_batch, n_heads, n_queries, n_keys, d_head = 2, 3, 5, 7, 11
q = torch.randn(n_batch, n_heads, n_queries, d_head, requires_grad=True)
k = torch.randn(n_batch, n_heads, n_keys, d_head, requires_grad=True)
v = torch.randn(n_batch, n_heads, n_keys, d_head, requires_grad=True)
visible = torch.rand(n_queries, n_keys) < 0.7

ours, weights = attention(q, k, v, visible)
theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
torch.testing.assert_close(ours, theirs)

direction = torch.randn_like(ours)
our_gradients = torch.autograd.grad((ours * direction).sum(), (q, k, v))
their_gradients = torch.autograd.grad((theirs * direction).sum(), (q, k, v))
torch.testing.assert_close(our_gradients, their_gradients)
torch.testing.assert_close(weights.sum(dim=-1), torch.ones(n_batch, n_heads, n_queries))
print("output ", tuple(ours.shape), "  largest difference", (ours - theirs).abs().max().item())
print("weights", tuple(weights.shape))

# %% [markdown]
# ## Why √d_k
#
# The paper's footnote 4 has the reason in one sentence. Let the components of q and k be
# independent, with mean 0 and variance 1. Each product of a pair then has variance 1, too; a dot
# product adds d_k of them; variances of independent things add up. So q · k has **variance d_k**,
# and a typical score is about √d_k large. Measured:

# %%
widths = [2**power for power in range(11)]  # 1 … 1,024
n_rows, n_choices = 1_000, 16  # queries, each with its own 16 keys
measured = []
raw_scores = {}
for width in widths:
    q = torch.randn(n_rows, 1, width)
    k = torch.randn(n_rows, n_choices, width)
    raw_scores[width] = (q @ k.transpose(-2, -1)).squeeze(1)  # (rows, choices)
    measured.append(raw_scores[width].var().item())

for width, variance in zip(widths, measured, strict=True):
    print(f"d_k {width:5}   variance {variance:8.1f}   after the division {variance / width:.2f}")
    assert 0.8 < variance / width < 1.25

# %% [markdown]
# Why is a large score bad? Because softmax turns differences into ratios. At d_k = 64 scores lie
# around ±8, and e⁸ ≈ 3,000: the winner takes all, before anything was learned. And where the winner
# takes all, nothing *can* be learned: for two keys, with weight w for the first, the derivative of
# w with respect to its score is w (1 − w). That is 0.25 at w = 0.5, and 0.0001 at w = 0.9999. The
# gradient is gone, whichever of the two was right.
#
# For any number of keys the derivatives form the matrix diag(w) − w wᵀ. Its size tells how much of
# a gradient passes through the softmax.


# %%
def passing_gradient(scores):
    """Return the size of the softmax's Jacobian, diag(w) − w wᵀ, for each row of scores."""
    weights = scores.softmax(dim=-1)
    jacobian = torch.diag_embed(weights) - weights.unsqueeze(-1) * weights.unsqueeze(-2)
    return jacobian.flatten(1).norm(dim=-1)


largest = {"undivided": [], "divided by √d_k": []}
gradient = {"undivided": [], "divided by √d_k": []}
for width in widths:
    for name, divisor in (("undivided", 1.0), ("divided by √d_k", math.sqrt(width))):
        scores = raw_scores[width] / divisor
        largest[name].append(scores.softmax(dim=-1).amax(dim=-1).median().item())
        gradient[name].append(passing_gradient(scores).median().item())

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for name, color in (("undivided", "#e8710a"), ("divided by √d_k", "#145090")):
    left.plot(widths, largest[name], "o-", color=color, label=name)
    right.plot(widths, gradient[name], "o-", color=color, label=name)
left.set(xscale="log", xlabel="d_k", title="largest of 16 weights (median)", ylim=(0, 1.05))
right.set(xscale="log", yscale="log", xlabel="d_k", title="gradient through the softmax (median)")
left.legend(frameon=False)
plt.show()

lost = gradient["divided by √d_k"][-1] / gradient["undivided"][-1]
print(f"at d_k = 1,024 the division lets {lost:,.0f} times more gradient through")
assert largest["undivided"][-1] > 0.99 > 0.5 > largest["divided by √d_k"][-1]
assert lost > 100

# %% [markdown]
# From d_k = 4 on the blue lines are flat: after the division, nothing depends on the width of a
# head any more. That is the purpose. A head can be made wider without becoming more stubborn.
#
# (And note what this is *not*: a law. The division only sets where training starts. A model that
# wants sharp weights can learn longer queries; exercise 3 asks what else would have done.)
#
# ## The mask, and why −∞ before the softmax
#
# A language model is trained to say the next word at *every* position at once. Position 3 must not
# see position 4: that is the answer it is asked for. `visible` says who may look at whom; a hidden
# score becomes −∞ before the softmax. As e^(−∞) is exactly 0, a hidden position gets no weight, and
# the visible ones share the whole 1 among themselves.
#
# Two other ways look just as good, run without an error, and are wrong. Both are found in the wild.
#
# - **A: softmax first, then times 0.** The rows no longer sum to 1. Worse, the hidden scores are
#   still in the denominator.
# - **B: a matrix of ones and zeros given to PyTorch as float.** A boolean mask means "may look"; a
#   float mask is *added to the scores*. Here it adds 1 to what is visible and 0 to what is hidden.


# %%
def right_way(x):
    """Hide the future before the softmax."""
    return attention(x, x, x, causal_mask(len(x), len(x)))[0]


def zero_after_softmax(x):
    """Way A: multiply the weights by 0 where the future is."""
    weights = (x @ x.T / math.sqrt(x.size(-1))).softmax(dim=-1)
    return (weights * causal_mask(len(x), len(x))) @ x


def float_tril(x):
    """Way B: pass ones and zeros as floats to PyTorch."""
    mask = torch.ones(len(x), len(x)).tril()
    return F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=mask)[0]


# %% [markdown]
# The test for all three is the same, and it is the one test worth having for any language model:
# **change one position, and see which outputs move.** Below, row i and column j show how much
# output i moves when input j is nudged. Right of the diagonal is the future: it must be white.


# %%
def influence(compute, n_positions=6, width=8):
    """Return how much each output (row) depends on each input (column)."""
    x = torch.randn(n_positions, width, generator=torch.Generator().manual_seed(4))
    jacobian = torch.autograd.functional.jacobian(compute, x)  # (T, D, T, D)
    return jacobian.square().sum(dim=(1, 3)).sqrt()


ways = {
    "−∞ before the softmax": right_way,
    "A: 0 after the softmax": zero_after_softmax,
    "B: float tril, added": float_tril,
}
figure, all_axes = plt.subplots(1, 3, figsize=(10, 3.5), layout="constrained")
for axes, (name, way) in zip(all_axes, ways.items(), strict=True):
    moved = influence(way)
    from_future = moved.triu(1).max().item()
    print(f"{name:24} largest influence of a later position: {from_future:.4f}")
    axes.imshow(moved.sqrt(), vmin=0, vmax=2)
    axes.set(title=name, xlabel="input nudged", ylabel="output that moves")
    assert (from_future == 0) == (way is right_way)
plt.show()

# %% [markdown]
# In A the later words act through the denominator alone; in B they are mixed in like any others.
# Neither raises an error, and a loss that is too good is a loss one likes to believe: only this
# test tells.
#
# One could repair A by dividing each row by its sum again. In exact arithmetic that equals the
# right way. In floating point it does not: if a *hidden* score is larger than the visible ones by
# some 100, the visible weights underflow to 0 and the repair divides 0 by 0.

# %%
scores = torch.tensor([0.0, 1.0, 120.0])  # the last one is hidden
visible = torch.tensor([True, True, False])
repaired = scores.softmax(dim=0) * visible
repaired = repaired / repaired.sum()
right = scores.masked_fill(~visible, -math.inf).softmax(dim=0)
print("repaired", repaired.tolist(), "   right", [round(weight, 4) for weight in right.tolist()])
assert repaired.isnan().all()
assert not right.isnan().any()

# %% [markdown]
# ## A row that sees nothing
#
# In a batch of sentences of unequal length the short ones are filled up with padding, which nobody
# should look at. So there can be a row in which *everything* is hidden. All its scores are −∞, and
# softmax is 0/0. A common way out is a large negative number such as −10⁹ in place of −∞. Then
# the row has no NaN; instead it looks at everything that was forbidden, evenly.

# %%
hidden = torch.zeros(1, 4, dtype=torch.bool)  # one query, four keys, none visible
v = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
scores = torch.randn(1, 4)
minus_infinity = scores.masked_fill(~hidden, -math.inf).softmax(dim=-1)
large_number = scores.masked_fill(~hidden, -1e9).softmax(dim=-1)
print("−∞   ", minus_infinity.tolist(), "→", (minus_infinity @ v).item())
print("−10⁹ ", large_number.tolist(), "→", (large_number @ v).item())

q = torch.randn(1, 8, requires_grad=True)
k = torch.randn(4, 8)
output, weights = attention(q, k, v, hidden)
(gradient_of_q,) = torch.autograd.grad(output.sum(), q)
print("ours ", weights.tolist(), "→", output.item(), "  gradient", gradient_of_q.abs().max().item())
assert output.item() == 0
assert gradient_of_q.isfinite().all()

added = q @ k.T + torch.full((1, 4), -math.inf)  # the same mask, added to the scores
mended = added.softmax(dim=-1).nan_to_num(0.0)
(gradient_of_q,) = torch.autograd.grad((mended @ v).sum(), q)
print("NaN replaced afterwards: weights", mended.tolist(), "  gradient", gradient_of_q.max().item())
assert gradient_of_q.isnan().all()

# %% [markdown]
# Mini-GPT defines it: who sees nothing gets nothing, weights 0 and output 0. The last lines of
# `attention` put finite scores into such a row *first* and take its weights away afterwards. The
# other order mends only what one sees: in the last line above the weights are clean, and the
# gradient is NaN, since 0 times NaN is NaN. One such row in a batch ruins every weight of a model.
#
# ## As a module, returning output and weights
#
# The class of the classic tutorials. `mask` may be any shape that broadcasts; where it is 0 is
# hidden. In training, dropout falls on the weights: now and then a connection is cut, so that no
# position relies on a single other one. What is *returned* are the weights before that, so their
# rows always sum to 1.

# %%
show(ScaledDotProductAttention)

# %%
module = ScaledDotProductAttention(dropout=0.1)
q, k, v = torch.randn(3, 2, 8, 10, 64).unbind()  # batch 2, 8 heads, 10 positions, d_k 64
output, weights = module(q, k, v)
assert torch.allclose(weights.sum(dim=-1), torch.ones(2, 8, 10))
once, again = module(q, k, v)[0], module(q, k, v)[0]
assert not torch.equal(once, again)  # training: dropout draws anew
module.eval()
assert torch.equal(module(q, k, v)[0], module(q, k, v)[0])  # evaluation: nothing is drawn
print("output", tuple(output.shape), "  weights", tuple(weights.shape))

# %% [markdown]
# ## What attention cannot see
#
# Now the surprise. Take two sentences that no reader would confuse, give each word its vector, and
# let every word attend to all words.

# %%
vector_of = dict(zip(("dog", "bites", "man"), torch.randn(3, 16), strict=True))


def attend(sentence):
    """Return what each word has gathered from all the words of the sentence."""
    x = torch.stack([vector_of[word] for word in sentence.split()])
    everything = torch.ones(len(x), len(x), dtype=torch.bool)
    output, _ = attention(x, x, x, everything)
    return dict(zip(sentence.split(), output, strict=True))


one, other = attend("dog bites man"), attend("man bites dog")
for word in vector_of:
    difference = (one[word] - other[word]).abs().max().item()
    print(f"{word:6} differs by {difference:.1e}")
    assert difference < 1e-6

# %% [markdown]
# The same, to the last digits of float32. **Attention sees a set, not a sequence.** Shuffle the
# positions and the outputs are shuffled alike, nothing else: attention is *equivariant* under
# permutations. It could hardly be otherwise: nowhere in equation 1 does a position's number occur.

# %%
x = torch.randn(13, 16)
everything = torch.ones(13, 13, dtype=torch.bool)
order = torch.randperm(13)
output, _ = attention(x, x, x, everything)
shuffled, _ = attention(x[order], x[order], x[order], everything)
torch.testing.assert_close(shuffled, output[order])

# %% [markdown]
# So word order has to be put in from outside: that is [notebook 3](3_positions.ipynb). Before it,
# [notebook 2](2_many_heads.ipynb) asks what one average cannot do.
#
# ## Exercises
#
# **1.** Queries (1, 1), keys (1, 1), (1, −1), (−1, −1). What are the weights, without and with the
# division by √2? Which of the two looks more evenly?
# *Hint: two of the three scores are 2 and −2.*
#
# <details><summary>Answer</summary>
#
# Scores 2, 0, −2. Without division: e² : 1 : e⁻² = 7.389 : 1 : 0.135, so 0.867, 0.117, 0.016. With
# it: scores 1.414, 0, −1.414, weights 0.768, 0.187, 0.045: more evenly. Dividing scores always
# makes the weights more even, like a temperature above 1.
# </details>
#
# **2.** All queries are 0. What does position i gather under a causal mask?
# *Hint: what is softmax of equal scores?*
#
# <details><summary>Answer</summary>
#
# Equal scores give equal weights: the plain mean of the values at 0 … i.
# `v.cumsum(0) / torch.arange(1, len(v) + 1)[:, None]` computes the same. A head that has learned
# nothing is a running mean.
# </details>
#
# **3.** T5 (Raffel et al. 2020) does not divide by √d_k at all. With what standard deviation must
# its query vectors start to have the same scores as here?
# *Hint: dividing the product by a number is the same as dividing q by it.*
#
# <details><summary>Answer</summary>
#
# 1/√d_k in place of 1: the division is folded into the first value of W^Q. At the start the two are
# the same function. Training differs, since the same step on W^Q then moves the scores √d_k times
# as much.
# </details>
#
# **4.** How many bytes do the weights of one layer take for 8 heads and 4,096 positions in float32?
# Why does `fast_causal_attention` never hold them?
# *Hint: one number per head and pair of positions.*
#
# <details><summary>Answer</summary>
#
# 8 · 4,096² · 4 bytes = 537 MB for each text of the batch, and four times as much for twice the
# length. The softmax of a row can be computed over blocks of keys, with a running maximum and a
# running sum (Dao et al. 2022), so the whole matrix need never exist.
# </details>
#
# ## What to read next in the code
#
# [`layers/attention.py`](../../src/minigpt/layers/attention.py), from the top to
# `ScaledDotProductAttention`; then [`tests/test_attention.py`](../../tests/test_attention.py),
# which holds it to the same properties.
