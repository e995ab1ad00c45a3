"""Record a run: score it on valid and test and keep the figures in docs/results/NAME.json.

    python benchmarks/record.py runs/wikitext2-10min-1 wikitext2-10min-seed1

In disjoint windows, as most published figures are, and in windows that move by half the context, so
that each token can look back at half of it at least. Test is looked at here, once, at the end. The
tests hold README and docs/experiments.md to the file.
"""

import argparse
import json
from pathlib import Path

from minigpt.checkpoint import Run
from minigpt.corpus import Split, open_corpus
from minigpt.data import prepare
from minigpt.evaluate import evaluate
from minigpt.generate import generate_text
from minigpt.machine import set_threads
from minigpt.run_folder import write_json

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def score(run: Run, split: Split, stride: int) -> dict[str, float]:
    """Return the figures of run on split: every token once, float32, windows stride apart."""
    stream = prepare(open_corpus(run.config.data), split, run.tokenizer)
    result = evaluate(run.model, stream, run.tokenizer.eos_id, stride=stride)
    return {
        "nats": result.nats,
        "tokens": result.tokens,
        "perplexity": result.token_perplexity,
        "unknown_share": stream.unknown_share,
    }


def main() -> None:
    """Score the run that is named and write its file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    options = parser.parse_args()
    set_threads(0)
    run = Run.open(options.run)
    sampling = run.config.sampling
    text = "".join(generate_text(run.model, run.tokenizer, "", sampling))
    context = run.config.model.context_length
    result = {
        "valid": score(run, "valid", context),
        "test": score(run, "test", context),
        "half_stride": {split: score(run, split, context // 2) for split in ("valid", "test")},
        "sample": {"seed": sampling.seed, "text": text},
        "report": run.report,
    }
    write_json(RESULTS / f"{options.name}.json", result)
    for name, figures in (("stride = context", result), ("half of it", result["half_stride"])):
        told = {split: round(figures[split]["perplexity"], 2) for split in ("valid", "test")}
        print(name, json.dumps(told))


if __name__ == "__main__":
    main()
