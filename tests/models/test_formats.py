"""Layouts both ways: a head of ours, written as others read it and read back, is the same bit for bit."""

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.eagle3 import OPTIONS
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.export import export_drafter, files_of
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.heads import import_head
from draftsmith.models.formats.source import Target, read_source
from draftsmith.models.targets.base import ShapeAlone, language_shape
from fails import fails_with
from heads_tiny import config_of
from published_tiny import VOCAB, WIDTH, block_folder, exported, head_folder, target_config, target_folder
from safetensors.torch import load_file
from tensors import same_weights
from torch.nn.functional import linear, silu

ROWS = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9))
EAGLE3 = {"kind": "eagle3", "visual_slots": "read", "draft_vocab_size": 20, "image": "placeholder"}
SEEN = EAGLE3 | {"image": "projected"}  # as SGLang shows pictures
PEAGLE = EAGLE3 | {"kind": "peagle", "parallel_tokens": 5, "mask_token_id": 41}
OTHER = {"kv_heads": "mha", "intermediate_size": 60, "norm_eps": 3e-6, "rope_theta": 500.0}
NORMED = {"fc_norm": True, "norm_output": True}  # EAGLE-3.1
# What speculators 0.9 trains by default: EAGLE-3, and P-EAGLE in Qwen3's layer.
THEIRS = {"norm_before_fc": True, "norm_before_residual": True, "sliding_window": 2048}
QWEN3 = {"norm_before_residual": True, "qk_norm": True, "sliding_window": 2048, "own_embedding": True}
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
        ("vllm", "llava", PEAGLE), ("speculators", "llava", PEAGLE), ("vllm", "llava", EAGLE3 | THEIRS),
        ("speculators", "llava", EAGLE3 | THEIRS | {"norm_output": True}), ("speculators", "llava", PEAGLE | QWEN3),
        ("vllm", "llava", EAGLE3 | {"sliding_window": 16}), ("vllm", "llava", PEAGLE | {"own_embedding": True}),
        ("vllm", "llava", EAGLE), ("vllm", "llava", EAGLE | {"fc_bias": False}), ("vllm", "llama", EAGLE | OTHER),
        ("vllm", "llava", {"kind": "msd"}), ("vllm", "llava", {"kind": "msd", "fc_bias": False}),
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
    pictures = settings["kind"] == "msd"  # for our plugin; without, an EAGLE head is written
    check_expressible(engine, source, "all" if pictures else "text")
    copied, rows = ROWS if engine == "eagle" else None, None if settings.get("own_embedding") else ROWS
    write_folder(tmp_path / "there", *files_of(engine, source, copied, pictures=pictures))
    text, image = config.get_text_config(), settings.get("image")
    back = import_head(settings["kind"], str(tmp_path / "there"), text, embedding=rows, image=image)
    ours, theirs = source.head.state_dict(), back.head.state_dict()
    assert ours.keys() == theirs.keys() and all(theirs[name].dtype == value.dtype for name, value in ours.items())
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert back.head.shape == source.head.shape
    shape = language_shape(text)
    for training in (True, False):
        assert back.config.reads(shape, training=training) == source.config.reads(shape, training=training)
        assert back.config.image_input() == source.config.image_input()
    for name in (*OPTIONS, "qk_norm", "draft_vocab_size"):  # what its manifest says when it is exported again
        assert getattr(back.config, name, None) == getattr(source.config, name, None)


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"draft_vocab_size": 20, "sliding_window": 8}, {"kv_heads": "mha"}, {"norm_eps": 3e-6, "rope_theta": 500.0},
     {"sliding_window": 8, "causal": True}],
)  # fmt: skip
def test_a_dflash_draft_comes_back_bit_for_bit(tmp_path, engine, settings):
    config, target = target_config(), target_folder(tmp_path / "target")
    section = {"kind": "dflash", "block_size": 4, "num_layers": 2, "taps": (2, 5), "mask_token_id": 41} | settings
    head = block_folder(tmp_path / "head", target, **section)
    source = read_source(tmp_path / "head", Target(config, "org/name"))
    check_expressible(engine, source, "all")
    write_folder(tmp_path / "there", *files_of(engine, source))
    back = import_head("dflash", str(tmp_path / "there"), config.get_text_config(), embedding=None)
    assert back.config == config_of(**section)
    assert same_weights(head, back.head)


@pytest.mark.parametrize("family", ["llava", "llama"])
def test_medusa_heads_come_back_bit_for_bit(tmp_path, family):
    """In vLLM's layout, whose own arithmetic (blocks by level, one LM head) scores as ours."""
    target = target_folder(tmp_path / "target", family, weights=True)
    text = target_config(family).get_text_config()
    head = medusa_folder(tmp_path / "head", target, family, dtype=torch.bfloat16)
    made = export_drafter(tmp_path / "head", tmp_path / "there", "vllm")
    values, state = exported(tmp_path / "there")
    assert values["architectures"] == ["MedusaModel"] and (values["num_heads"], values["num_hidden_layers"]) == (3, 2)
    assert ("--hf-overrides" in made.command) == (family == "llava") and made.chain == 3
    assert made.command.startswith("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve")
    scores = load_file(target / "model.safetensors")
    assert torch.equal(state["lm_head.weight"], next(v for n, v in scores.items() if "lm_head" in n).bfloat16())
    x = hidden = torch.randn(5, WIDTH, dtype=torch.bfloat16)
    for layer in range(2):
        x = x + silu(linear(x, state[f"blocks.1.layers.{layer}.weight"], state[f"blocks.1.layers.{layer}.bias"]))
    assert torch.equal(x, head(hidden)[1])
    back = import_head("medusa", str(tmp_path / "there"), text, embedding=None)
    assert back.config.num_heads == 3 and back.config.num_layers == 2
    assert all(torch.equal(value, back.head.state_dict()[name]) for name, value in head.state_dict().items())
    write_folder(tmp_path / "own", values, state | {"lm_heads.0.weight": ROWS})
    fails_with("LM heads of their own", import_head, "medusa", str(tmp_path / "own"), text, embedding=None)
    write_folder(tmp_path / "lost", values, {n: v for n, v in state.items() if n != "blocks.0.layers.1.weight"})
    with pytest.raises(UserError, match=r"not Medusa heads for this target(.|\n)*heads.0.1.linear.weight is missing"):
        import_head("medusa", str(tmp_path / "lost"), text, embedding=None)
    fails_with("alone has Medusa", export_drafter, tmp_path / "head", tmp_path / "sglang", "sglang")


def test_medusa_heads_of_some_ids_come_back_bit_for_bit(tmp_path):
    """vLLM writes its scores of the ids of `token_map` at their places, and takes their rows of a whole LM head."""
    target = target_folder(tmp_path / "target", "llava")
    text = target_config("llava").get_text_config()
    head = medusa_folder(tmp_path / "head", target, "llava", dtype=torch.bfloat16, draft_vocab_size=20)
    export_drafter(tmp_path / "head", tmp_path / "there", "vllm")
    values, state = exported(tmp_path / "there")
    assert values["truncated_vocab_size"] == 20 < values["vocab_size"] and values["original_lm_head"]
    assert torch.equal(state["token_map"], head.draft_ids) and len(state["lm_head.weight"]) == 20 and "d2t" not in state
    hidden = torch.randn(5, WIDTH, dtype=torch.bfloat16)
    theirs = torch.full((5, text.vocab_size), float("-inf"))
    theirs[:, state["token_map"]] = linear(hidden, state["lm_head.weight"]).float()
    assert torch.equal(theirs, head.draft_scores(hidden, None, None))
    whole = torch.zeros(text.vocab_size, WIDTH, dtype=torch.bfloat16)
    whole[state["token_map"]] = state["lm_head.weight"]
    write_folder(tmp_path / "whole", values, state | {"lm_head.weight": whole})
    for place in ("there", "whole"):
        back = import_head("medusa", str(tmp_path / place), text, embedding=None)
        assert back.config.draft_vocab_size == 20
        assert all(torch.equal(value, back.head.state_dict()[name]) for name, value in head.state_dict().items())
    write_folder(tmp_path / "lost", values, state | {"lm_head.weight": whole[:19]})
    fails_with("token_map names 20 ids", import_head, "medusa", str(tmp_path / "lost"), text, embedding=None)


def medusa_folder(folder, target, family, dtype, **settings):
    """Loud heads, as a stage leaves them."""
    config = MedusaConfig(kind="medusa", num_heads=3, num_layers=2, **settings)
    beside = ShapeAlone(language_shape(target_config(family).get_text_config()))
    torch.manual_seed(0)
    head = config.build(beside).to(dtype)
    if head.draft_ids is not None:
        head.d2t.copy_(torch.arange(len(head.d2t)))  # every other id
    for value in head.parameters():
        value.data.normal_(0, 0.2)
    identity = TargetIdentity({"kind": "llava" if family == "llava" else "causal_lm", "path": str(target)})
    config.save(head, folder, config.manifest(beside, identity))
    return head
