"""Tokenizer files: which of the four builds a tokenizer.json is, before a library runs it.

In: the text of a tokenizer.json. Out: its kind, or a UserError.

The format can say far more than the four kinds need: patterns that take years to match, steps that
are applied to all text, entries with any id. A file may come from anyone, so all of it but the
vocabulary must be what `vocabulary` builds, and the ids of that 0, 1, 2, … without a gap.
"""

from functools import cache
from typing import Any

from minigpt.config import TokenizerConfig, TokenizerKind
from minigpt.errors import UserError, require
from minigpt.reading import parse_json
from minigpt.vocabulary import EOS, SPELT_UNKNOWN, learn

# Some 1,200,000 words. What is read of it takes twenty times as much memory.
MOST_BYTES = 1 << 25

# The smallest vocabulary that each kind can be built with.
_LEAST: dict[TokenizerKind, int] = {"basic_english": 0, "wikitext": 0, "bpe": 257, "char": 0}


def kind_of(tokenizer_json: str) -> TokenizerKind:
    """Return the kind of a tokenizer.json. Raises UserError where it is not one of the four."""
    try:
        tree = parse_json(tokenizer_json)
    except ValueError as error:
        raise UserError(f"it is not a tokenizer.json ({error})") from None
    model: Any = tree.get("model") if isinstance(tree, dict) else None
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    require(isinstance(vocab, dict), "it is not a tokenizer.json (it has no vocabulary)")
    kind = next((kind for kind in _LEAST if _build(tree) == _build_of(kind)), None)
    if kind is None:
        raise UserError(
            f"a {str(model.get('type'))[:20]} tokenizer of this build is none of "
            "basic_english, wikitext, bpe and char"
        )
    _check_entries(vocab, tree.get("added_tokens"), model.get("merges", []))
    return kind


@cache
def _build_of(kind: TokenizerKind) -> Any:
    return _build(parse_json(learn(TokenizerConfig(kind, _LEAST[kind]), lambda: []).to_str()))


def _build(tree: dict[str, Any]) -> Any:
    """Return all that a tokenizer.json says, but its entries."""
    model = {name: part for name, part in tree["model"].items() if name not in ("vocab", "merges")}
    build = {name: part for name, part in tree.items() if name != "added_tokens"}
    return _said({**build, "model": model})


def _said(part: Any) -> Any:
    """Return part without what is null or false: a later version of the library may add some."""
    if isinstance(part, dict):
        return {name: _said(p) for name, p in part.items() if p is not None and p is not False}
    return [_said(inner) for inner in part] if isinstance(part, list) else part


def _check_entries(vocab: dict[str, Any], added: Any, merges: Any) -> None:
    """Raise UserError where ids have a gap, or what is added or merged are no entries."""
    ids = list(vocab.values())
    whole = all(type(i) is int for i in ids)
    require(whole and sorted(ids) == list(range(len(ids))), "its ids have a gap")
    require(isinstance(added, list) and isinstance(merges, list), "it is not a tokenizer.json")
    for token in added:
        content: Any = token.get("content") if isinstance(token, dict) else None
        require(content in (EOS, *SPELT_UNKNOWN), "it adds a token that is no special")
        as_ours = {
            "id": vocab.get(content),
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content == EOS,
        }
        require(token == as_ours, f"it adds {content!r} in another way")
    require(len(merges) <= len(vocab), "it has more merges than entries")
