"""Published DFlash drafts: their native layout (`z-lab/*-DFlash`) and speculators'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ...core.errors import UserError
from ..drafters.dflash import DflashConfig
from ..drafters.dflash_files import native_values, settings_of
from ..drafters.dflash_module import DflashHead
from ..hub import rope_of, usual_heads
from ..llamagen.folders import CONFIG
from ..targets.base import language_shape
from .published_head import check_rope, read_published, theta_of


def import_dflash(
    source: str, text: Any, *, revision: str | None = None
) -> tuple[DflashHead, DflashConfig, dict[str, Any], tuple[str, ...]]:
    """A published draft in the precision that it is stored in: the head, its config, the recipe's section and notes.

    Args:
        source: Hub id or directory.
        text: the target's text config.

    Raises:
        UserError: a file is missing, or the draft is of another kind or target.
    """
    folder, values, state = read_published(source, revision)
    where, path = str(folder), folder / CONFIG
    values = native_values(values, path)
    if "hidden_norm.weight" not in state or not values.get("dflash_config"):
        raise UserError("no DFlash draft: hidden_norm.weight or dflash_config is missing", where=where,
                        hint="give --as the kind that it was published as")  # fmt: skip
    settings: dict[str, Any] = {"kind": "dflash"}
    settings |= {name: value for name, value in settings_of(values, path).items() if value is not None}
    sections, rope = check_rope(values, text, where)
    if sections:
        raise UserError("its positions turn by three (mrope_section)", where=where, hint="such drafts are not read")
    target = rope_of(text)
    notes = [f"layers {values['dflash_config']['target_layer_ids']} count what leaves a layer: {settings['taps']} here"]
    if "d2t" in state:
        settings["draft_vocab_size"] = len(state["d2t"])
    if (eps := float(values.get("rms_norm_eps", 1e-6))) != text.rms_norm_eps:
        settings["norm_eps"] = eps
    if (theta := theta_of(values, where)) != float(target.get("rope_theta") or 10000.0):
        settings["rope_theta"] = theta
    if rope != "target":
        settings["rope"] = rope
    if settings.get("intermediate_size") == text.intermediate_size:
        del settings["intermediate_size"]
    if values.get("num_key_value_heads") not in (None, usual_heads(text)[0]):
        settings["kv_heads"] = "mha"  # compared with the weights' shapes below
    config = DflashConfig.model_validate(settings)
    stored = next(value.dtype for value in state.values() if value.is_floating_point())
    beside: Any = SimpleNamespace(shape=language_shape(text), embedding=torch.empty(0, text.hidden_size))
    return config.read(folder, beside, stored, None).eval(), config, settings, tuple(notes)
