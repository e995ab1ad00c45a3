"""Record a run: score it on valid and test and keep the figures in docs/results/NAME.json.

    python benchmarks/record.py runs/wikitext2-1 wikitext2-10min-seed1

Test is looked at here, once, at the end. The tests hold README and docs/experiments.md to the file.
"""

import argparse
import json
from pathlib import Path

from minigpt.checkpoint import Run, write_json
from minigpt.corpus import Split, open_corpus
from minigpt.data import prepare
from minigpt.evaluate import evaluate
from minigpt.generate import Sampling, generate_text
from minigpt.machine import set_threads

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def score(run: Run, split: Split) -> dict[str, float]:
    """Return the figures of run on split: disjoint windows, every token once, float32."""
    stream = prepare(open_corpus(run.config.data), split, run.tokenizer)
    result = evaluate(run.model, stream, run.tokenizer.eos_id)
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
    sampling = Sampling(max_new_tokens=100)
    text = "".join(generate_text(run.model, run.tokenizer, "", sampling))
    result = {
        "valid": score(run, "valid"),
        "test": score(run, "test"),
        "sample": {"seed": sampling.seed, "text": text},
        "report": run.report,
    }
    write_json(RESULTS / f"{options.name}.json", result)
    print(json.dumps({split: result[split]["perplexity"] for split in ("valid", "test")}))


if __name__ == "__main__":
    main()
