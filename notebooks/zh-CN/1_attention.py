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
# # 1 · 从点积到注意力
#
# **读完之后你会明白**：为什么注意力就是加权平均，为什么分数要除以 √d_k，为什么掩码要放在 softmax
# 之前而不是之后。
#
# 《Attention Is All You Need》3.2.1 节，公式 1 · 下一篇：[2 · 多个头](2_many_heads.ipynb) ·
# [English](../en/1_attention.ipynb)
#
# 凡是能算的结论，都在紧接着的单元格里算给你看。改几个数字再跑一遍：这些单元格就是给你改的。

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
# ## 一本不必二选一的字典
#
# 查字典你很熟悉：拿一个查询（query）去比对各个键（key），命中一个，取回它的值（value）。
# 注意力也是查字典，只不过*每个*键都命中一点点，取回来的是所有值的混合。
#
# 为此，“命中”得变成一个数。给每个词两个属性：*有多像动物*、*有多像饮料*。
# 两个词的属性逐项相乘再求和，两个词在同一属性上都强，和就大。这就是点积。

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
# 下一个词是 *it*，它想知道自己指的是哪只动物，所以它的查询是“动物”：(2, 0)。与每个键做一次点积，
# 得到**分数**。要让分数变成份额，它们必须为正，且总和为 1；**softmax** 做的正是这件事：先取指数，
# 再除以总和。笔算一下：e⁴ ≈ 54.6，e⁰ = 1，所以 *cat* 得到 54.6 / (54.6 + 3) = 0.948。

# %%
query = torch.tensor([2.0, 0.0])
scores = vectors @ query
weights = scores.exp() / scores.exp().sum()
print("scores ", scores.tolist())
print("weights", [round(weight, 3) for weight in weights.tolist()])
assert torch.allclose(weights, scores.softmax(dim=0))
assert math.isclose(weights[1].item(), math.exp(4) / (math.exp(4) + 3), rel_tol=1e-6)

# %% [markdown]
# 答案就是各个**值**按这些份额加权的平均。键和值是两回事：键说的是*什么时候该听我的*，
# 值说的是*我要讲什么*。值可以是任何东西，这里每个词就用一个数。

# %%
values = torch.tensor([10.0, 20.0, 30.0, 40.0])
answer = weights @ values
print(f"answer {answer:.2f}")
assert values.min() <= answer <= values.max()

# %% [markdown]
# 答案落在最小值和最大值之间，而且永远如此：加权平均跑不出被平均者的范围。**注意力从不无中生有，
# 它只做混合。** 从混合里造出新东西的是前馈网络，见[笔记本
# 4](4_feed_forward_norms_residuals.ipynb)。
#
# softmax 有两个性质值得记住。第一，只有分数之*差*起作用：所有分数加上同一个数，结果不变。第二，
# 差会变成*比*：分数高出 1，权重就是 e ≈ 2.718 倍，与两者本身有多大无关。

# %%
scores = torch.tensor([1.0, 2.0, 5.0])
weights = scores.softmax(dim=0)
assert torch.allclose(weights, (scores + 100).softmax(dim=0))
print("weight of the second over that of the first:", (weights[1] / weights[0]).item())
assert torch.isclose(weights[1] / weights[0], torch.tensor(math.e))

# %% [markdown]
# ## 公式
#
# 把所有查询排成矩阵 Q 的行，键排成 K，值排成 V，一次矩阵乘法就得到全部分数，
# 整件事就是论文里的一行：
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V
# \qquad (1)$$
#
# 下面是 Mini-GPT 里的这一行，在你阅读时直接取自源码。其中有三处还没有解释，本篇余下部分逐一说明：
# 除以 √d_k、`visible`，以及什么也看不见的那一行。

# %%
show(attention)

# %% [markdown]
# 对不对呢？PyTorch 有同样的函数，是编译好的代码。两者必须一致，返回值要一致，
# 反向传播的梯度也要一致，而且对任意尺寸都成立。（这里的尺寸是互不相同的素数，
# 任何两个轴弄反了都会暴露。）

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
# ## 为什么除以 √d_k
#
# 论文的脚注 4 用一句话给出了理由。设 q 和 k 的分量相互独立，均值 0，方差 1。
# 那么每一项乘积的方差也是 1；点积把 d_k 项加起来；独立量之和的方差等于方差之和。所以 q · k
# 的**方差是 d_k**，一个典型分数的大小约为 √d_k。实测如下：

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
# 分数大有什么不好？因为 softmax 把差变成比。d_k = 64 时分数在 ±8 上下，而 e⁸ ≈
# 3,000：还什么都没学，赢家就已经通吃了。而赢家通吃的地方，什么也*学不到*：只有两个键时，
# 设第一个的权重是 w，w 对它的分数的导数是 w (1 − w)。w = 0.5 时是 0.25，w = 0.9999 时只有
# 0.0001。梯度没了，不管两个里哪个才是对的。
#
# 键的个数任意时，这些导数组成矩阵 diag(w) − w wᵀ。它的大小说明有多少梯度能穿过 softmax。


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
# 从 d_k = 4 起，蓝线是平的：除过之后，一切都与头的宽度无关了。目的就在这里：头可以变宽，
# 而不会因此变得更固执。
#
# （但也要看清它*不是*什么：它不是定律。这个除法只决定训练从哪里出发。模型想要尖锐的权重，
# 尽可以学出更长的查询向量；练习 3 会问还有什么别的办法。）
#
# ## 掩码：为什么在 softmax 之前填 −∞
#
# 语言模型训练时，*每个*位置同时都要说出下一个词。位置 3 不许看位置 4：那正是要它回答的答案。
# `visible` 规定谁可以看谁；被遮住的分数在 softmax 之前变成 −∞。e^(−∞) 恰好等于
# 0，所以被遮住的位置得不到任何权重，看得见的位置瓜分完整的 1。
#
# 另有两种写法看上去一样好，运行也不报错，却是错的。两种都真有人写过。
#
# - **A：先 softmax，再乘 0。** 各行之和不再是 1。更糟的是，被遮住的分数还留在分母里。
# - **B：把 0 和 1 组成的矩阵以 float 传给 PyTorch。** 布尔掩码的意思是“可以看”，
#   而浮点掩码会被*加到分数上*。于是看得见的加 1，被遮住的加 0。


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
# 三种写法用同一个测试来检验，这也是任何语言模型最值得写的一个测试：**改动一个位置，
# 看哪些输出会动。** 下图中，第 i 行第 j 列表示轻推输入 j 时输出 i 动了多少。对角线右侧是未来，
# 必须是白的。


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
# 在 A 里，后面的词只通过分母起作用；在 B 里，它们和别的词一样被混了进来。两种都不报错，
# 而好得出奇的损失又是人们乐于相信的损失：只有这个测试能说出真相。
#
# A 可以补救：每行再除以它的和。按精确算术，这与正确写法相等。浮点数却不然：
# 如果*被遮住*的分数比看得见的高出 100 左右，看得见的权重就下溢成 0，补救变成 0 除以 0。

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
# ## 什么也看不见的一行
#
# 一个批次里句子长短不一，短句用填充（padding）补齐，谁也不该看填充。于是可能有一行，*全部*被遮住。
# 分数全是 −∞，softmax 就是 0/0。常见的绕法是用一个很大的负数，比如 −10⁹，来代替 −∞。这样确实没有
# NaN 了；但这一行会平均地看向所有禁止看的东西。

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
# Mini-GPT 给出了明确的定义：什么也看不见，就什么也得不到，权重为 0，输出为 0。`attention`
# 的最后几行*先*在这样的行里填上有限的分数，再把权重拿走。顺序反过来，只能修好看得见的部分：
# 上面最后一行输出里，权重是干净的，梯度却是 NaN，因为 0 乘 NaN 还是 NaN。一个批次里只要有一行这样，
# 整个模型的权重就全毁了。
#
# ## 写成模块：返回输出和权重
#
# 这就是经典教程里的那个类。`mask` 可以是任何能广播的形状，为 0 处即被遮住。训练时 dropout
# 作用在权重上：偶尔切断一条连接，使任何位置都不至于只依赖另一个位置。*返回*的是 dropout
# 之前的权重，所以每行之和总是 1。

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
# ## 注意力看不见什么
#
# 出人意料的来了。取两个句子，没有哪个读者会把它们弄混；给每个词一个向量，让每个词都看所有的词。

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
# 一模一样，差别只在 float32 的末位。**注意力看到的是集合，不是序列。** 打乱位置，输出只是跟着打乱，
# 此外毫无变化：注意力对置换是*等变*的。也不可能是别的样子：公式 1 里根本没有出现位置的编号。

# %%
x = torch.randn(13, 16)
everything = torch.ones(13, 13, dtype=torch.bool)
order = torch.randperm(13)
output, _ = attention(x, x, x, everything)
shuffled, _ = attention(x[order], x[order], x[order], everything)
torch.testing.assert_close(shuffled, output[order])

# %% [markdown]
# 所以词序必须从外面加进去：这是[笔记本 3](3_positions.ipynb)的内容。在那之前，[笔记本
# 2](2_many_heads.ipynb)先问：一个平均值做不到什么？
#
# ## 练习
#
# **1.** 查询 (1, 1)，键 (1, 1)、(1, −1)、(−1, −1)。不除以 √2 和除以 √2，权重各是多少？
# 哪一个看得更平均？
# *提示：三个分数里有两个是 2 和 −2。*
#
# <details><summary>答案</summary>
#
# 分数是 2、0、−2。不除：e² : 1 : e⁻² = 7.389 : 1 : 0.135，即 0.867、0.117、0.016。除过之后分数是
# 1.414、0、−1.414，权重 0.768、0.187、0.045，更平均。分数除以大于 1 的数，总会让权重更平均，
# 就像温度高于 1。
# </details>
#
# **2.** 所有查询都是 0。在因果掩码下，位置 i 收集到的是什么？
# *提示：分数全都相等时，softmax 是什么？*
#
# <details><summary>答案</summary>
#
# 分数相等，权重就相等：收集到的是位置 0 … i 的值的普通平均。`v.cumsum(0) / torch.arange(1, len(v) +
# 1)[:, None]` 算出来一样。一个什么也没学到的头，就是一个累积平均。
# </details>
#
# **3.** T5（Raffel 等，2020）根本不除以 √d_k。它的查询向量的标准差要从多少开始，分数才和这里一样？
# *提示：乘积除以一个数，等于 q 除以这个数。*
#
# <details><summary>答案</summary>
#
# 1/√d_k，而不是 1：这个除法被并进了 W^Q 的初值。起点上两者是同一个函数。训练过程则不同：对 W^Q
# 走同样的一步，分数的变化是原来的 √d_k 倍。
# </details>
#
# **4.** 8 个头、4,096 个位置、float32，一层的权重占多少字节？`fast_causal_attention`
# 为什么从来不保存它们？
# *提示：每个头、每一对位置一个数。*
#
# <details><summary>答案</summary>
#
# 8 · 4,096² · 4 字节 = 537 MB，批次里每个文本都要这么多；长度翻倍，就是四倍。一行的 softmax
# 可以分块计算，随时更新目前的最大值与和（Dao 等，2022），所以完整的矩阵根本不必存在。
# </details>
#
# ## 接下来读哪些代码
#
# [`layers/attention.py`](../../src/minigpt/layers/attention.py)，从头读到
# `ScaledDotProductAttention`；然后是 [`tests/test_attention.py`](../../tests/test_attention.py)，
# 那里用测试保证同样的性质。
