"""The docs: both languages agree, what a page names is there, its figures are measured again."""

import base64
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from minigpt.config import ModelConfig, load_preset
from minigpt.model import MiniGPT, Objective
from minigpt.report import Report
from minigpt.train import train
from tiny import run_config, write_corpus

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))

import batch_walk  # noqa: E402
import docs_math  # noqa: E402
import docs_notebooks  # noqa: E402
import docs_pages  # noqa: E402
import walkthrough  # noqa: E402
from docs_pages import DocsError, Site  # noqa: E402

PAIRS = sorted(
    (path.with_name(path.name.replace(".zh-CN", "")), path) for path in DOCS.glob("*.zh-CN.md")
)
PAGES = sorted(DOCS.glob("*.md"))
INCLUDE = re.compile(r"^<!-- (source|trace): (.+) -->$", re.M)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def outside_code(path: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)


# The pages


def test_every_page_for_learners_is_there_in_both_languages() -> None:
    names = {english.stem for english, _ in PAIRS}
    assert {"index", "walkthrough", "questions"} <= names
    assert all(english.is_file() for english, _ in PAIRS)


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda path: path.name)
def test_both_languages_say_the_same(english: Path, chinese: Path) -> None:
    def told(path: Path) -> dict[str, object]:
        text, prose = path.read_text("utf-8"), outside_code(path)
        links = [
            link.replace("zh-CN/", "en/").replace(".zh-CN", "") for _, link in LINK.findall(prose)
        ]
        figures = re.findall(r"\d+(?:[.,]\d+)+", prose)
        return {
            "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.M)],
            "includes": INCLUDE.findall(text),
            "links": links,
            "tables": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
            "blocks": re.findall(r"^```(\w*)$", text, re.M),
            "figures": sorted(figures),
        }

    ours, theirs = told(english), told(chinese)
    for what, there in ours.items():
        assert there == theirs[what], what


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda path: path.name)
def test_each_language_leads_to_the_other_at_the_top(english: Path, chinese: Path) -> None:
    for page, label, other in ((english, "中文", chinese), (chinese, "English", english)):
        top = "\n".join(page.read_text("utf-8").splitlines()[:5])
        assert f"[{label}]({other.name})" in top


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_include_is_there(path: Path) -> None:
    for kind, name in INCLUDE.findall(path.read_text("utf-8")):
        if kind == "source":
            assert docs_pages.find_source(name).text
        else:
            assert name in walkthrough.SECTIONS


def test_every_trace_is_shown() -> None:
    shown = {
        n
        for kind, n in INCLUDE.findall((DOCS / "walkthrough.md").read_text("utf-8"))
        if kind == "trace"
    }
    assert shown == set(walkthrough.SECTIONS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    local = [
        link.partition("#")[0] for _, link in LINK.findall(outside_code(path)) if "://" not in link
    ]
    missing = [link for link in local if not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["walkthrough", "questions", "index"])
def test_a_link_that_names_an_object_leads_to_its_file(page: str) -> None:
    named = [
        (re.fullmatch(r"`([\w.]+)`", text), link)
        for text, link in LINK.findall(outside_code(DOCS / f"{page}.md"))
        if link.endswith(".py")
    ]
    assert named
    for match, link in named:
        assert match, f"{link} has no name in backticks"
        file = (DOCS / link).resolve().relative_to(ROOT).as_posix()
        if file.startswith("src/"):
            module = docs_pages.module_name(file)
            names_module = module.endswith(f".{match[1]}")
            assert names_module or docs_pages.find_source(f"{module}.{match[1]}"), link
        elif file.startswith("tests/"):
            assert re.search(rf"^def {match[1]}\(", (ROOT / file).read_text("utf-8"), re.M), match[
                1
            ]
        else:
            assert Path(file).stem == match[1]


@pytest.mark.parametrize("page", ["walkthrough", "questions", "index"])
def test_names_in_prose_are_names_in_the_code(page: str) -> None:
    """What looks like a name of ours, some_name or SomeName, occurs in the code as a word."""
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("tools/*.py")]
    words = set(re.findall(r"\w+", "".join(path.read_text("utf-8") for path in files)))
    quoted = re.findall(r"`([^`\n]+)`", outside_code(DOCS / f"{page}.md"))
    names = [q for q in quoted if re.fullmatch(r"\w+_\w+|_\w+|(?:[A-Z]+[a-z]+){2,}", q)]
    assert [name for name in names if name not in words] == []


def test_every_question_says_where() -> None:
    for page, code, test, notebook in (
        ("questions.md", "Code: ", "Test: ", "Notebook: "),
        ("questions.zh-CN.md", "代码：", "测试：", "笔记本："),
    ):
        answers = re.split(r"^### ", (DOCS / page).read_text("utf-8"), flags=re.M)[1:]
        assert len(answers) >= 15
        for answer in answers:
            title = answer.partition("\n")[0]
            where = re.search(rf"{code}(.*){test}(.*){notebook}(.*)", answer, re.S)
            assert where, title
            assert "src/minigpt/" in where[1], title
            assert "tests/" in where[2], title
            assert "notebooks/" in where[3], title


# The figures of the pages


def row_of(page: str, label: str) -> list[float]:
    """Return the figures of the one table row that begins with label."""
    text = (DOCS / page).read_text("utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [float(cell) for cell in row.strip("| ").split("|")[1:]]


def test_the_root_keeps_the_softmax_alive() -> None:
    torch.manual_seed(1)
    for column, d_k in enumerate(int(width) for width in row_of("questions.md", "d_k")):
        q, k = torch.randn(2_000, 1, d_k), torch.randn(2_000, 10, d_k)
        scores = (q @ k.transpose(-2, -1)).squeeze(1)  # (2000, 10)
        assert scores.var().item() == pytest.approx(d_k, rel=0.1)
        for how, divisor in (("undivided", 1.0), ("divided", math.sqrt(d_k))):
            weights = (scores / divisor).softmax(dim=-1)
            largest = weights.max(dim=-1).values.median().item()
            jacobian = torch.diag_embed(weights) - weights[:, :, None] * weights[:, None, :]
            derivative = jacobian.flatten(1).norm(dim=-1).median().item()
            for what, measured in (
                ("largest weight", largest),
                ("derivative of the softmax", derivative),
            ):
                told = row_of("questions.md", f"{what}, {how}")[column]
                assert told == pytest.approx(measured, abs=0.04), (d_k, what, how)


def gradient_of_the_last_block(norm_placement: str, n_layers: int) -> float:
    """Return the norm of the gradient of the last block's matrices, over three fresh models."""
    config = ModelConfig(
        vocab_size=97,
        context_length=32,
        d_model=64,
        n_heads=4,
        n_layers=n_layers,
        position="sinusoidal",
        norm="layer",
        norm_placement=norm_placement,
        feed_forward="relu",
        bias=True,
    )
    norms = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = MiniGPT(config)
        for parameter in model.blocks.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
        ids = torch.randint(97, (8, 33))
        nats, count = Objective(model)(ids[:, :-1], ids[:, 1:])
        (nats / count).backward()
        gradients = [p.grad.flatten() for p in model.blocks[-1].parameters() if p.dim() == 2]
        norms.append(torch.cat(gradients).norm().item())
    return sum(norms) / len(norms)


def test_gradients_at_the_last_block_shrink_with_depth_in_pre_norm_alone() -> None:
    depths = [int(depth) for depth in row_of("questions.md", "blocks")]
    post = [gradient_of_the_last_block("post", depth) for depth in depths]
    pre = [gradient_of_the_last_block("pre", depth) for depth in depths]
    assert row_of("questions.md", "norm after the sum (paper)") == pytest.approx(post, abs=0.02)
    assert row_of("questions.md", "norm before the part (GPT-2)") == pytest.approx(pre, abs=0.02)
    assert post[1] == pytest.approx(post[0], rel=0.2)
    assert pre[1] < 0.7 * pre[0]


def test_a_second_table_would_be_large() -> None:
    config = load_preset("mini")
    model = MiniGPT(config.model.resolved(config.tokenizer.vocab_size))
    n_table = model.embedding.weight.numel()
    n_all = sum(parameter.numel() for parameter in model.parameters())
    for page in ("questions.md", "questions.zh-CN.md"):
        text = (DOCS / page).read_text("utf-8")
        for figure in (f"{n_table:,}", f"{n_all:,}", f"{100 * n_table / n_all:.0f} %"):
            assert figure in text


@pytest.mark.parametrize("page", ["questions.md", "questions.zh-CN.md"])
def test_the_table_of_a_run_folder_is_complete(page: str, tmp_path: Path) -> None:
    config = run_config(write_corpus(tmp_path / "text.txt"))
    with Report(tmp_path / "run", config) as report:
        train(config, tmp_path / "run", report)
    written = {
        re.sub(
            r"checkpoints/\d+/", "checkpoints/STEP/", path.relative_to(tmp_path / "run").as_posix()
        )
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    text = (DOCS / page).read_text("utf-8")
    listed = re.findall(r"^\| `([\w/.]+)` \|", text, re.M)
    assert len(listed) == len(set(listed))
    assert set(listed) == written


# The walkthrough


def test_the_text_of_the_walkthrough_is_that_of_wikitext2(wikitext2: Path) -> None:
    lines = (wikitext2 / "wiki.train.tokens").read_text("utf-8").split("\n")
    at = lines.index(batch_walk.LEARNED.rstrip("\n"))
    assert lines[at + 1].startswith(batch_walk.HELD_OUT.rstrip("\n"))
    assert lines[at - 2] == " = Gold dollar = "


def test_a_watch_notes_what_each_line_made() -> None:
    def watched(x: torch.Tensor, scale: float) -> torch.Tensor:
        doubled = x * 2
        for _ in range(3):
            x = x + 1
        doubled.add_(1)  # the same tensor, so nothing new was made
        return x.sum() * scale

    watch = batch_walk.Watch((watched,))
    first, second = torch.zeros(5), torch.ones(7)
    before = sys.gettrace()
    with watch.watching():
        watched(first, 0.5)
        watched(second, 0.5)
    assert sys.gettrace() is before
    (made,) = watch.made.values()
    start = watched.__code__.co_firstlineno
    seen = [(entry.line and entry.line - start, entry.name, entry.value.shape) for entry in made]
    assert seen == [
        (0, "x", (5,)),
        (1, "doubled", (5,)),
        *[(3, "x", (5,))] * 3,
        (5, "return", ()),
    ]
    assert made[-1].value == 7.5


def test_the_watched_batch_is_what_the_page_says() -> None:
    walk = batch_walk.walk(2)
    assert len(walk.losses) == 2
    given, undivided, divided, hidden = (
        [made.value for made in walk.made["attention"] if made.name == name]
        for name in ("q", "scores", "scores", "weights")
    )
    assert given[0].shape == (3, 8, 12, 32)
    ratio = undivided[0].std() / divided[1].std()
    assert ratio.item() == pytest.approx(math.sqrt(32), rel=1e-5)
    torch.testing.assert_close(hidden[-1].sum(-1), torch.ones(3, 8, 12))
    # What was noted is what the model gave.
    (nats,) = [made.value for made in walk.made["Objective.forward"] if made.name == "nats"]
    log_probs = walk.logits.log_softmax(-1).gather(-1, walk.batch.targets[..., None])
    assert nats.item() == pytest.approx(-log_probs.sum().item(), rel=1e-4)
    # Untrained, it bets on the word it has just read, and loses more than by guessing evenly.
    assert torch.equal(walk.logits[0].argmax(-1), walk.batch.inputs[0])
    assert nats.item() / 36 > 2 * math.log(walk.config.model.vocab_size)
    # The window is read again when it is full, and only then.
    again = [reading for reading in walk.readings if reading.n_cached == 0]
    assert [len(reading.read) for reading in again] == [2, 7]
    assert all(len(r.read) == 1 for r in walk.readings if r.n_cached)


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_every_section_is_a_table_or_a_block(language: str) -> None:
    for name in walkthrough.SECTIONS:
        text = walkthrough.section(name, language, 2)
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert lines or text.startswith("```text\n"), name
        rows = text.split("\n\n")
        for part in rows:
            widths = {line.count("|") for line in part.splitlines() if line.startswith("| ")}
            assert len(widths) <= 1, name
    assert walkthrough.section("heads", language, 2).count("(B, H, T, K)") == 4
    with pytest.raises(KeyError):
        walkthrough.section("tails", language, 2)


def test_the_users_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path))
    with batch_walk._own_cache(tmp_path / "own"):
        assert os.environ["MINIGPT_CACHE"] == str(tmp_path / "own")
    assert os.environ["MINIGPT_CACHE"] == str(tmp_path)


# What the hooks are made of


@pytest.mark.parametrize(
    ("name", "path", "begins", "ends"),
    [
        (
            "minigpt.layers.attention.split_heads",
            "src/minigpt/layers/attention.py",
            "def split_heads(",
            "transpose(1, 2)",
        ),
        (
            "minigpt.model.MiniGPT.forward",
            "src/minigpt/model.py",
            "def forward(self, ids",
            "return logits",
        ),
        (
            "minigpt.evaluate.Score",
            "src/minigpt/evaluate.py",
            "@dataclass(frozen=True)\nclass Score",
            "self.bytes",
        ),
        (
            "minigpt.evaluate.Score.loss",
            "src/minigpt/evaluate.py",
            "@property\ndef loss",
            "self.nats / self.tokens",
        ),
        ("minigpt.evaluate.Window.end", "src/minigpt/evaluate.py", "end: int", "end: int"),
        ("minigpt.sampling.USUAL", "src/minigpt/sampling.py", "USUAL = ", "Sampling()"),
        ("minigpt.layers", "src/minigpt/layers/__init__.py", '"""The parts', "]"),
    ],
)
def test_source_is_found_with_its_lines(name: str, path: str, begins: str, ends: str) -> None:
    found = docs_pages.find_source(name)
    assert found.path == path
    assert found.text.startswith(begins)
    assert found.text.rstrip().endswith(ends)
    lines = (ROOT / path).read_text("utf-8").splitlines()
    assert [line.strip() for line in lines[found.first - 1 : found.last]] == [
        line.strip() for line in found.text.splitlines()
    ]
    block = docs_pages.source_block(name)
    assert f'title="{path}, lines {found.first}-{found.last}"' in block
    assert f'linenums="{found.first}"' in block


@pytest.mark.parametrize(
    "name",
    [
        "minigpt.model.MaxiGPT",
        "minigpt.model.MiniGPT.x",
        "minigpt.nothing",
        "torch.nn",
        "minigpt.evaluate.Score.loss.nats",
    ],
)
def test_source_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(DocsError, match=re.escape(name.rpartition(".")[2])):
        docs_pages.find_source(name)


def test_includes_are_put_in_outside_code_alone() -> None:
    fence = "```md\n<!-- source: minigpt.no.such -->\n```"
    page = f"Before\n\n<!-- trace: sizes -->\n\n{fence}\n\n<!-- a remark -->\n\nafter `x`\n"
    expanded = docs_pages.expand(page, {"sizes": "| B |"}.__getitem__)
    assert expanded == page.replace("<!-- trace: sizes -->", "| B |")


@pytest.mark.parametrize(
    "line",
    [
        "<!-- source: minigpt.no.such -->",
        "<!-- trace: nothing -->",
        "text <!-- source: minigpt.model.MiniGPT -->",
        "<!-- source:minigpt.model.MiniGPT -->",
        "  <!-- source: minigpt.model.MiniGPT -->",
        "<!--source: minigpt.model.MiniGPT-->",
        "<!-- source minigpt.model.MiniGPT -->",
    ],
)
def test_an_include_that_gives_nothing_is_an_error(line: str) -> None:
    with pytest.raises(DocsError):
        docs_pages.expand(f"# Title\n\n{line}\n", {}.__getitem__)


SITE = Site(
    {
        "docs/index.md": "index.md",
        "docs/decisions.md": "decisions.md",
        "README.md": "readme.md",
        "src/minigpt/model.py": "reference/model.md",
        "notebooks/en/1_attention.ipynb": "notebooks/en/1_attention.md",
        "notebooks/en/1_attention-1.png": "notebooks/en/1_attention-1.png",
    }
)


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("docs/index.md", "[a](decisions.md)", "[a](decisions.md)"),
        ("docs/index.md", "[a](decisions.md#x)", "[a](decisions.md#x)"),
        ("docs/index.md", "[R](../README.md)", "[R](readme.md)"),
        ("README.md", "[a](docs/decisions.md)", "[a](decisions.md)"),
        ("docs/index.md", "[m](../src/minigpt/model.py)", "[m](reference/model.md)"),
        (
            "docs/index.md",
            "[`MiniGPT.hidden`](../src/minigpt/model.py)",
            "[`MiniGPT.hidden`](reference/model.md#minigpt.model.MiniGPT.hidden)",
        ),
        (
            "docs/index.md",
            "[`MiniGPT._initialise`](../src/minigpt/model.py)",
            "[`MiniGPT._initialise`](reference/model.md)",
        ),
        ("docs/index.md", "[m](../src/minigpt/model.py#L20)", "[m](reference/model.md)"),
        (
            "notebooks/en/1_attention.ipynb",
            "[m](../../src/minigpt/model.py)",
            "[m](../../reference/model.md)",
        ),
        ("notebooks/en/1_attention.ipynb", "![](1_attention-1.png)", "![](1_attention-1.png)"),
        ("docs/index.md", "see [`t`](../tests/tiny.py), [r](results)", "see `t`, r"),
        ("README.md", "[![p](docs/index.md)](docs/index.md)", "[![p](index.md)](index.md)"),
        ("docs/index.md", "[w](https://a.b/c) [h](#here)", "[w](https://a.b/c) [h](#here)"),
        (
            "docs/index.md",
            "`[a](nowhere.md)` ``[`b`](no.md)``",
            "`[a](nowhere.md)` ``[`b`](no.md)``",
        ),
        ("docs/index.md", "```\n[a](nowhere.md)\n```\n", "```\n[a](nowhere.md)\n```\n"),
    ],
)
def test_links_work_on_the_site(page: str, before: str, after: str) -> None:
    assert SITE.rewrite(before, page) == after


@pytest.mark.parametrize(
    "link",
    [
        "[a](nowhere.md)",
        "![p](no.png)",
        "[o](../../elsewhere.md)",
        "after\n\n```\ncode\n```\n\n[a](no.md)",
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(link: str) -> None:
    with pytest.raises(DocsError, match="leads nowhere"):
        SITE.rewrite(link, "docs/index.md")


def test_with_a_public_address_files_are_linked_there() -> None:
    site = Site(SITE.pages, "https://example.org/mini/")
    text = site.rewrite("[t](../tests/tiny.py#L3)", "docs/index.md")
    assert text == "[t](https://example.org/mini/blob/main/tests/tiny.py#L3)"


def test_a_notebook_becomes_a_page() -> None:
    outputs = [
        {"output_type": "stream", "text": ["\x1b[31mred\x1b[0m\n", "```\n"]},
        {
            "output_type": "display_data",
            "data": {"image/png": base64.b64encode(b"PNG").decode(), "text/plain": "x"},
        },
        {"output_type": "execute_result", "data": {"text/html": "<b>\n\n</b>", "text/plain": "x"}},
        {"output_type": "execute_result", "data": {"text/plain": ["4", "2"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "print(1)", "outputs": outputs},
        {"cell_type": "code", "source": " ", "outputs": []},
    ]
    page, pictures = docs_notebooks.notebook_page({"cells": cells}, "1_x")
    assert page == (
        "# Title\ntext\n\n```python\nprint(1)\n```\n\n"
        "````text\nred\n```\n````\n\n![](1_x-1.png)\n\n"
        '<div class="output">\n<b>\n</b>\n</div>\n\n```text\n42\n```\n'
    )
    assert pictures == {"1_x-1.png": b"PNG"}
    error = {"output_type": "error", "ename": "ValueError"}
    with pytest.raises(DocsError, match="ValueError"):
        docs_notebooks.notebook_page({"cells": [{**cells[1], "outputs": [error]}]}, "1_x")


@pytest.mark.parametrize(
    ("tex", "shown"),
    [
        ("x_i^2", "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"),
        ("x^2_i", "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"),
        (r"\sum_i", "<munder><mo>∑</mo><mi>i</mi></munder>"),
        (r"\frac{1}{10}", "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>10</mn></mrow></mfrac>"),
        (r"\sqrt{\lambda}", "<msqrt><mrow><mi>λ</mi></mrow></msqrt>"),
        (r"\text{a < b}", '<mi mathvariant="normal">a\u00a0&lt;\u00a0b</mi>'),
        (r"a * b", "<mi>a</mi><mo>∗</mo><mi>b</mi>"),
        (r"\left( a \right.", '<mo stretchy="true">(</mo><mi>a</mi><mo stretchy="true"></mo>'),
    ],
)
def test_tex_becomes_mathml(tex: str, shown: str) -> None:
    assert docs_math.mathml(tex, display=False) == f"<math><mrow>{shown}</mrow></math>"


def test_a_matrix_has_its_rows_and_columns() -> None:
    tex = r"\begin{pmatrix} a & -b \\ c & d \end{pmatrix}"
    shown = docs_math.mathml(tex, display=True)
    assert shown.startswith('<math display="block">')
    assert shown.count("<mtr>") == 2
    assert shown.count("<mtd>") == 4


@pytest.mark.parametrize(
    "tex", [r"\nonsense x", "{a", "a}", "x^", r"\text a", r"\begin{table}\end{table}", r"\frac{a}"]
)
def test_tex_that_is_not_known_is_an_error(tex: str) -> None:
    with pytest.raises(docs_math.MathError):
        docs_math.mathml(tex, display=False)
    with pytest.raises(DocsError, match="formula"):
        docs_notebooks.with_formulas(f"$${tex}$$")


def test_formulas_are_found_outside_code_alone() -> None:
    page = "`$A/x`, $b$ and $5, then\n\n$$c\n= d$$\n\n```\n$e$\n```\n"
    b, c = docs_math.mathml("b", display=False), docs_math.mathml("c\n= d", display=True)
    shown = docs_notebooks.with_formulas(page)
    assert shown == page.replace("$b$", b).replace("$$c\n= d$$", f'<div class="formula">{c}</div>')


def test_a_docstring_keeps_its_columns_and_loses_no_word() -> None:
    shown = docs_pages.docstring_markdown(
        "Score each of <eos> and a*b*c.\n\n"
        "softmax(Q Kᵀ)   — Vaswani et al. 2017,\nsection 3.\n\n"
        "q   (B, T)    k   (S,)\n    set in\nReturns `<eos>` [0, 1].\n\n"
        "B batch · T sequence · D width\n\n"
        "| a | b |\n|---|---|\n"
    )
    assert shown == (
        "Score each of \\<eos> and a\\*b\\*c.\n\n"
        "softmax(Q Kᵀ) — Vaswani et al. 2017,\nsection 3.\n\n"
        "```text\nq   (B, T)    k   (S,)\n    set in\n```\n\nReturns `<eos>` \\[0, 1\\].\n\n"
        "```text\nB batch · T sequence · D width\n```\n\n"
        "| a | b |\n|---|---|"
    )


def test_the_reference_has_every_module_in_reading_order() -> None:
    listed = re.findall(r"^\| \[`([\w.]+)`\]", docs_pages.reference_index(), re.M)
    assert listed == docs_pages.reading_order()
    assert listed.index("layers.attention") < listed.index("model") < listed.index("train")


# The site


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="needs the extra docs: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("<!-- source: minigpt.model.MaxiGPT -->", "there is no MaxiGPT in src/minigpt/model.py"),
        ("[a](../nowhere.md)", "leads nowhere"),
    ],
)
def test_a_page_that_names_what_is_not_there_ends_the_build(
    line: str, complaint: str, tmp_path: Path
) -> None:
    for folder in ("docs", "src", "tools", "tests", "notebooks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml"]:
        shutil.copy(path, tmp_path)
    index = tmp_path / "docs" / "index.md"
    index.write_text(index.read_text("utf-8") + f"\n{line}\n", "utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "docs/index.md: " in done.stderr
    assert complaint in done.stderr


class Loads(HTMLParser):
    """Collects what a page loads by itself, and where its links go."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.loaded.append(given["href"])
        self.loaded += [
            given[name] for name in ("src", "srcset", "poster", "data") if name in given
        ]


@pytest.mark.slow
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = build(ROOT, site)
    assert done.returncode == 0, done.stderr
    pages = {path: Loads(path.read_text("utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for address in page.loaded:
            assert not re.match(r"\w+:|//", address) or address.startswith("data:"), (path, address)
            assert (
                address.startswith("data:")
                or path.name == "404.html"
                or (path.parent / address.split("?")[0]).is_file()
            )
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:|//", link) or path.name == "404.html":
                continue
            there = (path.parent / target).resolve() if target else path
            assert there.is_file(), (path, link)
            assert not anchor or anchor in pages[there].ids, (path, link)
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"(?:url\(|@import\s)[\"']?(?:https?:)?//", sheet.read_text("utf-8")
        ), sheet
    for english, chinese in PAIRS:
        assert (site / english.with_suffix(".html").name).is_file()
        text = (site / f"{chinese.name.removesuffix('.md')}.html").read_text("utf-8")
        assert '<html lang="zh-CN"' in text
    for name in ("walkthrough.html", "walkthrough.zh-CN.html"):
        text = (site / name).read_text("utf-8")
        found = docs_pages.find_source("minigpt.layers.attention.attention")
        assert f"{found.path}, lines {found.first}-{found.last}" in text
        assert "3 × 8 × 12 × 32" in text
        assert "<!-- source" not in text
        assert "<!-- trace" not in text
    assert "search_index.js" in {path.name for path in (site / "search").iterdir()}
    reference = (site / "reference" / "layers" / "attention.html").read_text("utf-8")
    assert reference.index('id="minigpt.layers.attention.attention"') < reference.index(
        'id="minigpt.layers.attention.causal_mask"'
    )
