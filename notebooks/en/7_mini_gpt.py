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
# # 7 · Mini-GPT: trained, writing, seen from inside
#
# **Afterwards you know** what a GPT is made of and what each tensor in it is shaped like; you have
# trained one, in a minute, on your own machine; you can read its perplexity, steer its text by
# temperature, see what its heads look at, and watch a prediction form from layer to layer.
#
# Before: [6 · WikiText-2 and the vocabulary](6_wikitext2_and_the_vocabulary.ipynb) · the first: [1
# · Attention](1_attention.ipynb) · [中文](../zh-CN/7_mini_gpt.ipynb)
#
# A minute is a budget, not a number of steps: how far training gets depends on the machine, so your
# figures and texts will differ from those stored here, while the seed is the same.

# %%
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from rich.console import Console

import minigpt
from minigpt.config import TokenizerConfig, load_preset
from minigpt.corpus import available_offline, open_corpus
from minigpt.data import fit_tokenizer, prepare
from minigpt.events import Finished, Started, Stepped, Validated
from minigpt.figures import figure_rows, figures
from minigpt.info import size_rows, sizes
from minigpt.report import Report

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})


def table(header, rows):
    """Show rows; what Markdown would take for its own is shown as it is."""
    plain = str.maketrans({"<": "&lt;", "|": "&#124;", "*": "&#42;", "$": "&#36;"})
    lines = [[str(cell).translate(plain) for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *lines]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


# %% [markdown]
# ## What is trained on what
#
# WikiText-2 where it is on this disk; otherwise the documentation inside your own Python, a twelfth
# as much text, in pieces of words. Figures of the two have nothing to do with each other, so the
# notebook says which it is.

# %%
config = replace(load_preset("quickstart"), minutes=1.1, seed=1)
if not available_offline(config.data):
    # The ids of pieces say nothing of how frequent they are, as the sampled softmax expects.
    model = replace(config.model, output="full")
    config = replace(
        config, data="python-docs", tokenizer=TokenizerConfig("bpe", 4_096), model=model
    )
corpus = open_corpus(config.data)
tokenizer = fit_tokenizer(corpus, config.tokenizer)
print(f"{config.data}: {tokenizer.kind}, {tokenizer.vocab_size:,} entries")

# %% [markdown]
# ## What it costs, before anything is trained
#
# The preset `quickstart` is the smallest of the modern recipes: four blocks, rotary positions, RMS
# norms in front of each part, and an output that spends less on rare words (Grave et al. 2017).
# `minigpt info --plan quickstart` prints the same.

# %%
table(["what", "how much"], size_rows(sizes(config, tokenizer.vocab_size), config))

# %% [markdown]
# Most parameters are in the blocks, and so is most of the work. The word tables are this small only
# because the adaptive version gives rare words narrower vectors.
#
# ## One batch on its way
#
# Every module of PyTorch can be listened to: a *forward hook* is called with what came out. Let
# five windows of seven words go through an untrained model.

# %%
B, T = 5, 7
torch.manual_seed(1)
model = minigpt.MiniGPT(config.model.resolved(tokenizer.vocab_size)).eval()
seen = []


def listen(name):
    def hook(module, _, output):
        seen.append((f"`{name}`", type(module).__name__, tuple(output.shape)))

    return hook


wanted = {"embedding", "positions", "norm", "output"}
parts = ("attention_norm", "attention", "feed_forward_norm", "feed_forward")
wanted |= {"blocks.0", *(f"blocks.0.{part}" for part in parts)}
hooks = [
    module.register_forward_hook(listen(name))
    for name, module in model.named_modules()
    if name in wanted
]
stream = prepare(corpus, "valid", tokenizer)
ids = torch.tensor(stream.ids[: B * T].astype("int64")).view(B, T)
with torch.no_grad():
    logits = model(ids)
for hook in hooks:
    hook.remove()
table(["module", "class", "what came out"], [("ids", "", tuple(ids.shape)), *seen])

# %% [markdown]
# (B, T) ids become (B, T, D) vectors; every part of every block reads such a tensor and returns
# another of the same shape, which is *added*: the residual stream. Only the output leaves it, with
# a score for each of V words at each of B · T positions. The three other blocks do as the first.
#
# An untrained model knows nothing, and says so: its perplexity is of the order of V, as if every
# word were equally likely. (With the adaptive softmax somewhat below: it treats a whole cluster of
# rare words as it treats one frequent word, so it begins with a hunch that frequent words are
# frequent.)

# %%
log_probabilities = logits.log_softmax(-1)
next_ids = torch.tensor(stream.ids[1 : B * T + 1].astype("int64")).view(B, T)
loss = -log_probabilities.gather(-1, next_ids[..., None]).mean()
print(f"perplexity before training: {loss.exp():,.0f}, entries: {tokenizer.vocab_size:,}")

# %% [markdown]
# ## A minute of training
#
# `minigpt.train` does what the command does. All that a user sees of it hangs on one callback that
# is told events, so a callback of your own can draw, log or stop to think; here it keeps the losses
# and passes each event on to the usual `Report`, which writes metrics, samples and a plot into the
# run folder.

# %%
folder = tempfile.TemporaryDirectory()
run_dir = Path(folder.name) / "mini-gpt"
events = []
with Report(run_dir, config, Console(quiet=True)) as report:

    def on_event(event):
        events.append(event)
        report(event)

    run = minigpt.train(config, run_dir, on_event=on_event)

started, finished = (next(e for e in events if isinstance(e, kind)) for kind in (Started, Finished))
steps = [event for event in events if isinstance(event, Stepped)]
(validated,) = (event for event in events if isinstance(event, Validated))
n_tokens = config.batch_size * config.model.context_length
print(f"{started.n_parameters:,} parameters, {started.budget}, matrix products in")
print(f"{run.config.precision} (measured: {started.matrix_rates} GFLOP/s)")
print(f"{finished.step} steps of {n_tokens:,} tokens, {steps[-1].epoch:.2f} epochs")

# %%
losses = torch.tensor([event.loss for event in steps])
smooth = [losses[max(0, i - 9) : i + 1].mean() for i in range(len(losses))]
figure, axes = plt.subplots(figsize=(5.5, 3.2))
axes.plot(losses, color="lightgray", label="each batch")
axes.plot(smooth, label="mean of ten")
axes.plot(len(losses), validated.score.loss, "o", label="all of valid")
axes.set(xlabel="step", ylabel="nats per token")
right = axes.twinx()
right.plot([event.rate for event in steps], ":", color="gray")
right.set(ylabel="factor on all rates (dotted)", ylim=(0, 1.3))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Steep at first, when it learns which words are frequent at all; then slower: which word follows
# which. Towards the end the rates go to zero, and the noise of the steps dies down with them.
#
# ## Perplexity, with all that it depends on
#
# A perplexity without its conditions is no figure. These are the rows that training ends with; the
# last says what it may be compared with. `minigpt evaluate` says more, an interval among it.

# %%
context = run.config.model.context_length
found = figures(run, "valid", stream, validated.score, context=context, stride=context)
table(["what", "value"], figure_rows({**found, "run": run.path.name}))

# %% [markdown]
# A minute is little, and how far it reaches depends on the machine: compare your own figure with
# these. On WikiText-2 a unigram has 965 and a bigram 312 (notebook 6); the preset
# `wikitext2-10min` on two cores reaches about 85; what took others hours to days stands at 60
# to 70.
#
# ## What it writes
#
# One word after the other is drawn from the model's distribution. *Temperature* divides the logits
# before the softmax: below 1 the likely becomes likelier, above 1 everything evens out. Same
# prompt, same seed, nothing selected.

# %%
prompt = "The city" if config.data == "wikitext-2" else "Return a"
for temperature in (0.3, 0.8, 1.3):
    text = minigpt.generate(
        run, prompt, temperature=temperature, top_k=None, seed=1, max_new_tokens=45
    )
    print(f"[{temperature}] {prompt}{text}\n")

# %% [markdown]
# Cold, it keeps to the most frequent words and phrases. Hot, it draws from the long tail of rare
# words (Zipf again) and falls apart. Somewhere between, the local grammar holds best, and the text
# is about nothing: what a minute can teach is which words go together, not what the world is like.
#
# ## What it expects next
#
# The distribution behind a single step:

# %%
ids = run.tokenizer.encode(prompt)
with torch.no_grad():
    probabilities = run.model.next_logits(torch.tensor([ids]))[0].softmax(-1)
top = probabilities.topk(10)
figure, axes = plt.subplots(figsize=(5, 2.8))
axes.barh(run.tokenizer.pieces(top.indices.tolist()), top.values)
axes.invert_yaxis()
axes.set(xlabel=f"probability after “{prompt}”")
plt.show()
entropy = -(probabilities * probabilities.clamp_min(1e-20).log()).sum()
print(f"these ten have {top.values.sum():.0%} of the probability;")
print(f"the whole is as uncertain as {entropy.exp():,.0f} equally likely words")

# %% [markdown]
# ## Where it looks
#
# The attention of every layer and head while the model reads a sentence, row by row: choose layer
# and head, and hover to see the weights. This is the page that `minigpt attention RUN TEXT --out
# page.html` writes.

# %%
sentence = {
    "wikitext-2": "The old city was built in the north , and the city was named after the king .",
    "python-docs": "Return a list of the names in the module, and the names of the classes.",
}[config.data]
minigpt.attention(run, sentence)

# %% [markdown]
# ## What each head does
#
# Pictures invite stories. So measure: on text that the model has not learnt from, how much of each
# head's weight goes to the previous token, the first, the same word earlier, the word that followed
# it last time; whether it finds a verb's object or a pronoun's antecedent better than looking at a
# fixed distance would; and how much worse the model gets when the head is switched off.

# %%
minigpt.heads(run)

# %% [markdown]
# After a minute of training, do not expect a relation for each head. Heads of the first layers that
# look at the neighbours tend to come first; heads whose loss column is near zero do nothing that
# the model would miss, whatever their picture looks like.
#
# ## The logit lens
#
# Every block only adds to the residual stream, and the output reads what stands in it at the end.
# So one may read it *earlier* with the same output (nostalgebraist 2020): what would the model say
# if it had to answer after each block?

# %%
ids = run.tokenizer.encode(sentence)[:12]
streams = []
hooks = [run.model.positions.register_forward_hook(lambda *args: streams.append(args[-1]))]
for block in run.model.blocks:
    hooks.append(block.register_forward_hook(lambda *args: streams.append(args[-1])))
with torch.no_grad():
    run.model(torch.tensor([ids]))
    read = [run.model.output(run.model.norm(x))[0] for x in streams]
for hook in hooks:
    hook.remove()

names = ["embedding", *(f"block {i}" for i in range(len(run.model.blocks)))]
rows = []
for position, (word, target) in enumerate(pairwise(ids)):
    said = [run.tokenizer.pieces([logits[position].argmax().item()])[0] for logits in read]
    rank = [(logits[position] > logits[position, target]).sum().item() + 1 for logits in read]
    cells = [f"{piece} ({r:,})" for piece, r in zip(said, rank, strict=True)]
    rows.append([*run.tokenizer.pieces([word, target]), *cells])
table(["word read", "word to come", *(f"after {name}" for name in names)], rows)

# %% [markdown]
# In each cell: what the model would say there, and in brackets the rank of the word that really
# comes next (1: it is right). The table of words is shared by input and output, so before the first
# block the stream is the word itself, and one may expect to read just that. The blocks then have to
# turn "which word is this?" into "which word comes next?". How far each of them gets, the ranks
# above and the nats below tell.

# %%
nexts = torch.tensor(ids[1:])
for name, logits in zip(names, read, strict=True):
    nats = -logits[:-1].log_softmax(-1)[torch.arange(len(nexts)), nexts]
    print(f"after {name:10} {nats.mean():5.2f} nats per word on this sentence")

# %% [markdown]
# ## What lies in the run folder
#
# Everything is a plain file, nothing is a pickle: opening a stranger's run folder executes nothing.

# %%
purposes = {
    "config.json": "every setting, resolved: with it the run can be repeated",
    "tokenizer.json": "text to ids and back; `transformers` reads it too",
    "tokenizer_config.json": "tells `transformers` which class and specials to use",
    "metrics.jsonl": "a line for each step and validation; cut back when a run is resumed",
    "lock": "nothing: the training that writes here holds it, and no second one can",
    "samples.md": "what the model wrote at each validation",
    "loss.png": "the learning curve",
    "report.json": "final figures, versions, hardware, hash of the data",
    "last.json": "names the newest checkpoint, from which a run goes on",
    "best.json": "names the checkpoint with the lowest loss on valid, which all commands open",
    "model.safetensors": "the weights",
    "trainer.safetensors": "the optimizers' memories and the random generators",
    "trainer.json": "step, clock, best figure, optimizer groups; sizes and hashes of the other two",
}
files = sorted(path for path in run.path.rglob("*") if path.is_file())
rows = [
    (f"`{path.relative_to(run.path).as_posix()}`", f"{path.stat().st_size:,}", purposes[path.name])
    for path in files
]
table(["file", "bytes", "what it is for"], rows)

# %% [markdown]
# With those a run that was broken off (Ctrl-C, a power cut) goes on as if nothing had been, to the
# last bit:
#
# `minigpt train --resume runs/NAME`, or in Python `minigpt.resume(run_dir)`.
#
# ## What a minute can and cannot do
#
# A model of this size learns frequencies first, then the neighbours of frequent words, then the
# shape of sentences and headings; how far down this list a minute leads, the machine decides. It
# does not lead to facts, to a subject kept for more than a few words, or to a role for each head.
# Those need more steps, and there is no trick to it:
#
# `minigpt train wikitext2-10min`
#
# takes the perplexity to about 85 (two cores, seed 1: see
# [experiments](../../docs/experiments.md)), and a night takes it further. What ten minutes cannot
# do either is learn to write *about* something: for that, two million words are a thousandth of
# what is needed.

# %%
folder.cleanup()

# %% [markdown]
# ## Exercises
#
# **1.** Without training anything: what is the loss of a model that gives every word the same
# probability? Compare with the first point of the curve.
# *Hint: −log(1/V).*
#
# <details><summary>Answer</summary>
#
# log V: for 33,278 words 10.4 nats. The adaptive softmax begins below, since it gives each frequent
# word as much as a whole cluster of rare ones.
# </details>
#
# **2.** Set the temperature to 0.01 and generate with seeds 1, 2 and 3. What do you see, and which
# decoding method is that?
# *Hint: what does the softmax become as logits are multiplied by 100?*
#
# <details><summary>Answer</summary>
#
# The same text three times. All probability goes to the largest logit: greedy decoding. In a small
# model it soon repeats itself for ever.
# </details>
#
# **3.** In the logit lens, why is the word that is read before the first block so often the word
# itself, and what would change with `tie_embeddings = false`?
# *Hint: which table turns the vector into scores?*
#
# <details><summary>Answer</summary>
#
# The output scores each word by the dot product of its row with the stream, and the stream *is*
# that row (normed). A row usually agrees best with itself. Untied, the output has a table of its
# own, and what is read before the first block says which word follows which, at best: a bigram.
# </details>
#
# **4.** Train the same model for the same minute with `model={"n_layers": 1}`. It gets more steps.
# Which is better, and what does it say about choosing a size for a budget?
# *Hint: `minigpt.train(config, folder, model={"n_layers": 1})` lays settings over a config.*
#
# <details><summary>Answer</summary>
#
# No figure is given here, since it depends on your machine: more steps against more depth. Shallow
# wins while steps are what is lacking; the best size grows with the budget.
# </details>
#
# ## What to read next in the code
#
# [`model.py`](../../src/minigpt/model.py), which you can read from top to bottom now;
# [`train.py`](../../src/minigpt/train.py), the loop;
# [`decoding.py`](../../src/minigpt/decoding.py), one word after the other, with and without cache;
# [`head_roles.py`](../../src/minigpt/head_roles.py), what is measured about a head. Then
# [CONTRIBUTING](../../CONTRIBUTING.md): there is more to do.
