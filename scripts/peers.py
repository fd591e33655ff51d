"""EAGLE-3 heads whose training forward and loss are speculators' own code (0.9.0), on our states and by our trainer.

    drafter: {kind: "draftsmith.scripts.peers:SpeculatorsEagle3", ...}    # keys as of kind: eagle3

tests/models/test_speculators.py says how to install that package, and finds its gradients equal to ours. Its model has
our head's parameters, so that optimizer, checkpoints, decoding and exports are ours (torch's Muon and AdamW are theirs,
too). It runs eagerly on one row of all samples, as on a CPU it must: its trainer, flex attention and fused losses need
a GPU.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ..core.batch import Batch, StepLoss
from ..core.states import TargetStates
from ..models.drafters.base import HeadObjective
from ..models.drafters.draft_vocabulary import lm_head_rows
from ..models.drafters.eagle3 import Eagle3Config, Eagle3Head
from ..models.drafters.head_training import HeadTraining, TokenTerms
from ..models.targets.base import Target


class SpeculatorsEagle3(Eagle3Config):
    """An EAGLE-3 head that speculators trains; passes and decay are `mtp_steps` and `objective.decay`."""

    kind: str  # type: ignore[assignment]

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        return _Theirs(cast(Eagle3Head, module), target, self, settings)


class _Theirs(HeadTraining):
    """`HeadTraining` by their forward. What is held out is measured by ours, so that numbers compare."""

    def __init__(self, head: Eagle3Head, target: Target, config: Eagle3Config, settings: HeadObjective | None):
        super().__init__(head, target, config, settings)
        # No module of this one: its parameters are the head's.
        self.theirs: tuple[Any] = (_model(head, target, config),)

    def forward(self, batch: Batch, states: TargetStates) -> StepLoss:
        if not self.training:
            return super().forward(batch, states)
        from speculators.losses import resolve_loss_config

        assert states.feature is not None
        model, dtype = self.theirs[0], self.head.dtype
        rows: list[list[Tensor]] = []
        for row, count in enumerate(batch.attention_mask.sum(1).tolist()):
            # Their shift_batch: token j + 1 beside the states at j, compared with the state at j + 1.
            joined = torch.cat([states.layers[layer][row, : count - 1] for layer in self.reads.state], -1)
            rows.append([batch.ids[row, 1:count], joined.to(dtype), states.feature[row, 1:count].to(dtype),
                         batch.loss_mask[row, 1:count], torch.full((count - 1,), row),
                         torch.arange(1, count)])  # fmt: skip
        ids, joined, goal, mask, documents, positions = (torch.cat(part)[None] for part in zip(*rows, strict=True))
        _, loss, metrics = model(
            joined, ids, documents, loss_mask=mask, position_ids=positions, verifier_last_hidden_states=goal,
            ttt_steps=self.num_passes, ttt_step_loss_decay=self.objective.decay or 1.0,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )  # fmt: skip
        count = mask.sum()
        known = metrics["full_acc_0_sum"].detach().float()
        last = metrics[f"full_acc_{self.num_passes - 1}_sum"].detach().float()
        return StepLoss(loss * count, count, dict(zip(TokenTerms.metrics, (known, known, known, last), strict=True)))


def _model(head: Eagle3Head, target: Target, config: Eagle3Config) -> Any:
    """Their model with the head's parameters and the target's tables."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    shape, ids = head.shape, head.draft_ids
    assert ids is not None
    layer = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=1,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab_size, rms_norm_eps=shape.norm_eps, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )  # fmt: skip
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=config.mtp_steps + 1)
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=len(ids), norm_output=config.norm_output,
        norm_before_residual=config.norm_before_residual, norm_before_fc=config.norm_before_fc,
        eagle_aux_hidden_state_layer_ids=list(config.layers_of(target.shape)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    ))  # fmt: skip
    for name, parameter in head.named_parameters():
        place, _, last = name.replace("midlayer.", "layers.0.").rpartition(".")
        setattr(model.get_submodule(place), last, parameter)
    model.verifier_norm = nn.Identity()  # our states are normed
    model.embed_tokens.weight = nn.Parameter(target.embedding.detach(), requires_grad=False)
    rows = lm_head_rows(target, ids)
    model.verifier_lm_head.weight = nn.Parameter(rows.to(target.embedding.dtype), requires_grad=False)
    return model
