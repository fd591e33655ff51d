"""Training forwards of LlamaGen and of its image tokenizer: what the synthetic dataset is drawn with.

The published models are trained elsewhere; these are the same classes at a size that a CPU can train.
Letters: B rows, n codes, C condition tokens, T ids of a caption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ....core import ranks
from ....core.batch import CodeBatch, PictureBatch, StepLoss
from ....core.states import TargetStates, uploaded
from ...folders import find_folder
from ...hub import load_pretrained
from ..drawing import TEXT_ENCODER, PerceptualConfig
from .files import save_model
from .transformer import LlamaGen
from .vq import VqTokenizer, revive_dead_codes

# Weight of the pixels against the codes in a tokenizer's loss: without it small tokenizers settle on a few colours.
RECONSTRUCTION = 5.0


class LlamaGenTraining(nn.Module):
    """Next-code cross-entropy. Text-conditional models may train a text encoder with them.

    Args:
        text_encoder: a `T5EncoderModel`; conditions are then ids of captions. None: labels, or features as they are.
        code_dropout: in training the largest share of a picture's codes that are not read; each picture's is drawn.
    """

    def __init__(self, model: LlamaGen, text_encoder: nn.Module | None, code_dropout: float = 0.0):
        super().__init__()
        self.code_dropout = code_dropout
        self.transformer, self.text_encoder = model, text_encoder

    def save(self, folder: Path) -> None:
        """Write the transformer, and the text encoder beside it."""
        save_model(self.transformer, folder)
        if self.text_encoder is not None:
            self.text_encoder.save_pretrained(folder / TEXT_ENCODER)  # type: ignore[operator]

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Trainable parameters by part, for the optimizer's groups."""
        named = {"transformer": [*self.transformer.named_parameters()]}
        if self.text_encoder is not None:
            named["text_encoder"] = [*self.text_encoder.named_parameters()]
        return named

    def forward(self, batch: CodeBatch, states: TargetStates | None = None) -> StepLoss:
        """Next-code cross-entropy, summed over the n codes of real rows."""
        model = self.transformer
        condition, mask = model.conditioned(self._features(batch.conditions), batch.uncond)
        whole = model.states(condition, batch.codes[:, :-1], mask, kept=self._kept(batch)).feature
        hidden = whole[:, model.config.num_condition_tokens - 1 :]
        scores = model.output(hidden[batch.real]).float()
        codes = batch.codes[batch.real]
        loss = F.cross_entropy(scores.flatten(0, 1), codes.flatten(), reduction="sum")
        metrics = {"accuracy": (scores.argmax(-1) == codes).sum()}
        return StepLoss(loss, torch.tensor(codes.numel(), device=loss.device), metrics)

    def _kept(self, batch: CodeBatch) -> Tensor | None:
        """[B,n-1] bool: codes that are read, by each row's own draws; None: all."""
        if not (self.training and self.code_dropout):
            return None
        drawn = [torch.rand(batch.codes.shape[1], generator=torch.Generator().manual_seed(s)) for s in batch.seeds]
        return uploaded(torch.stack([row[1:] >= self.code_dropout * row[0] for row in drawn]), batch.codes.device)

    def _features(self, conditions: tuple[Tensor, ...]) -> list[Tensor]:
        """[t,F] of each caption, or its label []."""
        if self.text_encoder is None:
            return list(conditions)
        ids = pad_sequence(conditions, batch_first=True)  # type: ignore[arg-type]
        lengths = torch.tensor([len(c) for c in conditions], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        states = self.text_encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return [row[: len(c)] for row, c in zip(states, conditions, strict=True)]


class PerceptualLoss(nn.Module):
    """A distance of EfficientNet-Lite0's states, where LlamaGen has LPIPS over VGG16. Frozen.

    As LPIPS (Zhang et al. 2018, section 3) compares states: those of several depths, each place's channels scaled to
    unit length, so that a depth with large states does not outweigh the others; squared distances are means over
    places. LPIPS has weights for each channel that people's judgements taught it; there are none for Lite0, and all
    channels count alike.
    """

    tower: Any  # an EfficientNetLite0Model

    def __init__(self, tower: nn.Module, weight: float):
        super().__init__()
        self.tower, self.weight = tower.eval().requires_grad_(False), weight

    @classmethod
    def load(cls, config: PerceptualConfig) -> PerceptualLoss:
        """Raises `UserError` where the folder is missing, or of another model."""
        from ...lite0 import EfficientNetLite0Model  # transformers takes long to import

        folder = find_folder(config.path, config.revision)
        return cls(load_pretrained(EfficientNetLite0Model.from_pretrained, folder, dtype=torch.float32), config.weight)

    def forward(self, images: Tensor, others: Tensor) -> Tensor:
        """Of pictures [B,3,S,S] in [-1,1], which need not be clamped: the weighted mean over B, the depths and their
        places. A scalar, 0 for equal pictures, at most 4 x weight. Gradients reach `images` alone.
        """
        with torch.no_grad():
            wanted = self._maps(others)
        distances = [(a - b).square().sum(1).mean() for a, b in zip(self._maps(images), wanted, strict=True)]
        return self.weight * torch.stack(distances).mean()

    def _maps(self, images: Tensor) -> list[Tensor]:
        """[B,C,h,w] of each depth, of unit length over C."""
        return [F.normalize(states, dim=1) for states in self.tower.maps(0.5 * images.float() + 0.5)]


class VqTraining(nn.Module):
    """Squared and absolute error of the reconstruction, the tokenizer's own quantisation loss, and a perceptual one.
    LlamaGen's adversarial term is left out.

    Args:
        perceptual: of reconstructions and pictures; None: drawn figures do without it.
        revive_every: training forwards between two revivals of dead codes; None: never.
        revive_until: forwards after which there is no more of it.
    """

    num_forwards: Tensor

    def __init__(
        self, tokenizer: VqTokenizer, *, perceptual: PerceptualLoss | None = None, revive_every: int | None = None,
        revive_until: int = 0,
    ):  # fmt: skip
        super().__init__()
        self.tokenizer, self.perceptual = tokenizer, perceptual
        self.revive_every, self.revive_until = revive_every, revive_until
        # Saved with the weights, so that a resumed run revives at the same steps.
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def save(self, folder: Path) -> None:
        """Write the image tokenizer."""
        save_model(self.tokenizer, folder)

    def parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Trainable parameters by part, for the optimizer's groups."""
        return {"tokenizer": [*self.tokenizer.named_parameters()]}

    def forward(self, batch: PictureBatch, states: TargetStates | None = None) -> StepLoss:
        """Reconstruction and quantisation loss, summed over real rows."""
        images = to_model(batch.pixels[batch.real])
        if self.training:
            self._revive(images)
        if not len(images):  # a filler's forward still runs every parameter
            reconstruction, quantisation = self.tokenizer(to_model(batch.pixels))
            return StepLoss(0.0 * (reconstruction.sum() + quantisation), batch.real.sum(), {})
        reconstruction, quantisation = self.tokenizer(images)
        squared = F.mse_loss(reconstruction, images)
        loss = RECONSTRUCTION * (squared + 0.5 * F.l1_loss(reconstruction, images)) + quantisation
        count = batch.real.sum()
        metrics = {"squared_error": squared.detach() * count}
        if self.perceptual is not None:
            distance = self.perceptual(reconstruction, images)
            loss, metrics["perceptual"] = loss + distance, distance.detach() * count
        return StepLoss(loss * count, count, metrics)

    def _revive(self, images: Tensor) -> None:
        """Rank 0's pictures decide, and every rank gets its rows: codebooks must stay one."""
        self.num_forwards += 1
        count = int(self.num_forwards)
        if self.revive_every is None or count > self.revive_until or count % self.revive_every:
            return
        cells = len(images) * (images.shape[-1] // self.tokenizer.config.factor) ** 2
        # With fewer cells than codes living ones would count as dead: the next full batch will do.
        if ranks.is_main() and cells >= self.tokenizer.config.codebook_size:
            revive_dead_codes(self.tokenizer, images, torch.Generator().manual_seed(count))
        rows = self.tokenizer.quantize.embedding.weight
        rows.data.copy_(ranks.broadcast(rows.data.cpu() if ranks.is_main() else None))


def to_model(pixels: Tensor) -> Tensor:
    """uint8 [B,3,S,S] to [-1,1]."""
    return pixels.float() / 127.5 - 1.0


def to_pixels(images: Tensor) -> Tensor:
    """[-1,1], not clamped, to uint8."""
    return ((images.float().clamp(-1, 1) + 1.0) * 127.5).round().to(torch.uint8)
