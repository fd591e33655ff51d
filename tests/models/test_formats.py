"""Layouts both ways: a head of ours, written as others read it and read back, is the same bit for bit."""

import pytest
import torch
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dflash_files import dflash_manifest
from draftsmith.models.drafters.dflash_module import DflashHead
from draftsmith.models.folders import write_folder
from draftsmith.models.formats import import_head
from draftsmith.models.formats.export import lay_out
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.source import Target, read_source
from draftsmith.models.targets.base import language_shape
from published_tiny import VOCAB, WIDTH, head_folder, target_config, target_folder

ROWS = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9))
EAGLE3 = {"kind": "eagle3", "visual_slots": "read", "draft_vocab_size": 20, "image": "placeholder"}
SEEN = EAGLE3 | {"image": "projected"}  # as SGLang shows pictures
PEAGLE = EAGLE3 | {"kind": "peagle", "parallel_tokens": 5, "mask_token_id": 41}
OTHER = {"kv_heads": "mha", "intermediate_size": 60, "norm_eps": 3e-6, "rope_theta": 500.0}
NORMED = {"fc_norm": True, "norm_output": True}  # EAGLE-3.1
EAGLE = {"kind": "eagle", "image": "placeholder"}


@pytest.mark.parametrize(
    ("engine", "family", "settings"),
    [
        ("vllm", "llava", EAGLE3), ("vllm", "llama_long", EAGLE3), ("vllm", "qwen2_5_vl", EAGLE3 | {"taps": (1, 4, 6)}),
        ("vllm", "llava", EAGLE3 | {"draft_vocab_size": None}), ("vllm", "llava", EAGLE3 | OTHER),
        ("vllm", "llava", EAGLE3 | NORMED), ("speculators", "llava", EAGLE3 | {"norm_output": True}),
        ("sglang", "qwen2_5_vl", SEEN), ("sglang", "qwen2_5_vl", SEEN | {"taps": (1, 4, 6)}),
        ("sglang", "qwen2_5_vl", SEEN | {"positions": "mrope"}),
        ("speculators", "llava", EAGLE3), ("speculators", "llama_long", EAGLE3 | OTHER), ("eagle", "llama", EAGLE3),
        ("vllm", "llava", PEAGLE), ("speculators", "llava", PEAGLE),
        ("vllm", "llava", EAGLE), ("vllm", "llava", EAGLE | {"fc_bias": False}), ("vllm", "llama", EAGLE | OTHER),
        ("sglang", "llama", EAGLE), ("eagle", "llama", EAGLE | OTHER), ("eagle", "llama", EAGLE | {"fc_bias": False}),
        ("eagle", "llava", {"kind": "msd"}), ("eagle", "qwen2_5_vl", {"kind": "msd"}),
        ("eagle", "qwen2_5_vl", {"kind": "vispec", "num_queries": 4}), ("eagle", "llava", {"kind": "vispec"} | OTHER),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_comes_back_bit_for_bit(tmp_path, engine, family, settings, dtype):
    target, config = target_folder(tmp_path / "target", family), target_config(family)
    head_folder(tmp_path / "head", target, dtype=dtype, **settings)
    source = read_source(tmp_path / "head", Target(config, "org/name"))
    check_expressible(engine, source, "text")
    write_folder(tmp_path / "there", *lay_out(engine, source, ROWS if engine == "eagle" else None))
    text, image = config.get_text_config(), settings.get("image")
    back = import_head(settings["kind"], str(tmp_path / "there"), text, embedding=ROWS, image=image)
    ours, theirs = source.head.state_dict(), back.head.state_dict()
    assert ours.keys() == theirs.keys() and all(theirs[name].dtype == value.dtype for name, value in ours.items())
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert back.head.shape == source.head.shape
    shape = language_shape(text)
    for training in (True, False):
        assert back.config.reads(shape, training=training) == source.config.reads(shape, training=training)
        assert back.config.image_input() == source.config.image_input()
    for name in NORMED:
        assert getattr(back.config, name, None) == getattr(source.config, name, None)


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"draft_vocab_size": 20, "sliding_window": 8}, {"kv_heads": "mha"}, {"norm_eps": 3e-6, "rope_theta": 500.0}],
)
def test_a_dflash_draft_comes_back_bit_for_bit(tmp_path, engine, settings):
    config = target_config()
    shape = language_shape(config.get_text_config())
    section = {"kind": "dflash", "block_size": 4, "num_layers": 2, "taps": (2, 5), "mask_token_id": 41}
    drafter = DflashConfig(**section | settings)
    torch.manual_seed(0)
    ids = None if drafter.draft_vocab_size is None else torch.arange(drafter.draft_vocab_size) * 2
    head = DflashHead(drafter.shape(shape), ids)
    written = drafter.model_dump(mode="json")
    drafter.save(head, tmp_path / "head", dflash_manifest(drafter, shape, TargetIdentity({}), drafter=written))
    source = read_source(tmp_path / "head", Target(config, "org/name"))
    check_expressible(engine, source, "all")
    write_folder(tmp_path / "there", *lay_out(engine, source))
    back = import_head("dflash", str(tmp_path / "there"), config.get_text_config(), embedding=None)
    assert back.config == drafter
    theirs = back.head.state_dict()
    assert head.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in head.state_dict().items())
