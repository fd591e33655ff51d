"""Muon beside AdamW: which weights it trains, stops and ranks, what is refused, and its dry run."""

from dataclasses import replace

import pytest
import torch
from draftsmith.models import stored
from draftsmith.models.targets.base import language_shape
from draftsmith.models.targets.llamagen.transformer import LlamaGen, published
from draftsmith.recipes.config.load import load
from draftsmith.recipes.config.plan import plan
from draftsmith.trainers.estimate.counted import META, flops
from draftsmith.trainers.train.fit import OptimConfig, build_optimizer
from draftsmith.trainers.train.muon import Float32Muon, is_hidden, newton_schulz_flops, orthogonal
from fails import fails_with
from heads_tiny import SETTINGS, config_of, text_config
from pydantic import ValidationError
from ranks_run import run_ranks
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode
from training import BATCH, engine, module, run

VALUES = {"name": "muon", "lr": 1e-2, "eps": 1e-3, "warmup_steps": 1, "clip_norm": 0.3}
MUON = OptimConfig(**VALUES)
SMOLLM2 = ["recipe=demo/smollm2-full", "stages.eagle3.optim.name=muon", "engine.precision=fp32"]
BLOCKS = {
    "dflash": {"kind": "dflash", "draft_vocab_size": 20, "confidence": {}},
    "dspark": {"kind": "dspark", "markov_rank": 6, "markov_head_type": "gated", "draft_vocab_size": 20},
    "dflash2": {"kind": "dflash2", "conv_group_size": 8, "selector_rank": 4},
    "medusa": {"kind": "medusa", "draft_vocab_size": 20},
}


@pytest.mark.parametrize("name", [*SETTINGS, *BLOCKS])
def test_every_matrix_but_tables_heads_and_norms_is_hidden(name):
    head = config_of(**(SETTINGS | BLOCKS)[name]).empty(language_shape(text_config(vocab=71)))
    others = [m for m in head.modules() if isinstance(m, nn.Embedding) or "Norm" in type(m).__name__]
    others = {id(p) for m in others for p in m.parameters()}
    for part, weight in head.named_parameters():
        expected = weight.dim() == 2 and not {1, 71, 20} & {*weight.shape} and id(weight) not in others
        assert is_hidden(part, weight) == expected, part
    assert any(is_hidden(*one) for one in head.named_parameters())
    assert not is_hidden("layer.self_attn.q_norm.weight", torch.zeros(4, 8)), "a gain for each head"


TWO_RANKS = f"""
import os, torch
from pathlib import Path
from draftsmith.trainers.train.fit import OptimConfig
from training import module, run

_, weights, _ = run(Path("none"), steps=3, micro=2, model=module(noisy=False), optim=OptimConfig(**{VALUES}))
torch.save(weights, f"rank{{os.environ['RANK']}}.pt")
"""


def test_two_ranks_agree_with_one(tmp_path):
    _, one, _ = run(tmp_path, steps=3, model=module(noisy=False), optim=MUON)
    for code, text in run_ranks(2, TWO_RANKS, cwd=tmp_path):
        assert code == 0, text[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    for name, value in one.items():  # a step moves a weight by about 2e-3
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("precision", "micro"), [("fp32", 2), ("bf16", BATCH)])
def test_a_stopped_training_goes_on_bit_for_bit(precision, micro, tmp_path):
    def die(step):
        assert step < 4

    asked = {"steps": 5, "precision": precision, "micro": micro, "optim": MUON}
    losses, weights, _ = run(tmp_path / "alone", **asked)
    with pytest.raises(AssertionError):
        run(tmp_path / "stopped", **asked, every=3, log=die)
    seen, resumed, _ = run(tmp_path / "stopped", **asked, every=3)
    assert seen == {step: losses[step] for step in (4, 5)}
    assert all(torch.equal(resumed[name], value) for name, value in weights.items())


def test_of_a_generator_matrices_of_its_layers_are_hidden():
    for condition, captions in (("class", 0), ("text", 2)):
        with torch.device(META):
            named = LlamaGen(published("B", condition=condition)).named_parameters()
        hidden = [name for name, weight in named if is_hidden(name, weight)]
        assert sum(name.startswith("layers.") for name in hidden) == 12 * 5 == len(hidden) - captions


def test_what_makes_no_sense_is_refused():
    for zero, said in ((1, "zero_stage hands"), (3, "zero_stage hands"), (0, "bf16 with several micro-batches")):
        fails_with(said, engine, module(noisy=False), MUON, steps=1, zero=zero, precision="bf16")
    fails_with("zero_stage 2 shares them out", load, [*SMOLLM2, "engine.zero_stage=2"])
    for recipe, stage in (("demo/lvlm", "finetune"), ("demo/visual-ar", "vq")):
        fails_with("muon trains heads", load, [f"recipe={recipe}", f"stages.{stage}.optim.name=muon"])
    fails_with("muon_weight_decay is Muon's", OptimConfig, lr=1.0, muon_weight_decay=0.1, error=ValidationError)
    fails_with("nothing is left for Muon", build_optimizer, {"head": [("norm", nn.Parameter(torch.ones(3)))]}, MUON)
    assert {"name", "muon_weight_decay"}.isdisjoint(OptimConfig(lr=1.0).model_dump()), "fingerprints of before hold"


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (9, 9)])
def test_steps_in_float32_are_torchs(shape):
    """Which rounds its Newton-Schulz steps to bfloat16: within a hundredth of an update."""
    torch.manual_seed(0)
    begun, gradients = torch.randn(shape), torch.randn(4, *shape)
    weights, states = {}, {}
    for kind in (torch.optim.Muon, Float32Muon):
        weight = nn.Parameter(begun.clone())
        optimizer = kind([weight], lr=0.1, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
        weights[kind], states[kind] = weight.detach(), optimizer.state[weight]
    size = 0.1 * 0.2 * max(shape) ** 0.5
    torch.testing.assert_close(weights[Float32Muon], weights[torch.optim.Muon], atol=0.01 * 4 * size, rtol=0)
    assert (weights[Float32Muon] - begun).norm() > 2 * size
    assert states[Float32Muon].keys() == states[torch.optim.Muon].keys()
    group = optimizer.param_groups[0]
    values = torch.linalg.svdvals(orthogonal(gradients[0], group))
    assert values.min() > 0.6 and values.max() < 1.3


def test_rank_0s_processor_decides_how_steps_are_computed(tmp_path, monkeypatch):
    for flags, kind in (("avx2", Float32Muon), ("avx512_bf16", torch.optim.Muon), ("", torch.optim.Muon)):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
        monkeypatch.setattr(stored, "PROCESSORS", tmp_path / "cpuinfo")
        built = build_optimizer(
            {"head": [(n, nn.Parameter(torch.ones(3, 4))) for n in ("fc.weight", "norm.weight")]}, MUON
        )
        assert type(built.muon) is kind


def test_operations_are_counted():
    for shape in ((3, 8), (8, 3), (5, 5)):
        with FlopCounterMode(display=False) as counter:
            _zeropower_via_newtonschulz(torch.zeros(shape), (3.0, -4.0, 2.0), 5, 1e-7)
        assert newton_schulz_flops([shape]) == counter.get_total_flops()
    weight = torch.zeros(8, 3, device=META, requires_grad=True)
    assert flops(lambda: (torch.zeros(4, 8, device=META) @ weight).sum().backward()) == 2 * (2 * 4 * 8 * 3)


def test_the_dry_run_tells_memory_and_share_of_a_step():
    """SmolLM2's EAGLE-3 head: fc behind a norm, one layer of width 576 and 1,536, and 8,192 rows of an LM head."""
    loaded = load([*SMOLLM2, "stages.eagle3.lm_head=null"])
    planned = next(one for one in plan(loaded.recipe, loaded.path) if one.name == "eagle3")
    by_muon = 576 * (3 * 576) + 1152 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536
    assert f"{by_muon:,} of them by Muon" in "\n".join(planned.stage.describe(planned))
    whole = planned.stage.memory(planned)
    assert whole.parts["optimizer"] == 2 * whole.parts["weights"] - 4 * by_muon
    assert 0.05 < whole.newton_schulz < 0.25, "measured: 11% of a step's time with 8 x 160 tokens and 4 passes"
    assert f"about {whole.newton_schulz:.0%} of a step's arithmetic" in "\n".join(whole.lines(None))
    frozen = planned.stage.model_copy(update={"lm_head": "frozen"})
    told = replace(planned, stage=frozen)
    assert "parameters" in (line := frozen.describe(told)[0]) and f"{9_809_856 - 8192 * 576:,}" in line
    assert whole.parts["optimizer"] - frozen.memory(told).parts["optimizer"] == 8 * 8192 * 576
    half = planned.stage.model_copy(update={"micro_batch_size": planned.stage.batch_size // 2})
    assert half.memory(replace(planned, stage=half)).newton_schulz == pytest.approx(whole.newton_schulz, rel=0.15)
