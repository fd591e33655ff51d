"""Training a language model of any family: its loss, its parts, and which of them learn.

A family's own file says how its pictures become embeddings and how its decoder is run over a batch.
Letters: B rows, T tokens, D width, V vocabulary, S supervised tokens; of pixels I images, P patches, C width, S side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.batch import Batch, StepLoss
from ..core.errors import UserError
from ..core.positions import Resume
from ..core.section import Section
from ..core.states import TargetStates, at_places, places_of
from .hub import is_tied
from .parts import Part, language_model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LoraConfig(Section):
    """peft's LoRA on the linear layers of the language model (its LM head and embedding stay frozen). Adapters are
    trained in place of the model's weights and merged into them when the stage ends, so that what is saved is an
    ordinary model.
    """

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


@torch.no_grad()
def merge_adapters(module: nn.Module) -> float:
    """Add every adapter into the layer that it sits on and take it away. Returns how far rounding moves the merged
    weights, as a share of what the adapters add (roots of sums of squares): outputs of random inputs move as far.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    moved = added = 0.0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer):
                adapted: Any = child
                layer, delta = adapted.get_base_layer(), adapted.get_delta_weight(*adapted.active_adapters).double()
                exact = layer.weight.double() + delta
                adapted.merge(safe_merge=True)
                moved += float((layer.weight.double() - exact).square().sum())
                added += float(delta.square().sum())
                setattr(parent, name, layer)
    return (moved / added) ** 0.5 if added else 0.0


class ModelTraining(nn.Module):
    """The training forward over a language model of any family, which says how it reads a batch. `forward(batch)` is
    what the engine calls, so that ZeRO-3 gathers weights by module call; nothing reads a weight outside its own module.
    The vision tower runs without gradients where it is frozen.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trainable: Sequence[Part],
        *,
        gradient_checkpointing: bool,
        lora: LoraConfig | None = None,
        resume: Resume = "max_plus_one",
    ):
        super().__init__()
        self.add_module("llava", model)  # so checkpoints name it, whatever the family
        self.trains_vision = "vision_tower" in trainable
        for part, module in self.parts_of(self.model).items():
            module.requires_grad_(part in trainable)
        decoder: Any = language_model_of(model)
        if lora is not None:
            model.lm_head.requires_grad_(False)
            add_adapters(decoder, lora)
        if is_tied(model.config):
            model.tie_weights()
        if gradient_checkpointing:
            decoder.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def model(self) -> Any:
        """The model that is trained, of transformers' class."""
        return self._modules["llava"]

    def states(self, batch: Batch) -> TargetStates | None:
        """The target's states that the loss compares with; None: it reads none."""
        return None

    @property
    def target_beside(self) -> PreTrainedModel | None:
        """The target's model, where it is held beside the one that is trained."""
        return None

    @staticmethod
    def parts_of(model: PreTrainedModel) -> dict[Part, nn.Module]:
        """A model's modules by part; the LM head belongs to the language model."""
        raise NotImplementedError

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Trainable parameters by part, for the optimizer's groups."""
        by_part: dict[str, list[tuple[str, nn.Parameter]]] = {}
        done: set[int] = set()
        for part, module in self.parts_of(self.model).items():
            named = [(f"{part}.{n}", p) for n, p in module.named_parameters() if p.requires_grad and id(p) not in done]
            done.update(id(p) for _, p in named)
            if named:
                by_part[part] = named
        return by_part

    def forward(
        self, batch: Batch, states: TargetStates | None = None, target_choice: Tensor | None = None
    ) -> StepLoss:
        """Next-token cross-entropy summed over the supervised tokens, and how many of them were right; plain next-token
        training reads no `states`. "agreement" counts the target's most likely tokens, `target_choice` [S].
        """
        hidden = self.hidden_states(batch)  # [B,T,D]
        places = places_of(batch.predicting, hidden.device)
        labels = at_places(batch.ids, places, 1)  # [S]
        # The head runs on supervised positions only: at 32064 rows it is most of a small draft's cost.
        logits = self.scores(at_places(hidden, places)).float()  # [S,V]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        choice = logits.argmax(-1)
        metrics = {"accuracy": (choice == labels).sum()}
        if target_choice is not None:
            metrics["agreement"] = (choice == target_choice).sum()
        return StepLoss(loss, batch.loss_mask[:, 1:].sum(), metrics)

    def scores(self, hidden: Tensor) -> Tensor:
        """[...,D] -> [...,V] of the LM head."""
        return self.model.lm_head(hidden)

    @property
    def num_unseen(self) -> int:
        """Tokens at a prompt's begin that the model is not shown."""
        return 0

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final states [B,T,D] of the language model, its feature: the LM head is still to come."""
        raise NotImplementedError

    def selected_features(self, pixels: Tensor) -> Tensor:
        """The tower's states [I,P,C] that the projector reads of pixels [I,3,S,S], where a family reads tiles."""
        raise NotImplementedError
