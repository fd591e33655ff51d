"""Image quality: one entry that measures pictures by every metric of a recipe, each with its n and what it is.

The variants are those of LANTERN's published evaluation (FID, CLIP score, precision and recall, HPS v2.1; section 5.1).
ADT-Tree (Tables I to IV) adds inception score and aesthetic score without saying which, and gets the usual ones here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from ...core.errors import UserError
from ...core.fields import Place
from ...core.section import Section
from . import statistics
from .clip import aesthetic_scores, clip_pair, hps_pair
from .convolutional import class_logits, fid_features, lite0_features, load_inception, vgg_features
from .extractors import Extractor, Folder, Picture, captioned_pictures, embed, extract
from .metric_weights import NEEDS, Metric, WeightName, find

PREFIX = "A photo depicts "  # of the CLIP score (Hessel et al. 2021, section 3); HPS v2 reads the caption alone
Extractors = Mapping[Metric, Extractor]
_FILES: Mapping[Metric, str] = {"fid_lite0": "reference", "name_recall": "names"}  # metric -> key of its pictures


class QualityConfig(Section):
    """How generated images are judged."""

    # fid and precision_recall compare with real images; clip and hpsv2 with the captions. FID wants thousands.
    # fid_lite0 and name_recall are for small generators: by EfficientNet-Lite0, and the name of the nearest picture.
    metrics: Annotated[tuple[Metric, ...], AfterValidator(lambda names: tuple(dict.fromkeys(names)))] = Field(
        min_length=1
    )
    # Folder of real images for fid and precision_recall; LANTERN took the pictures of the captions, MS-COCO's.
    # For fid_lite0 a file as `names`.
    reference: Place | None = None
    # For name_recall: captions of real pictures in MS-COCO's layout ("a red apple, flat"), the pictures beside it.
    names: Place | None = Field(None, exclude_if=lambda value: value is None)
    # Where each metric's weights lie, by the name that its error message gives; nothing is downloaded.
    weights: dict[WeightName, Place] = Field(default_factory=dict)
    # Images per pass. Moves no result beyond rounding; HPS v2.1 takes 4 GB before the first image.
    batch_size: int = Field(32, ge=1)


@dataclass(frozen=True)
class Measured:
    """One number with what it is worth."""

    value: float
    n: int  # generated images
    what: str  # the metric, whose features, and against what
    # Standard error of a mean over images; of the inception score the deviation between parts; None: not known.
    spread: float | None = None
    caution: str | None = None  # why the number must not be read as it stands


def check(
    config: QualityConfig, extractors: Extractors | None = None, reference: Sequence[Picture] | None = None
) -> None:
    """Raises `UserError` for weights or real images that are not there; metrics of `extractors` need no weights.

    Args:
        reference: real images in place of the recipe's folder.
    """
    for metric in config.metrics:
        for name in () if metric in (extractors or {}) else NEEDS[metric]:
            find(metric, name, config.weights)
        if metric in ("fid", "precision_recall"):
            real = Folder(config.reference) if reference is None and config.reference is not None else reference
            if real is None or not len(real):
                problem = f"the metric {metric!r} compares with real images, and there are none"
                raise UserError(problem, where="reference", hint="name a folder of real images")
        if key := _FILES.get(metric):
            place = dict(config)[key]
            if place is None or not Path(place).is_file():
                problem = f"the metric {metric!r} reads captioned pictures, and there is no file {place}"
                raise UserError(problem, where=key, hint="name a file in MS-COCO's layout")


def measure(
    config: QualityConfig,
    images: Sequence[Picture],
    *,
    captions: Sequence[str] | None = None,
    reference: Sequence[Picture] | None = None,
    extractors: Extractors | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Measured]:
    """Results by metric (`precision_recall` gives `precision` and `recall`), one network in memory at a time. Raises
    `UserError` where a metric lacks weights, captions, real images, or enough images.

    Args:
        images: generated, uint8 [H,W,3]; a list, or a `Folder` that reads them when asked for.
        captions: what each image was asked for, in the images' order.
        reference: real images in place of the recipe's folder.
        extractors: networks in place of the published ones, by metric.
    """
    extractors = extractors or {}
    if not len(images):
        raise UserError("there are no generated images to measure", hint="generate some first")
    check(config, extractors, reference)
    of_folder = {"fid", "precision_recall"} & {*config.metrics}
    if reference is None and config.reference is not None and of_folder:
        reference = Folder(config.reference)
    for metric in config.metrics:
        if metric in ("clip", "hpsv2", "name_recall") and (captions is None or len(captions) != len(images)):
            count = "none" if captions is None else len(captions)
            problem = f"the metric {metric!r} needs a caption for each of {len(images)} images, found {count}"
            hint = f"measure images that were asked for in words, or leave {metric!r} out of metrics"
            raise UserError(problem, hint=hint)
    task = _Task(config, images, captions or (), () if reference is None else reference, device)
    results: dict[str, Measured] = {}
    for metric in config.metrics:
        # Not kept in a name: the next network is loaded after this one is gone.
        results |= task.run(metric, extractors.get(metric) or load(metric, config.weights, device))
    return results


def load(metric: Metric, weights: Mapping[WeightName, str], device: torch.device | str = "cpu") -> Extractor:
    """The published network of a metric. Raises `UserError` where its weights are missing or are something else."""
    paths = [find(metric, name, weights) for name in NEEDS[metric]]
    match metric:
        case "fid":
            return fid_features(load_inception(paths[0], device))
        case "inception_score":
            return class_logits(load_inception(paths[0], device))
        case "precision_recall":
            return vgg_features(paths[0], device)
        case "clip":
            return clip_pair(paths[0], device)
        case "hpsv2":
            return hps_pair(paths[0], paths[1], device)
        case "aesthetic":
            return aesthetic_scores(paths[0], paths[1], device)
        case "fid_lite0" | "name_recall":
            return lite0_features(paths[0], device, pooled=metric == "fid_lite0")


@dataclass(frozen=True)
class _Task:
    """What is measured, and the ways of measuring it."""

    config: QualityConfig
    images: Sequence[Picture]
    captions: Sequence[str]
    reference: Sequence[Picture]
    device: torch.device | str

    def run(self, metric: Metric, network: Extractor) -> dict[str, Measured]:
        n, generated = len(self.images), self._features(network, self.images)
        name = network.name
        match metric:
            case "fid" | "fid_lite0":
                file = None if metric == "fid" else self.config.reference
                pictures = self.reference if file is None else captioned_pictures(file, len(self.images[0]))[0]
                real = self._features(network, pictures)
                value, few, dimensions = statistics.frechet_distance(real, generated), min(n, len(real)), real.shape[1]
                what = f"FID ({name} features) against {len(real)} real images"
                biased = f"biased upwards: {few} images for {dimensions} features; compare with the same n only"
                return {metric: Measured(value, n, what, caution=None if few > dimensions else biased)}
            case "name_recall":
                assert self.config.names is not None, "check() asks for it"
                pictures, captions = captioned_pictures(self.config.names, len(self.images[0]))
                found, ceiling = statistics.named(self._features(network, pictures), captions, generated, self.captions)
                value, error = statistics.mean_and_error(found.double())
                names = len({caption.partition(", ")[0] for caption in captions})
                what = f"share whose nearest real picture, of {names} names, has its own ({name}; real: {ceiling:.0%})"
                return {metric: Measured(value, n, what, error)}
            case "precision_recall":
                real = self._features(network, self.reference)
                what = f"({name} features, k=3) against {len(real)} real images"
                precision, recall = statistics.precision_recall(real, generated)
                return {
                    "precision": Measured(precision, n, f"precision {what}"),
                    "recall": Measured(recall, n, f"recall {what}"),
                }
            case "inception_score":
                value, spread = statistics.inception_score(generated)
                return {metric: Measured(value, n, f"inception score ({name}, mean of 10 parts)", spread)}
            case "clip":
                what = f"CLIP score ({name}, mean cosine with '{PREFIX}...')"
                return {metric: self._agreement(network, generated, PREFIX, what)}
            case "hpsv2":
                what = f"HPS v2 ({name}, mean cosine; some papers print it times 100)"
                return {metric: self._agreement(network, generated, "", what)}
            case "aesthetic":
                value, error = statistics.mean_and_error(generated.flatten().double())
                return {metric: Measured(value, n, f"aesthetic score ({name})", error)}

    def _features(self, network: Extractor, pictures: Sequence[Picture]) -> Tensor:
        return extract(network, pictures, batch_size=self.config.batch_size, device=self.device)

    def _agreement(self, network: Extractor, generated: Tensor, prefix: str, what: str) -> Measured:
        texts = embed(network, [prefix + caption for caption in self.captions], batch_size=self.config.batch_size)
        value, error = statistics.mean_and_error(statistics.cosines(generated, texts))
        return Measured(value, len(generated), what, error)
