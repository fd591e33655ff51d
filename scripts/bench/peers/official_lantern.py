"""jadohu/LANTERN's `generate`: EAGLE-2's tree over a text-conditional LlamaGen of 16 x 16 codes, exact and relaxed.

Captions fill all 120 places: at shorter ones a padded place attends to itself in our target and to nothing in theirs,
which their head, and ours, sees. Their relaxed greedy rule indexes with a table of uint16, which torch refuses: the
table that it reads here is int64.
"""

from __future__ import annotations

import argparse
import random
import types
from pathlib import Path
from typing import Any

import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.eval.lantern import Lantern, LanternConfig
from draftsmith.eval.loop import Decoding
from draftsmith.eval.policies import Draw, Dynamic
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.neighbours import NeighbourTable
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.targets.llamagen.lantern_layout import to_lantern
from draftsmith.models.targets.llamagen.target import LlamaGenTarget
from draftsmith.models.targets.llamagen.transformer import LlamaGen, LlamaGenConfig
from peers.clones import LANTERN, accepted_by, clone, empty_module, joined
from peers.ours import SIZES, side
from peers.pairs import DRAFT, SCORES, TARGET, Answer, Profile, Side, compare
from torch import nn
from transformers import LlamaConfig, set_seed

CODES, NEIGHBOURS, DELTA, GUIDANCE, FEATURES = 16384, 1000, 0.1, 3.0, 64
TREE = {"total": 60, "depth": 4, "width": 10}


def official_lantern(size: str, arguments: argparse.Namespace) -> list[Profile]:
    """Exact and relaxed, greedy and sampled."""
    sizes = SIZES[size]
    config = LlamaGenConfig(
        num_layers=4, num_heads=sizes["num_attention_heads"], dim=sizes["hidden_size"], caption_dim=FEATURES,
        init_std=0.06, ffn_hidden=sizes["intermediate_size"], vocab_size=CODES, grid=16, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    model = LlamaGen(config)
    model.reset_parameters(torch.Generator().manual_seed(arguments.seed))
    nn.init.normal_(model.output.weight, std=0.06)
    target = LlamaGenTarget(model, Guidance(GUIDANCE))
    drafts = EagleConfig(kind="eagle")
    head = drafts.build(target).eval().requires_grad_(False)
    drafter = drafts.drafter(head, target)
    official = _official(arguments.peers, model, head)
    table = torch.randint(CODES, (CODES, NEIGHBOURS + 1), generator=torch.Generator().manual_seed(0))
    official.nearest_latents = table.numpy()
    accepted = accepted_by(official)
    relaxed = LanternConfig(kind="lantern", k=NEIGHBOURS, delta=DELTA, residual="reference")
    modules = {TARGET: (model.cls_embedding, *model.layers, model.norm), DRAFT: (head.fc, *head.layers)}
    own_work = {part: [(module, "forward") for module in made_of] for part, made_of in modules.items()}
    own_work[SCORES] = [(model.output, "forward")]
    profiles = []
    for name in ("exact", "relaxed"):
        for temperature in (0.0, 1.0):
            rule: Any = RULES["sampling" if temperature else "greedy"]
            if name == "relaxed":
                rule = Lantern(relaxed, NeighbourTable(table.int()), not temperature)
            decoding = Decoding(Dynamic(**TREE), rule, Draw("top-k"), Warp(temperature, NEIGHBOURS), 1, ())

            def theirs(number: int, tokens: int, name: str = name, temperature: float = temperature) -> Answer:
                set_seed(number)
                random.seed(number)
                accepted.clear()
                codes, _, _ = official.generate(
                    [str(number)], max_length=tokens, temperature=temperature, top_k=NEIGHBOURS, top_p=1.0,
                    cfg=GUIDANCE, lantern=name == "relaxed", lantern_k=NEIGHBOURS, lantern_delta=DELTA,
                )  # fmt: skip
                return Answer(codes[0].tolist(), [int(count) for count in accepted])

            what = f"LANTERN's loop ({name}), {size}, {CODES} codes, T {temperature:g}"
            mine = side(target, drafter, decoding, lambda number: ImageRequest(_caption(number), "1"), own_work)
            other = Side([(official.base_model.model, "forward")], theirs)
            profiles.append(compare(what, mine, other, arguments, goal=0.65, equal=not temperature))
    return profiles


def _caption(number: int) -> torch.Tensor:
    return torch.randn(120, FEATURES, generator=torch.Generator().manual_seed(number))


class _Captions:
    """In the place of their T5: random features."""

    def __init__(self, **_: Any):
        pass

    def get_text_embeddings(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """[1,120,F] and their mask [1,120]."""
        return _caption(int(prompts[0]))[None], torch.ones(1, 120, dtype=torch.int64)


def _official(peers: Path, model: LlamaGen, head: nn.Module) -> Any:
    """Their model with the same weights."""
    folder = clone(peers, LANTERN)
    # Their package imports all of its models, and some need what is not here: only LlamaGen's files are read.
    empty_module("models", folder / "models")
    empty_module("models.base_models.llamagen.t5", T5Embedder=_Captions)
    from models.drafters.cnets_llamagen import Model  # type: ignore[import-not-found]
    from models.ea_model_llamagen import EaModel  # type: ignore[import-not-found]
    from models.kv_variants.modeling_llamagen_kv import LlamaForCausalLM as Generator  # type: ignore[import-not-found]

    weights, values = to_lantern(model.state_dict(), model.config)
    config = LlamaConfig(**values, max_position_embeddings=512, pad_token_id=None)
    more = {
        "token_dropout_p": 0.0, "ffn_dropout_p": 0.0, "resid_dropout_p": 0.0, "class_dropout_p": 0.0,
        "n_positions": 512, "n_layers": 4, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 1e4,
        "qkv_bias": False, "num_labels": 2, "use_cache": True,
    }  # fmt: skip
    for name, value in more.items():
        setattr(config, name, value)
    config._attn_implementation = "eager"
    base = Generator(config).eval()
    unknown = base.load_state_dict(weights, strict=False)
    assert not unknown.missing_keys, unknown.missing_keys
    plain = types.SimpleNamespace(**config.to_dict() | values | more | {"num_hidden_layers": 1, "rms_norm_eps": 1e-6})
    layer = Model(plain, bias=True, total_tokens=TREE["total"], depth=TREE["depth"], top_k=TREE["width"]).eval()
    return joined(EaModel, base, layer, config, head.state_dict())
