"""Texts on the disk, and what a corpus makes of them."""

from pathlib import Path

from minigpt.corpus import SPLITS, open_corpus


def written(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def texts(name: str) -> list[str]:
    corpus = open_corpus(name)
    return ["\n".join(corpus.lines(split)) for split in SPLITS]
