"""Anole in a recipe: published weights, the tokenizer of its texts, and the VQ-GAN of its pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from ....core.errors import UserError
from ....core.fields import DeviceMap, Dtype, Place, Revision
from ....core.json_types import JsonMapping, JsonObject
from ....core.placement import check_spread, onto, spread
from ....core.pretrained import reading_pretrained
from ....core.section import torch_dtype
from ...decoding.rows import Guidance, GuidanceScale
from ...hub import load_pretrained, read_config
from ...stored import resolved_dtype
from ..base import TargetShape
from ..drawing import Conditions, Drawer, Folders, ImageTargetSection
from ..llamagen.training import to_model, to_pixels
from .target import DEFAULT_GUIDANCE, AnoleTarget, anole_shape
from .vqgan import encode_images, load_encoder, load_vqgan

if TYPE_CHECKING:
    from transformers import ChameleonConfig

PINNED = "chameleon-anole-7b"  # the config that dry runs build
PUBLISHED = "leloy/Anole-7b-v0.1-hf"


class AnoleTargetConfig(ImageTargetSection):
    """Anole 7B, published: a stage trains heads for it and never the model itself."""

    adt_preset: ClassVar[str] = "adt"
    adt_bound: ClassVar[tuple[int, float]] = (100, 0.5)  # as the page of ADT-Tree's authors prints
    adt_widths: ClassVar[JsonObject] = {"width_step": 3, "width_range": (3, 14)}

    kind: Literal["anole"]
    # Hub id or directory in transformers' layout (leloy/Anole-7b-v0.1-hf). GAIR/Anole-7b-v0.1 is in Meta's.
    path: Place = PUBLISHED
    revision: Revision | None = None
    # auto: on a GPU as the weights are stored (published: bfloat16), on a CPU float32, which takes 28 GB.
    dtype: Dtype = "auto"
    # accelerate's device map for GPUs that do not hold 14 GB, in runs of one rank; null: this rank's device.
    device_map: DeviceMap | None = None
    # Guidance. Two samplers are published: LANTERN's has scale 3, top-k 2000, T 1; GAIR's, without pictures in the
    # prompt, scale 3, T 0.7, top-p 0.9. Numbers of one are not comparable with the other's.
    cfg_scale: GuidanceScale = 3.0
    # The image tokenizer, which turns codes into pictures: Hub id or directory in the layout of
    # leloy/Anole-7b-v0.1-vqvae-hf, or the file of Meta's vqgan.ckpt; null draws none.
    vq_path: Place | None = "leloy/Anole-7b-v0.1-vqvae-hf"
    # A commit, tag or branch of `vq_path`.
    vq_revision: Revision | None = None

    @classmethod
    def mirrored_in(cls, folder: Path, values: JsonMapping) -> TargetShape | None:
        if values.get("model_type") != "chameleon":
            return None
        return anole_shape(_chameleon(read_config(str(folder), key="--target"), folder))

    def provides(self) -> set[str]:
        """Things that need no stage: they come from outside. The text's tokenizer lies beside the weights."""
        return {"target", "text"} | ({"vq"} if self.vq_path is not None else set())

    @property
    def image_size(self) -> int:
        """Pixels along a side of the pictures."""
        return 512

    @property
    def codebook_size(self) -> int:
        shape: Any = self.model_config_of().vq_config
        return int(shape.num_embeddings)

    @property
    def condition(self) -> str:
        """The kind of condition."""
        return "text"

    @property
    def prompt_places(self) -> int:
        """Places of a long caption."""
        return 128

    @property
    def guidance(self) -> Guidance:
        return Guidance(self.cfg_scale)

    def model_config_of(self) -> ChameleonConfig:
        """Chameleon's config; of the published weights the pinned one, which names no image codes."""
        source = PINNED if self.path == PUBLISHED else self.path
        return _chameleon(read_config(source, key="target.path", revision=self.revision, network=False), self.path)

    def mirrored(self) -> TargetShape:
        return anole_shape(self.model_config_of())

    def count(self) -> dict[str, int]:
        import transformers

        with torch.device("meta"):
            model = transformers.ChameleonForConditionalGeneration(self.model_config_of())
        return {"transformer": sum(p.numel() for p in model.parameters())}

    def load(self, folders: Folders, *, device: torch.device) -> AnoleTarget:
        dtype = torch_dtype(resolved_dtype(self, self.path, device, key="target"))
        return load_anole(
            self.path, revision=self.revision, dtype=dtype, device_map=self.device_map, device=device,
            guidance=self.guidance,
        )  # fmt: skip

    def conditions(self, folders: Folders, *, device: torch.device) -> Conditions:
        """Text ids [t] of a caption in Anole's own tokenizer, without special ones."""
        return _text_ids(self)

    def sample_condition(self, words: Any = None) -> Callable[[Any], Tensor]:
        text = _text_ids(self)
        return lambda sample: text(sample.info["caption"], None)

    def drawer(self, folders: Folders, *, device: torch.device) -> Drawer:
        vqgan = load_vqgan(self._vq_path("drawn"), revision=self.vq_revision).to(device)
        return Drawer(lambda codes: to_pixels(vqgan.decode(codes.to(device))).cpu(), vqgan.codebook.detach(), 4)

    def picture_encoder(self, folders: Folders, *, device: torch.device) -> Callable[[Tensor], Tensor]:
        encoder: Any = load_encoder(self._vq_path("encoded"), revision=self.vq_revision)
        encoder.to(device)
        return lambda pixels: encode_images(encoder, to_model(pixels.to(device))).cpu()

    def _vq_path(self, done: str) -> str:
        if self.vq_path is None:
            raise UserError(f"pictures are {done} and target.vq_path is null", hint="name the weights of the VQ-GAN")
        return self.vq_path

    def placed(self, parts: Mapping[str, Path]) -> Any:
        """Return the section with the places where the reader has the weights and the VQ-GAN."""
        named = {"path": parts.get("target"), "vq_path": parts.get("vq")}
        return self.model_copy(update={key: str(place) for key, place in named.items() if place is not None})


def _text_ids(config: AnoleTargetConfig) -> Conditions:
    """A function from a caption to ids [t], without special ones."""
    from transformers import AutoTokenizer

    with reading_pretrained(config.path, "cannot load the tokenizer of", key="target.path", weights=False):
        tokenizer = AutoTokenizer.from_pretrained(config.path, revision=config.revision)
    return lambda caption, _: torch.tensor(tokenizer(caption, add_special_tokens=False).input_ids, dtype=torch.int64)


def load_anole(
    path: str | Path,
    *,
    revision: Revision | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device_map: DeviceMap | None = None,
    device: torch.device | None = None,
    guidance: Guidance = DEFAULT_GUIDANCE,
) -> AnoleTarget:
    """A frozen target. Only safetensors are read. `device`: where to, without a `device_map`; None stays on the CPU.
    Raises `UserError`: it cannot be read, is no Chameleon, or lacks weights.
    """
    import transformers

    _chameleon(read_config(str(path), key="target.path", revision=revision), path)
    maker: Any = transformers.ChameleonForConditionalGeneration
    hint = "check the name and the network; the layout is transformers', in safetensors"
    placed = onto(device) if device_map is None else spread(device_map, offload=None, key="target")
    model = load_pretrained(
        maker.from_pretrained, path, key="target.path", hint=hint, revision=revision, dtype=dtype,
        use_safetensors=True, **placed,
    )  # fmt: skip
    if device_map is not None:
        check_spread(model, device_map, offload=None, key="target")
    return AnoleTarget(model, guidance=guidance)


def _chameleon(config: Any, path: str | Path) -> ChameleonConfig:
    """`config` if it is one of Chameleon's own; Lumina-mGPT's says chameleon too."""
    from transformers import ChameleonConfig

    if any("XLLMX" in name for name in config.architectures or ()):
        refuse_lumina()
    if not isinstance(config, ChameleonConfig):
        problem = f"target.path: {str(path)!r} is a {config.model_type}, expected a chameleon"
        raise UserError(problem, key="target.path", hint=f"name {PUBLISHED}")
    return config


def refuse_lumina() -> NoReturn:
    """Raises `UserError`, by what its repository (Alpha-VLLM/Lumina-mGPT) says; its weights say chameleon."""
    raise UserError(
        "Lumina-mGPT is not supported: its weights do not fit Chameleon's query and key norms (one row per "
        "model-parallel rank, not one per head), and its pictures come in many sizes with announcing and row-end "
        "tokens that no head, tree or image decoder here knows",
        key="target.kind", hint="use kind: anole, the same family, or kind: llamagen",
    )  # fmt: skip
