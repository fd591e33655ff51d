"""A draft LVLM as it was trained, for vLLM's method `draft_model` with our plugin's patches: mode M or T.

In M its own projector reads the target's tower, which vLLM runs once for both, so that the draft's tower must be the
target's. In T a newline stands for each picture, and no tower is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ...core.errors import UserError
from ...core.files import checked
from ...core.json_types import JsonObject
from ...core.pretrained import reading_pretrained
from ..drafters.lvlm import LvlmConfig, own_projector, reading_of
from ..drafters.manifest import MANIFEST
from ..hub import config_value, target_tower
from ..parts import language_model_of
from ..targets.load import load_lvlm
from ..targets.table import family_of
from .lvlm import HELD, IDS, LEFT_OUT, PROJECTOR
from .plugin import served_by_plugin
from .source import Files, Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PatchedMode = Literal["M", "T"]


def section_of(folder: Path, manifest: JsonObject, mode: PatchedMode | None) -> LvlmConfig:
    """The drafter's section of an export's manifest; imported drafts bring none.

    Args:
        mode: that is asked for; None: the section's own.

    Raises:
        UserError: it is no draft LVLM's.
    """
    written = dict(manifest.get("drafter") or {"kind": "lvlm", "path": str(folder)})
    written |= {} if mode is None else {"mode": mode}
    return checked(written, LvlmConfig, where=f"{folder / MANIFEST}, drafter", hint="train it with this version")


def from_ours(folder: Path, section: LvlmConfig, target: Target) -> Files:
    """`config.json` and tensors as our plugin reads them.

    Raises:
        UserError: vLLM would run something else, with patches too; every reason is named.
    """
    model = load_lvlm(folder, **HELD)
    members = section.mode.members
    reasons = list(_unserved(model, target, members))
    if not reasons and members == ("M",) and reading_of(model.config).projector_input == "tower":
        reasons += _other_tower(model, target, str(folder))
    if reasons:
        raise UserError(
            "vLLM cannot run this draft LVLM with pictures, not even with patches:\n"
            + "\n".join(f"  - {why}" for why in reasons), where=str(folder),
            hint="decode with our own loop, or train one for vLLM: drafter.projector_input: projected and "
            "drafter.first_token: false; on text alone its language model drafts: --prompts text",
        )  # fmt: skip
    text, dtype = model.config.text_config, str(model.dtype).removeprefix("torch.")
    values = {key: value for key, value in text.to_dict().items() if key not in LEFT_OUT}
    values |= {"torch_dtype": dtype, **{name: config_value(target.text, name) for name in IDS}}
    state = {f"model.{name}": value for name, value in language_model_of(model).state_dict().items()}
    state |= {"lm_head.weight": model.lm_head.weight.detach().clone()}
    if members == ("T",):
        return served_by_plugin(values, "lvlm-t", newline_id=_newline(target)), state
    state |= {f"{PROJECTOR}{name}": value for name, value in own_projector(model).state_dict().items()}
    return served_by_plugin(values, "lvlm-m", projector_input=reading_of(model.config).projector_input), state


def _unserved(model: PreTrainedModel, target: Target, members: tuple[str, ...]) -> Iterator[str]:
    config, theirs = model.config, target.config
    if len(members) > 1:
        yield f"it drafts as an ensemble ({', '.join(members)}), and the engine runs one row a request"
    elif members[0] not in ("M", "T"):
        yield f"in mode {members[0]} it is shown something else than pictures or newlines (modes M and T: --mode)"
    if "patched" not in family_of(theirs).engines.get("vllm", ()):
        yield f"pictures of {theirs.model_type} were not compared with the patches, LLaVA-1.5's were"
    if config.text_config.model_type != "llama":
        yield f"its language model is a {config.text_config.model_type}, and the plugin's class is Llama's"
    if config.text_config.vocab_size != target.text.vocab_size:
        rows = f"{config.text_config.vocab_size} rows of vocabulary, and the target {target.text.vocab_size}"
        yield f"it has {rows}: name its own target by --target"
    reading = reading_of(config)
    if not reading.first_token:
        yield "it was trained without a prompt's first token (drafter.first_token), which a draft model is shown"
    if reading.projector_input == "projected" and reading.target_width != target.text.hidden_size:
        yield f"it reads features of width {reading.target_width}, and the target's have {target.text.hidden_size}"


def _other_tower(model: PreTrainedModel, target: Target, where: str) -> Iterator[str]:
    """Reasons that a draft has whose tower, or the layer that it reads, is not the target's."""
    own, theirs = model.config, target.config
    if own.model_type != theirs.model_type:
        yield f"it is a {own.model_type}, which reads its tower's features with newlines between them"
        return
    for name in ("vision_feature_layer", "vision_feature_select_strategy"):
        here, there = config_value(own, name), config_value(theirs, name)
        if here != there:
            yield f"its {name} is {here}, and the target's {there}"
    held = target_tower(target.place, where=where)
    state = {name.removeprefix("vision_model."): value for name, value in model.model.vision_tower.state_dict().items()}
    apart = [name for name, value in state.items() if not _equal(value, held.get(name))]
    if apart:
        yield f"{len(apart)} of its tower's {len(state)} tensors are not the target's: it has its own, or was trained"


def _equal(own: torch.Tensor, theirs: torch.Tensor | None) -> bool:
    """Equal in the target's precision."""
    return theirs is not None and own.shape == theirs.shape and torch.equal(own.to(theirs.dtype), theirs)


def _newline(target: Target) -> int:
    """Id of a newline, as our loop reads it from the target's tokenizer."""
    from transformers import AutoTokenizer

    place = str(target.place)
    with reading_pretrained(place, "cannot load the target's tokenizer", weights=False):
        tokenizer = AutoTokenizer.from_pretrained(place)
    return int(tokenizer("\n", add_special_tokens=False).input_ids[-1])
