"""LANTERN's drafters of LlamaGen and Anole (`jadohu/*`): EAGLE heads with an embedding of their own.

Their loader takes the first file of a target that it finds, and in LlamaGen's that is the LM head: the rows that a head
was trained with are those in its checkpoint, and may differ from the target's.
"""

from __future__ import annotations

import torch

from ...core.errors import UserError
from ...core.json_types import JsonObject
from ..drafters.eagle import EagleConfig
from ..drafters.eagle_images import ImageEagleHead, load_eagle
from ..targets.base import TargetShape
from .source import read_published


def to_ours(
    source: str, mirrored: TargetShape, *, revision: str | None = None
) -> tuple[ImageEagleHead, JsonObject, tuple[str, ...]]:
    """The head, the recipe's `drafter` section without its path, and what nobody can know of it. `mirrored`: of the
    target that it was trained for. Raises `UserError`: a file is missing, or it was trained for another target.
    """
    folder, values, state = read_published(source, revision)
    if "embed_tokens.weight" not in state:
        raise UserError("embed_tokens.weight is missing, and may not have been the target's", where=str(folder),
                        hint="fetch the whole checkpoint")  # fmt: skip
    settings: JsonObject = {"kind": "eagle"}
    named = {"intermediate_size": values.get("intermediate_size"), "num_heads": values.get("num_attention_heads"),
             "norm_eps": values.get("rms_norm_eps")}  # fmt: skip
    plain = EagleConfig(kind="eagle").layer(mirrored)
    same = {"intermediate_size": plain.intermediate_size, "num_heads": plain.num_heads, "norm_eps": plain.norm_eps}
    settings |= {name: value for name, value in named.items() if value not in (None, same[name])}
    if plain.num_kv_heads not in (plain.num_heads, values.get("num_key_value_heads")):
        settings["kv_heads"] = "mha"
    config = EagleConfig.model_validate(settings)
    shape = config.layer(mirrored)
    kind, codes, wanted = values.get("input_type"), values.get("block_size"), mirrored.grid**2
    by_cell = shape.rope == "grid"  # LlamaGen's turn by the cell of the picture, Anole's by the place in the text
    if by_cell and kind is not None:
        condition = "class" if kind == "c2i" else "text"
        if condition != mirrored.condition or (codes is not None and int(codes) != wanted):
            raise UserError(
                f"it drafts {codes or 'some'} codes of {condition}-conditional pictures (input_type {kind}), and the "
                f"target draws {wanted} of {mirrored.condition}-conditional ones: its positions would be others",
                where=str(folder), hint="name the target that it was trained for",
            )  # fmt: skip
    head = load_eagle(folder, torch.zeros(shape.vocab_size, shape.hidden_size), shape, config)
    head.to(state["fc.weight"].dtype)
    notes = ["keeps its own embedding, which need not be the target's: the one that it was trained beside"]
    if not by_cell:
        notes.append(
            "LANTERN's data loader for Anole pairs a feature with its own token, decoding with the next one; which "
            "script trained this head is not said: measure tau before trusting it"
        )
    return head, settings, tuple(notes)
