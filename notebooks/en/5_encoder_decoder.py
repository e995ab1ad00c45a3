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
# # 5 · Encoder and decoder
#
# **Afterwards you know** the whole Transformer of the paper at work: which mask does what in
# training and in decoding, how label smoothing and the warm-up look, and you have trained one that
# makes no mistake.
#
# *Attention Is All You Need*, figure 1 and sections 3.1, 3.2.3, 5.3, 5.4, 6.1 · before:
# [4 · Feed-forward, norms, residuals](4_feed_forward_norms_residuals.ipynb) · next:
# [6 · WikiText-2 and the vocabulary](6_wikitext2_and_the_vocabulary.ipynb) ·
# [中文](../zh-CN/5_encoder_decoder.ipynb)

# %%
import inspect
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from torch.nn import functional as F

from minigpt.transformer import (
    DecoderLayer,
    EncoderLayer,
    Transformer,
    beam_search,
    greedy_decode,
    label_smoothing_loss,
    look_ahead_mask,
    padding_mask,
    paper_rate,
)

torch.manual_seed(1)
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
# ## A language with two sentences
#
# Translation needs millions of sentences. A task with the same form, but small enough for a minute,
# is this: the source is an order and some letters, `copy b a d` or `reverse b a d`; the target is
# what the order asks for. Lengths differ, so there is padding; the order stands at one end, so each
# letter of the answer depends on a word far away; and for `reverse` the first letter out is the
# last one in.

# %%
words = ["<unk>", "<pad>", "<bos>", "<eos>", "copy", "reverse", *"abcdefghij"]
PAD, BOS, EOS, COPY, REVERSE = 1, 2, 3, 4, 5
LONGEST = 7


def exercises(n, generator, shortest=1, longest=LONGEST):
    """Return sources (n, S) and targets (n, S + 1), padded, as ids."""
    letters = torch.randint(6, len(words), (n, longest), generator=generator)
    lengths = torch.randint(shortest, longest + 1, (n, 1), generator=generator)
    backwards = torch.randint(2, (n, 1), generator=generator) == 1
    place = torch.arange(longest)
    is_padding = place >= lengths
    reversed_letters = letters.gather(1, (lengths - 1 - place).clamp(min=0))
    answers = torch.where(backwards, reversed_letters, letters).masked_fill(is_padding, PAD)
    orders = torch.where(backwards, REVERSE, COPY)
    sources = torch.cat((orders, letters.masked_fill(is_padding, PAD)), dim=1)
    targets = torch.cat((torch.full((n, 1), BOS), answers, torch.full((n, 1), PAD)), dim=1)
    return sources, targets.scatter(1, lengths + 1, EOS)


def spell(ids):
    """Return ids as words."""
    return " ".join(words[i] for i in ids.tolist())


sources, targets = exercises(4, torch.Generator().manual_seed(303))
for source, target in zip(sources, targets, strict=True):
    print(f"{spell(source):50} {spell(target)}")

# %% [markdown]
# ## The parts
#
# Everything in it you know from notebooks 1 to 4. An encoder layer is self-attention and
# feed-forward, each with its residual and norm.

# %%
show(EncoderLayer)

# %% [markdown]
# A decoder layer has a third part between the two: **cross attention**. Its queries come from the
# target, its keys and values from what the encoder made of the source, the *memory*. This is the
# one place where the two sequences meet.

# %%
show(DecoderLayer)

# %% [markdown]
# The whole model is used in two ways. In training `forward` gets source *and* target. When it
# writes, there is no target yet: `encode` once, then `decode` again and again.

# %%
show(Transformer.forward)

# %%
show(Transformer.decode)

# %% [markdown]
# ## Three masks
#
# For the first and the last of the four exercises above, and for each of the three attentions: row
# = the position that looks, blue = what it may look at.

# %%
inputs = targets[:, :-1]  # the decoder never reads the last word: nothing comes after it
chosen = (0, 3)
figure, all_axes = plt.subplots(2, 3, figsize=(10, 6.4), layout="constrained")
for row, i in enumerate(chosen):
    n_source, n_target = sources.size(1), inputs.size(1)
    of_source = padding_mask(sources, PAD)[i]  # (1, S): the same for every row
    of_target = look_ahead_mask(inputs, PAD)[i]  # (T, T)
    pictures = {
        "encoder: no padding": (of_source.expand(n_source, -1), sources, sources),
        "decoder, self: no padding, no future": (of_target, inputs, inputs),
        "decoder, cross: no padding": (of_source.expand(n_target, -1), inputs, sources),
    }
    for axes, (title, (visible, rows, columns)) in zip(
        all_axes[row], pictures.items(), strict=True
    ):
        axes.imshow(visible, vmin=0, vmax=1.6)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(columns.size(1)), spell(columns[i]).split(), rotation=90)
        axes.set_yticks(range(rows.size(1)), spell(rows[i]).split())
        axes.tick_params(labelsize=7, length=0)
plt.show()

# %% [markdown]
# Rows of `<pad>` look, too, since something must be computed for them; nobody ever looks at *them*,
# and the loss does not count them.
#
# | mask | training: all positions at once | decoding: one word at a time |
# |---|---|---|
# | padding, encoder | short sources are not disturbed by their filling | the same, once |
# | padding, cross | the decoder does not read the filling | the same, for each word |
# | look-ahead | position i must say word i + 1 unseen | the future does not exist yet |
#
# (The look-ahead mask stays on in decoding, so that each position computes what it computed before.
# Evaluation hides what training hides: there, too, the whole text goes in at once. With a cache of
# keys and values, notebook 2, only the newest word is computed; its row of the mask hides nothing,
# so none is needed.)
#
# The words of the target go in shifted by one (*outputs shifted right* in figure 1): what position
# i reads, and what it has to say. Feeding the right words whatever the model would have said is
# called **teacher forcing**, and it is what makes all positions one single pass.

# %%
print("reads", [words[w] for w in targets[0, :-1].tolist()])
print("says ", [words[w] for w in targets[0, 1:].tolist()])

# %% [markdown]
# Do the masks do what the pictures say? On a model with random weights, three tests. More padding
# changes nothing; a later target word changes nothing before it; and a word at a time gives what
# all at once gave, *because* nothing looks ahead.

# %%
torch.manual_seed(1)
model = Transformer(len(words), len(words), d_model=32, n_heads=4, n_layers=2, d_ff=128, pad_id=PAD)
model.eval()
with torch.no_grad():
    logits = model(sources, inputs)

    longer = F.pad(sources, (0, 5), value=PAD)
    torch.testing.assert_close(model(longer, inputs), logits, atol=1e-5, rtol=1e-5)

    changed = inputs.clone()
    changed[:, 4:] = 6
    after = model(sources, changed)
    torch.testing.assert_close(after[:, :4], logits[:, :4], atol=1e-5, rtol=1e-5)
    assert (after[:, 4:] - logits[:, 4:]).abs().max() > 0.01

    memory = model.encode(sources)
    for n_words in range(1, inputs.size(1) + 1):
        last = model.decode(inputs[:, :n_words], memory, sources)[:, -1]
        torch.testing.assert_close(last, logits[:, n_words - 1], atol=1e-5, rtol=1e-5)
print("all three hold")

# %% [markdown]
# ## Label smoothing: never quite sure
#
# The target is not "p(right) = 1" but 0.9 for the right word, and the other 0.1 spread over the
# whole vocabulary (section 5.4, ε = 0.1). Left: the target for one position. Right: the loss as a
# function of the probability that the model gives to the right word, when the rest is spread
# evenly.

# %%
n_words, smoothing = len(words), 0.1
wanted = torch.full((n_words,), smoothing / n_words)
wanted[6] += 1 - smoothing

p = torch.linspace(0.3, 0.9999, 400)
rest = ((1 - p) / (n_words - 1)).unsqueeze(1).expand(-1, n_words - 1)
logits = torch.cat((p.unsqueeze(1), rest), dim=1).log()  # (400, V), the right word is word 0
right = torch.zeros(1, 1, dtype=torch.int64)
smoothed = torch.stack([label_smoothing_loss(row[None, None], right, 0.1, PAD) for row in logits])
plain = torch.stack([label_smoothing_loss(row[None, None], right, 0.0, PAD) for row in logits])

figure, (left, middle) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
left.bar(range(n_words), wanted, color="#145090")
left.set_xticks(range(n_words), words, rotation=90, fontsize=8)
left.set(title="what is wanted where the right word is a")
middle.plot(p, plain, color="#e8710a", label="plain")
middle.plot(p, smoothed, color="#145090", label="ε = 0.1")
middle.set(xlabel="probability of the right word", title="loss", ylim=(0, 1.4))
middle.legend(frameon=False)
plt.show()

floor = -(wanted * wanted.log()).sum().item()
best = p[smoothed.argmin()].item()
print(f"the best probability is {best:.3f}, and there the loss is {smoothed.min():.4f}")
assert math.isclose(best, 1 - smoothing + smoothing / n_words, abs_tol=2e-3)
assert math.isclose(smoothed.min().item(), floor, abs_tol=1e-3)

# %% [markdown]
# Two things for the training below. Being surer than 0.906 costs. And the loss cannot go below
# **0.565**, the entropy of what is wanted: a model that shows that number is perfect, not stuck.
#
# ## The learning rate: up, then down
#
# $$rate = d_{model}^{-0.5} \cdot \min(step^{-0.5},\; step \cdot warmup^{-1.5}) \qquad (3)$$
#
# The two terms are equal at step = warmup. Before it the second is the smaller one, a straight
# line; after it the first, which halves when the step is four times as large.

# %%
steps = range(1, 20_001)
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for d_model, warm_up, color in (
    (512, 4_000, "#145090"),
    (512, 8_000, "#8abde0"),
    (256, 4_000, "#e8710a"),
):
    rates = [paper_rate(step, d_model, warm_up) for step in steps]
    axes.plot(steps, rates, color=color, label=f"d_model {d_model}, warm-up {warm_up:,}")
axes.set(xlabel="step", title="paper_rate")
axes.legend(frameon=False)
plt.show()

print(f"the base model's highest rate, at step 4,000: {paper_rate(4_000):.6f}")
assert math.isclose(paper_rate(4_000), 512**-0.5 * 4_000**-0.5)
assert math.isclose(paper_rate(16_000), paper_rate(4_000) / 2)

# %% [markdown]
# ## Training
#
# One layer on each side is enough, 32 wide, with four heads. Everything else is the paper's:
# post-norm, Adam with β₂ = 0.98, label smoothing, warm-up and decay (200 steps, half of the rate).
# Only dropout is left out, since the exercises never run out.
#
# The last habit is from section 6.1 and easily overlooked: the paper's base models are **averages
# of their last five checkpoints**, the big ones of the last twenty. Keep one every 40 steps.

# %%
torch.manual_seed(1)
generator = torch.Generator().manual_seed(1)
model = Transformer(
    len(words), len(words), d_model=32, n_heads=4, n_layers=1, d_ff=128, dropout=0.0, pad_id=PAD
)
optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
losses, checkpoints = [], []
for step in range(1, 1_001):
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * paper_rate(step, d_model=32, warmup_steps=200)
    sources, targets = exercises(64, generator)
    logits = model(sources, targets[:, :-1])
    loss = label_smoothing_loss(logits, targets[:, 1:], smoothing, PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 40 == 0:
        checkpoints.append({name: w.clone() for name, w in model.state_dict().items()})

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.plot(losses, color="#145090", linewidth=1)
axes.axhline(floor, color="#e8710a", label="as low as it goes")
axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
axes.legend(frameon=False)
plt.show()
print(f"{sum(w.numel() for w in model.parameters()):,} parameters, last loss {losses[-1]:.3f}")

# %% [markdown]
# The examination: 1,000 exercises from another seed, written word by word, without any help. An
# answer counts only if every letter and its end are right. (There are 20 million exercises with
# seven letters; training has shown some 9,000 of them.)

# %%
test_sources, test_targets = exercises(1_000, torch.Generator().manual_seed(99))


def mistakes(model, sources, targets):
    """Return how many answers have anything wrong."""
    written = greedy_decode(model, sources, BOS, EOS, max_len=targets.size(1) - 1)
    written = F.pad(written, (0, targets.size(1) - 1 - written.size(1)), value=PAD)
    return int((written != targets[:, 1:]).any(dim=1).sum())


last_five = checkpoints[-5:]
for i, weights in enumerate(last_five, start=1):
    model.load_state_dict(weights)
    print(f"checkpoint {i} of the last five: {mistakes(model, test_sources, test_targets):3} wrong")

model.load_state_dict({name: sum(w[name] for w in last_five) / 5 for name in last_five[0]})
n_wrong = mistakes(model, test_sources, test_targets)
print(f"their average:                 {n_wrong:3} wrong of 1,000")
assert n_wrong == 0

# %% [markdown]
# None. And note the step from single checkpoints to their average: no training, a few additions. At
# this rate the weights circle around a good place, and how far off they are when you stop is a
# matter of luck. Their mean is not.
#
# ## What the cross attention looks at
#
# If the model copies, the word it writes at position i must come from letter i of the source. If it
# reverses, from the other end. Nobody told it where to look. A hook on the decoder's cross
# attention catches the weights that it returns; here is the mean over its four heads.

# %%
seen = []
cross_attention = model.decoder.layers[0].cross_attention


def keep_weights(_module, _inputs, output):
    """Keep the second of what the layer returns: its weights (B, H, T, S)."""
    seen.append(output[1])


hook = cross_attention.register_forward_hook(keep_weights)
letters = [words.index(letter) for letter in "bhcaeig"]
orders = {"copy": letters, "reverse": letters[::-1]}
figure, all_axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for axes, (order, answer) in zip(all_axes, orders.items(), strict=True):
    source = torch.tensor([[words.index(order), *letters]])
    target = torch.tensor([[BOS, *answer]])
    with torch.no_grad():
        model(source, target)
    weights = seen[-1][0].mean(dim=0)  # (T, S), mean over the heads
    axes.imshow(weights, vmin=0)
    axes.set_xticks(range(source.size(1)), spell(source[0]).split(), rotation=90)
    axes.set_yticks(range(len(answer) + 1), [*spell(target[0, 1:]).split(), "<eos>"])
    axes.set(title=order, xlabel="source", ylabel="word to be written")
    places = torch.arange(1, 8) if order == "copy" else torch.arange(7, 0, -1)
    hits = int((weights[:7].argmax(dim=-1) == places).sum())
    print(f"{order}: {hits} of 7 letters are looked at most when they have to be written")
    assert hits >= 5
plt.show()
hook.remove()

# %% [markdown]
# A diagonal and an anti-diagonal, with the same weights: one word at the beginning of the source
# turns the whole picture round.
#
# Has it understood what reversing *is*? It has never seen more than 7 letters. Give it 8 and 11.

# %%
for length in (7, 8, 11):
    longer = exercises(200, torch.Generator().manual_seed(5), shortest=length, longest=length)
    n_wrong = mistakes(model, *longer)
    print(f"{length:2} letters: {n_wrong:3} of 200 wrong")
assert n_wrong > 100

# %% [markdown]
# It has not. At the next place the table of sines is as exact as ever (notebook 3), but no weight
# was ever trained on it. What was learned is to look at *these* places, not the idea.
#
# ## Greedy, and beams
#
# Greedy decoding takes the likeliest next word, again and again. The likeliest *sentence* may begin
# with another word. The smallest case one can check by hand: put the probabilities into a table in
# place of a trained model, and let the project's own search run on it.

# %%
tree_words = ["<unk>", "<pad>", "<bos>", "<eos>", "a", "the", "dog", "cat", "end"]
after = {
    "<bos>": {"a": 0.6, "the": 0.4},
    "a": {"dog": 0.4, "cat": 0.3, "end": 0.3},
    "the": {"end": 0.9, "dog": 0.1},
    "dog": {"<eos>": 1.0},
    "cat": {"<eos>": 1.0},
    "end": {"<eos>": 1.0},
}


class Tree(Transformer):
    """A Transformer whose next word depends on the last one alone, by the table above."""

    def decode(self, target, memory, source):  # noqa: ARG002
        """Return the logarithms of the table's probabilities, (B, T, V)."""
        probabilities = torch.full((*target.shape, len(tree_words)), 1e-12)
        for row, ids in enumerate(target.tolist()):
            for position, i in enumerate(ids):
                for word, probability in after.get(tree_words[i], {"<eos>": 1.0}).items():
                    probabilities[row, position, tree_words.index(word)] = probability
        return probabilities.log()


n_tree = len(tree_words)
tree = Tree(n_tree, n_tree, d_model=4, n_heads=1, n_layers=1, d_ff=4, pad_id=PAD)
source = torch.tensor([[4]])
greedy = greedy_decode(tree, source, BOS, EOS, max_len=5)[0].tolist()
print("greedy: ", [tree_words[i] for i in greedy])
for ids, score in beam_search(tree, source, BOS, EOS, max_len=5, n_beams=2, length_penalty=0.0):
    print("beam of 2:", [tree_words[i] for i in ids], f"probability {math.exp(score):.2f}")

(best, score), *_ = beam_search(tree, source, BOS, EOS, max_len=5, n_beams=2, length_penalty=0.0)
assert [tree_words[i] for i in greedy] == ["a", "dog", "<eos>"]
assert [tree_words[i] for i in best] == ["the", "end"]
assert math.isclose(math.exp(score), 0.4 * 0.9, rel_tol=1e-4)

# %% [markdown]
# *a dog*: 0.6 · 0.4 = 0.24. *the end*: 0.4 · 0.9 = 0.36. Greedy had thrown *the* away at the first
# step. A beam of two kept it, as the paper keeps four. Probabilities multiply, so longer sentences
# always have smaller ones; the length penalty (α = 0.6 in the paper) makes up for that.
#
# Our trained model is so sure of itself that there is nothing to find for a beam:

# %%
source = torch.tensor([[REVERSE, *letters]])
for ids, score in beam_search(model, source, BOS, EOS, max_len=12):
    print(f"{' '.join(words[i] for i in ids):20} score {score:.2f}")
best, _ = beam_search(model, source, BOS, EOS, max_len=12)[0]
assert best == letters[::-1]

# %% [markdown]
# ## Exercises
#
# **1.** What happens if the look-ahead mask is forgotten in training? Guess first: the loss, and
# then what the model writes. *Hint: what is the easiest way for position i to say word i + 1?*
#
# <details><summary>Answer</summary>
#
# It looks one place to the right, where the word stands. The loss falls to its floor faster than
# ever, and the model has learned nothing about the source. In decoding there is no word to the
# right, and it writes nonsense. A loss that is too good is a symptom.
# </details>
#
# **2.** Why must the cross attention have the padding mask, but not the look-ahead mask?
# *Hint: what is known when the first word is written?*
#
# <details><summary>Answer</summary>
#
# All of the source is known from the start, so there is nothing to hide in it, except the filling,
# which depends on who else is in the batch.
# </details>
#
# **3.** By hand: the lowest possible loss for ε = 0.1 and a vocabulary of 10,000. Compare it with
# 0.565.
# *Hint: 0.90001 for the right word, 0.00001 for each of 9,999 others.*
#
# <details><summary>Answer</summary>
#
# −0.90001 · ln 0.90001 − 9,999 · 0.00001 · ln 0.00001 = 0.095 + 1.151 = 1.246 nats. Hence losses
# with smoothing can be compared neither with those without it, nor between vocabularies.
# </details>
#
# **4.** With a beam as wide as there are sentences, is the best sentence always found? And is it
# always the better translation?
# *Hint: the first is a question about search, the second about the model.*
#
# <details><summary>Answer</summary>
#
# Yes: then nothing is ever thrown away. No: a model's likeliest sentence can be a bad one, often
# too short, even empty (Stahlberg and Byrne 2019). Wide beams find the model's own errors.
# </details>
#
# ## What to read next in the code
#
# [`transformer.py`](../../src/minigpt/transformer.py) from top to bottom: you know every part of it
# now. Then [`model.py`](../../src/minigpt/model.py), which is its right half without the cross
# attention: Mini-GPT.
