"""A drafter as its folder says it is, trained here or published, with the config of its target; and a head's layer
under the keys of a Llama's `config.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from ...core.errors import UserError
from ...core.files import checked
from ...core.json_types import JsonObject, object_at, text_at, value_at
from ...core.pretrained import CPU, Checkpoint
from ..drafters import DRAFTER
from ..drafters.dflash import DflashConfig
from ..drafters.head_config import HeadConfig
from ..drafters.head_files import head_state
from ..drafters.manifest import MANIFEST, read_manifest
from ..drafters.medusa import MedusaConfig
from ..drafters.outside import find_start
from ..folders import CONFIG, State, opened_target, read_values
from ..hub import config_value, read_config, rope_of
from ..layer import AT_EXPORT, LayerShape, stretched, written_rope
from ..targets.base import TargetShape, language_shape
from ..targets.table import IMAGE_SECTIONS, family_named

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ReadConfig = HeadConfig | DflashConfig | MedusaConfig  # of drafters that read states
Files = tuple[JsonObject, dict[str, Tensor]]  # config.json, model.safetensors
# Of the module that a trainer wrapped the head in.
_WRAPPERS = ("module.", "draft_model.", "ea_layer.", "spec_layer.", "model.")
# Tables that follow from the config: older checkpoints hold them.
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")

# Drafted tokens that the speculators format names as its default.
CHAIN = 5


@dataclass(frozen=True)
class Target:
    """The target that a drafter was made for."""

    config: PreTrainedConfig
    name: str | None  # None: weights of a run, which have no name
    place: str = ""  # Hub id or directory that it was read from
    revision: str | None = None  # of a Hub id

    @property
    def text(self) -> Any:
        """The config of its language model."""
        return self.config.get_text_config()

    @property
    def shape(self) -> TargetShape:
        """Sizes and config of its language model, which heads mirror."""
        return language_shape(self.text)

    @property
    def sees(self) -> bool:
        """Whether the target reads pictures."""
        return self.text is not self.config


@dataclass(frozen=True)
class Source:
    """A head (Medusa's levels included) or DFlash draft that reads a language model's states."""

    folder: Path
    config: ReadConfig  # as it was trained
    head: Any  # StateHead | DflashHead | MedusaHead
    target: Target
    manifest: JsonObject

    @property
    def layout(self) -> Literal["eagle", "eagle3", "dflash", "medusa"]:
        """The file of this folder that writes it; vLLM calls the methods so, too."""
        assert self.config.layout is not None, "read_source asks"
        eagle3 = self.config.layout == "eagle" and cast(HeadConfig, self.config).is_eagle3
        return "eagle3" if eagle3 else self.config.layout

    @property
    def dtype(self) -> str:
        """The type of its weights, as configs name it."""
        return str(next(self.head.parameters()).dtype).removeprefix("torch.")


def kind_of(folder: Path) -> str:
    """language_head, image_head, lvlm or causal. Raises `UserError`: no folder of a drafter."""
    if not folder.is_dir():
        raise UserError(f"no directory {str(folder)!r}", hint="give the folder of a stage that trained a drafter")
    manifest = read_manifest(folder)
    kind = value_at(manifest, "drafter", "kind")
    # What a class of another package proposes, it alone knows.
    if not (folder / "config.json").is_file() or ":" in str(kind):
        if kind is not None:
            raise UserError(f"no engine has a layout for a drafter of kind {kind!r}", where=str(folder),
                            hint="decode with our own loop: draftsmith evaluate")  # fmt: skip
        raise UserError("no drafter is in this folder", where=str(folder),
                        hint="give the folder of the stage that trained it, inside a run's")  # fmt: skip
    values = read_values(folder)
    of_target = text_at(manifest, "target", "kind")
    if of_target in IMAGE_SECTIONS:
        return "image_head"
    if of_target and manifest.get("method") is not None:
        return "language_head"
    if (manifest.get("imported") or {}).get("as") == "lantern":
        return "image_head"
    model = str(values.get("model_type"))
    if family_named(model).shares_pictures or "vision_config" in values:
        return "lvlm"
    if "num_hidden_layers" in values and "architectures" in values and "fc_bias" not in values and not manifest:
        return "causal"
    raise UserError(
        f"{MANIFEST} does not say which drafter this is (model_type {model})", where=str(folder),
        hint="give a folder that a stage of this project wrote; draftsmith import makes one of a published head",
    )  # fmt: skip


def named_target(folder: Path, target: str | None) -> tuple[JsonObject, str]:
    """The target's section in a drafter's manifest, and the target that is named, or else the section's. Raises
    `UserError`: nobody names one.
    """
    written = read_manifest(folder).get("target")
    section = object_at(written)
    if section is None:  # a draft LVLM's is a name alone
        section = {"path": written}
    name = target or section.get("path")
    if name in (None, "inline"):
        raise UserError(
            "the target of this drafter was trained in its run and has no name", where=str(folder / MANIFEST),
            hint="give its folder: --target runs/x/target",
        )  # fmt: skip
    return section, str(name)


def find_target(folder: Path, target: str | None) -> Target:
    """The target that is named, shipped:NAME among them, or that the drafter's manifest names. Raises `UserError` as
    `named_target`.
    """
    section, name = named_target(folder, target)
    place = opened_target(name, where="--target" if target else str(folder / MANIFEST))
    revision = section.get("revision") if name == section.get("path") else None
    config = read_config(place, key="target", revision=revision)
    if len(ends := Checkpoint(place, revision).generation_ends()) > 1:
        config.get_text_config().eos_token_id = list(ends)  # the config's own is one of them, and layouts copy it
    return Target(config, None if Path(place).is_dir() else place, place, revision)


def read_source(folder: Path, target: Target) -> Source:
    """A head or DFlash draft of ours, on the CPU in the precision that it is stored in. Raises `UserError`: a file is
    missing, or the head was made for another target.
    """
    manifest = read_manifest(folder)
    config = _trained_config(manifest, folder)
    return Source(folder, config, read_beside(config, folder, target.text), target, manifest)


def read_published(source: str | Path, revision: str | None) -> tuple[Path, JsonObject, State]:
    """Folder, `config.json` and weights of a published head, under the names that we use. Raises `UserError`: a file is
    missing, or cannot be read without running it.
    """
    folder = find_start(source, revision)
    state = head_state(folder)
    while (names := [name for name in state if ".self_attn." in name]) and (
        prefix := next((w for w in _WRAPPERS if all(name.startswith(w) for name in names)), None)
    ):  # every layer's weights carry it
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return folder, read_values(folder), {n: value for n, value in state.items() if not n.endswith(_DERIVED)}


def read_beside(config: ReadConfig, folder: Path, text: PreTrainedConfig) -> Any:
    """The module in a folder: shapes and settings are compared with the target's, none of whose weights is needed."""
    stored = next(value.dtype for value in head_state(folder).values() if value.is_floating_point())
    beside: Any = SimpleNamespace(
        shape=language_shape(text), embedding=torch.empty(0, text.hidden_size), device=CPU,
        scores=lambda states: states.new_zeros(*states.shape[:-1], text.vocab_size),
    )  # fmt: skip
    return config.read(folder, beside, stored, None).eval()


def _trained_config(manifest: JsonObject, folder: Path) -> ReadConfig:
    written, hint = manifest.get("drafter"), "train it with this version, or import it again"
    if manifest.get("method") == "dflash":
        return checked(written, DflashConfig, where=f"{folder / MANIFEST}, drafter", hint=hint)
    try:
        config = DRAFTER.validate_python(written or {})
    except ValidationError as error:
        raise UserError(
            f"{MANIFEST} does not hold the head's settings: {error.errors()[0]['msg']}", where=str(folder / MANIFEST),
            hint=f"{hint} with draftsmith import",
        ) from error  # fmt: skip
    if config.layout is None:
        raise unserved("no engine can express this head", config.exports(""), folder, "decode with our own loop")
    return cast(ReadConfig, config)


def unserved(problem: str, reasons: Sequence[str], folder: Path, hint: str) -> UserError:
    """The error for a refusal, with every reason on its line."""
    return UserError("\n".join([f"{problem}:", *(f"  - {why}" for why in reasons)]), where=str(folder), hint=hint)


def proposals(algorithm: str, speculative_tokens: int, target: Target) -> JsonObject:
    """The part of speculators' `config.json` that names the algorithm, its chain's length and the target."""
    return {
        "algorithm": algorithm,
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": speculative_tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target.name, "architectures": list(target.config.architectures or [])},
    }


def llama_values(shape: LayerShape, text: PreTrainedConfig) -> JsonObject:
    """A one-layer Llama of the head's shape, for readers of transformers 4 and 5."""
    scaling = None if shape.rope_scaling is None else dict(shape.rope_scaling)
    rope: JsonObject = {"rope_type": "default", "rope_theta": shape.rope_theta} | (scaling or {})
    if shape.mrope_section:
        scaling = {"rope_type": "default", "mrope_section": list(shape.mrope_section)}
        rope |= {"mrope_section": list(shape.mrope_section)}
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        # Qwen3-VL's text config has none of them.
        **{name: config_value(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def window_values(window: int, layers: int) -> JsonObject:
    """The keys of `layers` layers that see a window of positions alone."""
    return {"layer_types": ["sliding_attention"] * layers, "sliding_window": window, "use_sliding_window": True}


def layer_settings(values: JsonObject, text: PreTrainedConfig, where: str) -> tuple[JsonObject, tuple[int, ...]]:
    """What a layer's config says of norms and rotation that is not the target's anyway, and M-RoPE's sections, none
    where there is one position. Raises `UserError`: the head stretches its positions otherwise than the target, or its
    config has what `written_rope` refuses.
    """
    rope, targets = written_rope(values, Path(where) / CONFIG), rope_of(text)
    ours, theirs = stretched(rope, values.get("max_position_embeddings")), stretched(targets)
    if ours not in (None, theirs):
        problem = f"its config.json stretches the head's positions ({ours}), and the target's are {theirs or 'plain'}"
        raise UserError(problem, where=where, hint=f"name a target that is stretched so; {AT_EXPORT}")
    said = {
        "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
        # EAGLE's code takes 10,000 where a config says nothing, whatever its target has.
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "rope": "target" if ours == theirs else "plain",
    }
    same = {"norm_eps": text.rms_norm_eps, "rope_theta": float(targets.get("rope_theta") or 10000.0), "rope": "target"}
    return {name: value for name, value in said.items() if value != same[name]}, tuple(rope.get("mrope_section") or ())
