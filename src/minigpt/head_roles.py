"""What each head does: a role by measured scores, or the answer that it has none.

That eight heads attend to eight relations (grammar, meaning, reference) is often said. Here it is
measured, on a model of one's own. In: a model, its tokenizer, held-out ids. Out: `HeadRoles`, which
is a table for people, JSON for programs, a picture and a notebook's table.

What is measured, and beside what: `head_scores`. Here stands what follows from it.

L layers · H heads
"""

import html
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigpt import head_picture
from minigpt.attention_maps import write_figure
from minigpt.head_scores import (
    PLACES,
    HeadScore,
    LossChange,
    RelationScore,
    held_out_windows,
    is_punctuation,
    loss_changes,
    recorded_windows,
    score_relation,
    score_weights,
    t_quantile,
)
from minigpt.model import MiniGPT
from minigpt.sentences import pronoun_sentences, verb_object_sentences
from minigpt.tokenizer import Tokenizer

# A role takes a tenth of a head's weight more than the head would give without it, …
MARGIN = 0.1
# … counted on this many rows at least, …
MIN_ROWS = 30
# … and a relation a chance below this, divided by the number of heads and relations tried.
SIGNIFICANCE = 0.05
# A head does nothing where the change of the loss and its 95 % interval stay within this many nats
# per token: one in a hundred of the perplexity.
NEGLIGIBLE = 0.01
# Looking at a fixed place is what these are, so what the head's average map gets is not taken off.
_OF_POSITION = ("previous_token", "first_token", "itself", "long_range")
RELATIONS = {"verb_object": "verb → object", "pronoun_antecedent": "pronoun → antecedent"}
UNEXPLAINED, DOES_NOTHING, UNDECIDED = "unexplained", "does nothing", "undecided"
# The columns of the tables, in order.
_COLUMNS = {
    "previous_token": "prev",
    "first_token": "first",
    "itself": "self",
    "long_range": "far",
    "entropy": "wide",
    "same_token": "same",
    "induction": "induct",
    "punctuation": "punct",
    "verb_object": "object",
    "pronoun_antecedent": "pronoun",
}


def measure_heads(
    model: MiniGPT,
    tokenizer: Tokenizer,
    ids: np.ndarray,
    *,
    n_tokens: int | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> "HeadRoles":
    """Measure every head of a model on held-out ids (n,) and on the 200 marked sentences.

    n_tokens   about how many of the ids to look at; None: 16 windows of the model's context
    say        told what is about to be done
    The model reads in evaluation mode and is left as it was. It costs a pass over the windows for
    each head, and a little. Raises UserError for ids that make fewer than two windows, and for a
    model that has diverged.
    """
    config = model.config
    windows = held_out_windows(ids, config.context_length, n_tokens)  # (N, T + 1)
    n_heads = config.n_layers * config.n_heads
    say(f"measuring {n_heads} heads on {len(windows)} windows of {config.context_length} tokens")
    inputs = windows[:, :-1]
    signs = is_punctuation(tokenizer, inputs)
    return HeadRoles(
        scores=score_weights(recorded_windows(model, inputs), inputs, signs),
        relations={
            "verb_object": score_relation(model, tokenizer, verb_object_sentences()),
            "pronoun_antecedent": score_relation(model, tokenizer, pronoun_sentences()),
        },
        loss=loss_changes(model, windows),
        n_windows=len(windows),
        context=config.context_length,
    )


@dataclass(frozen=True, eq=False)
class HeadRoles:
    """What was measured of every head, and what role that makes. Tensors are (L, H)."""

    scores: dict[str, HeadScore]
    """By the names of `head_scores.PLACES`, and "entropy"."""
    relations: dict[str, RelationScore]
    """By the names "verb_object" and "pronoun_antecedent"."""
    loss: LossChange
    n_windows: int
    context: int

    def excess(self) -> dict[str, Tensor]:
        """Return how far each score of PLACES lies above what needs no knowledge of the words.

        That is an even look; and, for what depends on the words (same token, induction,
        punctuation), also the head's own average map, whichever is higher.
        """
        return {
            name: score.measured - score.even
            if name in _OF_POSITION
            else score.measured - score.position_only.clamp(min=score.even)
            for name, score in self.scores.items()
            if name in PLACES
        }

    def tracks(self, relation: str) -> Tensor:
        """Return which heads track a relation, (L, H) bool: better than place and coin, both.

        By the sign tests of `RelationScore`. Each head has a chance to look good by luck in each
        relation, so the level is divided by their number (Bonferroni).
        """
        score = self.relations[relation]
        n_tries = score.p_place.numel() * len(self.relations)
        # Both must hold: then the larger value tests the pair, and needs no correction for it.
        return score.p_place.maximum(score.p_rival) < SIGNIFICANCE / n_tries

    def interval(self) -> Tensor:
        """Return how far to each side the 95 % interval of each change of the loss reaches, (L, H).

        By Student's t, over windows that lie apart. Head by head: of heads that change nothing, one
        in twenty shows a change by chance, so among 32 of them one or two.
        """
        return t_quantile(self.n_windows) * self.loss.error

    def matters(self) -> Tensor:
        """Return for which heads the interval of the change leaves 0 out, (L, H) bool."""
        return self.loss.change.abs() > self.interval()

    def roles(self) -> list[list[str]]:
        """Return the role of every head, L lists of H.

        The score of the largest excess, if that is MARGIN or more on MIN_ROWS rows or more; else a
        relation that the head tracks. Without either it is "unexplained" where the loss changes
        when the head is off (`matters`), "does nothing" where that change and its interval stay
        within NEGLIGIBLE nats, and "undecided" where neither is so: more tokens may tell.
        """
        names = [name for name in PLACES if self.scores[name].n_rows >= MIN_ROWS]
        excess = self.excess()
        tracked = {name: self.tracks(name) for name in self.relations}
        matters = self.matters()
        idle = self.loss.change.abs() + self.interval() < NEGLIGIBLE

        def role(layer: int, head: int) -> str:
            best = max(names, key=lambda name: float(excess[name][layer, head]), default=None)
            if best is not None and excess[best][layer, head] >= MARGIN:
                return _spoken(best)
            for relation, heads in tracked.items():
                if heads[layer, head]:
                    return _spoken(relation)
            if matters[layer, head]:
                return UNEXPLAINED
            return DOES_NOTHING if idle[layer, head] else UNDECIDED

        n_layers, n_heads = matters.shape
        return [[role(layer, head) for head in range(n_heads)] for layer in range(n_layers)]

    def table(self) -> list[list[str]]:
        """Return rows for people: names, what needs no knowledge, then a row for each head.

        `legend` says how to read them.
        """
        even = [self._column(name)[1] for name in _COLUMNS]
        cells = [
            _percent(share) + "/50" * (name in self.relations)
            for name, share in zip(_COLUMNS, even, strict=True)
        ]
        rows = [["head", *_COLUMNS.values(), "off", "role"], ["even", *cells, "", ""]]
        roles, tracked = self.roles(), {name: self.tracks(name) for name in self.relations}
        for layer, head in np.ndindex(*self.loss.change.shape):
            cells = []
            for name in _COLUMNS:
                cell = _percent(self._column(name)[0][layer, head])
                if name in self.relations:
                    cell += f"/{_percent(self.relations[name].of_two[layer, head])}"
                    cell += "*" * bool(tracked[name][layer, head])
                elif name in PLACES and name not in _OF_POSITION:
                    cell += f"/{_percent(self.scores[name].position_only[layer, head])}"
                cells.append(cell)
            off = f"{self.loss.change[layer, head]:+.4f} ±{self.loss.error[layer, head]:.4f}"
            rows.append([f"{layer}.{head}", *cells, off, roles[layer][head]])
        return rows

    def _column(self, name: str) -> tuple[Tensor, float]:
        """Return a column of the table, (L, H), and what needs no knowledge of the words."""
        if name in self.relations:
            return self.relations[name].accuracy, self.relations[name].fixed_accuracy
        return self.scores[name].measured, self.scores[name].even

    def legend(self) -> list[tuple[str, str]]:
        """Return the columns of `table` and what stands in each; all but the loss is in percent."""
        n_heads = self.loss.change.numel()
        spoken = {
            **{name: f"weight on {place}" for name, place in PLACES.items()},
            "entropy": "entropy of the weights, a share of an even look's",
            "verb_object": "sentences in which, from the object, its verb gets the largest weight",
            "pronoun_antecedent": "the same from a pronoun, for the noun that it stands for",
        }
        places = " and ".join(
            r.fixed_place if r.n_sentences else "–" for r in self.relations.values()
        )
        return [
            *((column, spoken[name]) for name, column in _COLUMNS.items()),
            ("off", f"change of the loss ({self.loss.loss:.4f} nats per token) when what the head"),
            ("", "mixed is set to 0, ± standard error"),
            ("…/…", "behind it: what the head's average map gets, which knows no words; for"),
            ("", "sentences, how often the target gets more than its rival"),
            ("*", f"p < {SIGNIFICANCE} after Bonferroni; sentences of one template are not quite"),
            ("", "independent"),
            ("even", f"an even look; for sentences, the best fixed place ({places})"),
            ("", "and a coin"),
            ("role", "the score farthest above an even look and, where the words matter, above"),
            ("", f"the average map, by {100 * MARGIN:.0f} points or more; else a relation with *"),
            ("", f"{UNEXPLAINED}: the loss changes (the 95 % interval leaves 0 out), as by"),
            ("", f"chance in {SIGNIFICANCE * n_heads:.1f} of {n_heads} heads that change nothing"),
            ("", f"{DOES_NOTHING}: change and interval stay within {NEGLIGIBLE} nats, so the"),
            ("", "perplexity within 1 %"),
            ("", f"{UNDECIDED}: neither; more tokens may tell"),
            ("", f"{self.n_windows} windows of {self.context} tokens, heads counted from 0"),
        ]

    def summary(self) -> list[str]:
        """Return what came out, a line for the roles and one for each relation."""
        roles = [role for of_layer in self.roles() for role in of_layer]
        counts = Counter(roles)
        without = [counts.pop(role, 0) for role in (UNEXPLAINED, DOES_NOTHING, UNDECIDED)]
        named = ", ".join(f"{n} {role}" for role, n in counts.most_common())
        changes = self.loss.change.flatten().tolist()
        n_lower = sum(
            role == UNEXPLAINED and change < 0 for role, change in zip(roles, changes, strict=True)
        )
        lower = f" (lower without {n_lower} of them)" if n_lower else ""
        return [
            f"{counts.total()} of {len(roles)} heads have a role{f' ({named})' if named else ''}; "
            f"without a role: {without[0]} whose removal changes the loss{lower}, "
            f"{without[1]} doing nothing, {without[2]} undecided",
            *map(self._told, self.relations),
        ]

    def _told(self, name: str) -> str:
        relation = self.relations[name]
        what = _spoken(name)
        skipped = (
            f" ({relation.n_skipped} sentences left out: words not in the vocabulary, or longer "
            "than the context)"
            if relation.n_skipped
            else ""
        )
        if not relation.n_sentences:
            return f"{what}: not measured{skipped}"
        level = SIGNIFICANCE / (relation.p_place.numel() * len(self.relations))
        n_beating = int((relation.p_place < level).sum())
        tracking = [f"{layer}.{head}" for layer, head in self.tracks(name).nonzero().tolist()]
        place = f"the best fixed place ({relation.fixed_place}, {relation.fixed_accuracy:.0%})"
        if tracking:
            text = f"tracked by {', '.join(tracking)}: better than {place}, and than a coin"
        elif n_beating:
            n_heads = f"{n_beating} heads beat" if n_beating > 1 else "1 head beats"
            text = f"{n_heads} {place}, but none tells the target from its rival"
        else:
            text = f"no head beats {place}"
        return f"{what}: {text}{skipped}"

    def to_json(self) -> dict[str, Any]:
        """Return all figures as dicts, lists and numbers, NaN for what was not measured."""
        return {
            "n_windows": self.n_windows,
            "context": self.context,
            "roles": self.roles(),
            "scores": {name: _plain(score) for name, score in self.scores.items()},
            "relations": {
                name: {**_plain(relation), "tracks": self.tracks(name).tolist()}
                for name, relation in self.relations.items()
            },
            "loss": _plain(self.loss),
            "summary": self.summary(),
        }

    def save_png(self, path: Path | str) -> None:
        """Draw the table as a picture and write it to path.

        Raises UserError where nothing can be written.
        """
        n_layers, n_heads = self.loss.change.shape
        roles = [role for of_layer in self.roles() for role in of_layer]
        columns = [_spoken(name) for name in _COLUMNS]
        shares = [
            torch.tensor([even, *heads.flatten().tolist()])
            for heads, even in map(self._column, _COLUMNS)
        ]
        figure = head_picture.draw(
            f"What each of {n_layers} × {n_heads} heads does",
            ["even", *(f"{layer}.{head}" for layer, head in np.ndindex(n_layers, n_heads))],
            columns,
            torch.stack(shares, dim=1),
            ["", *roles],
            *(
                torch.tensor([math.nan, *of_heads.flatten().tolist()])
                for of_heads in (self.loss.change, self.interval())
            ),
        )
        write_figure(figure, Path(path))

    def _repr_html_(self) -> str:
        names, *rows = self.table()
        lines = [
            f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in row)}</tr>"
            for tag, row in [("th", names), *(("td", row) for row in rows)]
        ]
        notes = [*self.summary(), *(f"{name} {what}" for name, what in self.legend())]
        return f"<table>{''.join(lines)}</table><p>{'<br>'.join(map(html.escape, notes))}</p>"


def _spoken(name: str) -> str:
    return RELATIONS.get(name, name.replace("_", " "))


def _percent(share: Tensor | float) -> str:
    share = float(share)
    return "–" if math.isnan(share) else f"{100 * share:.0f}"


def _plain(score: HeadScore | RelationScore | LossChange) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in vars(score).items()
    }
