"""Any text, any place: what people have, and where they stand, a few steps of training will do.

Each goes the whole way that a user goes: the command, a run, and a word that the run writes.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path

import pytest

import minigpt
from commands import failed
from minigpt import cli
from minigpt.config import TokenizerConfig
from minigpt.tokenizer import Tokenizer
from namespaces import within

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    *[
        "--steps",
        "3",
        "--threads",
        "1",
        "--compile",
        "off",
        "--precision",
        "float32",
        "--batch-size",
        "3",
        "--validations",
        "1",
    ],
    *["--model.context-length", "8", "--model.d-model", "16", "--model.n-heads", "2"],
    *["--model.n-layers", "1", "--model.d-ff", "24"],
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test start in an empty folder with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))


def written(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# Any text

ENGLISH = "The cat sat on the mat , and the dog lay by it .\n"
# Each with the tokenizer that it is tried with in seconds; with the others, it takes minutes.
TEXTS: dict[str, tuple[str | None, str]] = {
    # transformers#18167: blocks of unequal length, or silently none, on a small file.
    "three lines": ("wikitext", ENGLISH * 3),
    # build-nanogpt#41: a length that no batch and no context divides.
    "1,001 lines": (None, "".join(f"{ENGLISH[:-1]} {i}\n" for i in range(1_001))),
    "one line": ("basic_english", (ENGLISH[:-1] + " ") * 40),
    "no line end": (None, ENGLISH * 40 + "the last"),
    "CRLF": ("char", ENGLISH.replace("\n", "\r\n") * 40),
    "a byte order mark": ("basic_english", "\ufeff" + ENGLISH * 40),
    # nanoGPT#401 and #109, GPT2-Chinese#88: a text of one's own, in any language.
    "Chinese": ("char", "语言模型读了很多文字 , 然后自己写 。\n" * 40),
    "Bengali": (None, "ভাষার মডেল অনেক লেখা পড়ে ।\n" * 40),
    "emoji": ("bpe", "Good 😊 morning 👩‍👩‍👧‍👦 , 🇨🇳 !\n" * 40),
    "right to left": ("wikitext", "שלום עולם ، مرحبا بالعالم .\n" * 40),
    "control characters": (None, "a\x0bb \x0c c\x1c \x85 d\u2028 e\x7f .\n" * 40),
    "blank lines": (None, f"\n\n{ENGLISH}\n \n" * 40),
}
SIZES = {"basic_english": "50", "wikitext": "50", "bpe": "300", "char": "0"}


def trained(data: Path | str, kind: str = "wikitext") -> list[str]:
    """Return what a user writes to train three steps on `data`."""
    how = ["--tokenizer.kind", kind, "--tokenizer.vocab-size", SIZES[kind]]
    return ["train", "mini", "--data", str(data), "--out", "run", *TINY, *how]


def last_validation() -> dict[str, float]:
    """Return what the run noted last, which is its validation."""
    lines = Path("run/metrics.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    last: dict[str, float] = json.loads(lines[-1])
    return last


# nanoGPT#401, #109: one's own text, Chinese or Bengali.
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        pytest.param(text, kind, marks=() if kind == quick else pytest.mark.slow)
        for text, (quick, _) in TEXTS.items()
        for kind in SIZES
    ],
)
def test_any_text_is_learned_from(
    tmp_path: Path, text: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "text.txt", TEXTS[text][1])
    assert cli.main(trained(data, kind)) == 0, capsys.readouterr().err
    assert math.isfinite(last_validation()["valid_loss"])
    assert cli.main(["generate", "run", "--prompt", "", "--max-new-tokens", "3"]) == 0


def test_a_long_line_without_blanks_is_learned_in_seconds(tmp_path: Path) -> None:
    """Merges take the square of a word's length: this one would take half a minute."""
    text = "".join(chr(0x4E00 + i * i % 1_009) for i in range(100_000))
    began_at = time.process_time()
    tokenizer = Tokenizer.train(TokenizerConfig("bpe", 400), lambda: [text])
    assert time.process_time() - began_at < 8
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < 3 * len(text) - 1_000, "it has learned to merge"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "kind"),
    [*product(("cat ", "语言 "), SIZES), ("语", "bpe"), ("语", "char")],
)
def test_three_megabytes_on_one_line(tmp_path: Path, word: str, kind: str) -> None:
    line = word * (3_000_000 // len(word.encode()))
    assert cli.main(trained(written(tmp_path / "text.txt", line), kind)) == 0
    assert math.isfinite(last_validation()["valid_loss"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty: give a file with text in it"),
        ("\ufeff \n\n".encode(), "is empty: give a file with text in it"),
        (b"one line\0of text\n" * 40, "has zero bytes"),
        # nanoGPT#401: Chinese as many a Windows saves it
        (("语言模型\n" * 40).encode("gb18030"), "iconv -f GB18030 -t UTF-8"),
        (("a text\n" * 40).encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        (b"a b\n", "is too short to be split: give at least 20 lines"),
        # transformers#18167: too few for one window is said, not passed over
        (b"hello world\n", "has 2 tokens: context_length 8 needs at least 9"),
    ],
)
def test_what_cannot_be_learned_from_is_told_in_one_line(
    tmp_path: Path, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "text.txt", content)
    assert says in failed(trained(data), capsys)
    assert not Path("run").exists()
    assert data.read_bytes() == content


# Any place


@pytest.mark.parametrize(
    "name",
    [
        "a folder with blanks/语言/it's “one” 😊.txt",
        pytest.param("-q/--x.txt", marks=pytest.mark.slow),
        pytest.param("50%/$HOME\\*?.txt", marks=pytest.mark.slow),
    ],
)
def test_a_path_of_any_name(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = written(tmp_path / name, ENGLISH * 40)
    assert cli.main(trained(data)) == 0, capsys.readouterr().err
    run = data.parent / "the run"
    shutil.move("run", run)
    assert cli.main(["generate", str(run), "--prompt", "The", "--max-new-tokens", "3"]) == 0


ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NO_HOME = {"HOME": "/dev/null", "MINIGPT_CACHE": "", "XDG_CACHE_HOME": "", "HF_HOME": ""}
NO_COMPILER = {"PATH": "/nonexistent", "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
READ_ONLY = (f"mount --bind '{ROOT}/src' '{ROOT}/src'", f"mount -o remount,bind,ro '{ROOT}/src'")
ONE_CORE = ("taskset -p 1 $$ >/dev/null",)


def in_a_place(
    prefix: list[str], environment: dict[str, str], *argv: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with what it keeps for a while kept here."""
    Path("temporary").mkdir(exist_ok=True)
    changes = {"TMPDIR": str(Path("temporary").resolve()), **environment}
    # Set behind the prefix, whose shell needs the PATH that there is.
    change = [str(shutil.which("env")), *(f"{name}={value}" for name, value in changes.items())]
    return subprocess.run(
        [*prefix, *change, sys.executable, "-m", "minigpt", *argv],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "setup", "network"),
    [
        pytest.param(
            {**ASCII, **NO_HOME, **NO_COMPILER}, (*READ_ONLY, *ONE_CORE), False, id="all at once"
        ),
        # nanoGPT#711: files opened in the encoding of the locale
        pytest.param(ASCII, (), True, id="ASCII", marks=pytest.mark.slow),
        pytest.param(NO_HOME, (), True, id="no home", marks=pytest.mark.slow),
        pytest.param(NO_COMPILER, (), True, id="no compiler", marks=pytest.mark.slow),
        pytest.param({}, READ_ONLY, True, id="read-only install", marks=pytest.mark.slow),
        pytest.param({}, ONE_CORE, True, id="one core", marks=pytest.mark.slow),
        pytest.param({}, (), False, id="no network", marks=pytest.mark.slow),
    ],
)
def test_any_place_will_do(
    tmp_path: Path, environment: dict[str, str], setup: tuple[str, ...], network: bool
) -> None:
    data = written(tmp_path / "语言" / "文本.txt", "语言 模型 读 了 很多 文字 。\n" * 40)
    argv = trained(data)
    argv[argv.index("--threads") + 1] = "0"  # as many as there are
    prefix = within(*setup, network=network) if setup or not network else []
    done = in_a_place(prefix, environment, *argv)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert math.isfinite(last_validation()["valid_loss"])
    assert "语言" in Path("run/tokenizer.json").read_text(encoding="utf-8")


# Disks that take no more

# A text whose ids need more than the disk has, and one whose ids fit.
DISK = 256 << 10
LARGE = "".join(f"word{i} and word{i * i % 9973} .\n" for i in range(60_000))
IN_ONE_PROCESS = """
import json, subprocess, sys
from minigpt import cli
for argv in json.loads(sys.argv[1]):
    print("status", subprocess.call(argv) if argv[0] == "mount" else cli.main(argv))
"""


@pytest.mark.parametrize("disk", ["full", pytest.param("read-only", marks=pytest.mark.slow)])
def test_a_cache_that_takes_no_more_is_told_and_stays_readable(tmp_path: Path, disk: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    small = written(tmp_path / "small.txt", ENGLISH * 40)
    large = written(tmp_path / "large.txt", LARGE)
    known, unknown, again = (trained(data) for data in (small, large, small))
    unknown[unknown.index("run")], again[again.index("run")] = "other", "again"
    steps = [known, unknown, again]
    if disk == "read-only":
        steps.insert(1, ["mount", "-o", "remount,ro", str(cache)])
    mounted = within(f"mount -t tmpfs -o size={DISK} none '{cache}'")
    done = subprocess.run(
        [*mounted, sys.executable, "-c", IN_ONE_PROCESS, json.dumps(steps)],
        env={**os.environ, "MINIGPT_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    statuses = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("status")]
    wanted = ["0", "2", "0"] if disk == "full" else ["0", "0", "2", "0"]
    assert statuses == wanted, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    why = {"full": "No space left on device", "read-only": "Read-only file system"}[disk]
    assert errors == [
        f"error: cache {cache / 'ids'} cannot be written to ({why}): "
        "set MINIGPT_CACHE to a folder that can"
    ]
    assert "Traceback" not in done.stderr
    assert not Path("other").exists()
    assert Path("again/best.json").exists()


# Ctrl-C


def test_ctrl_c_while_the_commands_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            if name == "minigpt.cli":
                raise KeyboardInterrupt
            return None

    from minigpt.__main__ import main

    monkeypatch.delitem(sys.modules, "minigpt.cli")
    monkeypatch.delattr(minigpt, "cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert main() == 130
    assert capsys.readouterr().err == "interrupted\n"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert scripts["scripts"] == {"minigpt": "minigpt.__main__:main"}, "the script begins there too"
