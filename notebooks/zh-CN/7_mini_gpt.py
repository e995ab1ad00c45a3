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
# # 7 · Mini-GPT：训练它，让它写，看它的内部
#
# **读完你会知道**一个 GPT 由什么组成，其中每个张量是什么形状；你会在自己的机器上用一分钟训练一个；
# 会读它的困惑度，会用温度调节它写的文本，会看它的头在看什么，还会看着一个预测逐层成形。
#
# 上一篇：[6 · WikiText-2 与词表](6_wikitext2_and_the_vocabulary.ipynb) · 第一篇：
# [1 · 注意力](1_attention.ipynb) · [English](../en/7_mini_gpt.ipynb)
#
# 一分钟是预算，不是步数：能训练到哪里取决于机器，所以种子虽然相同，
# 你得到的数字和文本会与这里保存的不同。

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
# ## 在什么数据上训练
#
# 磁盘上有 WikiText-2 就用它；没有就用你自己的 Python 里带的文档，文本量是它的十二分之一，
# 切成词的碎片。两者的指标毫不相干，所以这里会说明用的是哪一个。

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
# ## 训练之前先算账
#
# 预设 `quickstart` 是现代配方里最小的一个：四个块，旋转位置编码，每个部件前面一个 RMS 归一化，
# 输出层在生僻词上少花力气（Grave 等 2017）。`minigpt info --plan quickstart` 打印的也是这张表。

# %%
table(["what", "how much"], size_rows(sizes(config, tokenizer.vocab_size), config))

# %% [markdown]
# 参数大多在各个块里，工作量也大多在块里；词表只是因为用了自适应的版本，让生僻词的向量更窄，
# 才这么小。
#
# ## 一个批次走一遍
#
# PyTorch 的每个模块都可以旁听：*前向钩子*（forward hook）在模块给出结果时被调用。让五个窗口、
# 每个七个词，穿过一个没有训练过的模型。

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
# (B, T) 个编号变成 (B, T, D) 个向量；每个块的每个部件都读这样一个张量，给出另一个同样形状的，
# 再把它*加*上去：这就是残差流。只有输出层离开它，在 B · T 个位置上各给 V 个词打分。
# 另外三个块和第一个一样。
#
# 没有训练过的模型什么也不知道，它自己也这么说：困惑度和 V 是一个数量级，好像所有的词都一样可能。
# （用自适应 softmax 时会低一些：它把一整簇生僻词当作一个常见词来对待，
# 所以一开始就隐约觉得常见词是常见的。）

# %%
log_probabilities = logits.log_softmax(-1)
next_ids = torch.tensor(stream.ids[1 : B * T + 1].astype("int64")).view(B, T)
loss = -log_probabilities.gather(-1, next_ids[..., None]).mean()
print(f"perplexity before training: {loss.exp():,.0f}, entries: {tokenizer.vocab_size:,}")

# %% [markdown]
# ## 一分钟的训练
#
# `minigpt.train` 做的就是命令做的事。用户看到的一切都挂在一个回调函数上，它会收到各种事件；
# 所以你自己的回调可以画图、记录，或者停下来想想。这里的回调把事件留下来，再转给平常的 `Report`，
# 由它把指标、样本和曲线写进运行文件夹。

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
# 一开始很陡，这时学的是哪些词常见；然后变慢：哪个词后面跟哪个词。接近结束时学习率降到零，
# 各步的噪声也随之平息。
#
# ## 困惑度，连同它所依赖的一切
#
# 没有条件的困惑度不算指标。下面就是训练结束时打印的各行，最后一行说明它可以与什么相比。
# `minigpt evaluate` 说得更多，包括区间。

# %%
context = run.config.model.context_length
found = figures(run, "valid", stream, validated.score, context=context, stride=context)
table(["what", "value"], figure_rows({**found, "run": run.path.name}))

# %% [markdown]
# 一分钟很短，能走到哪里取决于机器：请拿你自己的数与下面这些比较。在 WikiText-2 上，unigram 是 965，
# bigram 是 312（笔记本 6）；预设 `wikitext2-10min` 在两个核上大约到 85；
# 别人花几小时到几天得到的结果在 60 到 70。
#
# ## 它写些什么
#
# 从模型给出的分布里一个词接一个词地抽取。*温度*在 softmax 之前除以 logits：低于 1，可能的更可能；
# 高于 1，一切趋于平均。同样的开头，同样的种子，没有挑选。

# %%
prompt = "The city" if config.data == "wikitext-2" else "Return a"
for temperature in (0.3, 0.8, 1.3):
    text = minigpt.generate(
        run, prompt, temperature=temperature, top_k=None, seed=1, max_new_tokens=45
    )
    print(f"[{temperature}] {prompt}{text}\n")

# %% [markdown]
# 温度低，它只用最常见的词和短语。温度高，它从生僻词的长尾里抽（又是齐普夫），文本就散了。
# 在两者之间，局部的语法最站得住，内容却不知所云：一分钟能教会的是哪些词常在一起，
# 而不是世界是什么样子。
#
# ## 它以为接下来是什么
#
# 单独一步背后的分布：

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
# ## 它看向哪里
#
# 模型读一句话时每一层、每个头的注意力，一行对应一个位置：选择层和头，把鼠标移上去看权重。
# 这就是 `minigpt attention RUN TEXT --out page.html` 写出的那个页面。

# %%
sentence = {
    "wikitext-2": "The old city was built in the north , and the city was named after the king .",
    "python-docs": "Return a list of the names in the module, and the names of the classes.",
}[config.data]
minigpt.attention(run, sentence)

# %% [markdown]
# ## 每个头做什么
#
# 图容易让人编故事，所以要测量：在模型没有学过的文本上，每个头有多少权重给了前一个词、第一个词、
# 前面出现过的同一个词、上次跟在这个词后面的那个词；它找动词的宾语、代词的先行词，
# 是否比只看固定距离更准；以及把这个头关掉，模型会变差多少。

# %%
minigpt.heads(run)

# %% [markdown]
# 训练一分钟以后，不要指望每个头都对应一种关系。最先出现的多半是低层里看相邻位置的头；
# 损失那一列接近零的头，不管它的图像什么样子，模型少了它都无所谓。
#
# ## logit 透镜
#
# 每个块只是往残差流里加东西，输出层读的是最后留在里面的内容。
# 所以也可以用同一个输出层*提前*去读（nostalgebraist 2020）：如果必须在每个块之后就回答，
# 模型会说什么？

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
# 每一格里是模型在那里会说的词，括号里是真正的下一个词排在第几（1 就是对了）。
# 输入和输出共用一张词表，所以在第一个块之前，流里就是这个词自己，可以预料读出来的也是它。
# 然后各个块要把“这是哪个词？”变成“下一个是哪个词？”。每个块推进多少，看上面的名次和下面的奈特数。

# %%
nexts = torch.tensor(ids[1:])
for name, logits in zip(names, read, strict=True):
    nats = -logits[:-1].log_softmax(-1)[torch.arange(len(nexts)), nexts]
    print(f"after {name:10} {nats.mean():5.2f} nats per word on this sentence")

# %% [markdown]
# ## 运行文件夹里有什么
#
# 全是普通文件，没有一个是 pickle：打开陌生人的运行文件夹不会执行任何东西。

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
# 有了这些，中断的训练（Ctrl-C、停电）可以继续，就像什么也没发生过，一个比特也不差：
#
# `minigpt train --resume runs/NAME`，
# 或者在 Python 里 `minigpt.resume(run_dir)`。
#
# ## 一分钟能做什么，不能做什么
#
# 这么大的模型先学会词频，再学会常见词的左邻右舍，然后是句子和标题的样子；一分钟能走到哪一步，
# 取决于机器。它学不到事实，讲一件事坚持不了几个词，也不会让每个头各司其职。这些都需要更多的步数，
# 没有什么窍门：
#
# `minigpt train wikitext2-10min`
#
# 能把困惑度降到大约 85（两个核，种子 1：见[实验记录](../../docs/experiments.md)），
# 训练一夜还会更低。但十分钟同样学不会*言之有物*：那需要的文本，两百万词只是它的千分之一。

# %%
folder.cleanup()

# %% [markdown]
# ## 练习
#
# **1.** 什么也不训练：给每个词同样概率的模型，损失是多少？和曲线的第一个点比一比。*提示：
# −log(1/V)。*
#
# <details><summary>答案</summary>
#
# log V：33,278 个词就是 10.4 奈特。自适应 softmax 从更低的地方开始，
# 因为它一开始给每个常见词的概率就和给一整簇生僻词的一样多。
# </details>
#
# **2.** 把温度设成 0.01，用种子 1、2、3 各生成一次。你看到什么？这是哪一种解码方法？*提示：
# logits 乘以 100，softmax 会变成什么？*
#
# <details><summary>答案</summary>
#
# 三次都是同样的文本。全部概率都给了最大的 logit：贪心解码。小模型很快就会永远重复自己。
# </details>
#
# **3.** 在 logit 透镜里，为什么在第一个块之前读出来的往往就是这个词自己？
# `tie_embeddings = false` 会怎样？*提示：哪一张表把向量变成分数？*
#
# <details><summary>答案</summary>
#
# 输出层用每个词的那一行与流的点积来打分，而流*就是*那一行（归一化以后）。一行通常和它自己最合。
# 不共用的话，输出层有自己的一张表，在第一个块之前读出来的至多是哪个词后面跟哪个词：一个 bigram。
# </details>
#
# **4.** 用 `model={"n_layers": 1}` 把同一个模型同样训练一分钟，它能走更多步。哪个更好？
# 关于怎样为预算选择大小，这说明了什么？*提示：
# `minigpt.train(config, folder, model={"n_layers": 1})` 把设置叠加在 config 上。*
#
# <details><summary>答案</summary>
#
# 这里不给数字，因为它取决于你的机器：步数与深度的取舍。缺的是步数时，浅的赢；预算越大，
# 合适的模型也越大。
# </details>
#
# ## 接下来读哪些代码
#
# [`model.py`](../../src/minigpt/model.py)，现在你可以从头读到尾了；
# [`train.py`](../../src/minigpt/train.py)，训练循环；
# [`decoding.py`](../../src/minigpt/decoding.py)，一个词接一个词，有缓存和没有缓存；
# [`head_roles.py`](../../src/minigpt/head_roles.py)，对一个头都测些什么。
# 然后是 [CONTRIBUTING](../../CONTRIBUTING.md)：还有事情可做。
