"""The speculators package reads what is exported for it, where it is installed (pip install speculators==0.9.0)."""

import importlib.util

import pytest
import torch
from dflash_tiny import draft, walked
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.export import files_of
from draftsmith.models.formats.source import Target, read_source
from served_pair import build
from tiny import llava
from tiny import request as ask
from tiny import target as language
from transformers import AutoConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="pip install speculators==0.9.0"),
]


def test_an_eagle3_head_has_equal_tensors_there(tmp_path):
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    build(tmp_path, steps=2)
    source = read_source(
        tmp_path / "head", Target(AutoConfig.from_pretrained(tmp_path / "target"), str(tmp_path / "target"))
    )
    write_folder(tmp_path / "out", *files_of("speculators", source))
    read = SpeculatorModelConfig.from_pretrained(str(tmp_path / "out"))
    assert read.speculators_model_type == "eagle3" and read.norm_before_residual is False
    loaded = Eagle3DraftModel.from_pretrained(str(tmp_path / "out")).state_dict()
    head = source.head.state_dict()
    for name in ("fc.weight", "norm.weight", "lm_head.weight"):
        assert torch.equal(loaded[name].to(head[name].dtype), head[name]), name
    assert "d2t" not in loaded, "this draft has all of the target's ids"


@pytest.mark.parametrize("window", [None, 20])
def test_a_dflash2_draft_drafts_the_same_there(tmp_path, window):
    """Its whole backbone and its selector, at one anchor.

    The package counts a window from the anchor and vLLM from each place; this one is longer than the prompt.
    """
    from speculators.models.dflash2 import DFlash2DraftModel

    model = llava(0, layers=5)
    big = language(model)
    config, head = draft(
        big,
        kind="dflash2",
        conv_group_size=8,
        selector_rank=6,
        selector_top_k=4,
        mask_token_id=61,
        sliding_window=window,
    )
    model.save_pretrained(tmp_path / "target")
    identity = TargetIdentity({"kind": "llava", "path": str(tmp_path / "target")})
    config.save(head, tmp_path / "head", config.manifest(big, identity))
    source = read_source(tmp_path / "head", Target(model.config, str(tmp_path / "target")))
    write_folder(tmp_path / "out", *files_of("speculators", source))
    theirs = DFlash2DraftModel.from_pretrained(str(tmp_path / "out"), attn_implementation="eager").float().eval()
    asked = ask(2, 1)
    path, q, layers = walked(config, head, big, asked, 9)
    count, selector = len(asked.ids), theirs.candidate_selector
    # The anchor stands after the prompt, and the places behind it must exist.
    states = torch.cat([layers[tap] for tap in config.taps], -1)
    states = torch.cat([states, torch.zeros(8, states.shape[1])])[None]
    ids = torch.cat([asked.ids, torch.tensor([9] + [0] * 7)])[None]
    mask = (torch.arange(count + 8) == count).float()[None]
    with torch.no_grad():
        hidden, logits, *_ = theirs._backbone_forward(
            states, ids, mask, states[..., :32], torch.zeros_like(ids), max_anchors=1
        )
        last, chosen, drawn = torch.tensor([[9]]), [], []
        for place in range(1, 5):
            candidates, scores = selector.select(logits[:, place, None], hidden[:, place, None], last)
            last = candidates[..., 0, :].gather(-1, scores[..., 0, :].argmax(-1, keepdim=True))
            chosen.append(int(last))
            drawn.append(torch.zeros(64).scatter(0, candidates[0, 0], scores[0, 0].softmax(-1)))
    assert path == chosen
    torch.testing.assert_close(q, torch.stack(drawn), atol=2e-5, rtol=1e-4)
