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
# # 6 · WikiText-2 与词表
#
# **读完你会知道**：WikiText-2 的一行文本怎样变成数字，经典路线怎么走，这个包自己的路线又怎么走；
# 截断词表失去什么、换来什么；为什么扔掉一些词困惑度反而会*下降*，
# 以及用哪一行算式就能把这份虚高的成绩还原。
#
# 上一篇：[5 · 编码器与解码器](5_encoder_decoder.ipynb) · 下一篇：
# [7 · Mini-GPT](7_mini_gpt.ipynb) · [English](../en/6_wikitext2_and_the_vocabulary.ipynb)
#
# 这一篇要用到 WikiText-2 本身，13 MB 文本。它依次在 `$MINIGPT_DATA/wikitext-2`、
# `data/wikitext-2` 和缓存里找，都没有就下载。如果全都不行，下一格会用一行话说明，
# 并告诉你把哪三个文件放到哪里。

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
# 维基百科的条目，已经按空格切成了词。有三点值得注意：
# 文本里本来就有 `<unk>`（制作者把训练集中出现不足三次的词都换成了它）；
# 连字符以及数字里的逗号和小数点写成 ` @-@ `、` @,@ `、` @.@ `；空行也算数，和别的行一样是一行。
#
# ## 经典路线
#
# 多年来，每篇教程都从 torchtext 的三个名字开始：`WikiText2`、`get_tokenizer`、
# `build_vocab_from_iterator`。这个库已经归档；`minigpt.text` 用纯 Python 提供了这三个名字，
# 得到的数字与原来相同。

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
# 四个特殊符号排在最前，然后是词，出现次数多的在前，次数相同的按字母顺序：
# 所以编号就是名次。`set_default_index` 指定没有编号的词由谁代替；没有它，*quokka* 会抛出异常。
# 28,785 就是用这四个特殊符号介绍这条路线的文章里写的那个数；只用 `<unk>` 一个时是 28,782。
#
# 再用 `max_tokens` 做一遍，想把模型做小的人都这么做：

# %%
small = build_vocab_from_iterator(map(basic_english, train), specials=specials, max_tokens=10_000)
print(f"{len(small):,} entries")

# %% [markdown]
# 少了一个。torchtext 先取文本中最常见的 10,000 − 4 个词，*然后*再去掉其中属于特殊符号的。
# `<unk>` 正在其中，因为 WikiText-2 的文本里就写着它。这几个经典名字保留了这个怪癖，
# 好让旧结果一个不差地重现；这个包自己的分词器没有这个怪癖，要 10,000 个就给 10,000 个。
#
# ## 齐普夫定律
#
# 排名第 *r* 的词出现多少次？在所有统计过的文本里，大约都是第一名的 1/*r*（Zipf 1935）。
# 在两个轴都取对数的纸上，这是一条直线。

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
# 直线一直延伸到只出现三次的那些词，再往下 WikiText-2 就没有词了。词表里一半以上的词，
# 在两百万词里出现不到十次：每个都要占嵌入表的一行，却几乎没有例子可学。
#
# ## N 个词的词表能覆盖多少
#
# 既然一半的词都这么少见，那就砍掉。代价是什么？取训练集里最常见的 N 个词，
# 数一数验证集里有多少词没有编号；文本自己写成 `<unk>` 的另算。

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
# 又是齐普夫：前 5,000 个词已经占了文本的将近九成，此后词表每加大一倍，找回来的都更少。
# 取 10,000 个词，每十六个词里丢一个（`basic_english` 是每二十个丢一个，
# 因为小写让 *The* 和 *the* 共用一项）。取全部的词则什么也不丢：
# 制作者保证了验证集里没有训练集没见过的词。
#
# 丢掉的恰恰是一句话要讲的东西。方括号里是这句话在 5,000 词的词表下失去的词：

# %%
kept = {word for word, _ in counts["wikitext"].most_common(5_000)}
print(" ".join(word if word in kept else f"[{word}]" for word in valid[41].split()[:24]))

# %% [markdown]
# ## basic_english 丢了什么
#
# 它的规则是为人们平常敲出来的英文写的，而 WikiText-2 已经被切过一遍词了。

# %%
line = ' " The 8 @.@ 5 @-@ inch gun of HMS Hood cost US $ 1 @,@ 250 ; it is lost : why ? " \n'
print(line.strip())
print(" ".join(basic_english(line)))

# %% [markdown]
# 大小写没有了，引号、冒号、分号也没有了，一个数字碎成了五块。这些都回不来：
# 在这种词流上训练的模型写不出一个正确的句子，只能写出小写的。而且这是另一种词流，
# 困惑度也就是另一种困惑度：

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
# 标点和大写不是噪声：模型必须预测它们，每一个都要付出代价。没有它们，题目就容易了（往下你会看到，
# 对一个只知道词频的模型来说容易了多少）。
# 所以 `basic_english` 的指标只能和 `basic_english` 的放在一起，绝不能与公开发表的并列。
#
# ## `wikitext` 保留了什么
#
# 第二种分词器再朴素不过：按空格切开，每个行尾放一个 `<eos>`，空行也放。
# 所有公开发表的 WikiText-2 指标用的都是这些词元，总数也是公认的。

# %%
corpus = open_corpus("wikitext-2")
closed = fit_tokenizer(corpus, TokenizerConfig("wikitext", 0))
streams = {split: prepare(corpus, split, closed) for split in ("train", "valid", "test")}
print(f"{closed.vocab_size:,} entries")
for split, stream in streams.items():
    print(f"{split}: {len(stream.ids):,} tokens, {stream.unknown_share:.0%} became <unk>")

print(closed.pieces(closed.encode(valid[41])[:14]))

# %% [markdown]
# 33,278 项；2,088,628、217,646 和 245,569 个词元。如果你自己的读取程序得到别的数目，
# 你的困惑度就不能与任何人的并列。没有一个词变成 `<unk>`：这个词表是*封闭*的。
#
# ## 为什么扔掉词困惑度会下降
#
# 困惑度是 exp(−log P(下一个词元) 的平均值)。截断词表以后，所有没有编号的词都并成一个词元 `<unk>`，
# 它的概率是这些词概率的*总和*。总和大于其中任何一项，
# 所以模型面对的是一道更容易的题（“是不是某个生僻词？”），分数自然更好。它什么也没多学到。
#
# 先看最简单的模型 *unigram*：不管前面是什么，每个词的概率就是它在训练集里的频率。
# 再复杂一步的 *bigram* 往回看一个词；词对越少见，它就越相信 unigram（Witten 和 Bell 1991）：
#
# $$P(w \mid v) = \frac{c(v, w) + t(v)\,P(w)}{c(v) + t(v)}$$
#
# 其中 c 是训练集里的计数，t(v) 是 v 后面出现过多少种不同的词。

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
# 就是这样：只有 500 个词的 unigram “胜过”了认识全部词的 bigram。谁也不会相信它是更好的英语模型，
# 可是只列两个数的表格不会告诉你这一点。而 `basic_english` 一个词也没截掉，
# 就让同一个 unigram 看上去好了将近五分之一，靠的全是它删掉的和合并的。
#
# ## 能够比较的指标
#
# 要比较，所有模型就得回答同一个问题：*下一个词是 33,278 个词里的哪一个？* 截断的模型只答了一半。
# 另一半就用最朴素的办法来答：凡是在训练集里变成了 `<unk>` 的词，在其中占多大比例，就给它多大概率。
#
# $$P(\text{word}) = P(\texttt{<unk>}) \cdot q(\text{word}), \qquad q(\text{word}) =
# \frac{\text{count of word in train}}{\text{count of all that reads as }\texttt{<unk>}}$$
#
# 文本自己的 `<unk>` 也是其中一个词。q 的总和是 1，
# 所以在完整的词表上 P 的总和是 Σ P(有编号的词) + P(`<unk>`) · 1 = 1：又是一个正规的概率分布。
# 它不需要训练，只需要训练集里的计数；验证集里的每个 `<unk>` 因此要再付 −log q(词) 奈特。


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
# 左边，两个模型都是知道得越少成绩越好。右边，unigram 的线是平的，一位数字也不差，而且必然如此：
# P(`<unk>`) · q(词) = count(`<unk>`)/n · count(词)/count(`<unk>`) = count(词)/n。
# 截断 unigram 既不增加知识也不减少知识，可比的指标说的正是这一点。
#
# bigram 的线向右*下降*：*New* 或 *Lieutenant* 后面会跟哪个生僻词，它是有话可说的，
# 而截断把这些都拿走了。这段下降就是小词表真正的代价，左图却把它画反了。超过 10,000
# 个词以后线就平了：更生僻的词例子太少，bigram 从中学不到什么。更好的模型在那里还能得到什么，
# 看下面的表。
#
# 这个包用分词器和若干行文本就能算出同样的东西；凡是词表被截断的模型，
# `minigpt evaluate` 都会打印它：

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
# 这个倍数只取决于怎样截断，与模型无关：谁要是公布了在 WikiText-2 最常见的 10,000 个词上的困惑度，
# 那个数大约要翻一倍，才能放到别的数旁边。
#
# 验证集里如果有训练集没有的词，它的 q = 0，这时任何有限的数都不诚实。WikiText-2 没有这种词；
# 你自己的文本会有，那时 `minigpt evaluate` 会数出来，并写上 *more than*（大于）。
#
# ## 训练出来的模型
#
# 现在换成 Transformer。每一行都是预设 `mini`（论文里的部件，4 层，8 个头，d_model 256）
# 配上另一个词表，其余全部相同：同一个种子，同样多的词元，同样多的步数。速度和内存是另外测的，
# 在同一次运行里轮流进行；文件里记着机器、版本和命令。

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
# 把最后两列对照着看。按词元算，最小的词表赢；每个词都叫出名字以后，各行回答的才是同一个问题，
# 也才谈得上名次。训练半个 epoch 之后，截到 10,000 个词的最好：234.3，而 5,000 个词是 244.4，
# 全部词是 250.5。这么早的时候，一个罕见词在训练集里所占的份额，比只读过十来次的表格行更可靠。
# 每种只有一个种子，相差也只有百分之几：训练更久，名次可能倒过来。
# 截断一定能换来的东西在中间几列：更少的参数，更少的内存，每秒更多的词元，
# 因而在同样的时间里能走更多步。
#
# `basic_english` 单独一张表。它的词是小写的，词流里没有空行，“可比”的意思是：
# 与*这个*词表的其他大小相比。

# %%
table([row for row in results["rows"] if row["tokenizer"] == "basic_english"])

# %% [markdown]
# ## 词的碎片
#
# 还有第三条路：如果允许把词拼出来，就没有不认识的词。`bpe` 从单个字节开始，
# 一次又一次把最常见的一对连起来（Sennrich 等 2016；用在字节上：Radford 等 2019）。

# %%
for vocab_size in (1_024, 8_192):
    bpe = fit_tokenizer(corpus, TokenizerConfig("bpe", vocab_size))
    stream = prepare(corpus, "valid", bpe)
    per_word = len(stream.ids) / stream.n_words
    print(f"bpe with {bpe.vocab_size:,} entries: {per_word:.2f} pieces a word")
    print("  ", " ".join(bpe.pieces(bpe.encode("the Odyssey of a quokka near Herzegovina"))))

# %% [markdown]
# 常见的词是一块，生僻的词是几块，什么都能写出来：中文也行，一个字节一个字节地写。代价是长度：
# 同样的文本词元更多，256 的上下文看到的文本就更少；而预测一个词，就意味着预测它的每一块。
# *每块*的困惑度很小，放在别的数旁边毫无意义。把各块的奈特加起来，除以*词*数，
# 才能与其他开放词表的结果并列。（不能与封闭词表的并列：
# bpe 模型会把一部分概率花在那里不可能出现的词上。）
#
# ## 什么时候用哪一种
#
# - **要与文献并列的指标**：`wikitext`，全部 33,278 个词，
# 再用采样 softmax 来负担它们（预设 `wikitext2-10min`）。
# - **跟着经典教程走，或者想在普通的词上看注意力**：`basic_english`，10,000 项（预设 `mini`）。
# - **在 WikiText-2 上要一个又小又快的词级模型**：`wikitext` 截到 10,000；引用可比的指标。
# - **自己的文本，任何语言，要拿来用**：`bpe`。
# - **想比较任意两个模型**：两个用同一个词表，或者两个都用可比的指标。
#
# 发表的时候，每个困惑度旁边都要写清楚：用的是什么词元，有多少个，其中多少是 `<unk>`，按什么平均。
#
# ## 练习
#
# **1.** 词表只有一项 `<unk>` 的模型，按词元的困惑度是多少？可比的困惑度又是多少？*提示：
# 这时 P(`<unk>`) 是多少，q 又是什么？*
#
# <details><summary>答案</summary>
#
# 按词元是 1：它永远是对的。可比的：P(`<unk>`) = 1，而 q 就是训练集的 unigram 分布，
# 所以正是上面那条平线，一位数字也不差。
# </details>
#
# **2.** q 不管前面是什么，只按频率给每个被藏起来的词概率。不动模型，能不能让可比的指标更低？*提示：
# 只要是单从训练集学来的分布，q 可以是任何一个。*
#
# <details><summary>答案</summary>
#
# 能：让 q 像 bigram 那样看前面一个词。这样得到的是一个更大的模型（你的模型加上命名模型）的指标，
# 只要说明了就是诚实的。约定用朴素的 q，是因为它只需要计数。
# </details>
#
# **3.** 把文本自己的 `<unk>` 和被截掉的词分开，后者用第二个符号。unigram 的可比指标会变吗？
# bigram 的呢？*提示：第一个问题对任何分法都有精确的答案。第二个：`<unk>` 旁边站着什么？*
#
# <details><summary>答案</summary>
#
# unigram 的不变：count(符号)/n · count(词)/count(符号) = count(词)/n，用什么符号都一样。
# bigram 的可以变好：两个符号比一个更能说明接下来是什么。改一改上面的 `cut` 和 `name_unknown`，
# 看看差多少。
# </details>
#
# **4.** 词表为什么不能用训练集*加*验证集来建？并没有泄漏任何标签呀。*提示：
# 对验证集里有而训练集里没有的词，模型知道些什么？*
#
# <details><summary>答案</summary>
#
# 知道它存在。词的清单也是模型的一部分；清单里有了验证集的词，
# 模型就会把概率放到它本来不可能知道的词上，不认识的词的代价又被藏起来了。
# </details>
#
# ## 接下来读哪些代码
#
# [`text.py`](../../src/minigpt/text.py)，用纯 Python 写的经典名字；
# [`vocabulary.py`](../../src/minigpt/vocabulary.py)，每一种词表怎样学来；
# [`unknown_words.py`](../../src/minigpt/unknown_words.py)，这一篇的算式，五十行；
# [`data.py`](../../src/minigpt/data.py)，从编号到批次。
# 测量程序是 [`benchmarks/vocabulary.py`](../../benchmarks/vocabulary.py)，
# 结果在 [`wikitext2.json`](../../docs/results/vocabulary/wikitext2.json)。
