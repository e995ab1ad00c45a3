"""The README is executed: every command runs, every link leads somewhere, both languages agree."""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from minigpt.cli import main
from minigpt.config import load_preset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from curves import load, ratios

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
# What makes a training of minutes one of seconds. The budget takes the place of --minutes.
SMALL = (
    "--steps 2 --validations 1 --batch-size 2 --compile off --precision float32 "
    "--model.context-length 32 --model.d-model 32 --model.d-ff 32 --model.n-layers 1"
)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)


def commands(path: Path) -> list[str]:
    lines = "".join(blocks(path, "sh")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def shortened(command: str) -> list[str]:
    words = shlex.split(command)[1:]
    if words[0] != "train":
        return words
    if "--minutes" in words:
        at = words.index("--minutes")
        del words[at : at + 2]
    return words + SMALL.split()


@pytest.mark.slow  # two of them train on WikiText-2 and score all of valid
def test_every_minigpt_command_runs(
    wikitext2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the city\n"))  # nobody types here
    words = [f"line {n} : the model reads on and on ." for n in range(997)]
    (tmp_path / "my_text.txt").write_text("\n".join(words), encoding="utf-8")
    ran = [command for command in commands(ENGLISH) if command.startswith("minigpt ")]
    assert len(ran) >= 9
    for command in ran:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(shortened(command))
        assert status == 0, f"{command}: {err.getvalue()}"
        assert out.getvalue().strip() or "train" in command, command
    assert (tmp_path / "heads.png").stat().st_size > 10_000
    assert "</html>" in (tmp_path / "attention.html").read_text("utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("path", [ENGLISH, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_every_make_target_exists(path: Path) -> None:
    targets = [command.split()[1] for command in commands(path) if command.startswith("make ")]
    assert targets
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    assert {command.split()[0] for command in commands(ENGLISH)} == {"make", "minigpt"}


def test_the_classic_route_gives_what_it_says(
    wikitext2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = blocks(ENGLISH, "python")
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("28785 [")


@pytest.mark.parametrize("path", [ENGLISH, CHINESE], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text("utf-8"))
    local = [link for link in links if "://" not in link]
    assert len(local) >= 15
    missing = [link for link in local if not (ROOT / link).exists()]
    assert not missing


def test_both_languages_agree() -> None:
    def told(path: Path) -> dict[str, object]:
        text = path.read_text("utf-8")
        links = {
            link.replace("notebooks/zh-CN/", "notebooks/en/").replace(".zh-CN.md", ".md")
            for link in re.findall(r"\]\(([^)]+)\)", text)
        }
        return {
            "commands": commands(path),
            "python": blocks(path, "python"),
            "output": blocks(path, "text"),
            "links": links,
            "headings": len(re.findall(r"^#+ ", text, re.M)),
            "figures": sorted(re.findall(r"\| \**(\d+\.\d+)\**", text)),
        }

    assert told(ENGLISH) == told(CHINESE)


RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


def test_there_are_results() -> None:
    assert RESULTS


# pytorch/examples#415, #281: figures that could not be had again.
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_figures_in_prose_are_those_of_the_runs(path: Path) -> None:
    """Each recorded run stands in both places with the perplexities that its report has."""
    result = json.loads(path.read_text("utf-8"))
    for page in (ENGLISH, ROOT / "docs" / "experiments.md"):
        rows = [row for row in page.read_text("utf-8").splitlines() if f"`{path.stem}`" in row]
        assert rows, f"{page.name} has no row for {path.stem}"
        for split in ("valid", "test"):
            assert f"{result[split]['perplexity']:.1f}" in rows[0], (page.name, split)


TIERS = sorted((ROOT / "docs" / "results" / "tiers").glob("*.json"))


@pytest.mark.parametrize("path", TIERS, ids=lambda path: path.stem)
def test_what_is_said_of_test_time_is_what_was_measured(path: Path) -> None:
    result = json.loads(path.read_text("utf-8"))
    tiers, run = result["tiers"], f"`{path.stem}`"
    assert result["run"] == path.stem
    assert result["split"] == "test"
    for page in (ENGLISH, CHINESE, ROOT / "docs" / "experiments.md"):
        text = page.read_text("utf-8")
        assert run in text
        for tier in (tiers["cache"], tiers["dynamic"]):
            static, own = tier["static_token_perplexity"], tier["token_perplexity"]
            assert f"| {tier['stride']} | {static:.1f} |" in text
            assert f"| {tier['stride']} | {own:.1f}" in text
            if page.name == "experiments.md":
                assert f"{own:.1f}: {1 - own / static:.1%} less".replace("%", " %") in text


HEADS = sorted((ROOT / "docs" / "results" / "heads").glob("*.json"))


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.stem)
def test_what_is_said_of_the_heads_is_what_was_measured(path: Path) -> None:
    page = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    result = json.loads(path.read_text("utf-8"))
    assert result["run"] == path.stem
    assert "\n".join(f"- {line}" for line in result["summary"]) in page.partition(path.stem)[2]


def test_the_head_that_finds_the_verb_does_so_as_often_as_is_said() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    (path,) = [path for path in HEADS if path.stem.startswith("adaptive")]
    verb = json.loads(path.read_text("utf-8"))["relations"]["verb_object"]
    ((layer, head),) = [
        (i, j) for i, of_layer in enumerate(verb["tracks"]) for j, it in enumerate(of_layer) if it
    ]
    accuracy, of_two = verb["accuracy"][layer][head], verb["of_two"][layer][head]
    assert f"in {accuracy:.0%} of the".replace("%", " %") in page
    assert f"in {of_two:.0%}.".replace("%", " %") in page


def test_the_table_of_vocabularies_is_the_measured_one() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    path = ROOT / "docs" / "results" / "vocabulary" / "wikitext2.json"
    measured = json.loads(path.read_text("utf-8"))["rows"]
    assert len(measured) == 5
    for row in measured:
        start = f"| `{row['tokenizer']}`, {row['vocab_size']:,} |"
        (line,) = (line for line in page.splitlines() if line.startswith(start))
        share, figures = f"{100 * row['unknown_share']:.1f} %", [row["n_parameters"]]
        figures += [round(row["tokens_per_second"]), round(row["step_megabytes"])]
        ends = f"{row['token_perplexity']:.1f} | {row['comparable_perplexity']:.1f} |"
        assert line == " | ".join([start[:-2], share, *(f"{n:,}" for n in figures), ends])


def test_the_times_to_the_same_perplexity_are_those_that_were_measured() -> None:
    found = ratios(load(ROOT / "docs" / "results" / "quality"))
    assert {ratio.goal.peer for ratio in found} == {"nanogpt", "lstm, 40 epochs"}
    for page, times in ((ENGLISH, "times"), (CHINESE, "倍")):
        text = page.read_text("utf-8")
        assert "docs/pictures/quality.svg" in text
        for ratio in found:
            figures = [f"{ratio.minutes:.1f}", f"{ratio.goal.perplexity:.1f}"]
            for figure in [*figures, f"{ratio.ratio:.0f} {times}"]:
                assert figure in text, (page.name, ratio)


WRITTEN = ROOT / "docs" / "results" / "samples" / "demo.json"


def test_the_ten_samples_are_all_that_the_command_wrote() -> None:
    found = json.loads(WRITTEN.read_text("utf-8"))
    assert len(found) == 10
    for page in (ENGLISH, CHINESE):
        text = page.read_text("utf-8")
        for one in found:
            shown = " / ".join((one["prompt"] + one["text"]).split("\n"))
            assert shown in text, shown


COHERENCE = sorted((ROOT / "docs" / "results" / "coherence").glob("*.json"))


@pytest.mark.parametrize("path", COHERENCE, ids=lambda path: path.stem)
def test_text_is_like_real_text_at_the_settings_of_the_preset(path: Path) -> None:
    """Issue's bars: repeated 4-grams, distinct 2-grams, 5-gram perplexity, marks of tokenizers."""
    found = json.loads(path.read_text("utf-8"))
    assert (found["split"], found["prompts"]) == ("test", 200)
    (row,) = found["rows"]
    real = found["real"]
    preset = load_preset(path.stem)
    assert row["sampling"] == asdict(preset.sampling)
    assert row["repeated_4_grams"] <= 1.5 * real["repeated_4_grams"]
    assert 0.8 <= row["distinct_2_grams"] / real["distinct_2_grams"] <= 1.2
    assert row["5_gram_perplexity"] <= 1.3 * real["5_gram_perplexity"]
    assert row["unknown_per_1000_words"] == 0
    # Recorded when pieces of words were still shown exactly, marks and all (now: test_spelling).
    marks = 1.3 * real["artefacts_per_1000_words"] if preset.tokenizer.kind == "bpe" else 0
    assert row["artefacts_per_1000_words"] <= marks
    page = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    for one, what in ((row, f"`{path.stem}`"), (real, "real text")):
        figures = f"{one['repeated_4_grams']:.2%} | {one['distinct_2_grams']:.3f}"
        figures = f"{figures} | {one['5_gram_perplexity']:.0f} |".replace("%", " %")
        assert any(what in line and figures in line for line in page.splitlines()), figures


def test_the_speed_of_writing_is_what_was_measured() -> None:
    folder = ROOT / "docs" / "results" / "generate"
    demo, long, large = (
        json.loads((folder / f"{name}.json").read_text("utf-8"))
        for name in ("demo", "long", "large")
    )
    times = "times_as_long_as_compiled"
    assert demo["writers"]["transformers"][times] >= 3
    assert long["writers"]["uncached"][times] >= 10
    assert large["weight_megabytes"] >= 200
    assert large["writers"]["compiled"]["a_token_in_readings"] <= 1.5
    figures = [f"{demo['writers'][name]['tokens_per_second']:.0f}" for name in demo["writers"]]
    figures += [f"{demo['writers']['transformers'][times]:.1f}"]
    figures += [f"{long['writers']['uncached'][times]:.0f}"]
    figures += [f"{large['writers']['compiled']['a_token_in_readings']:.2f}"]
    for page in (ENGLISH, CHINESE):
        text = page.read_text("utf-8")
        assert [figure for figure in figures if figure not in text] == [], page.name


def test_the_advice_on_vocabularies_has_its_figures() -> None:
    path = ROOT / "docs" / "results" / "vocabulary" / "wikitext2-10min.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    measured = [row for row in rows if "comparable_perplexity" in row]
    assert {(row["tokenizer"], row["vocab_size"]) for row in measured} == {
        ("wikitext", 33_278),
        ("wikitext", 10_000),
        ("bpe", 8_000),
    }
    experiments = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    for row in measured:
        unknown = f"{row['unknown_share']:.1%}".replace("%", " %")
        speed, memory = f"{row['words_per_second']:,.0f}", f"{row['step_megabytes']:.0f}"
        perplexity = f"{row['comparable_perplexity']:.1f}"
        for page in (ENGLISH, CHINESE):
            told = f" | {unknown} | {speed} | {memory} | {perplexity} |\n"
            assert told in page.read_text("utf-8"), (page.name, told)
        assert f"{speed} words/s, {memory} MB" in experiments
        assert perplexity in experiments
