"""Published heads of language models: settings read off their weights, and what no file says asked for.

EAGLE-1/2 (`yuhuili/EAGLE-*`), EAGLE-3 (EAGLE's own, SpecForge's, SGLang's, vLLM's and the speculators format), MSD
(`lucylyn/*`) and ViSpec (`JLKang/*`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ...core.errors import UserError
from ..drafters import AnyDrafter
from ..drafters.eagle3 import Eagle3Config
from ..drafters.head_config import HeadConfig
from ..drafters.head_files import no_lm_head
from ..drafters.head_inputs import Image
from ..drafters.head_module import StateHead
from ..drafters.made_for import OfAnotherTarget
from ..exports.layouts import unfold_fc_bias
from ..hub import rope_of, usual_heads
from ..llamagen.folders import check_shapes, shapes_of
from ..targets.base import language_shape
from .files import State, as_one_layer, check_rope, read_published, theta_of

LanguageHead = Literal["eagle", "eagle3", "peagle", "msd", "vispec"]
LANGUAGE_HEADS: tuple[LanguageHead, ...] = get_args(LanguageHead)
_OF_EAGLE3 = ("eagle3", "peagle")
_TABLES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
# EAGLE-3 variants with other layers: the keys that say so, in files of any origin.
_VARIANTS = ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "use_sp_ulysses")


@dataclass(frozen=True)
class ImportedHead:
    """Args:
    settings: the recipe's `drafter` section, without its path.
    notes: what was decided, and what nobody can know.
    """

    head: StateHead
    config: HeadConfig
    settings: dict[str, Any]
    notes: tuple[str, ...]


def import_head(
    kind: LanguageHead,
    source: str,
    text: Any,
    *,
    embedding: Tensor | None,
    image: Image | None = None,
    sees: bool = True,
    revision: str | None = None,
) -> ImportedHead:
    """A published head in the precision that it is stored in.

    Args:
        source: Hub id or directory.
        text: the target's text config.
        embedding: the target's [V,D]: a head's own copy is compared with it; None: it is not, and that is noted.
        image: what stood at visual tokens in its training; published files do not say. Of `eagle`, `eagle3`, `peagle`.
        sees: the target reads pictures.

    Raises:
        UserError: a file is missing, or the head is of another kind or target.
    """
    folder, values, state = read_published(source, revision)
    where = str(folder)
    notes: list[str] = []
    _check_kind(kind, state, where)
    is_eagle3 = kind in _OF_EAGLE3
    layer = values.get("transformer_layer_config") or values
    if int(layer.get("num_hidden_layers", 1)) != 1 or layer.get("hidden_act", "silu") != "silu":
        raise UserError("not one Llama layer with SiLU", where=where, hint="such heads are not read")
    section, turned = check_rope(layer, text, where)
    if is_eagle3:
        _refuse_variants(values, state, where)
    state = as_one_layer(state, "midlayer." if is_eagle3 else "layers.0.", where)
    _check_tables(state, embedding, is_eagle3, where, notes)
    settings: dict[str, Any] = {"kind": kind, "norm_eps": float(layer.get("rms_norm_eps", 1e-6))}
    settings |= {"rope_theta": theta_of(layer, where), "rope": turned}
    if turned == "plain":
        notes.append("its positions are not stretched as the target's are: rope: plain")
    if is_eagle3:
        settings |= _eagle3(values, state, text, where, notes)
        settings |= _parallel(values, where) if kind == "peagle" else {}
        if section:
            settings["positions"] = "mrope"
            notes.append("its positions are the target's three (mrope_section): positions: mrope")
    else:
        state = _fused(state, where)
        settings |= _fc(state, kind)
    if kind in ("eagle", *_OF_EAGLE3):
        settings |= _at_pictures(kind, image, sees, where)
    settings |= _attention(state, "midlayer" if is_eagle3 else "layers.0", text, where)
    config = cast(HeadConfig, TypeAdapter[Any](AnyDrafter).validate_python(_plain(settings, text)))
    head = _load(config, state, text, where)
    if settings["norm_eps"] != text.rms_norm_eps:
        notes.append(f"norms add {settings['norm_eps']:g}, the target's {text.rms_norm_eps:g}: kept as norm_eps")
    return ImportedHead(head, config, config.model_dump(mode="json", exclude_defaults=True), tuple(notes))


def _check_kind(kind: str, state: State, where: str) -> None:
    """Refuse a head whose weights have names that another kind alone has."""
    told = "eagle3" if any(n in ("d2t", "t2d") or n.startswith("midlayer.") for n in state) else None
    told = "vispec" if any(name.startswith("imadpt.") for name in state) else told
    told = "peagle" if "mask_hidden" in state else told
    joined = state.get("fc.weight")
    if told is None and kind in _OF_EAGLE3 and joined is not None and joined.shape[1:] == (2 * len(joined),):
        told = "eagle"  # or MSD: they differ in nothing that a file says
    if told is not None and told != kind:
        raise UserError(f"the folder holds a head of kind {told}, and {kind} is asked for", where=where,
                        hint=f"read it as {told}: --as {told}, or drafter.kind: {told} in a recipe")  # fmt: skip


def _plain(settings: dict[str, Any], text: Any) -> dict[str, Any]:
    """Without what is the target's anyway."""
    rope = rope_of(text)
    same = {"norm_eps": text.rms_norm_eps, "rope_theta": float(rope.get("rope_theta") or 10000.0)}
    return {name: value for name, value in settings.items() if same.get(name) != value}


def _check_tables(state: State, embedding: Tensor | None, is_eagle3: bool, where: str, notes: list[str]) -> None:
    """Take the target's tables out, after a look whether they are the target's."""
    own = state.pop("embed_tokens.weight", None)
    for name in _TABLES:
        if name in state and not (is_eagle3 and name == "lm_head.weight"):
            del state[name]
            notes.append(f"{name} is left out: the target's own scores are used")
    if own is None:
        return
    if embedding is None:
        notes.append("its copy of the embedding was not compared with the target's, whose weights were not given")
        return
    rows = min(len(own), len(embedding))
    if own.shape[1:] != embedding.shape[1:]:
        raise UserError(f"its embeddings are {list(own.shape)}, the target's {list(embedding.shape)}", where=where,
                        hint="name the target that it was trained for")  # fmt: skip
    # Rows after the tokens are padding, which conversions draw anew: most of the others must agree.
    apart = (own[:rows].float() - embedding[:rows].float()).abs().amax(1) > 1e-2
    if float(apart.float().mean()) > 0.01:
        raise OfAnotherTarget(
            f"{int(apart.sum())} of its {rows} rows of embedding are not the target's", where=where,
            hint="name the target that it was trained for (a chat model and its base model differ, too)",
        )  # fmt: skip


def _fused(state: State, where: str) -> State:
    """A head in vLLM's layout keeps fc's bias in its attention."""
    if "layers.0.self_attn.o_proj.bias" not in state:
        return state
    if "fc.bias" in state or "layers.0.input_layernorm.weight" in state:
        raise UserError("the attention's output has a bias of its own", where=where, hint="such heads are not read")
    return unfold_fc_bias(state)


def _fc(state: State, kind: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "fc_bias": "fc.bias" in state,
        "input_norm": "layers.0.input_layernorm.weight" in state,
    }
    if kind == "vispec" and "imadpt.q" in state:
        settings["num_queries"] = len(state["imadpt.q"])
    return settings


def _attention(state: State, layer: str, text: Any, where: str) -> dict[str, Any]:
    key, gate = f"{layer}.self_attn.k_proj.weight", f"{layer}.mlp.gate_proj.weight"
    if key not in state or gate not in state:
        held = ", ".join(sorted(state)[:4])
        raise UserError(f"{key} is missing; the file begins with {held}", where=where, hint="give the folder of a head")
    own, width = usual_heads(text)
    heads = state[key].shape[0] // width
    settings: dict[str, Any] = {"qkv_bias": f"{layer}.self_attn.q_proj.bias" in state}
    if heads != own:
        if heads != text.num_attention_heads:
            raise UserError(
                f"{heads} heads of keys and values, the target has {own} for "
                f"{text.num_attention_heads} of queries", where=where, hint="name the target that it was trained for",
            )  # fmt: skip
        settings["kv_heads"] = "mha"
    if state[gate].shape[0] != text.intermediate_size:
        settings["intermediate_size"] = state[gate].shape[0]
    return settings


def _at_pictures(kind: str, image: Image | None, sees: bool, where: str) -> dict[str, Any]:
    if not sees:
        return {"visual_slots": "read"} if kind in _OF_EAGLE3 else {}
    if image is None:
        raise UserError(
            "what stood at pictures in this head's training is in none of its files, and a mismatch shows nowhere",
            where=where,
            hint="say --image placeholder (vLLM's way: AngelSlim, speculators, heads trained on text alone) or --image "
            "projected (SGLang's: SpecForge)",
        )
    return {"image": image} | ({"visual_slots": "read"} if kind in _OF_EAGLE3 else {})


def _refuse_variants(values: dict[str, Any], state: State, where: str) -> None:
    variants = [name for name in _VARIANTS if values.get(name)] + [
        n for n in state if n.startswith(("fc_norm", "input_norm"))
    ]
    if variants:
        raise UserError(f"a variant of EAGLE-3 with other norms ({variants[0]})", where=where, hint="it is not read")
    before = values.get("norm_before_residual")
    if before is None and "speculators_model_type" in values:
        raise UserError(
            "norm_before_residual is not written: vLLM takes it for true, the speculators package for false",
            where=where, hint="write into its config.json which it was trained with",
        )  # fmt: skip
    if before:
        raise UserError("its residual is the normed state (norm_before_residual), and ours the state itself",
                        where=where, hint="such heads are not read")  # fmt: skip
    if values.get("target_hidden_size") not in (
        None,
        (values.get("transformer_layer_config") or values)["hidden_size"],
    ):
        raise UserError("it is narrower than its target (target_hidden_size)", where=where, hint="it is not read")


def _eagle3(values: dict[str, Any], state: State, text: Any, where: str, notes: list[str]) -> dict[str, Any]:
    taps = _taps(values, where, notes)
    settings: dict[str, Any] = {} if taps is None else {"taps": taps}
    if taps is None:
        taken = Eagle3Config(kind="eagle3").layers_of(language_shape(text))
        notes.append(f"names no layers: {taken}, the default of every engine, are taken")
    rows = text.vocab_size
    if "lm_head.weight" not in state:
        is_whole = len(state["d2t"]) == rows if "d2t" in state else values.get("draft_vocab_size", 0) in (None, rows)
        hint = no_lm_head(rows) if is_whole else "EAGLE-3 brings its own; is this EAGLE-1?"
        raise UserError("lm_head.weight is missing", where=where, hint=hint)
    state |= _vocabulary(state, rows, where, notes)
    return settings


def _parallel(values: dict[str, Any], where: str) -> dict[str, Any]:
    """P-EAGLE's mask, and how many tokens a pass drafts where the file says."""
    mask = next((values[name] for name in ("pard_token", "mask_token_id", "ptd_token_id") if name in values), None)
    if mask is None:
        raise UserError("no id of a mask: pard_token or mask_token_id is missing", where=where,
                        hint="fetch its config.json again; is it EAGLE-3?")  # fmt: skip
    asked = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = asked[0].get("speculative_tokens")
    return {"mask_token_id": int(mask)} | ({"parallel_tokens": int(count)} if count else {})


def _taps(values: dict[str, Any], where: str, notes: list[str]) -> tuple[int, int, int] | None:
    """Ids at the top level count what enters a layer (vLLM), those of eagle_config what leaves it (SGLang)."""
    nested = values.get("eagle_config") or {}
    # vLLM reads them under this name, too, and counts them as at the top level.
    top = values.get("eagle_aux_hidden_state_layer_ids") or nested.get("layer_ids")
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    if inner is not None:
        raised = [one + 1 for one in inner]
        if top is not None and list(top) != raised:
            raise UserError(
                f"eagle_aux_hidden_state_layer_ids are {list(top)}, and {list(inner)} in eagle_config, which count one "
                "less: they name different layers", where=where, hint="remove the wrong one from its config.json",
            )  # fmt: skip
        notes.append(f"layers {list(inner)} of eagle_config count what leaves a layer: {raised} here")
        top = raised
    if top is None:
        return None
    if len(top) != 3:
        raise UserError(f"it joins {len(top)} layers, {list(top)}", where=where, hint="three are what is read")
    return tuple(sorted(top))  # type: ignore[return-value]


def _vocabulary(state: State, rows: int, where: str, notes: list[str]) -> State:
    """d2t as an offset and t2d as a mask. Raises `UserError` where they contradict each other or the target."""
    size = len(state["lm_head.weight"])
    offset = state.get("d2t")
    if offset is None:
        if size != rows:
            raise UserError(f"{size} draft tokens and no d2t to say which of the target's {rows}", where=where,
                            hint="fetch the whole checkpoint")  # fmt: skip
        offset = torch.zeros(size, dtype=torch.int64)
    offset, known = offset.long(), state.get("t2d")
    ids = offset + torch.arange(size)
    if known is not None and not _names(ids, known, rows) and _names(offset, known, rows):
        ids = offset
        notes.append("d2t held the target's ids themselves; engines read offsets, and would propose other tokens")
    if len(ids) != size or not bool(((ids >= 0) & (ids < rows)).all()) or len(ids.unique()) != size:
        raise UserError(f"d2t leads out of the target's {rows} ids, or twice to one", where=where,
                        hint="name the target that it was trained for")  # fmt: skip
    if known is not None and not _names(ids, known, rows):
        raise UserError("d2t and t2d name different tokens", where=where, hint="fetch the checkpoint again")
    if not bool((ids.diff() > 0).all()):
        order = ids.argsort()
        ids, state["lm_head.weight"] = ids[order], state["lm_head.weight"][order]
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": mask, "lm_head.weight": state["lm_head.weight"]}


def _names(ids: Tensor, known: Tensor, rows: int) -> bool:
    inside = bool(((ids >= 0) & (ids < min(rows, len(known)))).all())
    return inside and int(known.sum()) == len(ids) and bool(known.bool()[ids].all())


def _load(config: HeadConfig, state: State, text: Any, where: str) -> StateHead:
    ids = state["d2t"] + torch.arange(len(state["d2t"])) if config.is_eagle3 else None
    head = config.module(config.layer(language_shape(text)), ids)
    check_shapes(
        shapes_of(state), shapes_of(head.state_dict()), where=where,
        what=f"not a head of kind {config.kind} for this target: ",
        hint="give --as and --target that it was trained as and for",
    )  # fmt: skip
    head.load_state_dict(state)
    return head.to(next(v.dtype for v in state.values() if v.is_floating_point())).eval()
