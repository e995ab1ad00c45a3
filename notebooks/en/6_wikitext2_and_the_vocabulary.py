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
# # 6 · WikiText-2 and the vocabulary
#
# **Afterwards you know** how a line of WikiText-2 becomes numbers, on the classic route and on this
# package's own; what is lost when a vocabulary is cut, and what is gained; why perplexity *falls*
# when you throw words away, and the one line of arithmetic that undoes the flattery.
#
# Before: [5 · Encoder and decoder](5_encoder_decoder.ipynb) · next: [7 ·
# Mini-GPT](7_mini_gpt.ipynb) · [中文](../zh-CN/6_wikitext2_and_the_vocabulary.ipynb)
#
# This notebook needs WikiText-2 itself, 13 MB of text. It is looked for in
# `$MINIGPT_DATA/wikitext-2`, `data/wikitext-2` and the cache, then downloaded. Where none of that
# works, the next cell says so in one line and tells which three files to put where.

# %%
import json
import math
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown

from minigpt.config import TokenizerConfig
from minigpt.corpus import open_corpus
from minigpt.data import fit_tokenizer, prepare
from minigpt.text import WikiText2, build_vocab_from_iterator, get_tokenizer
from minigpt.unknown_words import UnknownWords

plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})

train, valid = (list(WikiText2(split=split)) for split in ("train", "valid"))
print(f"{len(train):,} lines of train, {len(valid):,} of valid")
for line in train[1:5]:
    print(repr(line[:92]))

# %% [markdown]
# Articles of Wikipedia, already cut into words at the blanks. Three things to notice: `<unk>`
# stands in the text itself (whoever made it replaced every word that occurs fewer than three times
# in train), hyphens and the commas and points inside numbers are written ` @-@ `, ` @,@ `, ` @.@ `,
# and blank lines count: they are lines like any other.
#
# ## The classic route
#
# For years every tutorial began with three names of torchtext: `WikiText2`, `get_tokenizer`,
# `build_vocab_from_iterator`. The library is archived; `minigpt.text` has the three, in plain
# Python, and they give the same numbers.

# %%
basic_english = get_tokenizer("basic_english")
specials = ["<unk>", "<pad>", "<bos>", "<eos>"]
vocab = build_vocab_from_iterator(map(basic_english, train), specials=specials)
vocab.set_default_index(vocab["<unk>"])

words = basic_english("Robert Boulter is an English quokka .")
ids = vocab(words)
print(words)
print(ids)
print(vocab.lookup_tokens(ids))
print(f"{len(vocab):,} entries")

# %% [markdown]
# The four specials come first, then the words, the most frequent first, equally frequent ones by
# alphabet: so an id is a rank. `set_default_index` says what stands in for a word that has no id;
# without it, *quokka* would raise. 28,785 is the number that you find in write-ups of this route
# with these four specials; with `<unk>` alone it is 28,782.
#
# Now the same with `max_tokens`, as one does to make a model small:

# %%
small = build_vocab_from_iterator(map(basic_english, train), specials=specials, max_tokens=10_000)
print(f"{len(small):,} entries")

# %% [markdown]
# One too few. torchtext takes the 10,000 − 4 most frequent words of the text, and *then* drops
# those that are specials. `<unk>` is among them, because WikiText-2 spells it out. The classic
# names keep this oddity, so that old results come back exactly; the tokenizers of this package do
# not, and give the 10,000 that were asked for.
#
# ## Zipf's law
#
# How often does the word of rank *r* occur? In every text anybody has counted, about 1/*r* times as
# often as the first (Zipf 1935). On paper with logarithms on both axes that is a straight line.

# %%
counts = {
    "wikitext": Counter(word for line in train for word in line.split()),
    "basic_english": Counter(word for line in train for word in basic_english(line)),
}
figure, axes = plt.subplots(figsize=(5.5, 3.4))
for kind, count in counts.items():
    ranked = [n for _, n in count.most_common()]
    axes.loglog(range(1, len(ranked) + 1), ranked, label=kind)
ranks = np.array([1, len(ranked)])
axes.loglog(ranks, ranked[0] / ranks, ":", color="gray", label="1 / rank")
axes.set(xlabel="rank of a word", ylabel="how often it occurs in train")
axes.legend(frameon=False)
plt.show()

for kind, count in counts.items():
    n_words, rare = count.total(), sum(n < 10 for n in count.values())
    common = ", ".join(word for word, _ in count.most_common(6))
    print(f"{kind}: {n_words:,} words, {len(count):,} different, {rare:,} of those below 10 times")
    print(f"  the most frequent: {common}")

# %% [markdown]
# The line is nearly straight until it meets the words that occur three times, below which
# WikiText-2 has none. More than half of all entries occur fewer than ten times in two million
# words: a row of the embedding table each, and hardly an example to learn it from.
#
# ## What a vocabulary of N words covers
#
# If half of the entries are that rare, cut them off. What does it cost? Take the N most frequent
# words of train, and count how many words of valid have no entry, those aside that the text itself
# calls `<unk>`.

# %%
splitters = {"wikitext": str.split, "basic_english": basic_english}
sizes = np.array([500, 1_000, 2_000, 5_000, 10_000, 20_000, 33_278])
figure, axes = plt.subplots(figsize=(5.5, 3.4))
for kind, split in splitters.items():
    rank = {word: i for i, (word, _) in enumerate(counts[kind].most_common())}
    found = np.array([rank.get(word, 10**9) for line in valid for word in split(line)])
    own = np.mean([word == "<unk>" for line in valid for word in split(line)])
    missing = [np.mean(found >= size) for size in sizes]
    axes.semilogx(sizes, missing, "o-", label=kind)
    shown = zip(sizes, missing, strict=True)
    print(f"{kind:14}", *(f"{size:,}: {share:.1%}" for size, share in shown), sep="  ")
    print(f"{'':14}  and {own:.1%} are <unk> in the text itself")
axes.set(xlabel="words in the vocabulary", ylabel="share of valid read as <unk>", ylim=0)
axes.yaxis.set_major_formatter("{x:.0%}")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# That is Zipf again: the first 5,000 words are nearly nine tenths of the text, and each doubling
# after that brings back a smaller piece. With 10,000 entries, one word in sixteen is gone (one in
# twenty in `basic_english`, whose lower case lets *The* and *the* share an entry). With all words
# nothing is gone: whoever made the text saw to it that valid has no word that train lacks.
#
# The words that go are those a sentence is about. In brackets, what 5,000 entries lose of this one:

# %%
kept = {word for word, _ in counts["wikitext"].most_common(5_000)}
print(" ".join(word if word in kept else f"[{word}]" for word in valid[41].split()[:24]))

# %% [markdown]
# ## What basic_english loses
#
# Its rules were made for English as people type it, and WikiText-2 has been tokenized once already.

# %%
line = ' " The 8 @.@ 5 @-@ inch gun of HMS Hood cost US $ 1 @,@ 250 ; it is lost : why ? " \n'
print(line.strip())
print(" ".join(basic_english(line)))

# %% [markdown]
# Case is gone, so are quotation marks, colons and semicolons, and a number has fallen into five
# pieces. None of it comes back: a model of this stream cannot write a correct sentence, only one in
# lower case. And the stream is another one, so its perplexity is another one:

# %%
n_deleted = sum(counts["wikitext"][mark] for mark in ('"', ":", ";"))
n_capital = sum(n for word, n in counts["wikitext"].items() if word != word.lower())
n_merged = len(counts["wikitext"]) - len({word.lower() for word in counts["wikitext"]})
n_blank = sum(not line.strip() for line in train)
n_words = counts["wikitext"].total()
print(f"{n_deleted:,} words of train are deleted ({n_deleted / n_words:.1%})")
print(f"{n_capital:,} lose a capital letter ({n_capital / n_words:.1%})")
print(f"{n_merged:,} entries merge with that of another spelling")
print(f"{n_blank:,} of {len(train):,} lines are blank and leave nothing behind")

# %% [markdown]
# Marks and capitals are not noise: a model must predict them, and each of them costs something.
# Without them the task is easier (further down you will see by how much, for a model that knows
# nothing but how frequent words are). So a figure of `basic_english` stands beside figures of
# `basic_english`, never beside published ones.
#
# ## What `wikitext` keeps
#
# The second tokenizer is the plainest there is: split at blanks, put `<eos>` at every line end,
# blank lines too. Those are the tokens of all published WikiText-2 figures, and there are known
# numbers of them.

# %%
corpus = open_corpus("wikitext-2")
closed = fit_tokenizer(corpus, TokenizerConfig("wikitext", 0))
streams = {split: prepare(corpus, split, closed) for split in ("train", "valid", "test")}
print(f"{closed.vocab_size:,} entries")
for split, stream in streams.items():
    print(f"{split}: {len(stream.ids):,} tokens, {stream.unknown_share:.0%} became <unk>")

print(closed.pieces(closed.encode(valid[41])[:14]))

# %% [markdown]
# 33,278 entries; 2,088,628, 217,646 and 245,569 tokens. If your own loader gives other counts, your
# perplexity cannot stand beside anyone's. Nothing becomes `<unk>`: the vocabulary is *closed*.
#
# ## Why perplexity falls when you throw words away
#
# Perplexity is exp(mean −log P(next token)). Cut the vocabulary and all the words without an entry
# become one token, `<unk>`, whose probability is the *sum* of theirs. A sum is larger than any of
# its parts, so the model is asked an easier question ("is it one of the rare words?") and gets a
# better mark. It has learnt nothing.
#
# See it on the simplest model there is, the *unigram*: every word has its frequency in train,
# whatever stands before it. One step less simple, the *bigram* looks at one word back; where the
# pair is rare it trusts the unigram more (Witten and Bell 1991):
#
# $$P(w \mid v) = \frac{c(v, w) + t(v)\,P(w)}{c(v) + t(v)}$$
#
# with c the counts in train and t(v) the number of different words seen after v.

# %%
V = closed.vocab_size
train_ids, valid_ids = (streams[split].ids.astype(np.int64) for split in ("train", "valid"))


def cut(ids, size):
    """Return ids with all but the `size` most frequent entries read as <unk>; an id is a rank."""
    return np.where(ids < size, ids, closed.unk_id)


def unigram(train, valid):
    """Return P(w) for each w of valid."""
    return np.bincount(train, minlength=V)[valid] / len(train)


def bigram(train, valid):
    """Return P(w | v) for each w of valid, v being the word before it."""
    pairs, n_pairs = np.unique(train[:-1] * V + train[1:], return_counts=True)
    n_after = np.bincount(pairs // V, weights=n_pairs, minlength=V)
    n_different = np.bincount(pairs // V, minlength=V)
    before = np.concatenate(([closed.eos_id], valid[:-1]))
    place = np.searchsorted(pairs, before * V + valid).clip(max=len(pairs) - 1)
    n_pair = np.where(pairs[place] == before * V + valid, n_pairs[place], 0)
    smooth = n_different[before]
    return (n_pair + smooth * unigram(train, valid)) / (n_after[before] + smooth)


def perplexity(probabilities):
    return math.exp(-np.log(probabilities).mean())


models = {"unigram": unigram, "bigram": bigram}
for name, model in models.items():
    row = {size: perplexity(model(cut(train_ids, size), cut(valid_ids, size))) for size in sizes}
    print(f"{name:8}", *(f"{size:,}: {value:.0f}" for size, value in row.items()), sep="  ")

print()
basic = fit_tokenizer(corpus, TokenizerConfig("basic_english", 0))
other = [prepare(corpus, split, basic).ids.astype(np.int64) for split in ("train", "valid")]
print(f"unigram on the stream of basic_english, every word: {perplexity(unigram(*other)):.0f}")

# %% [markdown]
# There it is: the unigram with 500 words "beats" the bigram that knows all of them. Nobody would
# believe that it is the better model of English, but a table of two numbers does not say so. And
# `basic_english`, with nothing cut at all, makes the same unigram look nearly a fifth better, by
# what it deletes and merges.
#
# ## The figure that can be compared
#
# To be compared, all models must answer the same question: *which of the 33,278 words comes next?*
# A cut model answers half of it. Let the other half be answered in the plainest way: of the words
# that became `<unk>` in train, take each as often as it stood there.
#
# $$P(\text{word}) = P(\texttt{<unk>}) \cdot q(\text{word}), \qquad q(\text{word}) =
# \frac{\text{count of word in train}}{\text{count of all that reads as }\texttt{<unk>}}$$
#
# The text's own `<unk>` is one of those words. q sums to 1, so over the full list P sums to Σ
# P(known) + P(`<unk>`) · 1 = 1: a proper probability again. It needs no training, only counts of
# train, and it costs every `<unk>` of valid another −log q(word) nats.


# %%
def name_unknown(size):
    """Return q for each word of valid, and 1 where the word has an entry."""
    hidden = (np.arange(V) >= size) | (np.arange(V) == closed.unk_id)
    n_train = np.bincount(train_ids, minlength=V)
    q = np.where(hidden, n_train / n_train[hidden].sum(), 1.0)
    return q[valid_ids]


per_token, comparable = {}, {}
for name, model in models.items():
    p = [model(cut(train_ids, size), cut(valid_ids, size)) for size in sizes]
    per_token[name] = [perplexity(p[i]) for i in range(len(sizes))]
    comparable[name] = [perplexity(p[i] * name_unknown(size)) for i, size in enumerate(sizes)]

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
for axes, figures, title in ((left, per_token, "per token"), (right, comparable, "comparable")):
    for name, values in figures.items():
        axes.semilogx(sizes, values, "o-", label=name)
        print(f"{title:10} {name:8}", *(f"{value:6.0f}" for value in values))
    axes.set(title=title, xlabel="words in the vocabulary", ylim=0)
left.set_ylabel("perplexity on valid")
right.legend(frameon=False)
plt.show()

# %% [markdown]
# On the left, both models get better the less they know. On the right, the unigram's line is flat
# to the last digit, and it must be: P(`<unk>`) · q(word) = count(`<unk>`)/n ·
# count(word)/count(`<unk>`) = count(word)/n. Cutting a unigram neither adds knowledge nor takes any
# away, and the comparable figure says exactly that.
#
# The bigram's line *falls* to the right: it has something to say about which rare word comes after
# *New* or *Lieutenant*, and a cut takes it away. That fall is the true price of a small vocabulary;
# the left picture shows it upside down. Beyond 10,000 words the line is flat: a bigram sees too few
# examples of each rarer word to learn anything about it. What a better model gains there, the table
# below shows.
#
# The package computes the same from a tokenizer and lines of text, and `minigpt evaluate` prints it
# for every run whose vocabulary was cut:

# %%
cut_tokenizer = fit_tokenizer(corpus, TokenizerConfig("wikitext", 10_000))
unknown = UnknownWords(cut_tokenizer, corpus.lines("train"))
cost = unknown.cost(corpus.lines("valid"))
print(f"{len(unknown):,} words share the <unk>, the text's own among them")
print(f"valid has {cost.n_unknown:,} of them, {cost.n_unseen} of which train does not have")
print(f"q('Homarus') = {unknown.share('Homarus'):.2g}, q('the') = {unknown.share('the'):.0f}")
print(f"naming them multiplies perplexity by {math.exp(cost.nats / len(valid_ids)):.3f}")
by_hand = -np.log(name_unknown(10_000)).sum()
print(f"{cost.nats:,.3f} nats here, {by_hand:,.3f} by hand above")

# %% [markdown]
# The factor depends on the cut alone, not on the model: whoever publishes a perplexity on the
# 10,000 most frequent words of WikiText-2 has a number that must be about doubled before it means
# anything beside the others.
#
# A word of valid that train does not have gets q = 0, and no finite figure is honest then.
# WikiText-2 has none; on your own text there will be some, and `minigpt evaluate` then counts them
# and says *more than*.
#
# ## Trained models
#
# Now with a Transformer. Each row is the preset `mini` (the paper's parts, 4 layers, 8 heads,
# d_model 256) on another vocabulary, all else the same: one seed, the same number of steps over the
# same number of tokens. Speed and memory were measured apart, one after the other in one sitting;
# the file names machine, versions and commands.

# %%
results = json.loads(Path("../../docs/results/vocabulary/wikitext2.json").read_text("utf-8"))


def number(row, name, form):
    return format(row[name], form) if name in row else "…"


def table(rows):
    columns = {
        "vocabulary": lambda row: f"`{row['tokenizer']}`, {row['vocab_size']:,}",
        "words read as `<unk>`": lambda row: number(row, "unknown_share", ".1%"),
        "parameters": lambda row: number(row, "n_parameters", ",d"),
        "tokens/s": lambda row: number(row, "tokens_per_second", ",.0f"),
        "beside 10,000": lambda row: number(row, "speed_ratio", ".2f"),
        "memory of a step, MB": lambda row: number(row, "step_megabytes", ",.0f"),
        "perplexity per token": lambda row: number(row, "token_perplexity", ",.1f"),
        "**comparable**": lambda row: f"**{number(row, 'comparable_perplexity', ',.1f')}**",
    }
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(of(row) for of in columns.values()) + " |" for row in rows]
    return Markdown("\n".join(lines))


table([row for row in results["rows"] if row["tokenizer"] == "wikitext"])

# %% [markdown]
# Read the last two columns against each other. Per token, the smallest vocabulary wins; with every
# word named, all rows answer the same question, and only then do they have an order. After half an
# epoch the cut to 10,000 words is best: 234.3, where 5,000 come to 244.4 and all words to 250.5. So
# early, a rare word's share in train says more than a table row that was read ten times. One seed
# each, and a few per cent apart: longer training may turn it round. What the cut buys for certain
# is in the middle: fewer parameters, less memory, more tokens a second, and with them more steps in
# the same time.
#
# `basic_english` has a table of its own. Its words are lower-case, its stream has no blank lines,
# and "comparable" means: with other sizes of *this* vocabulary.

# %%
table([row for row in results["rows"] if row["tokenizer"] == "basic_english"])

# %% [markdown]
# ## Pieces of words
#
# There is a third way: no word is unknown if words may be spelt in pieces. `bpe` begins with single
# bytes and joins the pair that is most frequent, again and again (Sennrich et al. 2016; on bytes:
# Radford et al. 2019).

# %%
for vocab_size in (1_024, 8_192):
    bpe = fit_tokenizer(corpus, TokenizerConfig("bpe", vocab_size))
    stream = prepare(corpus, "valid", bpe)
    per_word = len(stream.ids) / stream.n_words
    print(f"bpe with {bpe.vocab_size:,} entries: {per_word:.2f} pieces a word")
    print("  ", " ".join(bpe.pieces(bpe.encode("the Odyssey of a quokka near Herzegovina"))))

# %% [markdown]
# Frequent words are one piece, rare ones several, and anything at all can be written: Chinese too,
# byte by byte. The price is length: more tokens for the same text, so a context of 256 sees less of
# it, and predicting a word means predicting each of its pieces. Perplexity *per piece* is small and
# means nothing beside the others. Add up the nats of the pieces and divide by the number of
# *words*; then it may stand beside other open vocabularies. (Not beside the closed one: a bpe model
# spends probability on words that cannot occur there.)
#
# ## Which to take when
#
# - **A figure beside the literature**: `wikitext` with all 33,278 words, and the sampled softmax
#   to pay for them (preset `wikitext2-10min`).
# - **To follow a classic tutorial, or see attention on plain words**: `basic_english` with 10,000
#   entries (preset `mini`).
# - **A small, fast model of words on WikiText-2**: `wikitext` cut to 10,000; quote the comparable
#   figure.
# - **Text of your own, any language, something to use**: `bpe`.
# - **To compare two models at all**: one vocabulary for both, or the comparable figure for both.
#
# And in print, beside every perplexity: which tokens, how many, how many of them `<unk>`, per what.
#
# ## Exercises
#
# **1.** A model with a vocabulary of one entry, `<unk>`, has which perplexity per token, and which
# comparable one?
# *Hint: what is P(`<unk>`), and what is q then?*
#
# <details><summary>Answer</summary>
#
# 1 per token: it is always right. Comparable: P(`<unk>`) = 1 and q is the unigram distribution of
# train, so it is the flat line above, to the digit.
# </details>
#
# **2.** q gives each hidden word its frequency, whatever stands before it. Could the comparable
# figure be made lower without touching the model?
# *Hint: q may be any distribution that was learnt from train alone.*
#
# <details><summary>Answer</summary>
#
# Yes: let q look at the word before, as the bigram does. The figure is then that of a larger model
# (yours and the naming model together), which is honest as long as it is said. The plain q is the
# convention because it needs nothing but counts.
# </details>
#
# **3.** Keep the text's own `<unk>` apart from the words that were cut, as a second symbol. Is the
# comparable figure of the unigram changed? That of a bigram?
# *Hint: the first is exact for every partition. For the second: what stands beside `<unk>`?*
#
# <details><summary>Answer</summary>
#
# The unigram's is not: count(symbol)/n · count(word)/count(symbol) = count(word)/n whatever the
# symbols. The bigram can gain: two symbols tell it more about what comes next than one. Change
# `cut` and `name_unknown` above and see by how much.
# </details>
#
# **4.** Why is it wrong to build the vocabulary on train *and* valid, though no label leaks?
# *Hint: what does the model know about a word of valid that is not in train?*
#
# <details><summary>Answer</summary>
#
# That it exists. The list of words is part of the model; with the words of valid on it, it puts its
# probability on words it could not have known, and the cost of unknown words is hidden again.
# </details>
#
# ## What to read next in the code
#
# [`text.py`](../../src/minigpt/text.py), the classic names in plain Python;
# [`vocabulary.py`](../../src/minigpt/vocabulary.py), how each kind is learnt;
# [`unknown_words.py`](../../src/minigpt/unknown_words.py), the arithmetic of this notebook in fifty
# lines; [`data.py`](../../src/minigpt/data.py), from ids to batches. The measurement is
# [`benchmarks/vocabulary.py`](../../benchmarks/vocabulary.py), its result
# [`wikitext2.json`](../../docs/results/vocabulary/wikitext2.json).
