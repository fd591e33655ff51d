"""Low-rank adapters on a language model. The only door to peft.

Adapters are trained in place of the language model's weights and merged into them when the stage
ends, so that what is saved is an ordinary model.
"""

from __future__ import annotations

from typing import cast

from pydantic import Field
from torch import nn

from ..core.errors import UserError
from ..core.section import Section


class LoraConfig(Section):
    """peft's LoRA on the linear layers of the language model (its LM head and embedding stay frozen)."""

    # Rank of the adapters.
    rank: int = Field(16, ge=1)
    # Scale of the adapters: alpha / rank.
    alpha: float = Field(32.0, gt=0)
    # Dropout in front of the adapters, in training.
    dropout: float = Field(0.0, ge=0, lt=1)
    # Names of linear layers inside the decoder.
    layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_adapters(language_model: nn.Module, config: LoraConfig) -> None:
    """Put adapters on `language_model` in place; only they are trainable afterwards."""
    import peft

    # peft's annotation asks for a whole alpha; it computes with any.
    alpha = cast(int, config.alpha)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, target_modules=list(config.layers)
    )
    language_model.requires_grad_(False)
    try:
        peft.inject_adapter_in_model(settings, language_model)
    except ValueError as error:
        linear = sorted({n.split(".")[-1] for n, m in language_model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(
            f"lora.layers: {list(config.layers)} name no layer of the language model",
            hint="its linear layers are " + ", ".join(linear),
        ) from error


def merge_adapters(module: nn.Module) -> None:
    """Add every adapter into the layer that it sits on and take it away. Nothing happens where there is none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                child.merge(safe_merge=True)
                setattr(parent, name, child.get_base_layer())
