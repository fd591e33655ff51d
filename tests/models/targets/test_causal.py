"""A text target whose rotations change with the length of the text: exact up to the length they are fixed for."""

import json

import pytest
import torch
from draftsmith.core.batch import Request
from draftsmith.core.errors import UserError
from draftsmith.core.states import Taps
from draftsmith.data.collate import Sample, collate
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.hub import is_tied, read_config
from draftsmith.models.stored import stored_table
from draftsmith.models.targets.causal.section import CausalTarget, CausalTargetConfig
from draftsmith.models.targets.load import build_target, load_target
from draftsmith.models.targets.table import training_of
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

FIXED = {"dynamic": 32, "longrope": 24}  # places up to which they stay
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": FIXED["longrope"], "factor": 4.0,
    },
}  # fmt: skip


def target(kind: str) -> CausalTarget:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, initializer_range=0.3, rope_parameters=ROPES[kind] | {"rope_theta": 10000.0},
    )  # fmt: skip
    return CausalTarget(LlamaForCausalLM(config).eval(), num_token_ids=40)


def asked(length: int) -> Request:
    ids = torch.randint(3, 40, (length,), generator=torch.Generator().manual_seed(1))
    return Request(ids, torch.zeros(length, dtype=torch.int8), None, "a record")


def test_two_stored_tables_stay_apart_whatever_the_config_says(tmp_path):
    """As transformers reads such a folder. The loaded config says so, else training would tie them."""
    model = target("dynamic").decoder.model
    model.save_pretrained(tmp_path)
    head = model.lm_head.weight.detach().clone()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    section = CausalTargetConfig(kind="causal_lm", path=str(tmp_path))
    trained = training_of(build_target(section, None), ("language_model",), gradient_checkpointing=False).model
    assert torch.equal(trained.lm_head.weight, head) and not is_tied(trained.config)
    assert not is_tied(read_config(str(tmp_path), key="target")), "estimates count two tables, too"
    assert torch.equal(stored_table("LM head", str(tmp_path), where="", tied=True), head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_of_tied_embeddings_is_transformers_own_whole_and_by_its_tables(tmp_path, dtype):
    """Its file has no LM head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "initializer_range": 0.3}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).to(getattr(torch, dtype)).eval()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    section = CausalTargetConfig(kind="causal_lm", path=str(tmp_path), dtype=dtype)
    known = {"num_token_ids": 40, "image_token_id": None, "device": torch.device("cpu")}
    whole, tables = (load_target(section, tmp_path, **known, tables_only=only) for only in (False, True))
    states = torch.randn(3, 32).to(whole.embedding.dtype)
    assert torch.equal(whole.scores(states), tables.scores(states))
    assert torch.equal(whole.embedding, tables.embedding)
    assert whole.decoder.model.lm_head.weight is whole.decoder.model.get_input_embeddings().weight
    ids = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                              eos_token_id=[], pad_token_id=0)[0, 9:].tolist()  # fmt: skip
    request = Request(ids[0], torch.zeros(9, dtype=torch.int8), None, "a record")
    draft = IndependentProposal(load_target(section, tmp_path, **known).decoder, "T", newline_id=7)
    for drafter in (None, draft):
        decoding = Decoding(Chain(3), Greedy(), Draw("top-k"), Warp(), 12, ())
        assert generate(whole, drafter, request, decoding).tokens == expected


@pytest.mark.parametrize("kind", ROPES)
def test_rotations_that_change_with_the_length(kind):
    own, fixed = target(kind), FIXED[kind]
    decoding = Decoding(Chain(3), Greedy(), Draw("top-k"), Warp(), 8, (2,))
    request = asked(fixed - 16)
    plain = generate(own, None, request, decoding).tokens
    drafted = generate(own, IndependentProposal(target(kind).decoder, "T", newline_id=7), request, decoding).tokens
    assert plain == drafted
    own.prefill(request, Taps(), capacity=16)
    with pytest.raises(UserError, match=rf"\({kind}\) change with the length of the text beyond {fixed}.*\n.*a record"):
        own.prefill(request, Taps(), capacity=17)
    long = asked(fixed + 1)
    batch = collate(
        [Sample(long.ids.tolist(), [True] * (fixed + 1), [0] * (fixed + 1), None, "a record")], pad_id=0, image_size=16
    )
    with pytest.raises(UserError, match="change with the length"):
        own.states(batch, Taps(feature=True))
