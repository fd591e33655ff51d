"""The speculators package reads what is exported for it, where it is installed (pip install speculators==0.9.0)."""

import importlib.util

import pytest
import torch
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.export import lay_out
from draftsmith.models.formats.source import Target, read_source
from served_pair import build
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
    write_folder(tmp_path / "out", *lay_out("speculators", source))
    read = SpeculatorModelConfig.from_pretrained(str(tmp_path / "out"))
    assert read.speculators_model_type == "eagle3" and read.norm_before_residual is False
    loaded = Eagle3DraftModel.from_pretrained(str(tmp_path / "out")).state_dict()
    head = source.head.state_dict()
    for name in ("fc.weight", "norm.weight", "lm_head.weight"):
        assert torch.equal(loaded[name].to(head[name].dtype), head[name]), name
    assert "d2t" not in loaded, "this draft has all of the target's ids"
