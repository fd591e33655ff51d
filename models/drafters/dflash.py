"""DFlash: a block of tokens drafted in one pass, beside the target's states (Chen et al. 2026, arXiv 2602.06036).

A cycle runs the draft once. Its queries are the last committed token and K masks; keys and values come from the states
of all tokens before it, joined from several layers of the target, and from the block. Mask i answers for the token i
places on. The target's pictures are states like any other. The module stands in dflash_module.py, the loss in
dflash_training.py, the files in dflash_files.py and the settings in dflash_settings.py.
Letters: N committed states of a cycle, C states held, Q places of a block, K masks, J joined states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ...core.json_types import JsonMapping, JsonObject
from ...core.pictures import TEXT
from ...core.states import uploaded
from ..attention import attend_all
from ..decoding.cache import Cache
from ..decoding.warp import Warp
from ..targets.base import Target, TargetShape, TargetStep, Verified
from .base import PLAIN, CountTokens, Drafter, DraftingOptions, TargetIdentity
from .dflash_confidence import kept_levels
from .dflash_files import dflash_manifest, holds_dflash, load_dflash, save_dflash
from .dflash_images import DflashImageProposal, DflashImageTraining
from .dflash_module import DflashHead
from .dflash_settings import DflashSettings
from .dflash_training import DflashTraining
from .dflash_walk import answers_of, likeliest_before
from .draft_vocabulary import drafted_ids
from .head_files import head_state
from .head_objective import HeadObjective
from .made_for import image_head_manifest

CONFIDENCE = "confidence_head."
PIECE = 4096  # states of a prompt that are read at once


class DflashConfig(DflashSettings):
    """A DFlash draft, for a language model or an image generator."""

    head_class: ClassVar[type[DflashHead]] = DflashHead
    starts_outside: ClassVar[bool] = True
    publishes_as_ours: ClassVar[bool] = True

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> DflashHead:
        """An own LM head begins with the target's rows of the ids that the training data has most often, a trained
        mask's vector with the mean of the embedding.
        """
        head = self.head_class(self.shape(target.shape), drafted_ids(self.draft_vocab_size, target, count_tokens))
        head.begin_as(target)
        if head.mask_embedding is not None:
            head.mask_embedding.data = target.embedding.float().mean(0).cpu()
        return head

    def read(self, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None) -> DflashHead:
        return load_dflash(self, self.head_class, folder, target, dtype, identity)

    def grown(self, folder: Path, target: Target, identity: TargetIdentity | None) -> DflashHead:
        """A draft in float32 with the weights of a DFlash draft in `folder`, ours or published, and whatever is this
        kind's own untrained: its first loss is DFlash's.

        Raises:
            UserError: as `load`.
        """
        shared = {name: value for name, value in self.model_dump().items() if name in DflashConfig.model_fields}
        state = head_state(folder, torch.device("cpu"))
        own: JsonObject = {"kind": "dflash", "loss": {}, "cut_below": None}
        own["confidence"] = {} if any(name.startswith(CONFIDENCE) for name in state) else None
        start = DflashConfig.model_validate(shared | own).read(folder, target, torch.float32, identity)
        ids = start.draft_ids
        head = self.head_class(self.shape(target.shape), None if ids is None else ids.cpu())
        kept = {name: value for name, value in start.state_dict().items() if not name.startswith(CONFIDENCE)}
        left = head.load_state_dict(kept, strict=False).unexpected_keys  # what is missing is this kind's own
        assert not left, f"{left} of a DFlash draft have no place"
        return head.to(target.embedding.device)

    def begin_from(self, folder: Path, target: Target, identity: TargetIdentity) -> nn.Module:
        """Also from a DFlash draft, where this is a kind that grew out of it."""
        if self.kind != "dflash" and holds_dflash(folder):
            return self.grown(folder, target, identity)
        return super().begin_from(folder, target, identity)

    def copy_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        head = cast(DflashHead, module)
        copy = self.head_class(head.shape, head.ids_on_host)
        copy.load_state_dict(state)
        return copy

    def save(self, module: nn.Module, folder: Path, manifest: JsonMapping) -> None:
        save_dflash(self.kind, cast(DflashHead, module), folder, manifest)

    def manifest(self, target: Target, identity: TargetIdentity, **training: object) -> JsonObject:
        if target.shape.draws_images:
            return image_head_manifest(self.model_dump(mode="json"), identity, **training)
        return dflash_manifest(self, target.shape, identity, drafter=self.model_dump(mode="json"), **training)

    def training_objective(self, module: nn.Module, target: Target, settings: HeadObjective | None = None) -> nn.Module:
        """Use the section's own loss; `settings` is not read."""
        training = DflashImageTraining if target.shape.draws_images else DflashTraining
        return training(cast(DflashHead, module), target, self)

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        proposal = DflashImageProposal if target.shape.draws_images else DflashProposal
        return proposal(cast(DflashHead, module), target, self)

    def empty(self, shape: TargetShape) -> nn.Module:
        with torch.device("meta"):
            ids = None if self.draft_vocab_size is None else torch.arange(self.draft_vocab_size)
            return self.head_class(self.shape(shape), ids)

    def exports(self, engine: str) -> list[str]:
        return []


class DflashProposal:
    """Drafts one block a cycle. Of the target its embedding and LM head are used."""

    def __init__(self, head: DflashHead, target: Target, config: DflashConfig):
        self.head, self.target, self.config = head.eval(), target, config
        self.taps = config.taps_for(target.shape, training=False)
        self.max_levels: int | None = head.shape.num_drafts
        self._within = torch.arange(head.shape.block_size, device=target.embedding.device)

    @property
    def num_held(self) -> int:
        """Number of tokens whose keys and values the draft holds."""
        return self._cache.length

    @torch.inference_mode()
    def start(self, request: object, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Make keys and values of the prompt's states; no attention is needed for that."""
        prompt = prefill.prompt
        assert prompt is not None and prompt.modality is not None, "this target does not tell what it prefilled"
        assert len(prompt.ids) == 1, "drafts of language models read one row"
        self._warp, self._guidance, kept = warp, prompt.guidance, prompt.mask[0]
        if self.config.visual(training=False) == "none":
            kept = kept & (prompt.modality[0] == TEXT)
        index = kept.nonzero()[:, 0]
        flat, count = self.config.positions == "flat", len(index)
        positions = index if flat else torch.arange(count, device=index.device)
        self._next = prompt.ids.shape[1] if flat else count  # position of the next committed token
        self._cache = Cache(self.head.shape.num_layers, count + capacity + self.head.shape.block_size)
        states = torch.cat([prefill.layers[tap] for tap in self.taps.text_layers], dim=-1)
        for start in range(0, count, PIECE):
            some = slice(start, start + PIECE)
            self._pass(states[:, index[some]], positions[some], None)
        self._states = states[:, :0]

    def begin(self, first: int) -> None:
        """The first block stands after the prompt."""
        self._last = torch.tensor([[first]])

    @torch.inference_mode()
    def root(self) -> Tensor:
        """Draft a block from the last committed token; return q [V] of its first mask."""
        count, device = self._states.shape[1], self.target.embedding.device
        places = self._next - count + torch.arange(count + self.head.shape.block_size, device=device)
        first = uploaded(self._last, device)
        hidden = self._pass(self._states, places, first)[:, self.head.shape.first :]
        self._states = self._states[:, :0]
        scores = self.head.draft_scores(hidden[0], self.target.scores, self.target.embedding.dtype)
        self._answers = answers_of(self.head, scores, hidden, self._warp, first[0], self._guidance)
        if self.config.cut_below is not None:
            before = likeliest_before(self.head, scores, hidden, first[0], self._guidance)
            self.max_levels = kept_levels(self.head.confidence(hidden[0], before), self.config.cut_below)
        return self._answers.root()

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Return q [F,V] of nodes, by their depth alone where no place reads the token before it."""
        return self._answers.expand(parents, tokens)

    def accept(self, verified: Verified) -> None:
        """True states of the last committed token and of the accepted path; the bonus token begins the next block."""
        assert verified.step is not None
        self._states = torch.cat([verified.step.layers[tap] for tap in self.taps.text_layers], dim=-1)
        self._last = torch.tensor([[verified.bonus]])
        self._next += self._states.shape[1]

    def _pass(self, states: Tensor, positions: Tensor, first: Tensor | None) -> Tensor:
        """Keep keys and values of states [1,N,J*D]; run the block after `first` [1,1] and return its [1,Q,D].

        Args:
            positions: [N+Q] of both; [N] without a block.
        """
        head, cache, count = self.head, self._cache, states.shape[1]
        blocks = states.new_zeros(1, 0, head.shape.layer.hidden_size, dtype=head.dtype)
        if first is not None:
            blocks = head.blocks(first, self.target.embedding)

        def seen(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.own_layers[number].update(k, v)
            return self._attended(q, keys, values) if first is not None else q

        hidden = head(blocks, head.context(states), positions[None], seen)
        cache.advance(count)  # the block's own keys are written over by the next cycle's states
        return hidden

    def _attended(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window, held = self.head.shape.sliding_window, keys.shape[2]
        if window is None or held <= window:
            return attend_all(q, keys, values)
        # Place i of the block sees the last `window` states before it, itself included, and all of the block.
        first = max(0, held - q.shape[2] - window + 1)
        index = torch.arange(first, held, device=q.device)
        seen = held - q.shape[2] + self._within[:, None] - index < window
        return attend_all(q, keys[:, :, first:], values[:, :, first:], seen)
