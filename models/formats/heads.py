"""Published heads of language models: settings read off their weights, and what no file says asked for.

EAGLE-1/2 (`yuhuili/EAGLE-*`), EAGLE-3 (EAGLE's own, SpecForge's, SGLang's, vLLM's and the speculators format), MSD
(`lucylyn/*`), ViSpec (`JLKang/*`), DFlash, DSpark and DFlash 2 (`z-lab/*-DFlash`, `incoai/*-DFlash2` and the
speculators format) and Medusa (vLLM's layout).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..drafters import DRAFTER
from ..drafters.base import DrafterConfig, TargetIdentity
from ..drafters.eagle import EagleConfig
from ..drafters.eagle3 import OPTIONS
from ..drafters.head_config import HeadConfig
from ..drafters.head_files import check_manifest
from ..drafters.head_settings import Image
from ..drafters.manifest import MANIFEST, OtherTarget, check_made_for
from ..drafters.medusa import MedusaConfig
from ..folders import State, check_shapes, shapes_of
from ..hub import usual_heads
from ..layer import LayerShape, head_window, refuse_window
from ..targets.base import Target, language_shape
from . import dflash, eagle, eagle3, lantern, medusa
from .source import ReadConfig, layer_settings, read_beside, read_published

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LanguageHead = Literal["eagle", "eagle3", "peagle", "msd", "vispec", "dflash", "dspark", "dflash2", "medusa"]
LANGUAGE_HEADS: tuple[LanguageHead, ...] = get_args(LanguageHead)
_OF_EAGLE3 = ("eagle3", "peagle")
_TABLES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class ImportedHead:
    """Args:
    settings: the recipe's `drafter` section, without its path.
    notes: what was decided, and what nobody can know.
    """

    head: Any  # StateHead | DflashHead | MedusaHead
    config: ReadConfig
    settings: JsonObject
    notes: tuple[str, ...]


def import_head(
    kind: LanguageHead,
    source: str,
    text: PreTrainedConfig,
    *,
    embedding: Tensor | None,
    image: Image | None = None,
    sees: bool = True,
    revision: str | None = None,
) -> ImportedHead:
    """A published head in the precision that it is stored in. Raises `UserError`: a file is missing, or the head is of
    another kind or target.

    Args:
        source: Hub id or directory.
        text: the target's text config.
        embedding: the target's [V,D]: a head's own copy is compared with it; None: it is not, and that is noted.
        image: what stood at visual tokens in its training; published files do not say. Of `eagle`, `eagle3`, `peagle`.
        sees: the target reads pictures.
    """
    folder, values, state = read_published(source, revision)
    if kind in dflash.BLOCK_KINDS:
        draft, section, decided = dflash.to_ours(cast(dflash.BlockKind, kind), values, state, text, folder)
        return ImportedHead(read_beside(draft, folder, text), draft, section, tuple(decided))
    if kind == "medusa":
        levels, drafter, decided = medusa.to_ours(values, state, text, str(folder))
        return ImportedHead(levels, drafter, drafter.model_dump(mode="json", exclude_defaults=True), tuple(decided))
    where, notes = str(folder), list[str]()
    _check_kind(kind, state, where)
    is_eagle3 = kind in _OF_EAGLE3
    layer = values.get("transformer_layer_config") or values
    if int(layer.get("num_hidden_layers", 1)) != 1 or layer.get("hidden_act", "silu") != "silu":
        raise UserError("not one Llama layer with SiLU", where=where, hint="such heads are not read")
    if not is_eagle3:
        refuse_window(layer, where)
    of_layer, sections = layer_settings(layer, text, where)
    if is_eagle3:
        eagle3.refuse_variants(values, state, where)
    prefix = eagle3.LAYER if is_eagle3 else eagle.LAYER
    if deeper := sorted(name for name in state if name.startswith("layers.") and not name.startswith("layers.0.")):
        raise UserError(f"the head has several layers ({deeper[0]})", where=where, hint="one layer is what is read")
    # Both names are in use for EAGLE-3's.
    state = {re.sub(r"^(layers\.0|midlayer)\.", prefix, name): value for name, value in state.items()}
    # The package's P-EAGLE trains its table where no key says otherwise (speculators 0.9, models/peagle/config.py).
    own = is_eagle3 and values.get("embed_requires_grad", values.get("speculators_model_type") == "peagle")
    _check_tables(state, embedding, is_eagle3, own, where, notes)
    if "rope" in of_layer:
        notes.append("its positions are not stretched as the target's are: rope: plain")
    if is_eagle3:
        settings, state = eagle3.to_ours(values, state, text, kind, where, notes)
        if (window := head_window(layer, where)) is not None:
            settings["sliding_window"] = window
        if sections:
            settings["positions"] = "mrope"
            notes.append("its positions are the target's three (mrope_section): positions: mrope")
    else:
        settings, state = eagle.to_ours(state, kind, where)
    settings |= {"kind": kind} | of_layer
    if is_eagle3:
        settings["visual_slots"] = "read"
    if sees and kind in ("eagle", *_OF_EAGLE3):
        if image is None:
            raise UserError(
                "what stood at pictures in this head's training is in none of its files, and a mismatch shows nowhere",
                where=where, hint="say --image placeholder (vLLM's way: AngelSlim, speculators, heads trained on text "
                "alone) or --image projected (SGLang's: SpecForge)",
            )  # fmt: skip
        settings["image"] = image
    settings |= _attention(state, prefix, text, where)
    config = cast(HeadConfig, DRAFTER.validate_python(settings))
    ids = state["d2t"] + torch.arange(len(state["d2t"])) if is_eagle3 else None
    head: Any = config.module(config.layer(language_shape(text)), ids)
    check_shapes(
        shapes_of(state), shapes_of(head.state_dict()), where=where,
        what=f"not a head of kind {kind} for this target: ",
        hint="give --as and --target that it was trained as and for",
    )  # fmt: skip
    head.load_state_dict(state)
    head.to(next(value.dtype for value in state.values() if value.is_floating_point())).eval()
    if "norm_eps" in of_layer:
        notes.append(f"norms add {of_layer['norm_eps']:g}, the target's {text.rms_norm_eps:g}: kept as norm_eps")
    return ImportedHead(head, config, config.model_dump(mode="json", exclude_defaults=True), tuple(notes))


def _check_kind(kind: str, state: State, where: str) -> None:
    """Refuse a head whose weights have names that another kind alone has."""
    joined, held = state.get("fc.weight"), kind
    if "mask_hidden" in state:
        held = "peagle"
    elif any(name.startswith("imadpt.") for name in state):
        held = "vispec"
    elif any(n in ("d2t", "t2d") or n.startswith("midlayer.") for n in state):
        held = "eagle3"
    elif kind in _OF_EAGLE3 and joined is not None and joined.shape[1:] == (2 * len(joined),):
        held = "eagle"  # or MSD: they differ in nothing that a file says
    if held != kind:
        raise UserError(f"the folder holds a head of kind {held}, and {kind} is asked for", where=where,
                        hint=f"read it as {held}: --as {held}, or drafter.kind: {held} in a recipe")  # fmt: skip


def _check_tables(
    state: State, embedding: Tensor | None, is_eagle3: bool, own: bool, where: str, notes: list[str]
) -> None:
    """Take the target's tables out, after a look whether they are; the head's `own`, which began as that, stays."""
    stored = state.pop("embed_tokens.weight", None)
    for name in _TABLES:
        if name in state and not (is_eagle3 and name == "lm_head.weight"):
            del state[name]
            notes.append(f"{name} is left out: the target's own scores are used")
    if stored is None:
        return
    if own:
        state["embed_tokens.weight"] = stored
    if embedding is None:
        notes.append("its copy of the embedding was not compared with the target's, whose weights were not given")
        return
    rows = min(len(stored), len(embedding))
    if stored.shape[1:] != embedding.shape[1:]:
        raise UserError(f"its embeddings are {list(stored.shape)}, the target's {list(embedding.shape)}", where=where,
                        hint="name the target that it was trained for")  # fmt: skip
    # Rows after the tokens are padding, which conversions draw anew: most of the others must agree.
    apart = (stored[:rows].float() - embedding[:rows].float()).abs().amax(1) > 1e-2
    if own:  # most ids come rarely in training, so that their rows stay alike
        apart = F.cosine_similarity(stored[:rows].float(), embedding[:rows].float()) < 0.5
    if float(apart.float().mean()) > (0.5 if own else 0.01):
        raise OtherTarget(
            f"{int(apart.sum())} of its {rows} rows of embedding are not the target's", where=where,
            hint="name the target that it was trained for (a chat model and its base model differ, too)",
        )  # fmt: skip


def _attention(state: State, layer: str, text: PreTrainedConfig, where: str) -> JsonObject:
    key, gate = f"{layer}self_attn.k_proj.weight", f"{layer}mlp.gate_proj.weight"
    if key not in state or gate not in state:
        held = ", ".join(sorted(state)[:4])
        raise UserError(f"{key} is missing; the file begins with {held}", where=where, hint="give the folder of a head")
    usual, width = usual_heads(text)
    heads = state[key].shape[0] // width
    settings: JsonObject = {"qkv_bias": f"{layer}self_attn.q_proj.bias" in state}
    if heads != usual:
        if heads != text.num_attention_heads:
            raise UserError(
                f"{heads} heads of keys and values, the target has {usual} for "
                f"{text.num_attention_heads} of queries", where=where, hint="name the target that it was trained for",
            )  # fmt: skip
        settings["kv_heads"] = "mha"
    if state[gate].shape[0] != text.intermediate_size:
        settings["intermediate_size"] = state[gate].shape[0]
    return settings


def load_published(
    config: DrafterConfig, folder: Path, target: Target, identity: TargetIdentity, embedding: Tensor | None
) -> nn.Module:
    """The head in float32 on the target's device, as `load_start` has it. `embedding`: of the target, which the head's
    files may be compared with; None: they are not.
    """
    where, section = str(folder), cast(EagleConfig, config)
    if config.base_kind == "eagle" and target.shape.draws_images:
        # LANTERN's head brings the rows that it was trained beside.
        _, settings, _ = lantern.to_ours(where, target.shape)
        written = EagleConfig.model_validate(settings).layer(target.shape)
        _check_layer(section.layer(target.shape), written, settings, where)
        return section.load(folder, target, dtype=torch.float32, identity=identity)
    if config.kind not in LANGUAGE_HEADS or target.shape.draws_images:
        raise UserError(
            f"published heads that are read are EAGLE, EAGLE-3, P-EAGLE, MSD, ViSpec, DFlash, DSpark, "
            f"DFlash 2, Medusa, LANTERN's; this is {config.kind}",
            where=where, hint=f"give a folder that draftsmith wrote (it has {MANIFEST})",
        )  # fmt: skip
    shape, text = target.shape, target.shape.text
    if isinstance(config, MedusaConfig):
        check_made_for(folder, config.kind, identity)
        imported = import_head("medusa", where, text, embedding=None)
        if imported.head.shape != config.shape(shape):
            _refuse("sizes", imported.head.shape, config.shape(shape), imported.settings, where)
    else:
        assert isinstance(config, HeadConfig)
        check_manifest(config, folder, shape, identity)
        kind = cast(LanguageHead, config.kind)
        image = config.image_input() or "placeholder" if kind in ("eagle", "eagle3", "peagle") else None
        imported = import_head(kind, where, text, embedding=embedding, image=image)
        stored, settings = cast(HeadConfig, imported.config), imported.settings
        _check_layer(config.layer(shape), stored.layer(shape), settings, where)
        ours, theirs = (list(one.reads(shape, training=True).state) or "feature" for one in (config, stored))
        if ours != theirs:
            _refuse("layers that it reads", theirs, ours, settings, where)
        for name in ("fc_bias", "num_queries", *OPTIONS):  # both have one, or none, as their kind has
            if dict(stored).get(name) != dict(config).get(name):
                _refuse(name, dict(stored).get(name), dict(config).get(name), settings, where)
    return imported.head.float().to(target.embedding.device).train()


def _check_layer(ours: LayerShape, theirs: LayerShape, settings: JsonObject, where: str) -> None:
    # How positions turn where they have three rows is decoding's choice.
    axes = {name: ours.to_dict()[name] for name in ("mrope_section", "mrope_interleaved")}
    different = ours.differs_from(theirs.to_dict() | axes)
    if different is not None:
        _refuse(*different, settings, where)


def _refuse(name: str, theirs: object, ours: object, settings: JsonObject, where: str) -> None:
    section = yaml.safe_dump(settings, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    raise UserError(
        f"the head was trained with {name} {theirs}, and the recipe's drafter has {ours}", where=where,
        hint=f"write what its files say: drafter: {section}",
    )  # fmt: skip
