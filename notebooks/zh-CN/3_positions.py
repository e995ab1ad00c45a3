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
# # 3 · 位置
#
# **读完之后你会明白**：没有位置会出什么问题，为什么正弦和余弦成对出现，为什么无论从哪里出发、前进
# k 个位置都是同一个旋转，以及学习式位置和旋转式位置有什么不同。
#
# 《Attention Is All You Need》3.5 节 · 上一篇：[2 · 多个头](2_many_heads.ipynb) · 下一篇：[4 ·
# 前馈、归一化、残差](4_feed_forward_norms_residuals.ipynb) · [English](../en/3_positions.ipynb)

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
# ## 没有位置会出什么问题
#
# 笔记本 1 以 “dog bites man” 和 “man bites dog” 结尾，注意力分不清这两句。因果掩码有帮助吗？
# 它确实打破了对称：第一个词看见一个词，第二个词看见两个。但*最后*一个词收集到的，
# 仍然是一个集合的混合。把前两个词对调，它毫无察觉。

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
# 看第二行：**两层**因果注意力就察觉到了。在第一层里，*dog* 要么只看见自己，要么还看见
# *bites*，所以第二层所混合的向量已经不是同一个集合了。因果模型其实可以完全不用位置来训练（Haviv
# 等，2022）。不过对这么基本的需要来说，这个信号太微弱；而在编码器里连这点信号都没有。
# 所以论文把位置加了进去。
#
# ## 时钟
#
# 原则上一个数 0、1、2、… 就够了。但把它加到嵌入上，它会大得盖过词；除以长度，
# 它在每个文本里的含义又不同。有一种更好的办法，用有界的数位来写一个数，你早就会：**二进制计数器**。
# 最低位每一步翻转一次，下一位每两步翻转一次，依此类推。每一位都很小，合起来却独一无二。
#
# 论文的位置就是一个计数器，只是它的各位不是翻转，而是平滑地转动，像钟表的指针，有快有慢：
#
# $$PE(pos, 2i) = \sin\left(pos / 10000^{2i/D}\right), \qquad
# PE(pos, 2i+1) = \cos\left(pos / 10000^{2i/D}\right)$$
#
# 通道 2i 和 2i + 1 是第 i 根指针的纵坐标和横坐标。

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
# 最慢的指针有多慢？论文说波长从 2π 到 10000 · 2π。后者是一个极限，没有哪个通道真正达到：最后一对的
# 2i = D − 2，所以在 D = 512 时，它转一圈需要

# %%
exponents = torch.arange(0, 512, 2, dtype=torch.float64) / 512
wavelengths = 2 * math.pi * 10_000**exponents
print(f"shortest {wavelengths[0]:.2f}, longest {wavelengths[-1]:,.0f}", end=" ")
print(f"of 10000 · 2π = {20_000 * math.pi:,.0f} positions")
print("pairs that come round once within 128 positions:", int((wavelengths <= 128).sum()), "of 256")
assert round(wavelengths[-1].item()) == 60_611

# %% [markdown]
# ## 为什么既要正弦*又要*余弦
#
# 单有正弦会有歧义：sin 30° = sin 150°。加上余弦，它就是圆上的一个点。
# 论文的核心论断因此成立：*对任何固定的偏移 k，PE(pos + k) 都可以表示为 PE(pos) 的线性函数*。前进 k
# 步，就是把每根指针转过一个角度，这个角度只取决于 k。而把一个点转过固定的角度是线性映射，即旋转：
#
# $$\begin{pmatrix} \sin(\omega (p+k)) \\ \cos(\omega (p+k)) \end{pmatrix} =
# \begin{pmatrix} \cos \omega k & \sin \omega k \\ -\sin \omega k & \cos \omega k \end{pmatrix}
# \begin{pmatrix} \sin \omega p \\ \cos \omega p \end{pmatrix}$$
#
# （就是中学学过的两个和角公式。）下图是 32 根指针中的四根，位置从 3 到 3 + 5，以及从 20 到 20 +
# 5：从蓝色指针到橙色指针的弧，上下两行完全一样。

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
# 再对所有指针、所有位置一起验证。按公式造出“前进五步”的矩阵，作用到整张表上。


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
# 这有什么用？一个头的查询和键，都是它所读内容的线性映射。所以一个头可以在 W^Q
# 里学会去找“PE(我的位置 − 1) 那个位置”，而同一组权重在*每个*位置都管用。我们手工造一个这样的头：
# 查询是向后转了一步的位置，键就是位置本身。

# %%
one_back = step_matrix(-1, d_model)
q, k = table @ one_back.T, table
scores = 4 * q @ k.T / math.sqrt(d_model)
weights = scores.masked_fill(~causal_mask(128, 128), -math.inf).softmax(dim=-1)
looks_at = weights.argmax(dim=-1)
print("positions 1 … 9 look at", looks_at[1:10].tolist())
assert torch.equal(looks_at[1:], torch.arange(127))

# %% [markdown]
# ## 点积里的距离
#
# 如果中间没有任何映射，两个位置的点积就是一串余弦之和（还是和角公式，sin a sin b + cos a cos b =
# cos(a − b)）：
#
# $$PE(a) \cdot PE(b) = \sum_i \cos(\omega_i (a - b))$$
#
# 它只取决于距离。所以全部点积画成的图，每条对角线上只有一种颜色。

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
# 有两点值得记住。近的相似，相似度随距离下降，但并不均匀。而且这张图是对称的：单凭点积，
# 分不清*前*和*后*。上面我们手工造的头分得清，因为它的 W^Q 里有一个旋转。位置本身给出距离，
# 学到的映射给出方向。
#
# ## 和词一样大
#
# 位置是加到嵌入上的，加进去的东西既不能淹没词，也不能被词淹没。每一对是半径为 1 的圆上的一个点，
# 所以每个位置的长度都是 √(D/2)。3.4 节把嵌入乘以 √D，没有说明理由。量一量它的效果：

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
# 正弦的长度是 √(D/2)，乘过之后的词约为 √D：同一个量级，相差 √2 倍。不乘的话，
# 词的长度只有位置的十六分之一。
#
# ## 没有最后一个位置
#
# 公式没有尽头。`PositionalEncoding` 从 max_len 行开始，遇到更长的文本就再造一些。在位置 100,000
# 处，数值也必须正确，而浮点数就埋伏在那里。float32 有 24 个有效二进制位，在 100,000
# 附近，相邻两个数相差 2⁻⁷ ≈ 0.008：存成 float32 的角度可能错上一半，即 0.004，它的正弦也一样。用
# float64 计算，最后只舍入一次，这张表就精确到了 float32 所能表达的极限。

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
# 由此下结论要小心。没有尽头的是这张*表*。一个只在 128 个位置上训练过的*模型*能不能理解位置
# 5,000，是另一个问题。论文希望能（“it may allow the model to extrapolate”）；后来有人测过，
# 效果很差（Press 等，2022，图 1）。
#
# ## 另外两种办法
#
# **学习式位置**（GPT-2；论文表 3 的 E 行，效果一样好）：每个位置一个自由的向量。表有尽头，
# 到头就报错。

# %%
learned = LearnedPositions(context_length=16, d_model=64, dropout=0.0)
print("16 positions:", tuple(learned(torch.zeros(1, 16, 64)).shape))
try:
    learned(torch.zeros(1, 17, 64))
except RuntimeError as error:
    print("17 positions:", error)

# %% [markdown]
# **旋转式位置**（rotary，Su 等，2021；Llama 和此后的大多数模型）从旋转出发把结论贯彻到底。
# 既然要紧的是“前进一步就是一个旋转”，那就不必把时钟加到词上：*直接旋转查询和键本身*。位置 i
# 的查询转 i 步，位置 j 的键转 j 步，它们的点积就只看得见两者之差。

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
# 用一张图来比较：64 个位置上全是*同一个词*，因而只有位置造成差别，W^Q 和 W^K
# 是随机的，看它们的分数。

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
# 学习式位置从噪声开始，什么叫“近”要靠训练去发现。正弦位置本身带有结构，但加到词上、再经过 W^Q 和
# W^K，就与词、与绝对位置混在了一起：头得学会把它取出来。旋转式的分数从构造上就只取决于距离：
# 每条对角线一种颜色，权重是什么都一样。
#
# ## 练习
#
# **1.** D = 4，笔算 PE(0)、PE(1) 和 PE(2)。两对里哪一对能区分 0 和 1？
# *提示：角度是 pos 和 pos / 100。*
#
# <details><summary>答案</summary>
#
# (0, 1, 0, 1)，(0.841, 0.540, 0.010, 1.000)，(0.909, −0.416, 0.020, 1.000)。
# 快的一对区分相邻的位置；慢的一对区分 0 和 100，而快的那一对到那时已经转了将近 16 圈。
# </details>
#
# **2.** 不用公式，求“前进五步”的矩阵：用最小二乘法从表中求。
# *提示：`torch.linalg.lstsq(table[:-5], table[5:])`。残差是多少？它的解为什么可能与那个旋转不同？*
#
# <details><summary>答案</summary>
#
# 残差只有百万分之几：线性映射确实存在，单凭数据就能找到。但它不一定就是*那个*旋转。在 123
# 个位置之内，慢的指针几乎不动，所以这张表在 float32 下的秩只有 24（`torch.linalg.matrix_rank`），
# 许多矩阵都拟合得一样好。
# </details>
#
# **3.** 旋转式位置为什么转查询和键，而不转值？
# *提示：一个转了 j 步的值，在位置 i 被混合之后意味着什么？*
#
# <details><summary>答案</summary>
#
# 看哪里，取决于距离；在那里找到什么，不应该取决于距离。转过的值从每个位置来时方向都不同，
# 而输出矩阵不知道 j，没法把它转回来。
# </details>
#
# **4.** 键值缓存存的是*已经转过*的键。后来的查询站在越来越新的位置上，这样存为什么仍然正确？
# *提示：两者各按谁的位置转？*
#
# <details><summary>答案</summary>
#
# 键按它自己的位置转，那个位置永远不变。距离只在与查询相乘时才出现，而查询自带它那一份旋转。
# </details>
#
# ## 接下来读哪些代码
#
# [`layers/positions.py`](../../src/minigpt/layers/positions.py)，全部；然后是
# [`model.py`](../../src/minigpt/model.py) 中的 `_make_positions` 和 `embedding_scale`。
