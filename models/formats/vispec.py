"""A ViSpec head where no prompt has a picture: an EAGLE head, which engines know.

Before the first picture the global vector is zero, so that `img_fc` is one linear map of the state, and goes into fc:
fc [E ; W f + b] = [fc_E, fc_f W] [E ; f] + (fc_b + fc_f b).
"""

from __future__ import annotations

from dataclasses import replace

from ..drafters.base import TargetIdentity
from ..drafters.eagle import EagleConfig
from ..drafters.head_files import manifest_of
from ..drafters.vispec import VispecHead
from .source import Source

# Settings that an EAGLE head has, too; its fc always has a bias here.
_SHARED = ("input_norm", "kv_heads", "qkv_bias", "intermediate_size", "norm_eps", "rope", "rope_theta", "positions")


def without_pictures(source: Source) -> Source:
    """The EAGLE head that equals this ViSpec head on prompts without pictures, computed in float32."""
    head: VispecHead = source.head
    settings = {name: dict(source.config)[name] for name in _SHARED}
    config = EagleConfig(kind="eagle", fc_bias=True, image="placeholder", **settings)
    width, state = head.shape.hidden_size, {name: value.float() for name, value in head.state_dict().items()}
    own = {name: value for name, value in state.items() if not name.startswith(("imadpt.", "img_fc."))}
    of_state = state["fc.weight"][:, width:]
    own["fc.weight"] = own["fc.weight"].clone()
    own["fc.weight"][:, width:] = of_state @ state["img_fc.weight"][:, :width]
    own["fc.bias"] = state.get("fc.bias", 0.0) + of_state @ state["img_fc.bias"]
    made = config.module(config.layer(source.target.shape), None)
    made.load_state_dict(own)
    about = source.manifest
    identity = TargetIdentity(about.get("target") or {}, about.get("tokenizer_sha256"))
    written = manifest_of(config, source.target.shape, identity, drafter=config.model_dump(mode="json"))
    return replace(source, config=config, head=made.to(head.dtype).eval(), manifest=about | written)
