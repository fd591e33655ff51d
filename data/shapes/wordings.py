"""Which of several right wordings an answer has.

Written with one wording each, answers can be learned word for word: then a target's answers are the data's, and a draft
learns nothing from them that the data does not say. With several, nobody can know which one the data has.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

# Wordings of one meaning, the usual one first -> one of them.
Say = Callable[..., str]
Wordings = Literal["usual", "several"]


def usual(*wordings: str) -> str:
    """The first: every answer of a kind is then written alike."""
    return wordings[0]


def drawn_by(rng: random.Random) -> Say:
    """Any of them, each as likely as the others."""
    return lambda *wordings: rng.choice(wordings)
