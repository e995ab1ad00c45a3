"""Formulas for the site: the TeX that Jupyter and GitHub show becomes MathML, which browsers show.

In: a formula in TeX. Out: one line of MathML. No script is loaded and nothing fetched; the part of
TeX that is known is what the notebooks use, and anything else is an error that names it.
"""

import re
from html import escape


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


# What becomes one letter or one sign.
_LETTERS = _pairs(
    "alpha α beta β gamma γ delta δ epsilon ε varepsilon ε theta θ lambda λ mu μ nu ν pi π rho ρ "
    "sigma σ tau τ phi φ omega ω Delta Δ Sigma Σ Omega Ω infty ∞ partial ∂ nabla ∇ ell ℓ"
)
_SIGNS = _pairs(
    "cdot · times × odot ⊙ oplus ⊕ pm ± mid | top ⊤ prime ′ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ in ∈ "
    "approx ≈ equiv ≡ propto ∝ to → rightarrow → mapsto ↦ Rightarrow ⇒ ldots … dots … cdots ⋯ "
    "sum ∑ prod ∏ int ∫ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lVert ‖ rVert ‖ | ‖ "
    "{ { } } % % _ _ # # & &"
)
_SPACES = {",": 0.17, ":": 0.22, ";": 0.28, "!": -0.17, " ": 0.25, "quad": 1, "qquad": 2}
_FUNCTIONS = frozenset(["sin", "cos", "tan", "tanh", "exp", "log", "ln", "max", "min", "lim"])
_ACCENTS = _pairs("hat ^ bar ¯ overline ¯ tilde ~ vec →")
_LAYOUTS = {"frac": ("mfrac", 2), "sqrt": ("msqrt", 1)}
_TEXTS = frozenset(["text", "textrm", "mathrm", "operatorname"])
_VARIANTS = {"texttt": "monospace", "mathtt": "monospace", "mathbf": "bold", "textbf": "bold"}
_FENCES = {"pmatrix": "()", "bmatrix": "[]", "vmatrix": "||", "matrix": "  ", "cases": "{ "}
_TOKEN = re.compile(r"\\([A-Za-z]+|.)|\s+|(\d+(?:[.,]\d+)*)|(.)", re.S)


class MathError(ValueError):
    """A formula uses TeX that is not known here."""


def mathml(tex: str, *, display: bool) -> str:
    """Return a formula as MathML. Raises MathError for TeX that is not known."""
    reader = _Reader(tex)
    rows = reader.row(until=None)
    kind = ' display="block"' if display else ""
    return f"<math{kind}>{rows}</math>"


def _mo(sign: str, **attributes: str) -> str:
    given = "".join(f' {name}="{value}"' for name, value in attributes.items())
    # Markdown must not read a sign as its own.
    text = escape(sign).replace("_", "&#95;").replace("*", "&#42;").replace("|", "&#124;")
    return f"<mo{given}>{text}</mo>"


def _mi(name: str, variant: str = "") -> str:
    text = escape(name).replace("_", "&#95;").replace("*", "&#42;")
    upright = "" if len(name) == 1 and not variant else f' mathvariant="{variant or "normal"}"'
    return f"<mi{upright}>{text}</mi>"


class _Reader:
    """Reads a formula from left to right, a token at a time."""

    def __init__(self, tex: str) -> None:
        self.tex, self.at = tex, 0

    def peek(self) -> str:
        """Return the next token, blanks left out; empty at the end."""
        match = _TOKEN.match(self.tex, self.at)
        while match and match[0].isspace():
            self.at = match.end()
            match = _TOKEN.match(self.tex, self.at)
        return match[0] if match else ""

    def take(self) -> str:
        """Return the next token and go past it."""
        token = self.peek()
        self.at += len(token)
        return token

    def row(self, until: str | None) -> str:
        """Return what comes before the token `until`, which is gone past; None: all."""
        parts: list[str] = []
        while (token := self.peek()) != (until or ""):
            if not token:
                raise MathError(f"{until} is missing in {self.tex}")
            parts.append(self.atom())
        self.take()
        return f"<mrow>{''.join(parts)}</mrow>"

    def atom(self) -> str:
        """Return the next thing with what stands above and below it."""
        base = self.base()
        scripts: dict[str, str] = {}
        while self.peek() in ("^", "_"):
            mark = self.take()
            scripts[mark] = self.base()
        # The bounds of a sum stand above and below it.
        names = ("munder", "mover", "munderover") if base[4:5] in "∑∏" else ()
        below, above, both = names or ("msub", "msup", "msubsup")
        if len(scripts) == 2:
            return f"<{both}>{base}{scripts['_']}{scripts['^']}</{both}>"
        for mark, tag in (("_", below), ("^", above)):
            if mark in scripts:
                return f"<{tag}>{base}{scripts[mark]}</{tag}>"
        return base

    def base(self) -> str:
        """Return the next thing: a group, a command, a number, a letter or a sign."""
        token = self.take()
        if token == "{":
            return self.row(until="}")
        if token.startswith("\\"):
            return self.command(token[1:])
        if token[:1].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return _mi(token)
        if token in ("", "}", "&", "$"):
            raise MathError(f"{token or 'the end'} comes unexpected in {self.tex}")
        return _mo({"-": "−", "*": "∗", "'": "′"}.get(token, token))

    def command(self, name: str) -> str:
        """Return what a command, named without its backslash, makes of what follows it."""
        if name in _TEXTS or name in _VARIANTS:
            return self.text(_VARIANTS.get(name, ""))
        if name in _ACCENTS:
            return f'<mover accent="true">{self.base()}{_mo(_ACCENTS[name])}</mover>'
        if name in _LAYOUTS:
            tag, n_parts = _LAYOUTS[name]
            return f"<{tag}>{''.join(self.base() for _ in range(n_parts))}</{tag}>"
        if name in ("left", "right"):
            return self.fence()
        return self.environment() if name == "begin" else self.symbol(name)

    def symbol(self, name: str) -> str:
        """Return what a command stands for that takes nothing from what follows."""
        if name in _SPACES:
            return f'<mspace width="{_SPACES[name]}em"/>'
        if name in _FUNCTIONS:
            return _mo(name, lspace="0", rspace="0.1em")
        if name in _LETTERS:
            return _mi(_LETTERS[name])
        if name in _SIGNS:
            return _mo(_SIGNS[name])
        raise MathError(f"\\{name} is not known: {self.tex}")

    def text(self, variant: str) -> str:
        """Return the words in braces, upright, blanks and all."""
        match = re.compile(r"\s*\{([^{}]*)\}").match(self.tex, self.at)
        if not match:
            raise MathError(f"{{ is missing in {self.tex}")
        self.at = match.end()
        words = match[1].replace("\\", "").replace(" ", "\u00a0")
        return _mi(words, variant)

    def fence(self) -> str:
        """Return a parenthesis that grows with what it encloses; a dot is none."""
        token = self.take()
        sign = _SIGNS.get(token[1:], token) if token.startswith("\\") else token
        return _mo("" if sign == "." else sign, stretchy="true")

    def environment(self) -> str:
        """Return a matrix with its brackets."""
        match = re.compile(r"\{(\w+)\}(.*?)\\end\{\1\}", re.S).match(self.tex, self.at)
        if not match or match[1] not in _FENCES:
            raise MathError(f"this environment is not known: {self.tex[self.at :]}")
        self.at = match.end()
        rows = re.split(r"\\\\", match[2].strip())
        cells = [[_Reader(cell).row(until=None) for cell in row.split("&")] for row in rows]
        body = "".join(
            "<mtr>" + "".join(f"<mtd>{cell}</mtd>" for cell in row) + "</mtr>" for row in cells
        )
        begin, end = (_mo(sign.strip(), stretchy="true") for sign in _FENCES[match[1]])
        return f"<mrow>{begin}<mtable>{body}</mtable>{end}</mrow>"
