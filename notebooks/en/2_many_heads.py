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
# # 2 · Many heads
#
# **Afterwards you know** what one head cannot do, what splitting into heads costs (nothing),
# whether each head finds a relation of its own, and why decoding with a cache of keys and values is
# exact.
#
# *Attention Is All You Need*, section 3.2.2 · before: [1 · Attention](1_attention.ipynb) · next:
# [3 · Positions](3_positions.ipynb) · [中文](../zh-CN/2_many_heads.ipynb)

# %%
import inspect

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from torch import nn
from torch.nn import functional as F

from minigpt.attention_maps import recorded
from minigpt.config import ModelConfig
from minigpt.layers.attention import (
    CausalSelfAttention,
    KeyValueCache,
    MultiHeadAttention,
    causal_mask,
    merge_heads,
    split_heads,
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
# ## One head is one average
#
# In "the cat drank milk", the verb has two questions: *who* drank, and *what* was drunk? A head has
# one row of weights per word, and the row sums to 1. What goes to the one is taken from the other.
# Give each half, and look at what comes back when the two change places.

# %%
cat, milk = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])
half = torch.tensor([0.5, 0.5])

cat_drank_milk = half @ torch.stack((cat, milk))  # weights for (who, what)
milk_drank_cat = half @ torch.stack((milk, cat))
print(
    "one head:  cat drank milk",
    cat_drank_milk.tolist(),
    "  milk drank cat",
    milk_drank_cat.tolist(),
)
assert torch.equal(cat_drank_milk, milk_drank_cat)

who, what = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
two_heads = torch.stack((who, what))  # a row of weights for each head
cat_drank_milk = (two_heads @ torch.stack((cat, milk))).flatten()
milk_drank_cat = (two_heads @ torch.stack((milk, cat))).flatten()
print(
    "two heads: cat drank milk",
    cat_drank_milk.tolist(),
    "  milk drank cat",
    milk_drank_cat.tolist(),
)
assert not torch.equal(cat_drank_milk, milk_drank_cat)

# %% [markdown]
# One head returned (2, 3), which is neither cat nor milk, and the same for both sentences. Two
# heads keep the two answers side by side. The paper says it in a sentence: "With a single attention
# head, averaging inhibits this."
#
# (Unequal halves, say 0.7 and 0.3, would tell the two sentences apart, at the price of hearing one
# of the words faintly. Further down we see how far a real model gets with that.)
#
# ## The equation, and the code
#
# $$\mathrm{MultiHead}(Q, K, V) = \mathrm{Concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h)\, W^O,
# \qquad \mathrm{head}_i = \mathrm{Attention}(Q W_i^Q, K W_i^K, V W_i^V)$$
#
# Each head looks at the words through three matrices of its own, D × K each, with K = D / h. Side
# by side, the h matrices of the queries are one D × D matrix. So there is one product for all
# heads, and what follows is a matter of cutting its result into pieces.

# %%
show(MultiHeadAttention)

# %%
show(split_heads)

# %%
show(merge_heads)

# %% [markdown]
# On a real batch: 2 texts, 5 positions, D = 12, three heads of K = 4. Head 1 gets channels 4 to 7
# of every position. Merging puts everything back where it was.

# %%
n_batch, n_positions, d_model, n_heads = 2, 5, 12, 3
d_head = d_model // n_heads
x = torch.randn(n_batch, n_positions, d_model)
heads = split_heads(x, n_heads)
print(tuple(x.shape), "→", tuple(heads.shape), "→", tuple(merge_heads(heads).shape))
assert torch.equal(heads[:, 1], x[:, :, 4:8])
assert torch.equal(merge_heads(heads), x)

# %% [markdown]
# There is a trap here, and it is silent. `view` straight to (B, H, T, K) has the right *shape*. But
# a view only renumbers what lies in memory, so "head 0" then holds all channels of the first
# positions, and no channel of the last ones. Number each entry by its position and see:

# %%
position = torch.arange(n_positions)[None, :, None].expand(1, n_positions, d_model)
right = split_heads(position, n_heads)
wrong = position.reshape(1, n_heads, n_positions, d_head)
print("which positions are in head 0, row by row")
print("right: view (B, T, H, K), then transpose\n", right[0, 0])
print("wrong: view (B, H, T, K)\n", wrong[0, 0])
assert right.shape == wrong.shape
assert wrong[0, 0].max() == 1  # positions 2, 3 and 4 never come into head 0

# %% [markdown]
# In the wrong one, every row of a head mixes channels that come from several positions, the causal
# mask hides rows that are no positions, and nothing fails. The test is again the one of notebook 1:
# change a later word and see what moves.
#
# ## Equal to PyTorch's
#
# `nn.MultiheadAttention` keeps the three input matrices in one block. Copy our weights into it,
# hide the future and the padding of one text, and compare the outputs and the weights of each head.
# Mind the masks: PyTorch's layer wants True where a position is **hidden**, here it is where one
# **may look**.

# %%
d_model, n_heads, n_batch, n_positions = 35, 5, 3, 11
ours = MultiHeadAttention(d_model, n_heads, dropout=0.0)
theirs = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
with torch.no_grad():
    inputs = (ours.query, ours.key, ours.value)
    theirs.in_proj_weight.copy_(torch.cat([linear.weight for linear in inputs]))
    theirs.in_proj_bias.copy_(torch.cat([linear.bias for linear in inputs]))
    theirs.out_proj.weight.copy_(ours.output.weight)
    theirs.out_proj.bias.copy_(ours.output.bias)

x = torch.randn(n_batch, n_positions, d_model)
is_padding = torch.zeros(n_batch, n_positions, dtype=torch.bool)
is_padding[1, 8:] = True  # the second text ends after 8 words
visible = causal_mask(n_positions, n_positions) & ~is_padding.unsqueeze(1)  # (B, T, S)

output, weights = ours(x, x, x, visible)
their_output, their_weights = theirs(
    x,
    x,
    x,
    attn_mask=~causal_mask(n_positions, n_positions),
    key_padding_mask=is_padding,
    average_attn_weights=False,
)
torch.testing.assert_close(output, their_output, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(weights, their_weights, atol=1e-5, rtol=1e-5)
print("outputs", tuple(output.shape), "differ by", (output - their_output).abs().max().item())
print("weights", tuple(weights.shape), "differ by", (weights - their_weights).abs().max().item())

# %% [markdown]
# ## Concat is a sum
#
# Concatenating heads and multiplying by W^O sounds as if the heads were stirred together. Cut W^O
# into h strips of K rows and look again: Concat(head_1, …, head_h) W^O = head_1 W_1^O + … +
# head_h W_h^O. **Every head writes its own contribution, and the contributions are added up.**
# Therefore a single head can be switched off, and further down it will be.

# %%
v = split_heads(ours.value(x), n_heads)
mixed = weights @ v  # (B, H, T, K)
strips = ours.output.weight.T.view(n_heads, d_model // n_heads, d_model)  # W_i^O, (H, K, D)
contributions = mixed @ strips  # (B, H, T, D): what each head adds
torch.testing.assert_close(contributions.sum(dim=1) + ours.output.bias, output, atol=1e-5, rtol=0)
print("contributions of", n_heads, "heads:", tuple(contributions.shape))

# %% [markdown]
# ## What heads cost
#
# Nothing: h heads of width D / h have the parameters of one head of width D. What is paid with is
# the width of each. The scores of a head are x_i (W^Q W^K ᵀ) x_j, and that inner matrix has rank
# K at most: a head of width 1 compares words by a single number.

# %%
x = torch.randn(1, 256, 512)
for n_heads in (1, 2, 8, 64, 512):
    layer = MultiHeadAttention(d_model=512, n_heads=n_heads)
    n_parameters = sum(parameter.numel() for parameter in layer.parameters())
    w_q, w_k = (part.weight[: 512 // n_heads] for part in (layer.query, layer.key))  # of head 0
    rank = int(torch.linalg.matrix_rank(w_q.T @ w_k))
    print(
        f"{n_heads:3} heads of width {512 // n_heads:3}: {n_parameters:,} parameters, rank {rank}"
    )
    assert n_parameters == 4 * (512 * 512 + 512)
    assert rank <= 512 // n_heads

# %% [markdown]
# So there is an optimum in between. The paper found it by trying (table 3, rows A: 24.9 BLEU with
# one head, 25.8 with eight, 25.4 with 32): one head is 0.9 BLEU worse than eight, and 32 heads lose
# 0.4.
#
# ## Does each head learn a relation of its own?
#
# One often reads that eight heads attend to eight relations: grammar here, reference there. Do not
# believe it; measure it. Here is a task that needs exactly **two** look-ups. The model reads random
# symbols, and at each position must name the entry of a fixed table in the row of the *first*
# symbol of the text and the column of the *previous* symbol. Neither of the two alone helps.

# %%
n_symbols, n_positions = 7, 12
table = torch.randint(n_symbols, (n_symbols, n_symbols), generator=torch.Generator().manual_seed(0))


def exercises(n_texts, generator):
    """Return texts (B, T) and the answers (B, T − 1) wanted from position 1 on."""
    ids = torch.randint(n_symbols, (n_texts, n_positions), generator=generator)
    first, previous = ids[:, :1].expand(-1, n_positions - 1), ids[:, :-1]
    return ids, table[first, previous]


def trained_model(n_heads, n_steps=400):
    """Return a Mini-GPT of one block and its losses on the way."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    model = MiniGPT(
        ModelConfig(
            vocab_size=n_symbols,
            context_length=n_positions,
            d_model=32,
            n_heads=n_heads,
            n_layers=1,
            norm="layer",
            feed_forward="relu",
            bias=True,
            tie_embeddings=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(n_steps):
        ids, answers = exercises(64, generator)
        loss = F.cross_entropy(model(ids)[:, 1:].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses


test_ids, test_answers = exercises(500, torch.Generator().manual_seed(2))


@torch.no_grad()
def correct(model):
    """Return the share of right answers in texts that the model has not seen."""
    return (model(test_ids)[:, 1:].argmax(dim=-1) == test_answers).float().mean().item()


models = {}
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for n_heads, color in ((1, "#e8710a"), (2, "#145090"), (8, "#8abde0")):
    models[n_heads], losses = trained_model(n_heads)
    label = f"h = {n_heads}: {correct(models[n_heads]):.0%} correct"
    axes.plot(losses, color=color, label=label)
axes.set(xlabel="step", ylabel="loss")
axes.legend(frameon=False)
plt.show()

assert len({sum(p.numel() for p in model.parameters()) for model in models.values()}) == 1
assert correct(models[1]) < 0.8 < 0.99 < correct(models[2])
assert correct(models[8]) > 0.99

# %% [markdown]
# Three models, the same number of parameters to the last one, the same data. Two heads solve the
# task; one head gets stuck half-way. (It is not quite hopeless: unequal weights tell the two
# symbols apart a little, as said above. With `n_steps=2_000` it comes to 57 %.)
#
# Now look inside. `recorded` shows the weights of each head; here they are averaged over 500 texts.
# Row: the position that looks. Column: where it looks.


# %%
@torch.no_grad()
def mean_weights(model):
    """Return the weights of the model's one block, averaged over the texts: (H, T, T)."""
    with recorded(model) as of_blocks:
        model(test_ids)
    return of_blocks[0].mean(dim=0)


maps = [*mean_weights(models[2]), *mean_weights(models[8])]
titles = [f"head {i} of 2" for i in range(2)] + [f"head {i} of 8" for i in range(8)]
figure, all_axes = plt.subplots(2, 5, figsize=(10, 4.4), layout="constrained")
for axes, weights, title in zip(all_axes.T.flatten(), maps, titles, strict=True):
    axes.imshow(weights, vmin=0, vmax=1)
    axes.set_title(title, fontsize=10)
    axes.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# With two heads (on the left) it is as the saying goes: one head, one relation. The first symbol is
# the first column, the previous symbol the line just below the diagonal. With eight heads there are
# not eight relations, since there are only two to find. Several do the same, and others look here
# and there, three or four symbols back, which this task never asks for.
#
# A picture of weights does not yet say that a head *matters*. For that, switch it off: set its
# strip of W^O to 0, so that it adds nothing, and count the right answers.


# %%
@torch.no_grad()
def without(model, switched_off):
    """Return the share of right answers while some heads add nothing."""
    output = model.blocks[0].attention.output
    before = output.weight.clone()
    strips = output.weight.view(output.weight.size(0), model.config.n_heads, -1)  # (D, H, K)
    strips[:, switched_off] = 0.0
    share = correct(model)
    output.weight.copy_(before)
    return share


rows = torch.arange(2, n_positions)  # from here on, first and previous are two different positions
weights = mean_weights(models[8])
to_first = weights[:, rows, 0].mean(dim=-1)
to_previous = weights[:, rows, rows - 1].mean(dim=-1)
print("head   looks at first   at previous   correct without it")
for head in range(8):
    share = without(models[8], [head])
    print(f"{head:4} {to_first[head]:14.2f} {to_previous[head]:13.2f} {share:15.1%}")

previous_heads = [head for head in range(8) if to_previous[head] > 0.5]
other_heads = [head for head in range(8) if head not in previous_heads]
spared = [head for head in range(8) if without(models[8], [head]) > 0.98]
for what, heads in (
    ("all that look at the previous symbol", previous_heads),
    ("all others", other_heads),
    ("all that can be spared one by one", spared),
):
    print(f"without {what}, {heads}: {without(models[8], heads):.1%} correct")
assert without(models[8], previous_heads) < 0.6
assert without(models[8], other_heads) < 0.6
assert correct(models[8]) > 0.99  # everything is back in its place

# %% [markdown]
# So the honest answer is: *heads find what the task needs, not what they are counted for.* Several
# heads may do the same; some do nothing that is missed, however decided their picture looks. And
# copies cover for each other: those in the last line cost next to nothing one by one, but a tenth
# of the answers all together. Nor are two trainings alike, as exercises 1 and 2 show.
#
# Of your own model, `minigpt heads RUN` tells what each head looks at and what the loss is without
# it; [notebook 7](7_mini_gpt.ipynb) does so for a model trained on WikiText-2.
#
# ## Self-attention to the past, and its cache
#
# What Mini-GPT runs is multi-head attention with a causal mask, always. That it is *always* causal
# makes it possible to read a text word by word and never compute anything twice.

# %%
show(CausalSelfAttention.forward)

# %%
show(KeyValueCache)

# %% [markdown]
# **Why is this exact?** Not approximately: the same numbers.
#
# 1. The embedding of position i depends on its word and its position alone, and neither changes
#    when the text grows.
# 2. If in some layer the vectors of positions 0 … i depend on words 0 … i and their positions
#    alone, then so do they in the next: position i attends to positions 0 … i, and norm and
#    feed-forward see one position.
# 3. So, by induction, in *no* layer does the vector of a past position depend on what came later.
#    When a new word arrives, all keys and values of the past are what they were. Keeping them is
#    the same as computing them again.
#
# The queries of the past are not kept: their rows were answered already, and nobody asks them
# again. Let us see it, word by word against all at once, in a model of three blocks with random
# weights.

# %%
config = ModelConfig(vocab_size=89, context_length=64, d_model=48, n_heads=6, n_layers=3)
model = MiniGPT(config).eval()
ids = torch.randint(89, (1, 64))
with torch.no_grad():
    at_once = model.hidden(ids)
    cache = model.new_cache(batch_size=1)
    word_by_word = torch.cat([model.hidden(ids[:, [i]], cache) for i in range(64)], dim=1)
difference = (word_by_word - at_once).abs().max().item()
print(f"largest difference {difference:.1e} in numbers of size {at_once.abs().max().item():.1f}")
assert difference < 1e-5
print("positions computed: ", sum(range(1, 65)), "without a cache,", 64, "with it")

# %% [markdown]
# Differences in the last digit remain, because sums of floats depend on their order. In exact
# arithmetic there would be none.
#
# The argument also says when a cache would be *wrong*: as soon as anything looks ahead. Take the
# same layer without a mask, as in an encoder, and append one word. The past changes.

# %%
layer = MultiHeadAttention(d_model=48, n_heads=6, dropout=0.0)
x = torch.randn(1, 12, 48)


def change_of_past(is_causal):
    """Return how much the first 11 outputs move when the 12th word arrives."""
    long = layer(x, x, x, causal_mask(12, 12) if is_causal else None)[0]
    short = layer(*[x[:, :11]] * 3, causal_mask(11, 11) if is_causal else None)[0]
    return (long[:, :11] - short).abs().max().item()


print(f"causal: {change_of_past(True):.1e}    without a mask: {change_of_past(False):.1e}")
assert change_of_past(True) < 1e-6 < 1e-3 < change_of_past(False)

# %% [markdown]
# The price of a cache is memory: keys and values of every layer and position. **Grouped-query
# attention** (Ainslie et al. 2023) lets several query heads share one head of keys and values, so
# that the cache shrinks by that factor. Which query heads look where stays free; what they can find
# is shared.

# %%
for n_kv_heads in (6, 3, 1):
    config = ModelConfig(
        vocab_size=89, context_length=64, d_model=48, n_heads=6, n_kv_heads=n_kv_heads, n_layers=3
    )
    cache = MiniGPT(config).new_cache(batch_size=1)
    keys = torch.stack([*cache.keys])  # one for each layer
    n_bytes = 2 * 4 * keys.numel()  # the values are as large
    print(f"6 query heads, {n_kv_heads} key heads: keys {tuple(keys.shape)}, {n_bytes:,} bytes")
    assert n_bytes == 4 * 2 * 3 * n_kv_heads * 64 * 8

# %% [markdown]
# ## Exercises
#
# **1.** Exchange heads 0 and 1 of a layer: their rows in W^Q, W^K, W^V. What must be exchanged in
# W^O so that the layer computes the same? What does that say about "head 3" in two trainings?
# *Hint: Concat is a sum.*
#
# <details><summary>Answer</summary>
#
# Their strips in W^O: its columns 0 … K − 1 and K … 2K − 1 in PyTorch's layout. A sum does not care
# for the order of its terms, so the number of a head means nothing: head 3 of another training is
# another head.
# </details>
#
# **2.** Train with another seed (`torch.manual_seed(2)` in `trained_model`). Are the same heads of
# the eight the ones that look at the first symbol? With two heads?
# *Hint: guess from exercise 1 first.*
#
# <details><summary>Answer</summary>
#
# No: which head takes which role is decided by the random start. What stays is that
# both roles are taken by some head.
# </details>
#
# **3.** Why has the decoder no cache of queries?
# *Hint: which row of the weights is new when a word arrives?*
#
# <details><summary>Answer</summary>
#
# Only the last row. It is the new query against all keys, mixing all values. Old queries belong to
# old rows, whose outputs are known already.
# </details>
#
# **4.** With learned positions and a window that slides by one word (the oldest word is dropped,
# everything moves one place to the left), is the cache still exact?
# *Hint: step 1 of the argument: which of the two changes when the window slides?*
#
# <details><summary>Answer</summary>
#
# No. Each word has a new position, hence another vector, hence another key: the cached keys are no
# longer those. Mini-GPT therefore moves its window by half its length at a time and reads that half
# again ([`decoding.py`](../../src/minigpt/decoding.py)).
# </details>
#
# ## What to read next in the code
#
# [`layers/attention.py`](../../src/minigpt/layers/attention.py) from `split_heads` to the end;
# [`attention_maps.py`](../../src/minigpt/attention_maps.py) for how weights are recorded without a
# trace in the model; `next_logits` and `new_cache` in [`model.py`](../../src/minigpt/model.py).
