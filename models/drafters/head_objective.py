"""What hidden-state heads are trained for: weights of the terms of their loss, which `head_training.py` computes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ...core.section import Section
from ..losses import Divergence


class HeadObjective(Section):
    """Weights of the terms at each trained input; a term of weight 0 is not computed."""

    # Of a train stage's `objective`: what is trained with the target's hidden states.
    kind: Literal["head"] = Field("head", exclude=True)

    # SmoothL1 between the predicted and the true state, mean over the width.
    feature: float = Field(0.0, ge=0)
    # Divergence between the two distributions that the LM head makes of them; lk_alpha and lk_hybrid are the LK losses.
    token: float = Field(0.0, ge=0)
    token_divergence: Divergence = "soft_ce"
    # Sum of |Q - P| over the vocabulary, at most 2.
    l1: float = Field(0.0, ge=0)
    # ListMLE over the target's likeliest tokens.
    listmle: float = Field(0.0, ge=0)
    # How many of them.
    top: int = Field(10, ge=1)
    # Weight of pass s is decay^s, as in EAGLE-3 (0.8); null: the mean over passes.
    decay: float | None = Field(None, gt=0, le=1)
    # Passes after the first in this stage; null: the head's mtp_steps. 0 for a stage of plain text.
    mtp_steps: int | None = Field(None, ge=0)
    # Width of the uniform noise on true states at 512 places; shorter samples get more of it (EAGLE: 0.2).
    noise: float = Field(0.2, ge=0)
    # Inputs whose vocabulary is projected at once: about 40 bytes for each input, pass and id.
    chunk: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _some_term(self) -> HeadObjective:
        if not any((self.feature, self.token, self.l1, self.listmle)):
            raise ValueError("no term has a weight; give feature, token, l1 or listmle")
        return self
