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
# # 4 · 前馈、归一化、残差
#
# **读完之后你会明白**：两次注意力之间，一个位置上发生了什么；为什么没有残差，深的网络就训练不起来；
# 以及为什么论文的归一化放在求和之后，而 GPT-2 的放在子层之前。
#
# 《Attention Is All You Need》3.1、3.3、5.4 节 · 上一篇：[3 · 位置](3_positions.ipynb) ·
# 下一篇：[5 · 编码器与解码器](5_encoder_decoder.ipynb) ·
# [English](../en/4_feed_forward_norms_residuals.ipynb)

# %%
import inspect
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from torch import nn
from torch.nn import functional as F

from minigpt.config import ModelConfig
from minigpt.layers.attention import MultiHeadAttention
from minigpt.layers.feed_forward import PositionwiseFeedForward
from minigpt.layers.norm import LayerNorm, RMSNorm
from minigpt.model import MiniGPT, PostNormBlock, PreNormBlock
from minigpt.transformer import EncoderLayer

torch.manual_seed(1)
torch.set_printoptions(precision=4, sci_mode=False)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False})
POST, PRE = "#e8710a", "#145090"  # one colour each, in all pictures


def show(part):
    """Display a part of minigpt as it stands in the package."""
    return Markdown(f"```python\n{inspect.getsource(part)}```")


# %% [markdown]
# ## 前馈网络：每个位置各算各的
#
# 注意力只做混合：它的输出是值的平均。从混合中算出*新*东西的，是两个矩阵，中间带一个弯折：
#
# $$\mathrm{FFN}(x) = \max(0,\; x W_1 + b_1)\, W_2 + b_2 \qquad (2)$$

# %%
show(PositionwiseFeedForward)

# %% [markdown]
# *逐位置*的意思是：每个位置上是同一个函数，而且谁也看不见谁。两个测试：打乱位置，输出只是跟着打乱；
# 改动一个位置，别的位置都不动。

# %%
feed_forward = PositionwiseFeedForward(d_model=64, d_ff=256, dropout=0.0)
x = torch.randn(1, 10, 64)
order = torch.randperm(10)
torch.testing.assert_close(feed_forward(x[:, order]), feed_forward(x)[:, order])

changed = x.clone()
changed[0, 3] += 1.0
moved = (feed_forward(changed) - feed_forward(x)).abs().amax(dim=-1)[0] > 1e-6
print("positions that move:", moved.nonzero().flatten().tolist())
assert moved.nonzero().flatten().tolist() == [3]

# %% [markdown]
# 第一个测试对注意力也成立（笔记本 1），第二个则不成立。
# 这就是一个块里的分工：**注意力在位置之间搬运东西，前馈网络就地加工。**
#
# 参数也大多在这里。论文的 base 模型，D = 512，F = 2,048，一个编码器层：

# %%
layer = EncoderLayer(d_model=512, n_heads=8, d_ff=2_048)
n_all = sum(parameter.numel() for parameter in layer.parameters())
for name, part in (("attention", layer.self_attention), ("feed-forward", layer.feed_forward)):
    n_part = sum(parameter.numel() for parameter in part.parameters())
    print(f"{name:12} {n_part:9,} of {n_all:,} parameters, {n_part / n_all:.1%}")
assert n_part == 2 * 512 * 2_048 + 2_048 + 512
assert 0.66 < n_part / n_all < 0.67

# %% [markdown]
# ## 一个通道做什么
#
# 从 F 个通道里取一个。W₁ 的第 c 行是一个方向，b 是它的阈值。如果 x 在这个方向上走得够远，
# 通道就*打开*，打开的程度等于超出阈值的量；否则恰好是 0。它写出的，
# 是 W₂ 中属于它的那一列乘以这个量。所以整个网络就是许多条互相独立的小规则之和：**如果 x
# 看起来像这样，就加上那个**（Geva 等，2021，把它们读作一个记忆的键和值）。

# %%
with torch.no_grad():
    amounts = feed_forward.widen(x[0, 0]).relu()  # (F,): how much each channel is on
    columns = feed_forward.narrow.weight.T  # (F, D): what each channel writes
    on = amounts.nonzero().flatten()
    written = sum(amounts[channel] * columns[channel] for channel in on)
    torch.testing.assert_close(written + feed_forward.narrow.bias, feed_forward(x)[0, 0])
print(f"{len(on)} of 256 channels are on; the others add nothing at all")

# %% [markdown]
# 没有这个弯折，两个矩阵就等于一个：W₂ W₁，加宽到 F 个通道也就白费了。有了它，每个通道就是一个铰链，
# 而铰链能搭出任何形状。两个铰链搭出 |x|。四个搭出一个鼓包：第一个让线上升，第二个让它变平，
# 第三个让它下降，第四个再让它变平。

# %%
line = torch.linspace(-3, 3, 200)
torch.testing.assert_close(line.relu() + (-line).relu(), line.abs())

hinges = [(1.0, 2.0), (-1.0, 1.0), (-1.0, -1.0), (1.0, -2.0)]  # what it adds, where it bends
parts = [amount * (line + shift).relu() for amount, shift in hinges]
bump = sum(parts)
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for part in parts:
    axes.plot(line, part, color="#bbbbbb", linewidth=1)
axes.plot(line, bump, color=PRE, linewidth=2.5)
axes.set(ylim=(-2.2, 3.2), xlabel="x", title="four hinges (grey) and their sum")
plt.show()
assert bump[0] == 0
assert bump[-1].abs() < 1e-5
assert torch.isclose(bump.max(), torch.tensor(1.0))

w_1, w_2 = feed_forward.widen.weight, feed_forward.narrow.weight
torch.testing.assert_close(x @ w_1.T @ w_2.T, x @ (w_2 @ w_1).T)  # no bend: one matrix

# %% [markdown]
# ## 手算层归一化
#
# 取向量 (1, 2, 3, 6)。均值是 3；偏差是 −2、−1、0、3；平方 4、1、0、9 之和是 14；方差是 14 / 4 =
# 3.5。偏差再除以 √3.5 = 1.871。

# %%
x = torch.tensor([1.0, 2.0, 3.0, 6.0])
by_hand = torch.tensor([-2.0, -1.0, 0.0, 3.0]) / math.sqrt(3.5)
norm = LayerNorm(4)
print([round(number, 4) for number in norm(x).tolist()])
torch.testing.assert_close(norm(x), by_hand, atol=1e-5, rtol=0)
torch.testing.assert_close(norm(x), nn.LayerNorm(4)(x))

# %%
show(LayerNorm)

# %% [markdown]
# **陷阱**：`x.std()` 除的是 D − 1（贝塞尔校正，用于从更大的总体中抽样的情形）。这样写，
# 层照样能训练，但它不是 LayerNorm；The Annotated Transformer 里的那个也不是，它还把 ε
# 加在了标准差上。误差是一个因子 √((D − 1) / D)：在上面的例子里很严重，在 D = 512 时是 0.1
# %，已经足以让别的代码库的权重加载到这里之后给出不同的答案。

# %%
for width in (4, 64, 512):
    x = torch.randn(1_000, width)
    with_bessel = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
    ratio = (with_bessel / LayerNorm(width)(x)).median().item()
    print(f"D {width:3}   with Bessel's correction / LayerNorm = {ratio:.4f}")
    assert math.isclose(ratio, math.sqrt((width - 1) / width), rel_tol=1e-3)

# %% [markdown]
# 归一化是干什么的：进来的不管多大，出去的大小都一样。向量乘以 10，结果不变；每个结果的长度都是
# √D（再乘以模型在 `weight` 里学到的倍数）。而且它只看一个文本的一个位置：
# 不像批归一化那样看整个批次，也不看其他位置。
#
# RMSNorm 省掉了中心化，只除以均方根。失去的是一个性质（给所有通道加上同一个常数，现在会改变结果），
# 去掉也无妨。

# %%
x = torch.randn(5, 64)
rms = RMSNorm(64)
torch.testing.assert_close(rms(x), nn.RMSNorm(64, eps=1e-5)(x))
for name, norm in (("LayerNorm", LayerNorm(64)), ("RMSNorm", rms)):
    scaled = (norm(10 * x) - norm(x)).abs().max().item()
    shifted = (norm(x + 10) - norm(x)).abs().max().item()
    print(f"{name:9} length {norm(x).norm(dim=-1).mean():.2f},", end=" ")
    print(f"changes by {scaled:.4f} when scaled by 10, by {shifted:.4f} when shifted by 10")
    assert scaled < 1e-3

# %% [markdown]
# ## 残差，或者说：深的网络为什么竟然能学习
#
# 把前馈网络一直叠到 32 层深，看传到最底下的梯度有多大。一次不加任何东西，y =
# f(x)；一次带上论文的残差，y = x + f(x)。


# %%
def gradient_at_the_bottom(depth, residual):
    """Return the size of the gradient at the input of `depth` networks."""
    torch.manual_seed(1)
    x = torch.randn(1, 16, 64, requires_grad=True)
    y = x
    for _ in range(depth):
        part = PositionwiseFeedForward(d_model=64, d_ff=256, dropout=0.0)
        y = y + part(y) if residual else part(y)
    (gradient,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), x)
    return gradient.norm().item()


depths = (1, 2, 4, 8, 16, 32)
bare = [gradient_at_the_bottom(depth, residual=False) for depth in depths]
residual = [gradient_at_the_bottom(depth, residual=True) for depth in depths]
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(depths, residual, "o-", color=PRE, label="x + f(x)")
axes.plot(depths, bare, "o-", color=POST, label="f(x)")
axes.set(yscale="log", xlabel="depth", title="gradient at the bottom")
axes.legend(frameon=False)
plt.show()
print(f"32 deep: {residual[-1]:.0f} with residuals, {bare[-1]:.0e} without")
assert bare[-1] < 1e-12
assert residual[-1] > 1

# %% [markdown]
# 没有残差，每个网络都把梯度乘上一个小于 1 的数，32 个相乘就什么也不剩。有了残差，x + f(x) 的导数是
# 1 + f′(x)：沿着那个 1，损失的梯度不打折扣地到达每一层。这条贯穿整个模型的通路就是**残差流**；
# 各个部分从它读取，再往它上面加。
#
# 注意力需要残差流，还有第二个原因，不那么广为人知。平均值的平均值，比平均值更加平均。
# 把注意力叠起来而不加残差，看各个位置变得多么相似（1：方向全都相同）。


# %%
@torch.no_grad()
def similarity(residual, n_layers=8):
    """Return the mean cosine between two positions after each attention."""
    torch.manual_seed(1)
    x = torch.randn(1, 16, 64)
    similarities = []
    for _ in range(n_layers):
        layer = MultiHeadAttention(64, 8, dropout=0.0)
        for part in (layer.query, layer.key, layer.value, layer.output):
            nn.init.zeros_(part.bias)  # a bias is the same at all positions: it would help to cheat
        x = (x if residual else 0) + layer(x, x, x)[0]
        directions = F.normalize(x[0], dim=-1)
        cosines = directions @ directions.T
        similarities.append(((cosines.sum() - 16) / (16 * 15)).item())
    return similarities


for residual in (False, True):
    print("residual  " if residual else "no residual", [round(s, 3) for s in similarity(residual)])
assert similarity(residual=False)[1] > 0.99
assert similarity(residual=True)[-1] < 0.5

# %% [markdown]
# 仅仅*两层*之后，十六个位置说的就全是同一件事，不管它们代表什么词（Dong 等，2021，
# 证明了必然如此）。“Attention is all you need” 是个好标题。但你需要的不只是注意力。
#
# ## 归一化放在哪里
#
# 论文：LayerNorm(x + Sublayer(x))，放在求和之后，即 **post-norm**。GPT-2 以及此后的几乎所有模型：x
# + Sublayer(LayerNorm(x))，即 **pre-norm**，并在最末尾再加一个归一化。两者对照：

# %%
show(PostNormBlock)

# %%
show(PreNormBlock)

# %% [markdown]
# 把两个 `forward` 当作一条从底到顶的路来读。在 post-norm 里，残差流本身要穿过每一个归一化。在
# pre-norm 里，路上没有任何阻挡，归一化都在支路上。对刚初始化的编码器层做两项测量，就能看到后果：
# 每一层的梯度有多大，以及每一层把残差流改变了多少。


# %%
def measure(placement, n_layers):
    """Return, for each layer of a fresh stack, its gradient and how much it turns the stream."""
    torch.manual_seed(1)
    layers = nn.ModuleList(
        EncoderLayer(64, 8, 256, dropout=0.0, norm_placement=placement) for _ in range(n_layers)
    )
    last_norm = LayerNorm(64) if placement == "pre" else nn.Identity()
    output = nn.Linear(64, 50)
    for parameter in [*layers.parameters(), *output.parameters()]:
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    x, targets = torch.randn(8, 16, 64), torch.randint(50, (128,))
    changes = []
    for layer in layers:
        before = x
        x = layer(x)
        # 1 − cosine: 0 for a layer that leaves the direction of the stream as it was
        changes.append((1 - F.cosine_similarity(before, x, dim=-1).mean()).item())
    F.cross_entropy(output(last_norm(x)).flatten(0, 1), targets).backward()
    gradients = [layer.feed_forward.narrow.weight.grad.norm().item() for layer in layers]
    return gradients, changes


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
measured = {}
for placement, color in (("post", POST), ("pre", PRE)):
    for n_layers, style in ((6, "o-"), (24, ".--")):
        gradients, changes = measured[placement, n_layers] = measure(placement, n_layers)
        numbers = range(1, n_layers + 1)
        label = f"{placement}-norm, {n_layers} layers"
        left.plot(numbers, gradients, style, color=color, label=label)
        right.plot(numbers, changes, style, color=color)
left.set(xlabel="layer", title="gradient of its second matrix", ylim=(0, None))
right.set(xlabel="layer", title="how far it turns the stream", ylim=(0, None))
left.legend(frameon=False, fontsize=8)
plt.show()

for placement in ("post", "pre"):
    few, many = (measured[placement, n_layers][0][-1] for n_layers in (6, 24))
    print(f"{placement}-norm: gradient of the last layer {few:.2f} of 6 layers, {many:.2f} of 24")
assert measured["post", 24][0][-1] > 0.9 * measured["post", 6][0][-1]
assert measured["pre", 24][0][-1] < 0.7 * measured["pre", 6][0][-1]

# %% [markdown]
# 左图：看每一摞的*最后一层*。在 pre-norm 里，叠得深，它的梯度就小：6 层时 0.41，24 层时 0.23；在
# post-norm 里却不是：0.86 和 1.11。Xiong 等（2020）的定理说的正是这里：在靠近输出的地方，pre-norm
# 的梯度大约按 1/√L 下降，post-norm 的不降，所以对深的 post-norm 模型来说，一上来就用全部学习率，
# 步子太大。论文的对策是 5.3 节的预热（warm-up）。对较低的层，这张图并没有这样说：pre-norm
# 的第一层在两摞里都约为 1.0，而六层的 post-norm 里，最低的几层梯度最大，约为 1.5。
#
# 右图：pre-norm 的代价。残差流每做一次加法就变大，再也不会缩小，所以越往后的层，越转不动它。
# post-norm 则相反：最低的一层转动 0.19，从第五层起，大约都在 0.3 到 0.5 之间。
#
# 现在做实验：笔记本 2 的表格任务，八层，同样的恒定学习率，分别不带预热和带预热。

# %%
n_symbols, n_positions = 7, 12
table = torch.randint(n_symbols, (n_symbols, n_symbols), generator=torch.Generator().manual_seed(0))


def losses_of(placement, n_warm_up, n_steps=200, rate=5e-3):
    """Train eight layers; return the loss of each step."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    model = MiniGPT(
        ModelConfig(
            vocab_size=n_symbols,
            context_length=n_positions,
            d_model=32,
            n_heads=4,
            d_ff=64,
            n_layers=8,
            norm="layer",
            norm_placement=placement,
            feed_forward="relu",
            bias=True,
            tie_embeddings=False,
        )
    )
    for parameter in model.blocks.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)  # the paper's code; Mini-GPT itself starts smaller
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    losses = []
    for step in range(1, n_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / max(n_warm_up, 1))
        ids = torch.randint(n_symbols, (32, n_positions), generator=generator)
        answers = table[ids[:, :1].expand(-1, n_positions - 1), ids[:, :-1]]
        loss = F.cross_entropy(model(ids)[:, 1:].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
final = {}
for placement, color in (("post", POST), ("pre", PRE)):
    for n_warm_up, style in ((0, "-"), (100, ":")):
        losses = losses_of(placement, n_warm_up)
        final[placement, n_warm_up] = sum(losses[-20:]) / 20
        label = f"{placement}-norm, {f'warm-up of {n_warm_up}' if n_warm_up else 'no warm-up'}"
        axes.plot(losses, style, color=color, label=label)
axes.set(xlabel="step", ylabel="loss")
axes.legend(frameon=False)
plt.show()
print({name: round(loss, 2) for name, loss in final.items()})
assert final["post", 0] > 1.2  # it has learned next to nothing
assert final["post", 100] < 1.0
assert max(final["pre", 0], final["pre", 100]) < 0.3

# %% [markdown]
# 没有预热，post-norm 几乎什么也学不到；有预热就能学。pre-norm 则无所谓。所以：
#
# - **论文的归一化为什么放在那里。** 论文没有给出理由。这样做的好处是：每一层的输出大小一样，
#   没有哪一层的声音会被前面的淹没。六层，加上预热，训练得很好。
# - **GPT-2 为什么挪了位置。** 它的论文也没有给出理由，但它多达 48 层。用 pre-norm，
#   向下的路畅通无阻，训练不再全靠预热；代价是越深的层说话越轻，而层数多，付得起。
#   残差流离开这样一摞层时大小不定，所以末尾要再加一个归一化。
#
# ## Dropout
#
# 5.4 节：dropout 作用在每个子层的输出上，在它被加进去*之前*；也作用在嵌入与位置之和上，
# 那是残差流的开头。被丢弃的变成 0，其余的除以 1 − p，使期望值不变。从那以后，残差流本身不再丢弃：
# 某个部分沉默一次，是一次锻炼；残差流上破一个洞，信息就真的丢了。（5.4
# 节没有提到作用在注意力权重上的 dropout。经典的代码都有，这里的 `MultiHeadAttention` 也有。）

# %%
dropout = nn.Dropout(0.1)
x = torch.ones(100_000)
print(
    "values:",
    sorted({round(v, 4) for v in dropout(x).tolist()}),
    " mean:",
    dropout(x).mean().item(),
)
assert abs(dropout(x).mean().item() - 1) < 0.01
assert torch.equal(dropout.eval()(x), x)  # evaluation: nothing is dropped

# %% [markdown]
# ## 练习
#
# **1.** ReLU 网络 W₁ = (1, −1)ᵀ，b₁ = (0, 0)，W₂ = (1, 1)，b₂ = −1，对 x = −2、0、3
# 的三个输出是什么？这是什么函数？
# *提示：两个铰链。*
#
# <details><summary>答案</summary>
#
# 1、−1、2：就是 |x| − 1。
# </details>
#
# **2.** (0, 0, 0, 4) 的 LayerNorm 是什么（权重 1，偏置 0，ε = 0）？RMSNorm 呢？
# *提示：均值 1，偏差 −1、−1、−1、3。*
#
# <details><summary>答案</summary>
#
# 方差 12 / 4 = 3：(−0.577, −0.577, −0.577, 1.732)。RMSNorm：均方是 16 / 4 = 4，所以是 (0, 0, 0,
# 2)。在那里，0 还是 0。
# </details>
#
# **3.** pre-norm 模型最后一次求和之后的那个归一化，为什么不能省？
# *提示：看看 24 层之后 x 有多大。*
#
# <details><summary>答案</summary>
#
# 残差流每做一次加法就变大（在 `measure` 里大约到了五倍）。logits 会跟着变大，softmax
# 还什么都没学到，就已经深信不疑了。
# </details>
#
# **4.** GPT-2 把写入残差流的矩阵的初值缩小到 1/√(2L)。为什么是这个数？
# *提示：有多少个部分往残差流里加？独立的量求和，大小怎样增长？*
#
# <details><summary>答案</summary>
#
# 2L 个，每块两个。n 个大小为 s 的独立项之和，大小是 s√n；s 除以 √(2L) 之后，
# 加进去的总量就和单独一个部分差不多大，与深度无关。做这件事的是
# [`model.py`](../../src/minigpt/model.py) 中的 `_initialise`。
# </details>
#
# ## 接下来读哪些代码
#
# [`layers/feed_forward.py`](../../src/minigpt/layers/feed_forward.py)、
# [`layers/norm.py`](../../src/minigpt/layers/norm.py)，以及
# [`model.py`](../../src/minigpt/model.py) 中的两种块。
