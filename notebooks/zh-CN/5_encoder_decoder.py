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
# # 5 · 编码器与解码器
#
# **读完之后你会明白**：论文里完整的 Transformer 如何运转，哪个掩码在训练时、在解码时各起什么作用，
# 标签平滑和预热是什么样子；并且你会亲手训练出一个从不出错的 Transformer。
#
# 《Attention Is All You Need》图 1，以及 3.1、3.2.3、5.3、5.4、6.1 节 · 上一篇：[4 ·
# 前馈、归一化、残差](4_feed_forward_norms_residuals.ipynb) · 下一篇：[6 · WikiText-2
# 与词表](6_wikitext2_and_the_vocabulary.ipynb) · [English](../en/5_encoder_decoder.ipynb)

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
# ## 一种有两个句子的语言
#
# 翻译需要几百万个句子。有一个任务形式相同，却小到一分钟就够：源序列是一个命令加几个字母，
# `copy b a d` 或 `reverse b a d`；目标序列就是命令所要求的。长度不一，所以有填充；命令在最前头，
# 所以答案的每个字母都取决于远处的一个词；而 `reverse` 时，最先写出的字母是最后读到的那个。

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
# ## 各个部件
#
# 里面的一切你都已经从笔记本 1 到 4 认识了。编码器层就是自注意力加前馈网络，各带自己的残差和归一化。

# %%
show(EncoderLayer)

# %% [markdown]
# 解码器层在两者之间还有第三个部分：**交叉注意力**。它的查询来自目标序列，
# 键和值来自编码器读完源序列得到的*记忆*（memory）。两个序列只在这里相遇。

# %%
show(DecoderLayer)

# %% [markdown]
# 整个模型有两种用法。训练时，`forward` 同时得到源*和*目标。写的时候还没有目标：先 `encode`
# 一次，再一遍又一遍地 `decode`。

# %%
show(Transformer.forward)

# %%
show(Transformer.decode)

# %% [markdown]
# ## 三个掩码
#
# 取上面四道题中的第一道和最后一道，对三个注意力分别画图：行是正在看的位置，蓝色是它可以看的位置。

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
# `<pad>` 的行也在看，因为那里总得算出点什么；但谁也不会去看*它们*，损失也不计它们。
#
# | 掩码 | 训练：所有位置一次算完 | 解码：一次一个词 |
# |---|---|---|
# | 填充，编码器 | 短的源序列不受填充干扰 | 相同，只做一次 |
# | 填充，交叉 | 解码器不读填充 | 相同，每个词都做 |
# | 前瞻 | 位置 i 要说出词 i + 1，却不许看它 | 未来还不存在 |
#
# （解码时前瞻掩码仍然开着，使每个位置算出的与先前完全一样。评估时遮住的与训练时相同，
# 因为那时也是整个文本一次输入。有键值缓存时（笔记本 2）只计算最新的词，掩码中它那一行什么也不遮，
# 所以不需要掩码。）
#
# 目标序列错开一位输入（图 1 里的 *outputs shifted right*）：位置 i 读什么，要说什么。
# 不管模型本来会说什么，输入的总是正确的词，这叫 **teacher forcing**，正是它使所有位置可以一次算完。

# %%
print("reads", [words[w] for w in targets[0, :-1].tolist()])
print("says ", [words[w] for w in targets[0, 1:].tolist()])

# %% [markdown]
# 掩码真的像图上那样起作用吗？在一个随机权重的模型上做三个测试：再多些填充，什么也不变；
# 改动目标里后面的词，前面的一概不变；一次一个词，得到的与一次算完的相同，*因为*没有任何东西向前看。

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
# ## 标签平滑：永远不完全肯定
#
# 目标不是“p(正确) = 1”，而是正确的词得 0.9，剩下的 0.1 平摊给整个词表（5.4 节，ε =
# 0.1）。左图：一个位置上的目标分布。右图：损失随模型给正确的词的概率而变，其余概率平均分配。

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
# 对下面的训练，有两点要记住。比 0.906 更肯定，就要付出代价。而且损失不可能低于 **0.565**，
# 即目标分布的熵：达到这个数的模型是完美的，不是卡住了。
#
# ## 学习率：先升后降
#
# $$rate = d_{model}^{-0.5} \cdot \min(step^{-0.5},\; step \cdot warmup^{-1.5}) \qquad (3)$$
#
# 在 step = warmup 处两项相等。在此之前第二项较小，是一条直线；在此之后第一项较小，步数变成四倍，
# 它就减半。

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
# ## 训练
#
# 每边一层就够了，宽 32，四个头。其余都照论文：post-norm，β₂ = 0.98 的 Adam，标签平滑，
# 先预热再下降（预热 200 步，学习率取一半）。只省掉了 dropout，因为题目取之不尽。
#
# 最后一个做法出自 6.1 节，很容易被忽略：论文的 base 模型是**最后五个检查点的平均**，big
# 模型是最后二十个的平均。我们每 40 步留一个。

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
# 考试：另一个种子产生的 1,000 道题，一个词一个词地写，没有任何帮助。每个字母和结尾都对，才算答对。
# （七个字母的题共有两千万道，训练中只出现过大约 9,000 道。）

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
# 一道也没有错。注意从单个检查点到平均的这一步：不再训练，只做几次加法。在这样的学习率下，
# 权重绕着一个好地方打转，停下来的那一刻离它多远，全凭运气。它们的平均值则不靠运气。
#
# ## 交叉注意力在看什么
#
# 如果模型在复制，它在位置 i 写的词必定来自源序列的第 i 个字母。如果在反转，就来自另一头。
# 没有人告诉过它该看哪里。在解码器的交叉注意力上挂一个钩子，截住它返回的权重；下图是四个头的平均。

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
# 一条对角线，一条反对角线，用的是同一组权重：源序列开头的一个词，就把整张图翻了过来。
#
# 它明白什么叫*反转*了吗？它从没见过超过 7 个字母的题。给它 8 个和 11 个试试。

# %%
for length in (7, 8, 11):
    longer = exercises(200, torch.Generator().manual_seed(5), shortest=length, longest=length)
    n_wrong = mistakes(model, *longer)
    print(f"{length:2} letters: {n_wrong:3} of 200 wrong")
assert n_wrong > 100

# %% [markdown]
# 没有明白。在下一个位置上，正弦表仍和先前一样精确（笔记本 3），但没有任何权重在那里训练过。
# 它学会的是看*这些*位置，而不是这个概念。
#
# ## 贪心与束搜索
#
# 贪心解码一次又一次地取最可能的下一个词。而最可能的*句子*也许从另一个词开始。
# 举一个能笔算的最小例子：用一张概率表代替训练好的模型，让项目自己的搜索在上面运行。

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
# *a dog*：0.6 · 0.4 = 0.24。*the end*：0.4 · 0.9 = 0.36。贪心在第一步就把 *the* 扔掉了。束宽为 2
# 的搜索留住了它；论文留四个。概率是相乘的，所以越长的句子概率总是越小；长度惩罚（论文取 α =
# 0.6）对此作出补偿。
#
# 我们训练好的模型太有把握，束搜索找不出什么新东西：

# %%
source = torch.tensor([[REVERSE, *letters]])
for ids, score in beam_search(model, source, BOS, EOS, max_len=12):
    print(f"{' '.join(words[i] for i in ids):20} score {score:.2f}")
best, _ = beam_search(model, source, BOS, EOS, max_len=12)[0]
assert best == letters[::-1]

# %% [markdown]
# ## 练习
#
# **1.** 训练时忘了前瞻掩码，会发生什么？先猜：损失会怎样，然后模型写出来的又会怎样。
# *提示：位置 i 要说出词 i + 1，最省力的办法是什么？*
#
# <details><summary>答案</summary>
#
# 它向右看一格，那个词就在那里。损失比任何时候都更快地降到底，而模型对源序列一无所知。
# 解码时右边没有词，它写的就是胡言乱语。好得过头的损失是一种症状。
# </details>
#
# **2.** 交叉注意力为什么必须有填充掩码，却不需要前瞻掩码？
# *提示：写第一个词的时候，已经知道什么？*
#
# <details><summary>答案</summary>
#
# 整个源序列从一开始就是已知的，所以其中没有什么需要遮住，除了填充：填充有多长，
# 取决于批次里碰巧还有谁。
# </details>
#
# **3.** 笔算：ε = 0.1，词表大小 10,000，损失最低是多少？与 0.565 比较。
# *提示：正确的词 0.90001，其余 9,999 个词各 0.00001。*
#
# <details><summary>答案</summary>
#
# −0.90001 · ln 0.90001 − 9,999 · 0.00001 · ln 0.00001 = 0.095 + 1.151 = 1.246
# 奈特。所以带平滑的损失既不能与不带平滑的比较，也不能在不同词表之间比较。
# </details>
#
# **4.** 如果束宽等于句子的总数，是否总能找到最好的句子？它是否总是更好的译文？
# *提示：第一问关于搜索，第二问关于模型。*
#
# <details><summary>答案</summary>
#
# 第一问：是的，因为什么也没有扔掉。第二问：不是。模型认为最可能的句子可能很糟，往往太短，
# 甚至是空的（Stahlberg 和 Byrne，2019）。束越宽，越能找出模型自己的错误。
# </details>
#
# ## 接下来读哪些代码
#
# [`transformer.py`](../../src/minigpt/transformer.py)，从头到尾：里面的每个部分你现在都认识了。
# 然后是 [`model.py`](../../src/minigpt/model.py)，它就是去掉交叉注意力的右半边：Mini-GPT。
