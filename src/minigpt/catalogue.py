"""Texts of the Hugging Face hub that have a name here: which files they are, and what proves them.

Each is pinned to one commit of its repository, and no byte of a text may be another: its size is
known, and its sha256 where that was ever published. The sizes of WikiText are those of its data set
card, put back into the layout of the official files; public documents that give the sizes and the
hashes of those files agree with them.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Part(NamedTuple):
    """One split: its files on the hub, its name here, and what proves it whole."""

    sources: tuple[str, ...]
    file: str
    n_bytes: int  # of the text; compressed as on the hub, it is no larger
    proof: str | int  # sha256 of the text, or the number of its lines where no hash is published


class HubText(NamedTuple):
    """A text at one commit of its repository, so that it is the same text for ever."""

    repository: str
    revision: str
    parts: Mapping[str, Part]


def _wikitext(
    config: str,
    ending: str,
    sizes: tuple[int, int, int],
    proofs: tuple[str | int, str | int, str | int],
    n_shards: int = 1,
) -> HubText:
    train = tuple(f"{config}/train-{i:05d}-of-{n_shards:05d}.parquet" for i in range(n_shards))
    sources = {
        "train": train,
        "valid": (f"{config}/validation-00000-of-00001.parquet",),
        "test": (f"{config}/test-00000-of-00001.parquet",),
    }
    return HubText(
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        {
            split: Part(files, f"wiki.{split}.{ending}", n_bytes, proof)
            for (split, files), n_bytes, proof in zip(sources.items(), sizes, proofs, strict=True)
        },
    )


TEXTS = {
    "wikitext-2": _wikitext(
        "wikitext-2-v1",
        "tokens",
        (10_797_148, 1_121_681, 1_256_449),
        (
            "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        ),
    ),
    "wikitext-2-raw": _wikitext(
        "wikitext-2-raw-v1",
        "raw",
        (10_940_747, 1_146_846, 1_290_590),
        (
            "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
            "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
            "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
        ),
    ),
    # No hash of these texts is published: their sizes, their lines, and the hash that the hub has
    # of its own files at that commit are what can be held against a download.
    "wikitext-103": _wikitext(
        "wikitext-103-v1",
        "tokens",
        (539_209_157, 1_142_309, 1_281_077),
        (1_801_350, 3_760, 4_358),
        n_shards=2,
    ),
    # It has no test: corpus makes two of its valid.
    "tinystories": HubText(
        "roneneldan/TinyStories",
        "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
        {
            "train": Part(
                ("TinyStories-train.txt",),
                "TinyStories-train.txt",
                1_924_281_556,
                "c5cf5e22ff13614e830afbe61a99fbcbe8bcb7dd72252b989fa1117a368d401f",
            ),
            "valid": Part(
                ("TinyStories-valid.txt",),
                "TinyStories-valid.txt",
                19_447_282,
                "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4",
            ),
        },
    ),
}
