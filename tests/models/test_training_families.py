"""Targets of every family to train: one loss over the states that decoding has, and weights that come back."""

import pytest
import tiny_qwen
import torch
from decodings import greedy
from draftsmith.core.batch import Request
from draftsmith.core.states import Taps, feature_places
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.parts import TokenIds
from draftsmith.models.targets.causal.section import CausalTarget, CausalTargetConfig
from draftsmith.models.targets.llava.model import LlavaDecoder
from draftsmith.models.targets.load import build_target, load_target
from draftsmith.models.targets.qwen.section import QwenTarget
from draftsmith.models.targets.table import training_of
from fails import fails_with
from tiny_qwen import (
    CLIP_ID,
    EOS,
    IDS,
    IMAGE_ID,
    KINDS,
    TOKENS,
    VOCAB,
    batch_of,
    model,
    request,
    target,
    text_config,
    vision_config,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

PARTS = ("vision_tower", "projector", "language_model")
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.25,
}  # fmt: skip
TEXT_IDS = TokenIds(VOCAB, -1, 1, EOS, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resume", ["max_plus_one", "longer_side"])
def test_training_sees_what_decoding_sees(kind, resume):
    llm = model(kind)
    batch = batch_of(request(kind, ((4, 6),), (5, 4, 4)), request(kind, (), seed=1))
    states = target(llm, resume=resume).states(batch, Taps(feature=True))
    kept = feature_places(batch.modality, batch.attention_mask, batch.loss_mask)
    with torch.no_grad():
        hidden = training_of(llm, PARTS, gradient_checkpointing=False, resume=resume).hidden_states(batch)
    torch.testing.assert_close(hidden[kept], states.feature[kept], atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_batch_of_text_runs_the_tower_for_nothing(kind):
    """Ranks that differ in modality would wait for each other; what the tower makes of nothing changes nothing."""
    module = training_of(model(kind), PARTS, gradient_checkpointing=False)
    words, seen = request(kind, (), seed=1), request(kind)
    module(batch_of(words)).loss_sum.backward()
    tower = [p for name, p in module.model.model.visual.named_parameters()]
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in tower)
    module(batch_of(seen)).loss_sum.backward()
    assert sum(float(p.grad.abs().sum()) for p in tower) > 0
    assert {*module.parts()} == {*PARTS}
    frozen = training_of(model(kind), ["projector"], gradient_checkpointing=False)
    frozen(batch_of(seen)).loss_sum.backward()
    assert {*frozen.parts()} == {"projector"}
    assert all(p.grad is None for p in frozen.model.model.language_model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_an_inline_target_is_made_and_comes_back(kind, tmp_path):
    section = tiny_qwen.section(
        kind.removesuffix("_moe"), language_model=text_config(kind, 2, 32), vision_tower=vision_config(kind, 32)
    )
    made = build_target(section, IDS)
    made.save_pretrained(tmp_path)
    settings = {"num_token_ids": TOKENS, "image_token_id": IMAGE_ID, "device": torch.device("cpu")}
    own = load_target(section, tmp_path, **settings)
    assert isinstance(own, QwenTarget)
    asked = request(kind)
    expected = target(made).prefill(asked, Taps(), capacity=1)[1].logits
    actual = own.prefill(asked, Taps(), capacity=1)[1].logits
    torch.testing.assert_close(actual, expected)
    assert actual[:, [IMAGE_ID, CLIP_ID]].isinf().all()
    other = "qwen2_vl" if kind != "qwen2_vl" else "qwen3_vl"
    fails_with("write kind: qwen", load_target, tiny_qwen.section(other, path=str(tmp_path)), tmp_path, **settings)


def test_a_target_of_text(tmp_path):
    """Trained, saved, read, decoded: greedy as transformers decodes, and a copy as draft is always right."""
    torch.manual_seed(0)
    section = CausalTargetConfig(kind="causal_lm", language_model=LLAMA)
    made = build_target(section, TEXT_IDS)
    asked = [Request(torch.randint(3, 60, (n,)), torch.zeros(n, dtype=torch.int8), None, f"r{n}") for n in (5, 9)]
    batch = batch_of(*asked)
    module = training_of(made, ["language_model"], gradient_checkpointing=False)
    module(batch).loss_sum.backward()
    assert {*module.parts()} == {"language_model"}
    fails_with("reads text alone", training_of, made, ["projector"], gradient_checkpointing=False)
    made.save_pretrained(tmp_path)
    own = load_target(section, tmp_path, num_token_ids=TOKENS, image_token_id=-1, device=torch.device("cpu"))
    assert isinstance(own, CausalTarget)
    states = own.states(batch, Taps(feature=True, text_layers=(1,)))
    kept = feature_places(batch.modality, batch.attention_mask, batch.loss_mask)
    with torch.no_grad():
        torch.testing.assert_close(module.hidden_states(batch)[kept], states.feature[kept], atol=1e-5, rtol=0)
    draft = IndependentProposal(LlavaDecoder(made, num_token_ids=TOKENS), "M", newline_id=5)
    for one in asked:
        expected = made.generate(
            one.ids[None], max_new_tokens=12, do_sample=False, suppress_tokens=[*range(TOKENS, VOCAB)],
            eos_token_id=EOS, pad_token_id=0, attention_mask=torch.ones_like(one.ids[None]),
        )[0, len(one.ids) :].tolist()  # fmt: skip
        drafted = generate(own, draft, one, greedy(Chain(3), 12, (EOS,)))
        assert drafted.tokens == expected
        assert all(c.num_accepted == c.num_drafted for c in drafted.cycles[:-1])
    fails_with("a model of text alone", own.prefill, request("qwen2_vl"), Taps(), capacity=1)


def test_models_that_are_more_than_embed_decode_and_score_are_refused():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    granite = GraniteConfig(**sizes, intermediate_size=64, num_key_value_heads=1, logits_scaling=8.0)
    windows = MistralConfig(**sizes, intermediate_size=64, num_key_value_heads=1, sliding_window=8)
    for made, reason in (
        (GraniteForCausalLM(granite), "more than embed"),
        (MistralForCausalLM(windows), "see a window alone"),
        (GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2)), "no decoder"),
    ):
        fails_with(reason, CausalTarget, made, num_token_ids=TOKENS)
