"""Draft LVLMs: TABED's (`mjbooo/lvlm68m`, ...) into ours, and a draft's language model as engines take draft models.

TABED's are LLaVAs of transformers 4 with ids that are not to be trusted. Engines' draft models have no vision tower: a
draft LVLM's language model reads a placeholder's own row at a picture, which it was never trained on. With pictures our
plugin for vLLM serves drafts that are made for it (`for_plugin`), and by patches of vLLM others (`for_patches`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from ...core.errors import UserError
from ...core.pretrained import read_safetensors, reading_pretrained
from ..drafters.lvlm import LvlmConfig, Reading, assemble, reading_of, trained_projector
from ..folders import WEIGHTS, State, check_shapes, read_values, shapes_of
from ..hub import config_value, rope_of, usual_heads
from ..parts import grow_vocabulary, language_model_of
from ..stored import stored_tower
from ..targets.load import load_lvlm, load_weights
from ..targets.table import family_of
from .expressible import Engine, Prompts
from .plugin import SECTION, served_by_plugin
from .source import Files, Target, unserved

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PatchedMode = Literal["M", "T"]
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LEFT_OUT = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
_HELD: dict[str, Any] = {"revision": None, "dtype": "auto", "key": "drafter", "whole": True}
_PROJECTOR = "multi_modal_projector."


def from_ours(
    folder: Path, engine: Engine, prompts: Prompts, target: Target, *, sees: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The draft's language model, and what the reader of the export must know. `sees`: it is a LLaVA, and no plain
    language model. Raises `UserError`: the engine takes no draft models, or this one does not fit the target.
    """
    from transformers import AutoModelForCausalLM

    where = str(folder)
    if engine not in ("vllm", "sglang", "gguf"):
        raise UserError(
            f"the {engine} layout is for heads, and this is a whole model", where=where, hint="use --to vllm or sglang"
        )
    if sees and prompts == "all" and target.sees:
        raise UserError(
            "the engine's draft models read ids alone, and this one reads pictures (llama.cpp: zero rows)", where=where,
            hint="serve it in vLLM: --to vllm; its language model alone drafts on prompts of text: --prompts text",
        )  # fmt: skip
    model = load_lvlm(folder, **_HELD) if sees else load_weights(AutoModelForCausalLM, folder, **_HELD)
    if not reading_of(model.config).first_token:
        raise UserError(
            "the draft was trained without a prompt's first token, which a draft model is shown", where=where,
            hint="export it with pictures: without --prompts text, --to vllm",
        )  # fmt: skip
    text, rows = model.config.get_text_config(), target.text.vocab_size
    if "mrope_section" in rope_of(text):
        raise UserError(
            f"a draft of {text.model_type} has positions of three coordinates (M-RoPE), which engines refuse in a "
            "draft model", where=where, hint="draft with a Llama, or with a head",
        )  # fmt: skip
    if text.vocab_size > rows:
        raise UserError(
            f"the draft has {text.vocab_size} rows of vocabulary, and the target {rows}: another tokenizer's",
            where=where, hint="name the target that it drafts for: --target",
        )  # fmt: skip
    draft = language_model_alone(model)
    notes = ["its language model alone: for prompts without pictures"] if sees else []
    if text.vocab_size < rows:
        grow_vocabulary(draft, rows, torch.Generator().manual_seed(0))
        notes.append(f"{rows - text.vocab_size} rows added near the mean, up to the target's vocabulary")
    for name in _IDS:
        # A draft's own are not to be trusted: JackFram's are no ids of Llama's tokenizer.
        value = config_value(target.text, name)
        setattr(draft.config, name, value)
        setattr(draft.generation_config, name, value)
    return draft.to(model.dtype), notes  # type: ignore[arg-type]


def language_model_alone(model: PreTrainedModel) -> PreTrainedModel:
    """A new model of text, float32, with the language model and the LM head of `model`, as engines read them."""
    from transformers import AutoModelForCausalLM

    text = model.config.get_text_config()
    config = type(text)(**{key: value for key, value in text.to_dict().items() if key not in _LEFT_OUT})
    alone: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    alone.model.load_state_dict(language_model_of(model).state_dict())
    alone.lm_head.load_state_dict(model.lm_head.state_dict())
    alone.config.architectures = [type(alone).__name__]
    return alone


def for_plugin(folder: Path, target: Target) -> Files:
    """`config.json` and tensors of a draft LVLM as our plugin for vLLM reads them. The tower and the target's projector
    stay behind: the engine has them. Raises `UserError`: it was made for a target of another width or vocabulary.
    """
    model = load_lvlm(folder, **_HELD)
    text, theirs, width = model.config.text_config, target.text, reading_of(model.config).target_width
    if (width, text.vocab_size) != (theirs.hidden_size, theirs.vocab_size):
        raise UserError(
            f"the draft was made for a target of width {width} and {text.vocab_size} rows of vocabulary; this one has "
            f"{theirs.hidden_size} and {theirs.vocab_size}", where=str(folder), hint="name its own target: --target",
        )  # fmt: skip
    language_model = {key: value for key, value in text.to_dict().items() if key not in _LEFT_OUT}
    # The engine's buffer of states has the target's width, that of embeddings the draft's.
    kv_heads, head_dim = usual_heads(theirs)
    outer = language_model | {
        "model_type": "llama", "hidden_size": width, "projection_dim": text.hidden_size,
        "torch_dtype": str(model.dtype).removeprefix("torch."), "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim,
        **{name: config_value(theirs, name) for name in _IDS},
    }  # fmt: skip
    return served_by_plugin(outer, "lvlm", language_model=language_model), _state(model) | _projector(model)


def from_plugin(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """The draft of an export for our plugin, beside its LLaVA, whose tower and projector it takes over. In mode T no
    picture is read, and its projector is a new one.
    """
    values, held = read_values(folder), read_safetensors(folder / WEIGHTS)
    about, config = values.pop(SECTION), copy.deepcopy(target.config)
    text = about.get("language_model") or {name: value for name, value in values.items() if name not in _LEFT_OUT}
    config.text_config = type(config.text_config)(**text)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings  # the draft's own, not the target's
    is_made = about["drafter"] == "lvlm"  # for the EAGLE path, which has no first token
    is_projected = is_made or about.get("projector_input") == "projected"
    if is_projected:
        Reading("projected", not is_made, target.config.text_config.hidden_size).write(config)
    draft = assemble(
        config, vision_tower=target.model.vision_tower,
        target_projector=target.model.multi_modal_projector if is_projected else None,
    )  # fmt: skip
    pieces = {"model.": language_model_of(draft), "lm_head.": draft.lm_head}
    pieces |= {} if about["drafter"] == "lvlm-t" else {_PROJECTOR: trained_projector(draft)}
    for prefix, module in pieces.items():
        state = {name.removeprefix(prefix): value for name, value in held.items() if name.startswith(prefix)}
        check_shapes(shapes_of(state), shapes_of(module.state_dict()), where=str(folder / WEIGHTS))
        module.load_state_dict(state)
    moved: Any = draft.to(target.device)  # type: ignore[arg-type]
    return moved.eval()


def to_ours(
    source: str, target: PreTrainedConfig, *, revision: str | None = None, ends: Sequence[int] = ()
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The draft in its own precision, with the target's ids and vocabulary. Raises `UserError`: it cannot be read, or
    does not fit the target.

    Args:
        target: the config of a LLaVA; one whose tokenizer has as many tokens is not therefore the same, which the
            tokenizer's hash tells.
        ends: that the target's generation config names.
    """
    model = load_lvlm(source, revision=revision, dtype="auto", key="source", whole=True)
    ours, notes = cast(Any, model.config), []
    for name, what in {"image_size": "pixels along a side", "patch_size": "pixels along a patch"}.items():
        if (mine := getattr(ours.vision_config, name)) != (other := getattr(target.vision_config, name)):
            raise UserError(f"its tower reads {mine} {what}, the target's {other}", where=source,
                            hint="give a target of its resolution: published drafts read 336 pixels")  # fmt: skip
    rows, have = target.text_config.vocab_size, ours.text_config.vocab_size
    if have > rows:
        raise UserError(f"{have} rows of vocabulary, the target has {rows}", where=source,
                        hint="give a target of the same tokenizer")  # fmt: skip
    if have < rows:
        dtype = next(model.parameters()).dtype
        model.float()
        grow_vocabulary(model, rows, torch.Generator().manual_seed(0))
        cast(nn.Module, model).to(dtype)
        notes.append(f"{rows - have} rows added near the mean, up to the target's vocabulary: they are never proposed")
    if ours.image_token_id != target.image_token_id:
        notes.append(f"its image token was {ours.image_token_id}, the target's is {target.image_token_id}")
        ours.image_token_id = ours.image_token_index = target.image_token_id
    for place, theirs in ((ours, target), (ours.text_config, target.text_config)):
        for name in _IDS:
            before, value = config_value(place, name), config_value(theirs, name)
            if before != value:
                notes.append(f"{name} was {before}, the target's is {value}")
                setattr(place, name, value)
    for name in _IDS:
        setattr(model.generation_config, name, config_value(target.text_config, name))
    if len(ends) > 1:
        model.generation_config.eos_token_id = list(ends)
    if model.dtype == torch.bfloat16:
        notes.append("stored in bfloat16: evaluate it in bfloat16, as its authors ask for lvlm160m-bf16")
    positions = ours.text_config.max_position_embeddings
    if positions < 4096:
        notes.append(
            f"{positions} positions, of which a picture takes {ours.image_seq_length}: longer prompts go past them"
        )
    return model, tuple(dict.fromkeys(notes))


def for_patches(folder: Path, section: LvlmConfig, target: Target) -> Files:
    """`config.json` and tensors of a draft LVLM as it was trained, for vLLM's method `draft_model` with our plugin's
    patches, in mode M or T. In M its own projector reads the target's tower, which vLLM runs once for both, so that the
    draft's tower must be the target's. In T a newline stands for each picture, and no tower is read. Raises
    `UserError`: vLLM would run something else, with patches too; every reason is named.
    """
    from transformers import AutoTokenizer

    model = load_lvlm(folder, **_HELD)
    members = section.mode.members
    reasons = list(_unserved(model, target, members))
    if not reasons and members == ("M",) and reading_of(model.config).projector_input == "tower":
        reasons += _other_tower(model, target, str(folder))
    if reasons:
        hint = ("decode with our own loop, or train one for vLLM: drafter.projector_input: projected and "
                "drafter.first_token: false; on text alone its language model drafts: --prompts text")  # fmt: skip
        raise unserved("vLLM cannot run this draft LVLM with pictures, not even with patches", reasons, folder, hint)
    text, dtype = model.config.text_config, str(model.dtype).removeprefix("torch.")
    values = {key: value for key, value in text.to_dict().items() if key not in _LEFT_OUT}
    values |= {"torch_dtype": dtype, **{name: config_value(target.text, name) for name in _IDS}}
    if members == ("T",):
        place = str(target.place)
        with reading_pretrained(place, "cannot load the target's tokenizer", weights=False):
            tokenizer = AutoTokenizer.from_pretrained(place)
        newline = tokenizer("\n", add_special_tokens=False).input_ids[-1]  # as our loop reads it
        return served_by_plugin(values, "lvlm-t", newline_id=int(newline)), _state(model)
    values = served_by_plugin(values, "lvlm-m", projector_input=reading_of(model.config).projector_input)
    return values, _state(model) | _projector(model)


def _state(model: Any) -> State:
    state = {f"model.{name}": value for name, value in language_model_of(model).state_dict().items()}
    return state | {"lm_head.weight": model.lm_head.weight.detach().clone()}


def _projector(model: PreTrainedModel) -> State:
    return {f"{_PROJECTOR}{name}": value for name, value in trained_projector(model).state_dict().items()}


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
    ours, theirs = model.config, target.config
    if ours.model_type != theirs.model_type:
        yield f"it is a {ours.model_type}, which reads its tower's features with newlines between them"
        return
    for name in ("vision_feature_layer", "vision_feature_select_strategy"):
        here, there = config_value(ours, name), config_value(theirs, name)
        if here != there:
            yield f"its {name} is {here}, and the target's {there}"
    held = stored_tower(target.place, where=where)
    state = {name.removeprefix("vision_model."): value for name, value in model.model.vision_tower.state_dict().items()}
    apart = 0
    for name, value in state.items():
        wanted = held.get(name)  # compared in the target's precision
        apart += wanted is None or value.shape != wanted.shape or not torch.equal(value.to(wanted.dtype), wanted)
    if apart:
        yield f"{apart} of its tower's {len(state)} tensors are not the target's: it has its own, or was trained"
