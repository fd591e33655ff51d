"""How the published models read pictures, where a folder comes without `preprocessor_config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import read_json
from ..core.pretrained import RESTORE

# The fewest and the most pixels of a picture in the published files of Qwen-VL's processors.
WHOLE_PIXELS = {"qwen2_vl": (3136, 12845056), "qwen2_5_vl": (3136, 12845056), "qwen3_vl": (65536, 16777216)}
# Families that another one's processor reads for: transformers gives Qwen3.5 that of Qwen3-VL.
_READ_BY = {"qwen3_5": "qwen3_vl"}
# CLIP's mean and deviation of each channel.
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])


@dataclass(frozen=True)
class Published:
    """Settings that stand for a missing file."""

    images: Mapping[str, Any]  # of the image processor
    about: Mapping[str, Any]  # of the processor: class, patch size, resolutions


def processor_family(model_type: str) -> str:
    """The family whose processor reads pictures for a model of this type."""
    family = model_type.removesuffix("_moe")
    return _READ_BY.get(family, family)


def published_settings(source: str | Path, revision: str | None, classes: Mapping[str, str]) -> Published | None:
    """What the published files say of a model that comes without `preprocessor_config.json`, by its `config.json`;
    None where that names no tower.

    Args:
        classes: model type -> the name of its processor's class.

    Raises:
        UserError: the model's pictures are read by settings that its config does not tell; with the file to write.
    """
    from transformers.utils import cached_file

    path = cached_file(source, "config.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    config = read_json(Path(path), dict[str, Any], hint=RESTORE) if path else {}
    vision, family = config.get("vision_config"), processor_family(str(config.get("model_type")))
    if not vision:
        return None
    tower, side = vision.get("model_type"), vision.get("image_size")
    clip = {"image_mean": _CLIP[0], "image_std": _CLIP[1], "resample": 3}
    half = {key: [0.5, 0.5, 0.5] for key in ("image_mean", "image_std")}
    if family in WHOLE_PIXELS:
        least, most = WHOLE_PIXELS[family]
        size = {"shortest_edge": least, "longest_edge": most}
        patches = {"patch_size": vision.get("patch_size"), "merge_size": vision.get("spatial_merge_size", 2)}
        images = {**(half if family == "qwen3_vl" else clip), "resample": 3, "size": size, **patches}
    elif family in classes and tower == "clip_vision_model" and side:
        images = clip | {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    elif family in classes and tower == "siglip_vision_model" and side:
        images = half | {"resample": 3, "size": {"height": side, "width": side}}
    else:
        square = {"height": side or "SIDE", "width": side or "SIDE"}
        wanted = half | {"resample": 3, "size": square, "image_processor_type": "SiglipImageProcessor"}
        raise UserError(
            f"{source} has no preprocessor_config.json, and none is published for a {family} with tower {tower}",
            where=str(source),
            hint=f"write {Path(source) / 'preprocessor_config.json'} with the model's own numbers, in this form: "
            + json.dumps(wanted),
        )
    about = {"processor_class": classes[family], "image_grid_pinpoints": config.get("image_grid_pinpoints")}
    return Published(images, about | {"patch_size": vision.get("patch_size")})
