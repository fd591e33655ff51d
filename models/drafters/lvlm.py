"""Independent draft LVLMs: a 68M or 160M Llama with the target's kind of vision tower (TABED, appendix H.1).

Config, assembly, the files it is saved as, and its proposals (M with the pictures, T without). The
loss is LLaVA's own, `models/targets/llava/model.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import nn

from ...core.errors import UserError
from ...core.fields import Place
from ...core.json_types import JsonMapping
from ...core.pretrained import Checkpoint, name_accelerator
from ...core.results import check_sums
from ...core.section import Section, torch_dtype
from ..folders import find_folder
from ..hub import config_value, read_config, rope_of
from ..inline import InlineModel
from ..parts import TokenIds
from ..targets.base import Target, TargetShape
from ..targets.llava.made_for_engines import ProjectorInput, reading_beside, reading_of
from ..targets.llava.made_for_engines import Reading as Reading
from ..targets.llava.made_for_engines import trained_projector as trained_projector
from ..targets.llava.model import LlavaDecoder, LlavaTraining, assemble, llava_config, load_halves
from ..targets.llava.section import LlavaTarget
from ..targets.load import load_lvlm
from ..targets.sizes import parameter_lines
from ..targets.table import family_of
from .base import PLAIN, Drafter, DraftingOptions, PublishedDrafter, TargetIdentity, check_alike
from .ensemble import DraftingMode, EnsembleProposal, preset
from .independent import IndependentProposal
from .manifest import MANIFEST, read_manifest, write_manifest
from .weights import weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# What others take of a draft's family they ask for here: drafts are LLaVAs.
LvlmTraining = LlavaTraining


class RopeScaling(Section):
    """More positions than the language model was pretrained with (JackFram's have 2,048)."""

    # linear squeezes positions into those that are known (simple, and right after finetuning); yarn leaves near
    # distances alone (better untrained).
    kind: Literal["linear", "yarn"] = "linear"
    # As many as the longest sample and what is decoded after it need.
    max_positions: int = Field(ge=1, le=1 << 28)


class LvlmConfig(PublishedDrafter):
    """A draft LVLM: assembled from a language model and a vision tower and trained, or a published one by its `path`.

    An assembled draft is a LLaVA-1.5; with a newline it is a LLaVA-OneVision with this language model.
    """

    kind: Literal["lvlm"]
    # A published draft, or the folder of a stage of another run; then nothing is assembled.
    path: Place | None = None
    # Of a published draft; null: the target's. mjbooo/lvlm160m-bf16 wants bfloat16.
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    # Hub id, directory, or an inline config (random weights) of a Llama-like model; "target" copies the target's own
    # (and its projector, where it reads the target's tower, too).
    language_model: Place | InlineModel | None = None
    # The target's layers that such a copy keeps, in ascending order; null: all.
    layers: tuple[int, ...] | None = Field(None, min_length=1, exclude_if=lambda value: value is None)
    # Hub id, directory or inline config of a CLIP-like tower; "target" copies the target's own.
    vision_tower: Place | InlineModel | None = None
    # The layer whose states the projector reads; null: as the target, and -2 for an image processor of its own.
    vision_feature_layer: int | None = None
    # A learned newline: for tiled pictures (anyres), several pictures as OneVision counts them, clips with newlines.
    newline: bool = False
    # target: the draft shares the target's tiles, as far as it can read them (without a newline, of a tiled picture
    # the first tile); own: its tower has another resolution or other statistics, and it gets tiles of its own.
    pictures: Literal["target", "own"] = "target"
    rope_scaling: RopeScaling | None = None
    # tower: its projector reads the tower's states; projected: what the target's projector makes of them, which is all
    # that a serving engine hands a draft. Of a published draft (path) its folder says.
    projector_input: ProjectorInput = "tower"
    # Whether it reads a prompt's first token. vLLM's EAGLE path leaves it out, so that a draft for it learns without.
    first_token: bool = True
    # What it is shown in decoding: M, T, C, P, T-text, T-raw; MT, MTCP (equal weights), MT*, MTCP* (adaptive); or
    # {name, members, weights}.
    mode: DraftingMode = preset("M")

    decoding_settings: ClassVar[frozenset[str]] = frozenset({"mode"})
    assembled_of: ClassVar[tuple[str, ...]] = ("language_model", "vision_tower")
    trains_on: ClassVar[str | None] = "records"

    @property
    def family(self) -> Literal["llava", "llava_onevision"]:
        """transformers' class that holds its weights."""
        return "llava_onevision" if self.newline else "llava"

    @model_validator(mode="after")
    def _one_source(self) -> LvlmConfig:
        if self.path is None and (self.language_model is None or self.vision_tower is None):
            raise ValueError("give path (a published draft), or language_model and vision_tower")
        if self.path is None and self.dtype is not None:
            raise ValueError("dtype is of a published draft (path); a stage trains in float32")
        if self.pictures == "own" and self.vision_tower == "target":
            raise ValueError("pictures: own is for another tower than the target's, and vision_tower is target")
        if self.projector_input == "projected" and (self.vision_tower not in (None, "target") or self.newline):
            raise ValueError(
                "projector_input: projected reads the target's own features: it wants vision_tower: target, no newline"
            )
        if self.layers is not None and self.language_model != "target":
            raise ValueError("layers are the target's: set language_model: target")
        return self

    def _loaded(
        self, folder: Path | None, target: Target, dtype: torch.dtype | None, identity: TargetIdentity | None
    ) -> PreTrainedModel:
        """A draft of ours, or one without our manifest; `dtype` None: the section's, or else the target's."""
        model = target.decoder.model  # type: ignore[attr-defined]
        dtype = dtype or (torch_dtype(self.dtype) if self.dtype else model.dtype)
        tokenizer = None if identity is None else identity.tokenizer_sha256
        ours = folder if folder is not None else _folder_of_ours(self)
        if ours is None:
            return load_strangers(self, model.config, dtype=dtype, device=target.device)
        return load_drafter(ours, tokenizer_hash=tokenizer, dtype=dtype, device=target.device)

    def save(self, module: nn.Module, folder: Path, manifest: JsonMapping) -> None:
        save_lvlm(cast("PreTrainedModel", module), folder, manifest)

    def lines(self, shape: TargetShape, config: PreTrainedConfig) -> list[str]:
        draft = self.config_beside(config)
        return [*parameter_lines(draft, vocabulary=True), *reading_of(draft).lines]

    def config_beside(self, target: PreTrainedConfig) -> PreTrainedConfig:
        """Its model config beside a target's, from pinned or inline configs, or of the folder of a published one."""
        if self.path is not None and (self.language_model is None or self.vision_tower is None):
            return read_config(self.path, key="drafter.path", revision=self.revision, network=False)
        ids = TokenIds(target.text_config.vocab_size, target.image_token_index, 1, 2, target.pad_token_id or 0)
        return drafter_config(self, target, ids, network=False)

    def exports(self, engine: str) -> list[str]:
        """Refuse the layouts for heads; vLLM and SGLang run the language model alone, for prompts of text."""
        if engine in ("vllm", "sglang"):
            return []  # its language model alone, for prompts of text
        return [f"the {engine} layout is for heads, and this is a whole model"]

    def drafter(self, module: nn.Module, target: Target, options: DraftingOptions = PLAIN) -> Drafter:
        theirs, substitutes = target.decoder, options.substitutes  # type: ignore[attr-defined]
        model, members = cast("PreTrainedModel", module), self.mode.members
        decoder = LlavaDecoder(model, num_token_ids=theirs.num_token_ids, never=theirs.never)
        newline_id = 0 if substitutes is None else substitutes.newline_id
        if len(members) == 1:
            return IndependentProposal(decoder, members[0], newline_id=newline_id, substitutes=substitutes)
        weights = weights_of(self.mode.weights, len(members))
        return EnsembleProposal(
            decoder, members, weights, newline_id=newline_id, substitutes=substitutes, record=options.record_weights
        )


def drafter_config(config: LvlmConfig, target: PreTrainedConfig, ids: TokenIds, *, network: bool) -> PreTrainedConfig:
    """The draft's model config: its own halves, the target's vocabulary and ids."""
    assert config.language_model is not None and config.vision_tower is not None, "a published draft is not built"
    text, key = copy.deepcopy(target.text_config), "drafter.language_model"
    if config.language_model != "target":
        text = read_config(config.language_model, key=key, revision=config.revision, network=network)
    if config.layers is not None:
        cut_to(text, config.layers)
    if config.vision_tower == "target":
        vision = target.vision_config
    else:
        vision = read_config(config.vision_tower, key="drafter.vision_tower", network=network)
        vision = config_value(vision, "vision_config", vision)  # CLIP's Hub config holds a text half, too
    other = vision.image_size, vision.patch_size
    shares = config.pictures == "target"
    if shares and other != (target.vision_config.image_size, target.vision_config.patch_size):
        raise UserError(
            f"the drafter's tower reads {vision.image_size} pixels in patches of {vision.patch_size}, the target's "
            f"{target.vision_config.image_size} in patches of {target.vision_config.patch_size}",
            key="drafter.vision_tower",
            hint="use a tower of the target's resolution, or set drafter.pictures: own",
        )
    layer = config.vision_feature_layer
    if layer is None:
        layer = target.vision_feature_layer if shares else None
    if config.rope_scaling is not None:
        scale_positions(text, config.rope_scaling)
    draft = llava_config(text, vision, ids, vision_feature_layer=layer, family=config.family)
    reading_beside(target, config.projector_input, config.first_token).write(draft)
    return draft


def cut_to(text: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Leave these of its layers to `text`. Raises `UserError` where they are not ascending, or not there."""
    if list(layers) != sorted({*layers} & {*range(text.num_hidden_layers)}):
        problem = f"layers are {', '.join(map(str, layers))}, and the target has {text.num_hidden_layers}, from 0"
        raise UserError(problem, key="drafter.layers", hint="name some of them in ascending order")
    text.num_hidden_layers = len(layers)
    if (types := config_value(text, "layer_types")) is not None:
        text.layer_types = [types[layer] for layer in layers]


def scale_positions(text: PreTrainedConfig, scaling: RopeScaling) -> None:
    """Stretch a language model's rotary positions. Raises `UserError` where it has as many, or stretched ones."""
    known, rope = text.max_position_embeddings, rope_of(text)
    key = "drafter.rope_scaling"
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"the language model's positions are scaled already: {rope}", key=key, hint="remove it")
    if scaling.max_positions <= known:
        problem = f"max_positions is {scaling.max_positions} and the language model has {known}"
        raise UserError(problem, key=key, hint="remove it, or ask for more positions")
    rope |= {"rope_type": scaling.kind, "factor": scaling.max_positions / known}
    if scaling.kind == "yarn":
        rope["original_max_position_embeddings"] = known
    text.rope_parameters, text.max_position_embeddings = rope, scaling.max_positions


def build_drafter(
    config: LvlmConfig, target: PreTrainedModel | PreTrainedConfig, ids: TokenIds, *, seed: int
) -> PreTrainedModel:
    """A float32 draft before its first stage. A whole target is needed only where a half is the target's."""
    from transformers import PreTrainedModel

    full = target.config if isinstance(target, PreTrainedModel) else target
    assert config.language_model is not None and config.vision_tower is not None
    joined = drafter_config(config, full, ids, network=True)
    halves = [{} if half == "target" else half for half in (config.language_model, config.vision_tower)]
    language_model, tower = load_halves(joined, *halves, section="drafter", revision=config.revision)
    if config.vision_tower == "target":
        assert isinstance(target, PreTrainedModel)
        tower = target.model.vision_tower
    projector = target.model.multi_modal_projector if config.projector_input == "projected" else None  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(seed)
    draft = assemble(
        joined, language_model=language_model, vision_tower=tower, target_projector=projector, generator=generator
    )
    if config.language_model == "target":
        assert isinstance(target, PreTrainedModel)
        text = copy.deepcopy(target.model.language_model)
        text.layers = nn.ModuleList(text.layers[layer] for layer in config.layers or range(len(text.layers)))
        draft.model.language_model.load_state_dict(text.state_dict())
        draft.lm_head.load_state_dict(target.lm_head.state_dict())
        if config.vision_tower == "target" and projector is None:
            draft.model.multi_modal_projector.load_state_dict(target.model.multi_modal_projector.state_dict())
    return draft


def save_lvlm(model: PreTrainedModel, folder: Path, manifest: JsonMapping) -> None:
    """A directory that plain `from_pretrained` of the model's class loads, plus our small manifest."""
    name_accelerator()
    model.save_pretrained(folder)
    write_manifest(folder, manifest)


def load_drafter(
    folder: Path, *, tokenizer_hash: str | None, dtype: torch.dtype, device: torch.device | None = None
) -> PreTrainedModel:
    """A trained draft on `device` (None: the CPU). Raises `UserError` where it was made for another tokenizer than the
    target's (None compares nothing), or a file of a published one is missing or has been changed.
    """
    check_sums(folder)
    trained_with, path = read_manifest(folder).get("tokenizer_hash"), str(folder / MANIFEST)
    if trained_with is None:
        problem = f"{MANIFEST} is missing, or does not name the draft's tokenizer (tokenizer_hash)"
        raise UserError(problem, where=path, hint="restore the file, or train the draft again")
    if tokenizer_hash is not None and trained_with != tokenizer_hash:
        raise UserError(
            "the draft was trained with another tokenizer than the target's: it would propose noise", where=path,
            hint="train the draft with this target's processor, or evaluate it with its own target",
        )  # fmt: skip
    return load_lvlm(folder, revision=None, dtype=dtype, key="drafter", whole=True, device=device)


def load_strangers(
    config: LvlmConfig, target: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device | None = None
) -> PreTrainedModel:
    """A published draft without our manifest: taken at its word, as far as the sizes that must agree do. Raises
    `UserError` where it cannot be loaded, or does not fit the target.
    """
    model = load_lvlm(
        str(config.path), revision=config.revision, dtype=dtype, key="drafter.path", whole=True, device=device
    )
    ours = model.config
    pairs = {
        "vocabulary": (ours.text_config.vocab_size, target.text_config.vocab_size),
        "image token": (ours.image_token_id, target.image_token_id),
        "picture's side": (ours.vision_config.image_size, target.vision_config.image_size),
        "patch": (ours.vision_config.patch_size, target.vision_config.patch_size),
    }
    hint = "give a draft that was trained for targets of this vocabulary and resolution"
    check_alike(pairs, key="drafter.path", hint=hint)
    return model


def _folder_of_ours(config: LvlmConfig) -> Path | None:
    """The folder of a published draft with our manifest; None: it has none, or cannot be reached, as loading tells."""
    try:
        manifest = Checkpoint(str(config.path), config.revision).file(MANIFEST)
    except UserError:
        return None
    if manifest is None or Path(str(config.path)).is_dir():
        return manifest and manifest.parent
    return find_folder(str(config.path), config.revision, files=("*",))


def as_target(model: PreTrainedModel, *, num_token_ids: int, image_token_id: int) -> LlavaTarget:
    """The draft as it answers on its own. One without a newline reads one tile of what a target reads in several."""
    reads_tiles = False if family_of(model.config).one_tile else None
    return LlavaTarget(model, num_token_ids=num_token_ids, image_token_id=image_token_id, reads_tiles=reads_tiles)
