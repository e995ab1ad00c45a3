"""Two hundred sentences with one question each: where should this word look?

    verb → object         the king built , when he wrote the letter , the bridge .
                                   ▲                                       │

    pronoun → antecedent  the queen spoke to the soldiers because they lived near the river .
                                                 ▲                  │

In a model that sees only what came before, the later word of a pair must look back at the earlier
one: the object at its verb, the pronoun at its antecedent. A head that does so knows some grammar,
unless a place told it where to look, or a word that is worth a look anyway. So the sentences, made
from templates, take such help away. How far apart the two stand changes from sentence to sentence,
and so does where they begin. And each sentence has a rival, here `wrote` and `queen`: a word as
good as the target but for its place in the grammar. The rival stands nearer in half of the
sentences, the target in the other half, and every word is target as often as rival.

All words are lower-case and frequent in WikiText-2. Nothing is drawn at random.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Sentence:
    """Words, and which of them (counted from 0) should look at which."""

    words: tuple[str, ...]
    looker: int
    """The later word: the object, or the pronoun."""
    target: int
    """Where it should look: its verb, or the noun that it stands for."""
    rival: int
    """A word of the target's kind where it should not: another verb, another noun."""

    def __str__(self) -> str:
        """Return the words, joined by blanks, as WikiText-2 has them."""
        return " ".join(self.words)


# A verb, the thing it is done to, and several of these.
_DEEDS = [
    ("built", "bridge", "bridges"),
    ("wrote", "letter", "letters"),
    ("won", "game", "games"),
    ("led", "army", "armies"),
    ("left", "city", "cities"),
    ("saw", "ship", "ships"),
    ("took", "gun", "guns"),
    ("played", "song", "songs"),
    ("held", "position", "positions"),
    ("received", "award", "awards"),
    ("opened", "church", "churches"),
    ("lost", "battle", "battles"),
    ("told", "story", "stories"),
    ("found", "body", "bodies"),
    ("killed", "animal", "animals"),
    ("made", "film", "films"),
    ("published", "book", "books"),
    ("crossed", "river", "rivers"),
    ("joined", "team", "teams"),
    ("destroyed", "house", "houses"),
]
# What stands in front of the subject: it moves all the rest about.
_OPENINGS = ["", "later", "after the war ,", "at night", "in the south of the country"]
# Which deed, counted on from a sentence's own, gives its rival. With every number its negative (of
# 20) is here: two verbs meet with the one as target as often as with the other.
_RIVALS = [3, 17, 7, 13, 10]
# V is the verb and O its object, or Os where it must be several; the small letters are another
# deed, done by the same or someone else: farther from the object than the verb …
_VERB_NEARER = [
    "the men who v os V Os .",
    "the king who v the o V the O .",
    "the woman who v the first o V the first O .",
    "the captain , who v os , V almost all the Os .",
    "the girl whose father v the o V in the summer the same O .",
]
# … or nearer.
_RIVAL_NEARER = [
    "the king V , as he v os , Os .",
    "she V for those who v the o several Os .",
    "his father V , when he v the o , the O .",
    "the old woman V , because she v os , the last two Os .",
    "the captain of the ship V in the year when he v the o the first O .",
]


def verb_object_sentences() -> list[Sentence]:
    """Return 100 sentences in which an object should look at its verb: 20 verbs, 5 times each.

    Each frame stands in 10 of them, so the two are 1 to 11 words apart, each distance 10 times.
    """
    frames = [*_VERB_NEARER, *_RIVAL_NEARER]
    found = []
    for number, turn in product(range(len(_DEEDS)), range(5)):
        story = f"{_OPENINGS[turn]} {frames[(number + 2 * turn) % len(frames)]}".split()
        rival = _DEEDS[(number + _RIVALS[turn]) % len(_DEEDS)]
        names = ("V", "O", "Os", "v", "o", "os")
        words = _filled(story, dict(zip(names, (*_DEEDS[number], *rival), strict=True)))
        found.append(Sentence(words, len(words) - 2, story.index("V"), story.index("v")))
    return found


def _filled(story: Sequence[str], forms: dict[str, str]) -> tuple[str, ...]:
    return tuple(forms.get(word, word) for word in story)


# Two nouns that no pronoun could mix up, each with its own.
_CANDIDATES = [
    (("queen", "she"), ("soldiers", "they")),
    (("king", "he"), ("players", "they")),
    (("mother", "she"), ("father", "he")),
    (("girl", "she"), ("boy", "he")),
    (("woman", "she"), ("men", "they")),
    (("actress", "she"), ("actor", "he")),
    (("son", "he"), ("daughter", "she")),
    (("husband", "he"), ("children", "they")),
    (("wife", "she"), ("officers", "they")),
    (("brother", "he"), ("sister", "she")),
]
# A and B are the candidates, P is the pronoun, 2 to 7 words behind the nearer of them.
_STORIES = [
    "the A spoke to the B because P lived near the river .",
    "after the war the A saw the B again before P left .",
    "the A wrote a letter to the B in the summer after P won the game .",
    "the A who lived with the B said that P worked in the city .",
    "later the A left the B , and P went to the north .",
    "the old A fought with the young B for three years until P died .",
    "in the city the A met the B at the church , where P worked .",
    "the A and the B lived in the same house while P worked at night .",
    "the A , not the B , said that P came from the river .",
    "when the A called the B , P came home at once .",
]


def pronoun_sentences() -> list[Sentence]:
    """Return 100 sentences in which a pronoun should look at the noun that it stands for.

    25 pairs of candidates and stories, each told four times: either noun first, either one meant.
    """
    found = []
    for number in range(25):
        # A pair comes back with another story: three further on each time.
        story = _STORIES[(number + 3 * (number // 10)) % len(_STORIES)].split()
        one, other = _CANDIDATES[number % len(_CANDIDATES)]
        places = [story.index("A"), story.index("B")]
        for nouns, meant in product([(one, other), (other, one)], [0, 1]):
            forms = {"A": nouns[0][0], "B": nouns[1][0], "P": nouns[meant][1]}
            words = _filled(story, forms)
            found.append(Sentence(words, story.index("P"), places[meant], places[1 - meant]))
    return found


@dataclass(frozen=True)
class FixedPlace:
    """What one gets who always looks at the same place, whatever the words are."""

    name: str
    """For people: "3 words back", or "word 2 of the sentence"."""
    hits: tuple[bool, ...]
    """Of each sentence, whether its target stands there."""


def best_fixed_place(sentences: Sequence[Sentence]) -> FixedPlace:
    """Return the distance back, or the position from the start, that hits most targets.

    It is chosen after the answers are known, so it is harder to beat than a head's own habit would
    be. Among equals the shortest distance wins. No sentences: no hits.
    """
    distances = Counter(s.looker - s.target for s in sentences)
    positions = Counter(s.target for s in sentences)
    distance = min(distances, key=lambda d: (-distances[d], d), default=1)
    position = min(positions, key=lambda p: (-positions[p], p), default=0)
    if positions[position] > distances[distance]:
        hits = tuple(s.target == position for s in sentences)
        return FixedPlace(f"word {position + 1} of the sentence", hits)
    hits = tuple(s.looker - s.target == distance for s in sentences)
    return FixedPlace(f"{distance} word{'s' * (distance != 1)} back", hits)
