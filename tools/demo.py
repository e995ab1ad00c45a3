"""Make the demo of the package from a run: its best weights in float16, a card and a licence.

minigpt train demo --seed 1 --out runs/demo
python tools/demo.py runs/demo
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from minigpt.checkpoint import Run, release
from minigpt.config import load_preset
from minigpt.errors import UserError, require
from minigpt.measurement import measure
from minigpt.run_folder import DEMO

MOST_BYTES = 12_000_000

CARD = """# The demo of Mini-GPT

A Transformer of {parameters:,} weights, trained from scratch on WikiText-2, for trying every
command at once:

    minigpt generate demo --prompt "The river"
    minigpt evaluate demo
    minigpt attention demo "The river flows into the sea ."

| | |
|---|---|
| made by | `{command}`, then `python tools/demo.py RUN` |
| text | WikiText-2, the train split: 600 articles of the English Wikipedia, 2.1 M words |
| words | the {vocab_size:,} most frequent; any other it reads as `<unk>`, and never writes |
| perplexity | {valid} on valid, {test} on test, where `<unk>` pays for its word |
| weights | float16, after {step:,} steps |

The perplexity is of all words, each scored once, in windows of {context} words; an `<unk>` costs
P(`<unk>`) times the share that its word has among the unknown ones of train. With `<unk>` as a
word like any other it is {valid_token} and {test_token}, not to be compared with published figures.

## What it is for, and what not

It shows how a small language model works. It knows 2 million words of encyclopedia and nothing
else: what it writes reads like articles, and is invented. It says what its text said of people and
places, wrong and biased as that may be. Do not take anything from it for a fact.

## Licence

The text is by the authors of Wikipedia, under CC BY-SA; the weights are given on under the same
terms, see [LICENSE](LICENSE). The code is MIT.
"""

LICENSE = """The files of this folder are made from WikiText-2 (Merity et al. 2016, "Pointer
Sentinel Mixture Models"), which is text by the authors of Wikipedia under the Creative Commons
Attribution-ShareAlike licence, and are given on under the same terms:

    Creative Commons Attribution-ShareAlike 4.0 International (CC BY-SA 4.0)
    https://creativecommons.org/licenses/by-sa/4.0/legalcode

You may share and adapt them, also commercially, if you name their origin (Mini-GPT; WikiText-2;
the authors of Wikipedia), say what you changed, and give on what you make of them under the same
licence. They come without any warranty.
"""


def make(run_dir: Path, command: str) -> None:
    """Write the demo anew. Raises UserError where it would be too large."""
    shutil.rmtree(DEMO, ignore_errors=True)
    trained = Run.open(run_dir)
    # How it writes is chosen when it has been trained: the preset knows it by now.
    config = replace(trained.config, sampling=load_preset("demo").sampling)
    release(replace(trained, config=config), DEMO)
    run = Run.open(DEMO)  # what is told of it is told of the weights in float16
    found = {split: measure(run, split).to_json() for split in ("valid", "test")}
    card = CARD.format(
        parameters=sum(weight.numel() for weight in run.model.parameters()),
        command=command,
        vocab_size=run.tokenizer.vocab_size,
        step=run.step,
        context=run.config.model.context_length,
        **{split: f"{one['comparable_perplexity']:.1f}" for split, one in found.items()},
        **{f"{split}_token": f"{one['token_perplexity']:.1f}" for split, one in found.items()},
    )
    (DEMO / "README.md").write_text(card, encoding="utf-8")
    (DEMO / "LICENSE").write_text(LICENSE, encoding="utf-8")
    size = sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file())
    require(size <= MOST_BYTES, f"{DEMO} has {size:,} bytes: at most {MOST_BYTES:,} are wanted")
    print(f"{DEMO}: {size:,} bytes")


def main() -> None:
    """Make the demo of the run that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--command", default="minigpt train demo --seed 1")
    options = parser.parse_args()
    try:
        make(options.run, options.command)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
