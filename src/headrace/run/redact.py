"""Takes secrets out of a command before it is recorded. Pure. Rather one value too many than one too few."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

HIDDEN = "***"

_SECRET = (
    r"(?:[\w.+-]*[-_.+])?"
    r"(?:\w*(?:token|secret|password|passwd|passphrase|credentials?|api[-_]?key|access[-_]?key|private[-_]?key)"
    r"|auth|key|pwd)"
)
#: Shapes that give a secret away wherever they stand: Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google, JWT.
_SHAPES = (
    r"hf_\w{6,}",
    r"sk-[\w-]{6,}",
    r"gh[pousr]_\w{16,}",
    r"github_pat_\w{16,}",
    r"glpat-[\w-]{12,}",
    r"A[KS]IA[0-9A-Z]{12,}",
    r"xox[abeprs]-[\w-]{8,}",
    r"AIza[\w-]{24,}",
    r"eyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*",
)


def redact(words: Sequence[str]) -> list[str]:
    """The same words with ``***`` in place of every value that looks like a secret.

    Hidden are: the value of an option or setting whose name says secret (``--api-key X``, ``key=X``), well-known shapes
    of tokens, the user part and secret parameters of URLs; also inside one word (``sh -c "export TOKEN=..."``).
    """
    done: list[str] = []
    hide_next = False
    for word in words:
        if hide_next and not word.startswith("-"):
            done.append(HIDDEN)
            hide_next = False
            continue
        hide_next = _flag().fullmatch(word) is not None
        done.append(_redact_word(word))
    return done


def _redact_word(word: str) -> str:
    for pattern, replacement in _inside():
        word = pattern.sub(replacement, word)
    return word


# Compiled when first needed: compiling takes 5 ms, and this module is imported while the program starts.
@cache
def _flag() -> re.Pattern[str]:
    return re.compile(rf"--?{_SECRET}", re.IGNORECASE)


@cache
def _inside() -> tuple[tuple[re.Pattern[str], str], ...]:
    value = r"""("[^"]*"|'[^']*'|[^\s,;&"'}\])]+)"""
    return (
        (re.compile(r"(\w+://)[^/\s@]+@"), rf"\1{HIDDEN}@"),
        (re.compile(r"([?&][\w-]*(?:token|secret|password|key|sig|signature)=)[^&\s#]+", re.I), rf"\1{HIDDEN}"),
        (re.compile(rf"""((?:^|[\s,;&{{(\["'])-{{0,2}}{_SECRET}["']?\s*[=:]\s*){value}""", re.I), rf"\1{HIDDEN}"),
        (re.compile(rf"(--{_SECRET}\s+)(?!-){value}", re.I), rf"\1{HIDDEN}"),
        (re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_SHAPES)})"), HIDDEN),
        (re.compile(r"\b((?:Bearer|Basic)\s+)[\w.~+/=-]{8,}", re.I), rf"\1{HIDDEN}"),
    )
