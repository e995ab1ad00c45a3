"""Attention made visible: the weights are those that were used, and nothing stays behind."""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minigpt import attention_maps as module
from minigpt.attention_maps import AttentionMaps, attention_maps, recorded
from minigpt.attention_page import numbers
from minigpt.config import ModelConfig
from minigpt.errors import UserError
from minigpt.layers.attention import fast_causal_attention
from minigpt.model import MiniGPT

B, T, L, H, K, F, V = 5, 17, 2, 3, 14, 31, 89
CONFIGS = {
    "sinusoidal": ModelConfig(
        V, 19, 22, H, 0, K, F, L, "sinusoidal", "layer", "post", "relu", dropout=0.5
    ),
    "rotary": ModelConfig(V, 19, 23, H, 0, K, F, L, dropout=0.5),
    "grouped": ModelConfig(V, 19, 23, H, 1, K, F, L, qk_norm=True, dropout=0.5),
    "attention_dropout": ModelConfig(V, 19, 23, H, 0, K, F, L, attention_dropout=0.5),
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def make_model(name: str = "rotary") -> MiniGPT:
    torch.manual_seed(1)
    model = MiniGPT(CONFIGS[name])
    with torch.no_grad():  # fresh weights look everywhere alike: give them something to prefer
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return model


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(0))


def some_maps(n_layers: int, n_heads: int, tokens: list[str]) -> AttentionMaps:
    size = len(tokens)
    scores = torch.randn(n_layers, n_heads, size, size, generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    return AttentionMaps(scores.masked_fill(hidden, -torch.inf).softmax(-1), tokens)


# pytorch/pytorch#119811: the fast path gives no weights.
@pytest.mark.parametrize("name", CONFIGS)
def test_the_recorded_model_computes_what_the_fast_one_does(name):
    model, ids = make_model(name).eval(), random_ids(B, T)
    fast = model(ids)
    with recorded(model) as weights:
        taught = model(ids)
    torch.testing.assert_close(taught, fast, atol=1e-5, rtol=1e-5)
    assert [tuple(w.shape) for w in weights] == [(B, H, T, T)] * L


# pytorch/pytorch#119811: the fast path gives no weights.
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_sum_to_1_and_the_future_gets_exactly_0(name):
    weights = attention_maps(make_model(name), random_ids(T).tolist()).weights
    assert weights.shape == (L, H, T, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones(L, H, T))
    assert torch.equal(weights.triu(1), torch.zeros(L, H, T, T))
    assert weights[..., -1, :].std(-1).min() > 0.01


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_mix_the_values_into_what_the_block_passes_on(name):
    model, ids = make_model(name).eval(), random_ids(1, T)
    seen = []
    attention = model.blocks[0].attention
    attention.value.register_forward_hook(lambda *_: seen.append(_[2]))
    attention.output.register_forward_hook(lambda *_: seen.append(_[1][0]))
    model(ids)
    values, mixed = seen
    values = values.unflatten(-1, (-1, K)).transpose(1, 2)  # (1, G, T, K)
    values = values.repeat_interleave(H // values.size(1), dim=1)
    weights = attention_maps(model, ids[0].tolist()).weights[0]
    torch.testing.assert_close((weights @ values).transpose(1, 2).flatten(2), mixed)


def test_nothing_stays_on_the_model():
    model, ids = make_model().train(), random_ids(T).tolist()
    model.blocks[1].eval()
    before = copy.deepcopy([sorted(vars(part)) for part in model.modules()])
    modes = [part.training for part in model.modules()]
    attention_maps(model, ids)
    assert [sorted(vars(part)) for part in model.modules()] == before
    assert [part.training for part in model.modules()] == modes
    assert all(block.attention.attend is fast_causal_attention for block in model.blocks)


def test_an_error_inside_restores_the_model_too():
    model = make_model()
    with pytest.raises(RuntimeError, match="boom"), recorded(model):
        raise RuntimeError("boom")
    assert all(block.attention.attend is fast_causal_attention for block in model.blocks)


def test_a_compiled_model_is_recorded_as_it_is_written():
    model, ids = make_model(), random_ids(T).tolist()
    expected = attention_maps(model, ids).weights

    def refuse(*_):
        pytest.fail("compiled")

    for block in model.blocks:
        block.compile(backend=refuse)
    assert torch.equal(attention_maps(model, ids).weights, expected)


def test_records_may_be_nested():
    model, ids = make_model().eval(), random_ids(1, T)
    with recorded(model) as outer:
        with recorded(model) as inner:
            model(ids)
        model(ids)
    assert len(inner) == len(outer) == L
    assert all(torch.equal(a, b) for a, b in zip(inner, outer, strict=True))


def test_gradients_flow_through_what_is_recorded():
    model = make_model()
    with recorded(model) as weights:
        model(random_ids(B, T))
    weights[1][..., -1, 0].sum().backward()
    assert model.blocks[0].attention.query.weight.grad.abs().sum() > 0


def test_a_cached_pass_is_recorded_with_its_past():
    model, ids = make_model().eval(), random_ids(1, T)
    cache = model.new_cache(1)
    with torch.no_grad(), recorded(model) as weights:
        model.next_logits(ids[:, :11], cache)
        model.next_logits(ids[:, 11:], cache)
    whole = attention_maps(model, ids[0].tolist()).weights
    assert [tuple(w.shape) for w in weights] == [(1, H, 11, 11)] * L + [(1, H, T - 11, T)] * L
    torch.testing.assert_close(torch.cat(weights[L:]), whole[..., 11:, :])


def test_what_changes_later_changes_no_earlier_row():
    model, ids = make_model(), random_ids(T).tolist()
    changed = [*ids[:11], *[(i + 1) % V for i in ids[11:]]]
    before, after = attention_maps(model, ids).weights, attention_maps(model, changed).weights
    torch.testing.assert_close(after[..., :11, :], before[..., :11, :])
    assert not torch.allclose(after[..., 11:, :], before[..., 11:, :], atol=1e-3)


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([], None, "the text has 0 tokens: give from 1 to 19"),
        ([1] * 20, None, "the text has 20 tokens: give from 1 to 19"),
        ([3, V], None, rf"ids \[{V}\] lie outside the model's vocabulary of {V}"),
        ([3, -1], None, r"ids \[-1\] lie outside"),
        ([3, 4, 5], ["a", "b"], "2 tokens for 3 positions"),
    ],
)
def test_a_text_that_cannot_be_drawn_is_refused(ids, tokens, message):
    with pytest.raises(UserError, match=message):
        attention_maps(make_model(), ids, tokens)


def test_entropy_tells_a_pointed_head_from_a_wide_one():
    wide = torch.ones(T, T).tril()
    pointed = torch.eye(T)
    weights = torch.stack([wide / wide.sum(-1, keepdim=True), pointed])[None]
    entropy = AttentionMaps(weights, ["x"] * T).entropy()
    torch.testing.assert_close(entropy, torch.tensor([[1.0, 0.0]]))


def test_a_view_begins_with_the_most_focused_of_the_chosen_heads():
    maps = some_maps(3, 5, ["the", "cat", "sat"])
    weights = maps.weights.clone()
    weights[1, 3] = torch.eye(3)  # nothing is more focused
    weights[2, 4] = torch.tensor([[1, 0, 0], [1, 0, 0], [0.01, 0.01, 0.98]])
    maps = AttentionMaps(weights, maps.tokens)
    for chosen, first in {
        (None, None): (1, 3),
        (1, None): (1, 3),
        (2, None): (2, 4),
        (None, 4): (2, 4),
        (0, 2): (0, 2),
    }.items():
        selection = maps.select(*chosen)
        assert selection.first_name == "Layer {}, head {}".format(*first)
        assert torch.equal(selection.first_weights, weights[first])
        assert selection.of == (3, 5)
        assert len(selection.layers) == (3 if chosen[0] is None else 1)
        assert selection.weights.shape[:2] == (len(selection.layers), len(selection.heads))


def test_a_single_token_has_a_first_head_too():
    maps = some_maps(2, 3, ["alone"])
    assert maps.entropy().isnan().all()
    assert maps.select().first_name == "Layer 0, head 0"
    assert maps.select(1).first_name == "Layer 1, head 0"


@pytest.mark.parametrize(
    ("layer", "head", "message"),
    [
        (2, None, "layer is 2: the model has layers 0 to 1"),
        (-1, 0, "layer is -1: the model has layers 0 to 1"),
        (None, 3, "head is 3: the model has heads 0 to 2"),
        (0, -1, "head is -1: the model has heads 0 to 2"),
    ],
)
def test_a_layer_or_head_that_is_not_there_is_refused_by_every_view(tmp_path, layer, head, message):
    maps = some_maps(2, 3, ["the", "cat"])
    for view in (maps.select, maps.heat_map, maps.html):
        with pytest.raises(UserError, match=message):
            view(layer, head)
    for name in ("a.png", "a.html", "a.json"):
        with pytest.raises(UserError, match=message):
            maps.save(tmp_path / name, layer, head)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(3, 1, 1), r"weights are of shape \(3, 1, 1\): give \(layers, heads, T, T\)"),
        (torch.ones(1, 1, 1, 2), "weights are of shape"),
        (torch.ones(1, 1, 0, 0), r"weights are of shape \(1, 1, 0, 0\): .* at least one of each"),
        (torch.ones(0, 1, 2, 2), "weights are of shape"),
        (torch.full((1, 1, 2, 2), 0.5), "look at what comes later"),
        (torch.eye(2)[None, None] * torch.nan, "some weights are not numbers from 0 to 1: give"),
        (torch.eye(2)[None, None] * torch.inf, "not numbers from 0 to 1"),
        (torch.eye(2)[None, None] * 2, "not numbers from 0 to 1"),
        (torch.eye(2)[None, None] * -0.1, "not numbers from 0 to 1"),
    ],
)
def test_weights_that_no_view_could_show_are_refused(weights, message):
    with pytest.raises(UserError, match=message) as caught:
        AttentionMaps(weights, ["x"] * weights.size(-1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_may_be_of_any_precision_and_of_a_graph(tmp_path, kind):
    maps = some_maps(2, 3, ["the", "cat", "sat"])
    given = maps.weights.to(kind).requires_grad_()
    found = AttentionMaps(given, maps.tokens)
    assert torch.equal(found.weights, given.detach().float())
    for name in ("a.png", "a.html", "a.json"):
        found.save(tmp_path / name)
    assert found.heat_map(1, 2).startswith("Layer 1, head 2")


def test_maps_equal_none_but_themselves():
    """Tensors compared by == give a tensor, which is neither true nor false."""
    one, other = some_maps(2, 3, ["the", "cat"]), some_maps(2, 3, ["the", "cat"])
    assert one == one
    assert one != other
    assert one.select() != one.select()


def test_a_model_that_has_diverged_is_told_apart_from_one_that_looks_nowhere():
    model = make_model()
    with torch.no_grad():
        model.blocks[1].attention.key.weight[3, 5] = torch.nan
    with pytest.raises(UserError, match="the model's attention is not finite"):
        attention_maps(model, random_ids(T).tolist())


def test_the_end_of_a_name_says_what_is_written(tmp_path):
    maps = some_maps(2, 3, ["the", "cat", "sat"])
    for name in ("a.png", "a.PNG", "new/a.html", "a.json"):
        maps.save(tmp_path / name, head=2)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "a.PNG").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new" / "a.html").read_text(encoding="utf-8") == maps.html(head=2)
    told = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert told["heads"] == [2]
    assert told["entropy"] == [[pytest.approx(e, abs=1e-6)] for e in maps.entropy()[:, 2].tolist()]
    maps.save(str(tmp_path / "text.json"))  # a path may be text
    for name in ("a.pdf", "a", ".png"):
        with pytest.raises(
            UserError, match=r"path is .*: give a name that ends in \.png, \.html or"
        ):
            maps.save(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 5  # and nothing half written


@pytest.mark.parametrize("name", ["a.png", "a.html", "a.json"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "file").write_text("x")
    (tmp_path / name).mkdir()
    for path in (tmp_path / "file" / name, tmp_path / name):
        with pytest.raises(UserError, match=rf"{name} cannot be written: .*, name another place"):
            some_maps(1, 1, ["the"]).save(path)
    assert len(list(tmp_path.iterdir())) == 2


def test_json_holds_the_weights_and_names_what_they_are():
    maps = some_maps(2, 3, ["the", "ca\nt", "语"])
    told = numbers(maps.select(layer=1), maps.entropy()[[1]])
    told = json.loads(json.dumps(told, allow_nan=False))
    assert told["tokens"] == maps.tokens
    assert (told["n_layers"], told["n_heads"]) == (2, 3)
    assert (told["layers"], told["heads"]) == ([1], [0, 1, 2])
    weights = torch.tensor(told["weights"], dtype=torch.float64)
    torch.testing.assert_close(weights, maps.weights[[1]].double(), atol=5e-7, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 3, 3).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        torch.tensor(told["entropy"]), maps.entropy()[[1]], atol=1e-6, rtol=0
    )
    assert max(len(str(w)) for w in weights.flatten().tolist()) <= 8  # 0.123456


def test_json_knows_no_nan(tmp_path):
    some_maps(2, 3, ["alone"]).save(tmp_path / "a.json")
    told = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert told["entropy"] == [[None] * 3] * 2


def test_a_notebook_is_told_little_beside_the_page():
    assert repr(some_maps(2, 3, ["the", "cat"])) == "AttentionMaps(tokens=['the', 'cat'])"


def test_threads_that_record_the_same_model_do_not_meet() -> None:
    model = make_model().eval()
    before = [block.attention.attend for block in model.blocks]
    texts = random_ids(4, 7).tolist()
    alone = [attention_maps(model, text).weights for text in texts]
    meanwhile: list[torch.Tensor] = []

    def look(number: int) -> None:
        for _ in range(20):
            assert torch.equal(attention_maps(model, texts[number]).weights, alone[number])

    def read() -> None:  # in a thread that records nothing
        meanwhile.append(model.hidden(random_ids(1, 7)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look, range(4)))
    with recorded(model) as weights:
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()
    assert weights == []
    assert len(meanwhile) == 1
    assert [block.attention.attend for block in model.blocks] == before


def test_more_weights_than_memory_holds_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_WEIGHTS", L * H * 5 * 5)
    model = make_model()
    assert attention_maps(model, [4] * 5).weights.size(-1) == 5
    with pytest.raises(UserError, match=f"6 tokens, too many for {L * H} maps .* at most 5"):
        attention_maps(model, [4] * 6)
