"""Targets that two ranks hold together: tokens are those of one rank, for chains and trees, greedy and sampled."""

import shutil
from pathlib import Path

import pytest
import tiny
import tiny_qwen
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.states import Taps
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy, Sampling
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.pruned import PrunedConfig, PrunedProposal
from draftsmith.models.targets.causal.section import CausalTargetConfig
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.load import load_target
from draftsmith.models.targets.parallel import check_cut, parallel_plan
from draftsmith.models.targets.qwen.section import QwenTargetConfig
from ranks_run import run_ranks
from tiny_saved import ALL, SIZES, saved
from transformers import LlamaConfig, PreTrainedConfig, Qwen3VLConfig

DECODED = {
    "chain": (Chain(3), Greedy(), 0.0),
    "tree": (Dynamic(12, 2, 3), Greedy(), 0.0),
    "sampled": (Chain(3), Sampling(), 1.0),
}  # fmt: skip


def opened(kind: str, folder: Path, size: int):
    sections = {"causal_lm": CausalTargetConfig, "llava": LlavaTargetConfig, "llava_onevision": LlavaTargetConfig}
    own = {"anyres": False} if kind == "llava_onevision" else {}
    config = sections.get(kind, QwenTargetConfig)(kind=kind, path=str(folder / kind), tensor_parallel_size=size, **own)
    image = tiny.IMAGE_ID if kind.startswith("llava") else None
    return load_target(config, folder / kind, num_token_ids=ALL[kind], image_token_id=image, device=torch.device("cpu"))


def asked(kind: str):
    if kind.startswith("qwen"):
        return tiny_qwen.request(kind, clip=(3, 4, 4))
    return tiny.request(0, images=int(kind != "causal_lm"), sizes=SIZES)


def computed(kind: str, folder: Path, size: int) -> dict[str, object]:
    """Tokens of each way to decode, and states and attention of the prompt, of one rank's view."""
    target, request = opened(kind, folder, size), asked(kind)
    session, step = target.prefill(request, Taps(text_layers=(1,), feature=True, prefill_attention=(0,)), capacity=4)
    result: dict[str, object] = {
        "states": [step.feature, step.layers[1], step.attention[0], target.embedding.detach()],
        "own_heads": session.cache.kv_layers[0].keys.shape[1],
    }
    for name, (policy, rule, temperature) in DECODED.items():
        drafter = PrunedProposal(target, target, PrunedConfig(kind="pruned", ratio=0.5 if kind != "causal_lm" else 0))
        decoding = Decoding(policy, rule, Draw("top-k"), Warp(temperature), 20, ())
        done = generate(target, drafter, request, decoding, torch.Generator().manual_seed(7))
        result[name] = done.tokens, [cycle.num_accepted for cycle in done.cycles]
    return result


SCRIPT = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2] / "eval")]!r}
from pathlib import Path
import torch
from draftsmith.core import ranks
from draftsmith.trainers.train.engine import init_distributed
from test_parallel import computed

init_distributed()
found = {{kind: computed(kind, Path("."), 2) for kind in sys.argv[1:]}}
torch.save(found, f"found-{{ranks.rank()}}.pt")
"""


def check_equal(folder: Path, *kinds: str) -> None:
    for kind in kinds:
        saved(kind, folder)
    for code, text in run_ranks(2, SCRIPT, *kinds, cwd=folder):
        assert code == 0, text[-3000:]
    both = [torch.load(folder / f"found-{rank}.pt", weights_only=True) for rank in (0, 1)]
    for kind in kinds:
        alone = computed(kind, folder, 1)
        accepted = [n for name in DECODED for n in alone[name][1]]
        assert sum(accepted) > 0, "nothing was drafted right, and commits are not tested"
        for found in (one[kind] for one in both):
            assert {name: found[name] for name in DECODED} == {name: alone[name] for name in DECODED}, kind
            assert found["own_heads"] == 1 and alone["own_heads"] == 2
            for mine, other in zip(found["states"], alone["states"], strict=True):
                torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-4)


def test_two_ranks_decode_what_one_does(tmp_path):
    check_equal(tmp_path, "llava")


@pytest.mark.slow
def test_other_families_and_tied_heads(tmp_path):
    check_equal(tmp_path, "causal_lm", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def broken(**values) -> PreTrainedConfig:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    config = LlamaConfig(**(sizes | values))
    for name in values.keys() & {"quantization_config", "num_experts", "model_type"}:
        setattr(config, name, values[name])
    return config


@pytest.mark.parametrize(("values", "size", "said"), [
    ({}, 4, ("num_key_value_heads is 2, which 4 ranks cannot share evenly", "use 2")),
    ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 30}, 2, ("num_attention_heads is 3",)),
    ({"intermediate_size": 63}, 2, ("intermediate_size is 63",)),
    ({"vocab_size": 61}, 2, ("vocab_size is 61",)),
    ({"quantization_config": {"quant_method": "awq"}}, 2, ("quantised",)),
    ({"num_experts": 4}, 2, ("mixture of experts", "device_map: auto")),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_its_number(values, size, said):
    with pytest.raises(UserError) as refused:
        check_cut(broken(**values), size, "somewhere")
    for words in (*said, "somewhere", "tensor_parallel_size"):
        assert words in str(refused.value)
    check_cut(broken(), 2, "somewhere")


def test_a_model_without_a_plan_is_refused():
    config = broken()
    config.base_model_tp_plan = None
    with pytest.raises(UserError, match="no tensor parallel plan for llama"):
        check_cut(config, 2, "somewhere")


def test_our_plan_cuts_what_transformers_has_none_for():
    config = Qwen3VLConfig()
    assert config.text_config.base_model_tp_plan is None, "transformers has one by now: lacks_parallel_plan goes"
    plan = parallel_plan(config, 2, "somewhere").tp_plan
    assert plan["model.language_model.layers.*.self_attn.o_proj"] == "rowwise" and len(plan) == 9


def test_the_run_has_as_many_ranks_as_hold_the_target(tmp_path):
    saved("causal_lm", tmp_path)
    with pytest.raises(UserError, match=r"tensor_parallel_size is 2, and the run has 1 rank.*\n.*accelerators 2"):
        opened("causal_lm", tmp_path, 2)
    shutil.rmtree(tmp_path / "causal_lm")
