"""Tiny image generators, heads and requests for the visual track's tests; real classes, no mocks of our own code.

Letters: B samples, R rows, N positions, K places seen, C condition tokens, n image codes, D width, V codes.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from decodings import greedy
from draftsmith.core.batch import CodeBatch, ImageRequest, StepLoss
from draftsmith.core.states import Taps, TargetStates
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dspark import DsparkConfig
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.targets.anole.target import AnoleTarget
from draftsmith.models.targets.llamagen.target import LlamaGenTarget
from draftsmith.models.targets.llamagen.transformer import LlamaGen, LlamaGenConfig, pad_left
from torch.nn import functional as F
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

VECTORS = Path(__file__).parents[1] / "models"
EAGLE, MEDUSA = EagleConfig(kind="eagle"), MedusaConfig(kind="medusa")
DFLASH = DflashConfig(kind="dflash", block_size=5, num_layers=2, taps=(1, 2))
DSPARK = DsparkConfig(kind="dspark", block_size=4, num_layers=2, taps=(1, 2), markov_rank=8, markov_above=True)


def arrays(file: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """The arrays of one folder of a recorded file, under their names in it."""
    with np.load(VECTORS / file, allow_pickle=False) as archive:
        names = [name for name in archive.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): torch.from_numpy(np.array(archive[name])) for name in names}


def llamagen(
    condition: str = "class",
    seed: int = 0,
    *,
    grid: int = 4,
    vocab: int = 24,
    dim: int = 32,
    heads: int = 2,
    loud: float = 0.35,
) -> LlamaGen:
    """Random weights whose scores follow the condition, the cell and the codes before it; `loud` sharpens them."""
    config = LlamaGenConfig(
        num_layers=2, num_heads=heads, dim=dim, ffn_hidden=2 * dim, vocab_size=vocab, grid=grid, condition=condition,
        num_classes=5, caption_dim=12, caption_slots=6, init_std=0.5, dropout=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model = LlamaGen(config).eval()
    model.reset_parameters(generator)
    torch.nn.init.normal_(model.output.weight, std=loud, generator=generator)
    return model


def target(model: LlamaGen, scale: float = 1.0, interval: int = -1) -> LlamaGenTarget:
    return LlamaGenTarget(model, Guidance(scale, interval))


def anole(seed: int = 0, *, scale: float = 3.0, heads: int = 2, kv_heads: int = 2, grid: int = 4) -> AnoleTarget:
    """A tiny Chameleon whose ids are the published ones as far as they go: 16 codes from id 4 on, `grid` a side."""
    names = {f"IMGIMG{''.join('ABCDEFGHIJ'[int(digit)] for digit in str(code))}Z": code + 4 for code in range(16)}
    names |= {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<image>": 23}
    names |= {"<eoss>": 20, "<racm3:break>": 21, "<reserved08706>": 22, **{f"w{i}": i for i in range(24, 34)}}
    vq = {
        "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8, "embed_dim": 4,
        "num_embeddings": 16, "resolution": 2 * grid, "attn_resolutions": [],
    }  # fmt: skip
    config = ChameleonConfig(
        vocab_size=34, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=128, vq_config=vq, vocabulary_map=names, pad_token_id=1,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = ChameleonForConditionalGeneration(config).eval()
    model.lm_head.weight.data *= 2
    return AnoleTarget(model, guidance=Guidance(scale), num_image_tokens=grid**2)


def request(model: LlamaGen, seed: int = 0) -> ImageRequest:
    config = model.config
    if config.condition == "class":
        return ImageRequest(torch.tensor(seed % config.num_classes), name=f"r{seed}")
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, config.caption_slots + 1, (), generator=generator))
    return ImageRequest(torch.randn(count, config.caption_dim, generator=generator), name=f"r{seed}")


def plain(target: LlamaGenTarget, asked: ImageRequest) -> list[int]:
    """A whole image by plain greedy decoding."""
    return generate(target, None, asked, greedy(Chain(1), target.num_codes)).tokens


def code_batch(
    model: LlamaGen, codes: torch.Tensor, *, uncond: torch.Tensor | None = None, real: torch.Tensor | None = None
) -> CodeBatch:
    """`codes` [B,n] under the requests of seeds 0 to B - 1."""
    count = len(codes)
    return CodeBatch(
        codes, tuple(request(model, seed).condition for seed in range(count)),
        torch.zeros(count, dtype=torch.bool) if uncond is None else uncond,
        torch.ones(count, dtype=torch.bool) if real is None else real,
        tuple(map(str, range(count))), codes.shape[1] - 1, tuple(range(count)),
    )  # fmt: skip


def step_of(training: torch.nn.Module, target: LlamaGenTarget | AnoleTarget, batch: CodeBatch) -> StepLoss:
    """One training forward as the loop calls it, with the states that its loss needs."""
    taps = Taps(feature=True, without_condition=bool(getattr(training.config, "guided", 0)))
    if isinstance(training.config, DflashConfig):
        taps = training.config.taps_for(target.shape, training=True)
    return training(batch, target.states(batch, taps))


def sequence(target: LlamaGenTarget | AnoleTarget, batch: CodeBatch, uncond: torch.Tensor) -> TargetStates:
    """The target's states, where the rows of `uncond` [B] lose their condition."""
    return target.states(replace(batch, uncond=uncond), Taps(feature=True))


def trained(target: LlamaGenTarget, config: EagleConfig | MedusaConfig, *, steps: int, seed: int = 0, lr: float = 5e-3):
    """A head that agrees with the target now and then, trained on its own greedy images; and its losses."""
    torch.manual_seed(seed)
    head = config.build(target)
    training = config.training_objective(head, target).train()
    weights = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=lr)
    codes = torch.tensor([plain(target, request(target.model, number)) for number in range(5)])
    batch, losses = code_batch(target.model, codes), []
    for step in range(steps):
        loss = step_of(training, target, replace(batch, seeds=tuple(range(5 * step, 5 * step + 5))))
        optimizer.zero_grad()
        (loss.loss_sum / loss.num_tokens).backward()
        optimizer.step()
        losses.append(float(loss.loss_sum.detach() / loss.num_tokens))
    return head.requires_grad_(False), losses


def embedded(model: LlamaGen, condition: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots [R,C,D] of the conditional and, for two rows, the unconditional view; and the caption's mask [R,C]."""
    uncond = torch.tensor([False, True])[:rows]
    if model.config.condition == "class":
        return model.cls_embedding(condition.expand(rows), uncond), None
    features, mask = pad_left([condition], model.config.num_condition_tokens)
    return model.cls_embedding(features.expand(rows, -1, -1), uncond), mask.expand(rows, -1)


@torch.no_grad()
def true_features(model: LlamaGen, condition: torch.Tensor, rows: int, codes: list[int]) -> torch.Tensor:
    """[R,C+len(codes),D] by one teacher-forced pass without a cache."""
    num_condition, mask = embedded(model, condition, rows)
    return model.states(num_condition, torch.tensor(codes, dtype=torch.int64).expand(rows, -1), mask).feature


def published(kind: str, case: str) -> SimpleNamespace:
    """A recorded LlamaGen (t2i or c2i, a or b): model, arrays, and the request of each sample."""
    result = arrays(f"vectors_llamagen/{kind}.npz", f"{case}/")
    sizes = {name.removeprefix("cfg/"): value.item() for name, value in result.items() if name.startswith("cfg/")}
    text = kind == "t2i"
    own = (
        {"condition": "text", "caption_dim": sizes["caption_dim"], "caption_slots": sizes["cls_token_num"]}
        if text
        else {"condition": "class", "num_classes": sizes["num_classes"]}
    )
    model = LlamaGen(
        LlamaGenConfig(
            num_layers=sizes["n_layer"], num_heads=sizes["n_head"], dim=sizes["dim"], ffn_hidden=sizes["ffn_hidden"],
            vocab_size=sizes["vocab_size"], grid=sizes["grid"], norm_eps=sizes["norm_eps"],
            rope_base=sizes["rope_base"], dropout=0, **own,
        )
    ).eval()  # fmt: skip
    model.load_state_dict({n.removeprefix("weights/"): v for n, v in result.items() if n.startswith("weights/")})
    if text:
        lengths = result["caption_mask_raw"].sum(-1).int().tolist()
        conditions = [rows[:n] for rows, n in zip(result["caption_features_raw"], lengths, strict=True)]
    else:
        conditions = list(result["labels"])
    return SimpleNamespace(model=model, arrays=result, requests=[ImageRequest(c) for c in conditions])


class LmHead:
    """The part of a target that heads use: its LM head under guidance, with ids that must not come."""

    def __init__(self, weight: torch.Tensor, guidance: Guidance, allowed: slice = slice(None)):
        self.weight, self.guidance = weight, guidance
        self.banned = torch.ones(len(weight), dtype=torch.bool)
        self.banned[allowed] = False

    def scores(self, feature: torch.Tensor) -> torch.Tensor:
        return F.linear(feature, self.weight)

    def guided(self, feature: torch.Tensor, steps) -> torch.Tensor:
        return self.guidance(self.scores(feature), steps).masked_fill(self.banned, float("-inf"))
