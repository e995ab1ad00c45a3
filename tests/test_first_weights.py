"""First weights from counts: the words' shares and company, of train alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import minigpt.first_weights
from minigpt.config import Config
from minigpt.errors import UserError
from minigpt.events import Validated
from minigpt.first_weights import _NeighbourCounts, begin_from_counts, log_shares, word_vectors
from minigpt.model import MiniGPT, Objective
from minigpt.train import train
from tiny import ADAPTIVE, MODERN, D, Recorder, T, V, run_config, write_corpus


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def zipf_ids(n: int, vocab_size: int = V, seed: int = 3) -> np.ndarray:
    shares = 1 / np.arange(2, vocab_size + 2)
    return np.random.default_rng(seed).choice(vocab_size, n, p=shares / shares.sum())


def test_log_shares_are_those_of_the_counts_and_sum_to_one():
    shares = log_shares(np.array([0, 0, 0, 2, 2, 4]), 5)
    assert_close(shares.exp(), torch.tensor([3.5, 0.5, 2.5, 0.5, 1.5]) / 8.5)


def test_ppmi_is_that_of_counting_pair_by_pair(monkeypatch):
    monkeypatch.setattr(minigpt.first_weights, "_ROWS", 7)
    vocab_size, n_neighbours = 17, 5
    ids = zipf_ids(211, vocab_size).astype(np.int64)
    by_frequency = np.argsort(-np.bincount(ids, minlength=vocab_size), kind="stable")
    neighbours = list(by_frequency[:n_neighbours])
    counts = np.zeros((vocab_size, n_neighbours))
    for i, word in enumerate(ids):
        for j in range(max(0, i - 4), min(len(ids), i + 5)):
            if j != i and ids[j] in neighbours:
                counts[word, neighbours.index(ids[j])] += 1
    p = counts / counts.sum()
    of_neighbour = p.sum(0) ** 0.75 / (p.sum(0) ** 0.75).sum()
    with np.errstate(divide="ignore"):
        expected = np.maximum(0, np.log(p / (p.sum(1, keepdims=True) * of_neighbour)))
    rows = list(_NeighbourCounts(ids, vocab_size, n_neighbours).ppmi())
    assert [first for first, _ in rows] == [0, 7, 14]
    assert_close(torch.cat([part for _, part in rows]), torch.from_numpy(expected).float())
    assert (expected > 0).sum() > 5


def test_vectors_are_those_of_the_singular_value_decomposition():
    """Inner products say all: how the vectors are turned is left to chance."""
    vocab_size, d_model = 41, 13
    ids = zipf_ids(997, vocab_size).astype(np.int64)
    matrix = torch.cat([rows for _, rows in _NeighbourCounts(ids, vocab_size, vocab_size).ppmi()])
    u, s, _ = torch.linalg.svd(matrix.double())
    expected = u[:, :d_model] * s[:d_model].sqrt()
    expected = torch.nn.functional.normalize(expected, dim=1)
    vectors = word_vectors(ids, vocab_size, d_model).double()
    assert_close(vectors @ vectors.T, expected @ expected.T, atol=1e-4, rtol=0)


def test_words_of_the_same_company_have_nearly_the_same_direction():
    """Words 10 to 14 stand where fruit stands, 15 to 19 where tools do; none beside another."""
    draw = np.random.default_rng(5)
    sentences = [
        [0, 1, draw.integers(10, 15), 2, 3]
        if draw.integers(2)
        else [4, 5, draw.integers(15, 20), 6, 7]
        for _ in range(5_000)
    ]
    ids = np.array([8, *np.concatenate(sentences)], dtype=np.int64)
    vectors = word_vectors(ids, 20, 8)
    alike = vectors @ vectors.T
    assert alike[10:15, 10:15].min() > 0.8
    assert alike[10:15, 15:20].max() < 0.5


@pytest.mark.parametrize(("n_ids", "vocab_size"), [(1, 3), (2, 5), (300, 7), (5000, 2 * D)])
def test_every_word_has_a_vector_of_length_one(n_ids, vocab_size):
    """Also where the text does not have the word, and where words are fewer than channels."""
    ids = zipf_ids(n_ids, vocab_size - 1).astype(np.int64)
    vectors = word_vectors(ids, vocab_size, D)
    assert vectors.shape == (vocab_size, D)
    assert_close(vectors.norm(dim=1), torch.ones(vocab_size))


def test_channels_matter_alike():
    vectors = word_vectors(zipf_ids(20_000).astype(np.int64), V, 24)
    sizes = vectors.square().mean(dim=0)
    assert sizes.max() < 6 * sizes.min()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_begins_as_the_unigram_model(tied):
    config = replace(MODERN, output="sampled", output_bias=True, tie_embeddings=tied)
    model = MiniGPT(config)
    length = model.output.table.norm(dim=1).mean()
    ids = zipf_ids(3001)
    begin_from_counts(model, ids)
    assert_close(model.output.table.norm(dim=1).mean(), length)
    assert_close(model.embedding.weight.norm(dim=1).std(), torch.tensor(0.0), atol=1e-6, rtol=0)
    shares = log_shares(ids, V)
    entropy = -(shares.exp() * shares).sum()
    inputs, targets = (torch.from_numpy(ids[i : i + 200 * T]).view(200, T) for i in (0, 1))
    nats, count = Objective(model).eval()(inputs, targets)
    assert abs(nats.item() / count - entropy) < 0.05
    assert entropy < math.log(V) - 0.3  # where a random model begins


def test_the_same_seed_gives_the_same_vectors():
    ids = zipf_ids(997).astype(np.int64)
    torch.manual_seed(7)
    first = word_vectors(ids, V, D)
    torch.manual_seed(7)
    assert torch.equal(first, word_vectors(ids, V, D))


def test_adaptive_tables_are_refused():
    with pytest.raises(UserError, match="first_weights is counted, but the tables of output"):
        Config(first_weights="counted", model=replace(ADAPTIVE, vocab_size=0))


def test_counting_starts_a_run_lower(tmp_path):
    data = write_corpus(tmp_path / "corpus.txt")
    best = {}
    for start in ("random", "counted"):
        config = run_config(data, steps=1, validations=1, first_weights=start)
        config = replace(config, model=replace(config.model, output="sampled", output_bias=True))
        recorder = Recorder()
        train(config, tmp_path / start, recorder)
        best[start] = recorder.of(Validated)[-1].score.nats
    assert best["counted"] < best["random"]
