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
# # 2 · 多个头
#
# **读完之后你会明白**：一个头做不到什么；拆成多个头要付出什么代价（没有代价）；
# 每个头是否真的各找一种关系；以及为什么带键值缓存的解码是精确的。
#
# 《Attention Is All You Need》3.2.2 节 · 上一篇：[1 · 从点积到注意力](1_attention.ipynb) ·
# 下一篇：[3 · 位置](3_positions.ipynb) · [English](../en/2_many_heads.ipynb)

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
# ## 一个头就是一个平均值
#
# 在 “the cat drank milk” 里，动词有两个问题：*谁*喝，*喝什么*？一个头给每个词只有一行权重，
# 这一行的和是 1，给了这个，就少了那个。两边各给一半，再看两者互换位置之后取回来的是什么。

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
# 一个头取回的是 (2, 3)，既不是猫也不是奶，而且两个句子一样。两个头则把两个答案并排留着。
# 论文用一句话说了这件事：“With a single attention head, averaging inhibits this.”
#
# （不对半分，比如 0.7 和 0.3，就能区分这两个句子，代价是其中一个词只能听得很轻。下面会看到，
# 真实的模型靠这一招能走多远。）
#
# ## 公式与代码
#
# $$\mathrm{MultiHead}(Q, K, V) = \mathrm{Concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h)\, W^O,
# \qquad \mathrm{head}_i = \mathrm{Attention}(Q W_i^Q, K W_i^K, V W_i^V)$$
#
# 每个头透过自己的三个矩阵看词，每个矩阵是 D × K，其中 K = D / h。把 h 个头的查询矩阵并排放好，
# 就是一个 D × D 的矩阵。所以所有头只需一次乘法，剩下的只是把结果切开。

# %%
show(MultiHeadAttention)

# %%
show(split_heads)

# %%
show(merge_heads)

# %% [markdown]
# 用一个真实的批次来看：2 个文本，5 个位置，D = 12，三个头，每个头 K = 4。头 1 拿到每个位置的第 4
# 到 7 个通道。合并之后，一切回到原处。

# %%
n_batch, n_positions, d_model, n_heads = 2, 5, 12, 3
d_head = d_model // n_heads
x = torch.randn(n_batch, n_positions, d_model)
heads = split_heads(x, n_heads)
print(tuple(x.shape), "→", tuple(heads.shape), "→", tuple(merge_heads(heads).shape))
assert torch.equal(heads[:, 1], x[:, :, 4:8])
assert torch.equal(merge_heads(heads), x)

# %% [markdown]
# 这里有个陷阱，而且不声不响。直接 `view` 成 (B, H, T, K)，*形状*是对的。但 view
# 只是给内存里的东西重新编号，于是“头 0”装的是最前面几个位置的全部通道，最后几个位置一个通道也没有。
# 给每个数标上它来自哪个位置，就看得出来：

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
# 在错误的写法里，一个头的每一行都混着来自好几个位置的通道，因果掩码遮住的行根本不是位置，
# 而程序不会报任何错。要发现它，还是笔记本 1 的那个测试：改动后面的一个词，看什么会动。
#
# ## 与 PyTorch 的相等
#
# `nn.MultiheadAttention` 把三个输入矩阵放在一整块里。把我们的权重复制进去，遮住未来，
# 也遮住其中一个文本的填充，再比较输出和每个头的权重。注意掩码的约定：PyTorch 这个层里 True
# 表示**被遮住**，我们这里表示**可以看**。

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
# ## Concat 其实是求和
#
# 把各个头拼接起来再乘以 W^O，听上去像是把所有头搅在了一起。把 W^O 切成 h 条，每条 K
# 行，再看一遍：Concat(head_1, …, head_h) W^O = head_1 W_1^O + … + head_h
# W_h^O。**每个头写下自己的一份贡献，各份贡献相加。** 所以可以单独关掉一个头，下面就会这样做。

# %%
v = split_heads(ours.value(x), n_heads)
mixed = weights @ v  # (B, H, T, K)
strips = ours.output.weight.T.view(n_heads, d_model // n_heads, d_model)  # W_i^O, (H, K, D)
contributions = mixed @ strips  # (B, H, T, D): what each head adds
torch.testing.assert_close(contributions.sum(dim=1) + ours.output.bias, output, atol=1e-5, rtol=0)
print("contributions of", n_heads, "heads:", tuple(contributions.shape))

# %% [markdown]
# ## 头的代价
#
# 没有代价：h 个宽 D / h 的头，参数与一个宽 D 的头一样多。付出的是每个头的宽度。一个头的分数是 x_i
# (W^Q W^K ᵀ) x_j，中间那个矩阵的秩最多是 K：宽度为 1 的头，比较两个词时只看一个数。

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
# 所以最佳值在两者之间。论文是试出来的（表 3，A 组：一个头 24.9 BLEU，八个头 25.8，32 个头 25.4）：
# 一个头比八个头差 0.9 BLEU，32 个头差 0.4。
#
# ## 每个头都学到自己的一种关系吗？
#
# 常见的说法是：八个头关注八种关系，这个管语法，那个管指代。别轻信，去测量。
# 下面的任务恰好需要**两次**查找。模型读入随机符号，每个位置要说出一张固定表格中的一项：
# 行由文本的*第一个*符号决定，列由*前一个*符号决定。只知道其中一个毫无用处。

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
# 三个模型，参数一个不差，数据完全相同。两个头解决了任务；一个头卡在半路。（也并非毫无希望：
# 如前所说，不相等的权重能把两个符号区分开一点点。用 `n_steps=2_000`，它能达到 57 %。）
#
# 现在看看里面。`recorded` 给出每个头的权重；这里对 500 个文本取平均。行是正在看的位置，
# 列是它看的地方。


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
# 两个头的时候（左边一列），正如常言：一个头，一种关系。第一个符号是第一列，
# 前一个符号是紧贴对角线下方的那条线。八个头并没有八种关系，因为要找的只有两种。
# 好几个头做着同一件事，另一些东看西看，看三四个符号之前，而这个任务从来不问那些。
#
# 权重的图还不能说明一个头*重要*。要知道这一点，就把它关掉：把它在 W^O 里的那一条设为
# 0，让它什么也不贡献，再数有多少答案正确。


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
# 所以诚实的回答是：*头找到的是任务需要的东西，而不是按人数分派的东西。* 好几个头可能做同样的事；
# 有些头去掉也无妨，哪怕它的图看上去非常果断。而且副本之间互相掩护：最后一行里的那些头，
# 逐个关掉几乎没有损失，一起关掉就丢掉十分之一的答案。两次训练的结果也各不相同，见练习 1 和 2。
#
# 对你自己的模型，`minigpt heads RUN` 会告诉你每个头看什么，以及没有它损失是多少；[笔记本
# 7](7_mini_gpt.ipynb)对一个在 WikiText-2 上训练的模型这样做。
#
# ## 看向过去的自注意力，及其缓存
#
# Mini-GPT 运行的是带因果掩码的多头注意力，始终如此。正因为*始终*是因果的，
# 才可以一个词一个词地读文本，而任何东西都不必算第二遍。

# %%
show(CausalSelfAttention.forward)

# %%
show(KeyValueCache)

# %% [markdown]
# **为什么这是精确的？** 不是近似，而是同样的数。
#
# 1. 位置 i 的嵌入只取决于它的词和它的位置，文本变长时，两者都不变。
# 2. 如果在某一层，位置 0 … i 的向量只取决于词 0 … i 及其位置，那么下一层也是如此：位置 i 只看位置 0
#    … i，而归一化和前馈网络只看一个位置。
# 3. 于是由归纳法，*任何*一层里，过去位置的向量都不取决于后来的东西。新词到来时，
#    过去的键和值全都还是原样。存着它们，与重算一遍是一回事。
#
# 过去的查询不必存：它们那几行早已得到回答，没有人会再问。下面在一个三个块、随机权重的模型里，
# 逐词计算与一次算完作比较。

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
# 末位上还有差别，因为浮点数求和与次序有关。按精确算术，就没有任何差别。
#
# 这个论证也说明了什么时候缓存是*错*的：只要有任何东西会向前看。取同一个层，像编码器里那样不加掩码，
# 再接上一个词，过去就变了。

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
# 缓存的代价是内存：每一层、每个位置的键和值。**分组查询注意力**（grouped-query attention，Ainslie
# 等，2023）让几个查询头共用一个键值头，缓存就按这个倍数缩小。哪个查询头看哪里，仍然是自由的；
# 能找到什么，则是共用的。

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
# ## 练习
#
# **1.** 交换一个层的头 0 和头 1，也就是它们在 W^Q、W^K、W^V 中的行。W^O 中要交换什么，
# 才能算出同样的结果？这对两次训练里的“头 3”意味着什么？
# *提示：Concat 是求和。*
#
# <details><summary>答案</summary>
#
# 交换它们在 W^O 中的那两条：按 PyTorch 的布局，是第 0 … K − 1 列与第 K … 2K − 1
# 列。求和不在乎各项的次序，所以头的编号没有任何意义：另一次训练里的头 3 是另一个头。
# </details>
#
# **2.** 换一个种子训练（`trained_model` 里的 `torch.manual_seed(2)`）。八个头里看第一个符号的，
# 还是那几个吗？两个头的时候呢？
# *提示：先根据练习 1 猜一猜。*
#
# <details><summary>答案</summary>
#
# 不是：哪个头承担哪个角色，由随机的起点决定。不变的是，两个角色总有头来承担。
# </details>
#
# **3.** 解码器为什么没有查询的缓存？
# *提示：新词到来时，权重的哪一行是新的？*
#
# <details><summary>答案</summary>
#
# 只有最后一行：新的查询对所有的键，混合所有的值。旧的查询属于旧的行，那些行的输出早就知道了。
# </details>
#
# **4.** 位置是学出来的，窗口每次滑动一个词（丢掉最旧的词，其余全部左移一位）。这时缓存还精确吗？
# *提示：看论证的第 1 步：窗口滑动时，两者中哪一个变了？*
#
# <details><summary>答案</summary>
#
# 不精确。每个词都有了新位置，于是向量变了，键也变了：缓存里的键已经不是它们了。所以 Mini-GPT
# 每次把窗口移动一半，并把那一半重新读一遍（[`decoding.py`](../../src/minigpt/decoding.py)）。
# </details>
#
# ## 接下来读哪些代码
#
# [`layers/attention.py`](../../src/minigpt/layers/attention.py)，从 `split_heads`
# 读到最后；[`attention_maps.py`](../../src/minigpt/attention_maps.py)，
# 看怎样记录权重而不在模型上留下痕迹；以及 [`model.py`](../../src/minigpt/model.py) 中的
# `next_logits` 和 `new_cache`。
