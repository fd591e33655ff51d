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
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...core.pictures import TEXT
from ...core.states import uploaded
from ..attention import attend_all
from ..decoding.cache import Cache
from ..decoding.expansions import Expansions
from ..decoding.warp import Warp
from ..targets.base import Target, TargetShape, TargetStep
from ..targets.language import LanguageTarget
from .base import PLAIN, CountTokens, Drafter, DraftingOptions, TargetIdentity
from .dflash_confidence import kept_levels
from .dflash_files import dflash_manifest, load_dflash, save_dflash
from .dflash_images import DflashImageProposal, DflashImageTraining
from .dflash_module import DflashHead
from .dflash_settings import DflashSettings
from .dflash_training import DflashTraining
from .eagle3 import likeliest_ids
from .made_for import image_head_manifest

PIECE = 4096  # states of a prompt that are read at once


class DflashConfig(DflashSettings):
    """A DFlash draft, for a language model or an image generator."""

    starts_outside: ClassVar[bool] = True
    publishes_as_ours: ClassVar[bool] = True

    def build(self, target: Target, *, count_tokens: CountTokens | None = None) -> DflashHead:
        """An own LM head begins with the target's rows of the ids that the training data has most often, a trained
        mask's vector with the mean of the embedding.
        """
        ids = None
        if self.draft_vocab_size is not None:
            assert count_tokens is not None, "a reduced vocabulary needs to know how often each id comes"
            never = target.scores(target.embedding.new_zeros(1, target.shape.hidden_size))[0].isneginf().cpu()
            ids = likeliest_ids(count_tokens(), self.draft_vocab_size, never)
        head = DflashHead(self.shape(target.shape), ids)
        if head.lm_head is not None and ids is not None:
            head.lm_head.weight.data = lm_head_rows(target, ids)
        if head.mask_embedding is not None:
            head.mask_embedding.data = target.embedding.float().mean(0).cpu()
        return head

    def read(self, folder: Path, target: Target, dtype: torch.dtype, identity: TargetIdentity | None) -> DflashHead:
        return load_dflash(self, folder, target, dtype, identity)

    def copy_of(self, module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
        copy = cast(DflashHead, module).fresh()
        copy.load_state_dict(state)
        return copy

    def save(self, module: nn.Module, folder: Path, manifest: Mapping[str, Any]) -> None:
        save_dflash(cast(DflashHead, module), folder, manifest)

    def manifest(self, target: Target, identity: TargetIdentity, **training: Any) -> dict[str, Any]:
        if target.shape.draws_images:
            return image_head_manifest(self.model_dump(mode="json"), identity, **training)
        return dflash_manifest(self, target.shape, identity, drafter=self.model_dump(mode="json"), **training)

    def training_objective(self, module: nn.Module, target: Target, settings: Any = None) -> nn.Module:
        """Use the section's own loss; `settings` is not read."""
        training = DflashImageTraining if target.shape.draws_images else DflashTraining
        return training(cast(DflashHead, module), target, self)

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        proposal = DflashImageProposal if target.shape.draws_images else DflashProposal
        return proposal(cast(DflashHead, module), target, self)

    def empty(self, shape: TargetShape) -> nn.Module:
        with torch.device("meta"):
            ids = None if self.draft_vocab_size is None else torch.arange(self.draft_vocab_size)
            return DflashHead(self.shape(shape), ids)

    def cached_numbers(self, shape: TargetShape) -> tuple[int, int]:
        made = self.shape(shape)
        return 2 * made.num_layers * made.layer.num_kv_heads * made.layer.head_dim, made.block_size

    def exports(self, engine: str) -> list[str]:
        return []


def lm_head_rows(target: Target, ids: Tensor) -> Tensor:
    """Rows [V',D] float32 on the CPU of the target's LM head at `ids` [V'], read from the scores of unit vectors."""
    width, step = target.shape.hidden_size, 256
    units = torch.eye(width, dtype=target.embedding.dtype, device=target.embedding.device)
    # Scores may be capped, which is not linear.
    project = target.decoder.projected if isinstance(target, LanguageTarget) else target.scores
    columns = [project(units[start : start + step])[:, ids.to(units.device)] for start in range(0, width, step)]
    return torch.cat(columns).T.float().cpu().contiguous()


class DflashProposal:
    """Drafts one block a cycle; `expand` answers by level. Of the target its embedding and LM head are used."""

    def __init__(self, head: DflashHead, target: Target, config: DflashConfig):
        self.head, self.target, self.config = head.eval(), target, config
        self.taps = config.taps_for(target.shape, training=False)
        self.max_levels: int | None = head.shape.num_masks
        self._within = torch.arange(head.shape.block_size, device=target.embedding.device)

    @property
    def num_held(self) -> int:
        """Number of tokens whose keys and values the draft holds."""
        return self._cache.length

    @torch.inference_mode()
    def start(self, request: Any, prefill: TargetStep, warp: Warp, *, capacity: int) -> None:
        """Make keys and values of the prompt's states; no attention is needed for that."""
        prompt = prefill.prompt
        assert prompt is not None and prompt.modality is not None, "this target does not tell what it prefilled"
        assert len(prompt.ids) == 1, "drafts of language models read one row"
        self._warp, kept = warp, prompt.mask[0]
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
        hidden = self._pass(self._states, places, uploaded(self._last, device))
        self._states = self._states[:, :0]
        scores = self.head.draft_scores(hidden[0, 1:], self.target.scores, self.target.embedding.dtype)
        self._levels, self._expansions = self._warp.apply_temperature(scores), Expansions()  # [K,V]
        if self.config.cut_below is not None:
            assert self.head.confidence_head is not None
            self.max_levels = kept_levels(self.head.confidence_head(hidden[0, 1:]), self.config.cut_below)
        return self._levels[0]

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """Return q [F,V] by the depth of each node; `tokens` are not read."""
        return self._levels[self._expansions.take(parents)]

    def accept(self, verified: Any) -> None:
        """True states of the last committed token and of the accepted path; the bonus token begins the next block."""
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
