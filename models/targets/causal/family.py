"""What the rest of draftsmith asks of language models of text alone."""

from __future__ import annotations

from dataclasses import replace

from ...decoding.decoder import CachedDecoder
from ..family import Family
from .training import CausalTraining

CAUSAL = Family("causal_lm", "AutoModelForCausalLM", CausalTraining, CachedDecoder)
_STATES = ("eagle", "eagle3", "dflash")
# model_type -> record, of those that engines were read for; every other model of text is CAUSAL.
FAMILIES = dict.fromkeys(
    ("llama", "qwen2", "qwen3"), replace(CAUSAL, engines={"vllm": _STATES, "sglang": ("eagle", "eagle3")})
)
