"""The decoder layer that heads are made of, as a shape that mirrors a target's: its sizes, norms and rotary positions.

Letters: R rows, N new positions, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from ..core.errors import UserError
from ..core.json_types import JsonMapping, JsonObject
from .hub import sees_window


@dataclass(frozen=True)
class LayerShape:
    """The layer's sizes, which mirror its target's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    # "grid": LlamaGen's interleaved rotation by rows and columns; "half": the halves of a head turn together (Llama).
    rope: Literal["grid", "half"] = "half"
    rope_theta: float = 10000.0
    # grid: codes along a side, and positions before the first code whose rotation is zero.
    grid: int = 0
    zeros_before: int = 0
    # A norm before the attention: EAGLE leaves it out where features are already normed; Anole's head keeps it.
    input_norm: bool = False
    # Chameleon's layer norm of queries and keys, with a gain and bias for each head.
    qk_norm: bool = False
    # Whether padded places of the prompt are hidden. LANTERN's LlamaGen heads see them, in training and decoding.
    mask_padding: bool = True
    # Biases of queries, keys and values (Qwen2).
    qkv_bias: bool = False
    # Root mean square norm over the width of each head's queries and keys (Qwen3).
    qk_rms_norm: bool = False
    # Width of a head where it is not hidden_size / num_heads (Qwen3).
    own_head_dim: int | None = None
    # Width of what the attention reads where it is not hidden_size (EAGLE-3: embedding and state beside each other).
    attention_input: int | None = None
    # half: how many frequencies turn by time, row and column (M-RoPE; none: by the place alone), and whether the three
    # alternate (Qwen3-VL).
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    # half: what stretches the rotation, in transformers' words (see `stretched`); None: nothing.
    rope_scaling: JsonObject | None = None
    # Inputs up to each, itself included, that it sees; None: all.
    sliding_window: int | None = None

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.own_head_dim or self.hidden_size // self.num_heads

    def to_dict(self) -> JsonObject:
        """Return the shape as JSON holds it; a window only where it has one, as in files of before there were any."""
        values = {**asdict(self), "mrope_section": list(self.mrope_section)}
        return {name: value for name, value in values.items() if name != "sliding_window" or value is not None}

    def differs_from(self, written: JsonObject) -> tuple[str, object, object] | None:
        """The first field that a head's file gives otherwise, with the file's value and this one's.

        What the file does not say is what layers were before they had the field.
        """
        before = {f.name: f.default for f in fields(self)} | {"mrope_section": []}
        for name, expected in {**before, **self.to_dict()}.items():
            value = written.get(name, before[name])
            if value != expected:
                return name, value, expected
        return None


# Families of transformers' language models whose layers are a Llama's (model_type -> prefix of their classes), but for
# biases of queries, keys and values in one, and norms of heads in another: servers know such heads by these names, too.
QKV_BIASED, NORMS_HEADS = "qwen2", "qwen3"
LLAMA_LIKE = {"llama": "Llama", "mistral": "Mistral", QKV_BIASED: "Qwen2", NORMS_HEADS: "Qwen3"}

# Stretched rotations that a layer knows, and the numbers that each has.
STRETCHED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip


def stretched(rope: JsonMapping, max_positions: int | None = None) -> JsonObject | None:
    """What stretches a rotation given as transformers' `rope_parameters` (or the older `rope_scaling`), None: nothing;
    of a kind that is not in `STRETCHED` the kind alone. A dynamic one is plain up to the length that its model was
    trained for, and counts as plain; so does one that turns a part of each attention head alone (proportional, Gemma
    4). `max_positions` were the original ones where it does not say.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "mrope", "dynamic", "proportional"):
        return None
    known = {"original_max_position_embeddings": max_positions} | {k: v for k, v in rope.items() if v is not None}
    return {"rope_type": kind} | {name: known[name] for name in STRETCHED.get(kind, ()) if name in known}


# What to do about a head that somebody stretched for long prompts, as engines run it.
AT_EXPORT = "one stretched after training (at export) is read once each rope key of its config.json is plain"


def refuse_window(values: JsonMapping, where: str) -> None:
    """Raises `UserError` for a published head whose layer sees a window of positions: ours sees all of the past."""
    if sees_window(values):
        problem = f"the head's layer sees a window of positions alone (sliding_window: {values.get('sliding_window')})"
        raise UserError(problem, where=where, hint="such heads are not read")


def head_window(values: JsonMapping, where: str) -> int | None:
    """The window of a published head's one layer, of its config; None: it sees all. Raises `UserError` where engines
    may differ: a window without `layer_types`, or without a width.
    """
    if not sees_window(values):
        return None
    kinds, window = list(values.get("layer_types") or ()), values.get("sliding_window")
    if kinds != ["sliding_attention"] or not isinstance(window, int):
        problem = f"layer_types is {kinds} and sliding_window {window}: what its layer sees is not said"
        raise UserError(problem, where=where, hint='write "layer_types": ["sliding_attention"] and the width beside it')
    return window


def written_rope(values: JsonMapping, where: Path) -> JsonObject:
    """The rotation that a head's `config.json` names: that of `rope_parameters` (or the older `rope_scaling`), with the
    base from there or from `rope_theta` beside it. Raises `UserError` where two rotations or bases are named, of which
    readers take either (transformers 5: `rope_scaling`, and the inner base), or a part of each attention head turns.
    """
    ropes: list[JsonMapping] = []
    for rope in (values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key)):
        kinds = [one for one in rope.values() if isinstance(one, Mapping)]  # a rotation for each kind of layers
        ropes += [{name: value for name, value in one.items() if value is not None} for one in kinds or [rope]]
    named: JsonObject = {name: value for one in reversed(ropes) for name, value in one.items()}
    # What one leaves out is yarn's default, or the other's M-RoPE.
    said = {"beta_fast": 32, "beta_slow": 1, "truncate": True, **{n: v for n, v in named.items() if "mrope" in n}}
    most = values.get("max_position_embeddings")
    whole = [said | (stretched(one, most) or {}) | {n: v for n, v in one.items() if n in said} for one in ropes]
    if any(one != whole[0] for one in whole):
        problem = f"two rotations are named, of which one is stretched otherwise: {' and '.join(map(str, ropes))}"
        raise UserError(problem, where=str(where), hint="leave the one that the head was trained with")
    for share in (one.get("partial_rotary_factor") for one in (values, *ropes)):
        if share not in (None, 1.0):
            problem = f"partial_rotary_factor is {share}, and a head's layer turns all of each attention head"
            raise UserError(problem, where=str(where), hint="such heads are not read")
    bases = [one["rope_theta"] for one in (*ropes, values) if one.get("rope_theta") is not None]
    if any(base != bases[0] for base in bases):
        problem = f"two rotary bases are named: rope_theta is {' and '.join(dict.fromkeys(map(str, bases)))}"
        raise UserError(problem, where=str(where), hint="keep the one that the head was trained with")
    return named | ({"rope_theta": bases[0]} if bases else {})
