"""Stage kind `contrast`: a target's projector learns what pictures show from words alone, without the language model.

A projector that starts at random says nothing to the language model, and each step that finds out costs a pass through
that model. Here every place of a picture is pulled to the mean input embedding of one text of its record (`words`), and
away from those of the other pictures of the batch (InfoNCE: van den Oord et al., 2018, equation 4; both ways as in
CLIP). The tower runs once over the pictures.
Letters: N pictures, P places of a picture, C width of the tower, D width of the language model, B pictures of a batch.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ...core import ranks
from ...core.errors import Refused, UserError
from ...core.json_types import list_at
from ...data.conversations import PromptFormat
from ...data.dataset import ConversationData, ConversationDataset
from ...data.families.processor import Processor
from ...data.served_prompt import other_aspect
from ...models.drafters.base import DrafterConfig
from ...models.targets.table import AnyTarget, language_section, training_of
from ..run.context import Context
from ..run.stage import Planned, Stage
from ..run.stage_records import open_records
from ..train.engine import init_distributed
from ..train.on_records import save_model, start_weights

_PICTURES = 16  # that the tower reads at once
_TEMPERATURE = 0.07  # what similarities are divided by
_SPREAD = 1.3  # how far projected places lie from the texts' mean embedding, in mean distances of the texts from it
_WEIGHT_DECAY = 0.05


class ContrastStage(Stage):
    reads_drafter: ClassVar[bool] = False  # it trains the target
    usual_purpose: ClassVar[str] = "the projector learns words for pictures"
    model: ClassVar[str] = "target"
    positions: ClassVar[int | None] = None  # of the language model: as it has them

    kind: Literal["contrast"]
    # Records of one picture each, with `words`: a text for each of the picture's places (a name, its noun, ...).
    data: ConversationData
    format: PromptFormat = PromptFormat()
    steps: int = Field(240, ge=1)
    batch_size: int = Field(128, ge=1)
    # AdamW's, after 20 steps of warm-up; falls linearly to 0.
    lr: float = Field(1.0e-3, gt=0)
    # Of the tower's features: few pictures are learned by heart.
    dropout: float = Field(0.4, ge=0, lt=1)

    def makes(self) -> set[str]:
        return {"target"}

    def uses(self) -> set[str]:
        return {"target"}

    def needs(self) -> dict[str, str | None]:
        return {"processor": None} | ({} if self.data.from_stage is None else {"data": self.data.from_stage})

    @classmethod
    def unsuited(cls, target: AnyTarget, drafter: DrafterConfig | None) -> str | None:
        if not target.draws_images and (family := language_section(target).families.get(target.base_kind)):
            return None if family.one_tile else f"contrast reads pictures in one tile, and a {target.kind} reads more"
        return f"contrast trains a projector, which a {target.kind} lacks"

    def check(self, target: AnyTarget, drafter: DrafterConfig | None) -> None:
        """Refuses tiled pictures, whose number of places is not fixed."""
        if self.data.aspect.startswith("anyres"):
            raise Refused("data.aspect", f"{self.data.aspect} cuts pictures into tiles", "use square or pad")

    def describe(self, plan: Planned) -> list[str]:
        return [f"  {self.steps:,} steps of {self.batch_size:,} pictures, the tower over each picture once"]

    def run(self, context: Context) -> None:
        """Rank 0 trains; the others wait."""
        init_distributed()
        with context.stop.together():
            if ranks.is_main():
                self._train(context)

    def _train(self, context: Context) -> None:
        from transformers import set_seed

        set_seed(context.seed)  # first weights, and what dropout takes away
        processor = context.processor()
        dataset = open_records(self.data, self.format, context, processor, learned=False)
        model: Any = start_weights(self.model, context, processor, context.seed)
        embeddings = model.to(context.device()).get_input_embeddings().weight.detach()
        wanted = torch.stack([self._words(dataset, i, processor, embeddings) for i in range(len(dataset))])  # [N,P,D]
        if len(wanted.flatten(1).unique(dim=0)) < 2:
            raise UserError("all records have the same words: there is nothing to tell apart",
                            key=f"stages.{context.name}.data", hint="give records of several things")  # fmt: skip
        module = training_of(model, ["projector"], gradient_checkpointing=False)
        features = self._features(dataset, module, context)
        loss = self._fit(module.parts_of(model)["projector"], features, wanted, context)
        context.say(f"{len(features):,} pictures of {features.shape[1]} places: contrast {loss:.3f} nats a place")
        aspect = other_aspect(self.data, processor, dataset.column("images"))
        save_model(self.model, self.format, context, model, processor, self.steps, context.seed, aspect)

    def _words(self, dataset: ConversationDataset, index: int, processor: Processor, table: Tensor) -> Tensor:
        """Mean input embeddings [P,D] of a record's texts."""
        words, places = list_at(dataset.record(index).get("words")), processor.num_image_tokens
        if words is None or len(words) != places:
            raise UserError(f"`words` should be {places} texts, one for each place of the picture",
                            where=dataset.sample_id(index), hint="write them into each record")  # fmt: skip
        encoded = [processor.tokenizer(f" {text}", add_special_tokens=False).input_ids for text in words]
        return torch.stack([table[torch.tensor(ids, device=table.device)].mean(0) for ids in encoded])

    def _pixels(self, dataset: ConversationDataset, index: int) -> Tensor:
        """[1,3,S,S] of a record's only picture."""
        request = dataset.request(index)[0]
        if request.pixels is None or len(request.pixels) != 1:
            raise UserError(f"{len(request.pictures)} pictures, and a contrast is of one",
                            where=dataset.sample_id(index), hint="leave the record out")  # fmt: skip
        return request.pixels

    @torch.no_grad()
    def _features(self, dataset: ConversationDataset, module: Any, context: Context) -> Tensor:
        """What the tower says of each picture: [N,P,C]. A tower that norms its channels gets their statistics."""
        rows = []
        module.eval()
        context.progress.count("picture", len(dataset), 0)
        for start in range(0, len(dataset), _PICTURES):
            context.stop.check("while the tower reads pictures")
            pixels = [self._pixels(dataset, i) for i in range(start, min(start + _PICTURES, len(dataset)))]
            rows.append(module.selected_features(torch.cat(pixels).to(context.device())))
            context.progress.advance(len(pixels))
        features = torch.cat(rows)
        fit_norms: Any = getattr(module.parts_of(module.model)["vision_tower"], "fit_norms", None)
        return features if fit_norms is None else fit_norms(features)

    def _fit(self, projector: nn.Module, features: Tensor, wanted: Tensor, context: Context) -> float:
        """Train the projector; return the last contrast."""
        center = wanted.mean(0)  # [P,D]: what all texts share tells no picture from another
        spread = (wanted - center).norm(dim=-1).mean() * _SPREAD
        directions = F.normalize(wanted - center, dim=-1)
        optimizer = torch.optim.AdamW(projector.parameters(), lr=self.lr, weight_decay=_WEIGHT_DECAY)
        # [N]: two pictures of one thing are no contrast.
        named = wanted.flatten(1).unique(dim=0, return_inverse=True)[1]
        generator = torch.Generator().manual_seed(context.seed)
        contrast = torch.zeros(())
        context.progress.count("step", self.steps, 0)
        for step in range(self.steps):
            context.stop.check("while the projector is trained")
            for group in optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (step + 1) / 20) * (1 - step / self.steps)
            rows = torch.randperm(len(features), generator=generator)[: self.batch_size]
            places = projector(F.dropout(features[rows], self.dropout))  # [B,P,D]
            near = F.normalize(places - center, dim=-1)
            scores = torch.einsum("bpd,cpd->pbc", near, directions[rows]) / _TEMPERATURE
            alike = (named[rows][:, None] == named[rows]).fill_diagonal_(False)
            scores = scores.masked_fill(alike, -torch.inf)
            own = torch.arange(len(rows), device=scores.device).expand(len(scores), -1)
            contrast = (F.cross_entropy(scores.transpose(1, 2), own) + F.cross_entropy(scores, own)) / 2
            cosine = (near * directions[rows]).sum(-1)
            # Cosines leave lengths free, and a language model reads places as it reads tokens.
            lengths = (places - center).norm(dim=-1) / spread
            optimizer.zero_grad()
            (contrast + (1 - cosine + (lengths - 1).square()).mean()).backward()
            optimizer.step()
            context.progress.advance(1)
        return contrast.item()
