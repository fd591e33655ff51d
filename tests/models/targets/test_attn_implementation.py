"""`target.attn_implementation`: eager and sdpa say the same tokens; kernels without masks of trees are refused."""

import pytest
import tiny
import tiny_qwen
import torch
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw, Dynamic
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.decoder import CachedDecoder
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.pruned import PrunedConfig
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.load import load_target
from draftsmith.models.targets.qwen.section import QwenTargetConfig
from draftsmith.recipes.config.load import load

CPU = torch.device("cpu")
FAMILIES = {
    "llava": (LlavaTargetConfig, lambda: tiny.llava(0), lambda: tiny.request(1, 1), tiny.IMAGE_ID, tiny.TOKENS),
    "qwen2_5_vl": (QwenTargetConfig, lambda: tiny_qwen.model("qwen2_5_vl"), lambda: tiny_qwen.request("qwen2_5_vl"),
                   None, tiny_qwen.TOKENS),
}  # fmt: skip
POLICIES = {"chain": lambda: Chain(3), "tree": lambda: Dynamic(total=12, depth=3, width=4)}
ITSELF = PrunedConfig(kind="pruned", ratio=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_and_sdpa_say_the_same_tokens(family, tmp_path):
    section, make, request, image_token_id, tokens = FAMILIES[family]
    make().save_pretrained(tmp_path)
    said = {}
    for name in ("auto", "eager", "sdpa"):
        settings = section(kind=family, path=str(tmp_path), attn_implementation=name)
        target = load_target(settings, tmp_path, num_token_ids=tokens, image_token_id=image_token_id, device=CPU)
        core = target.decoder.core
        tower = core.visual if family != "llava" else core.vision_tower
        for config in (core.language_model.config, tower.config):
            assert (config._attn_implementation == "eager") == (name == "eager")
        for policy, built in POLICIES.items():
            drafter = ITSELF.drafter(ITSELF.load(None, target), target)
            decoding = Decoding(built(), Greedy(), Draw("top-k"), Warp(0.0), 14, ())
            answer = generate(target, drafter, request(), decoding, torch.Generator().manual_seed(0))
            assert sum(cycle.num_accepted for cycle in answer.cycles) >= len(answer.cycles), "drafts are accepted"
            said[name, policy] = answer.tokens
    assert len({tuple(one) for one in said.values()}) == 1, said


@pytest.mark.parametrize("name", ["flash_attention_2", "paged|flash_attention_3", "flex_attention", "spda"])
def test_what_cannot_verify_a_tree_is_refused_with_what_can(name):
    with pytest.raises(UserError, match=r"target.attn_implementation: input should be 'auto', 'eager' or 'sdpa'"):
        load(["recipe=llava15-68m", f"target.attn_implementation={name}"])


def test_a_model_that_came_with_such_a_kernel_is_refused_before_it_decodes():
    model = tiny.llava(0)
    model.model.language_model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="attends by flash_attention_2, which takes no mask of a tree"):
        CachedDecoder(model, num_token_ids=tiny.TOKENS)
