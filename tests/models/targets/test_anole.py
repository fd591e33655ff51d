"""Anole as a target: recorded numbers of the stock class, trees against one path at a time, and what is refused."""

import json
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensors
import torch
from decodings import greedy
from draftsmith.core.batch import CodeBatch, ImageRequest
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Static
from draftsmith.models.decoding.rows import Guidance
from draftsmith.models.decoding.tree import chain
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.targets.anole.section import (
    AnoleTargetConfig,
    load_anole,
)
from draftsmith.models.targets.anole.target import (
    AnoleIds,
    AnoleTarget,
    read_ids,
)
from draftsmith.models.targets.base import Taps
from exact import path_to, random_tree
from fails import fails_with
from pydantic import ValidationError
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, LlamaConfig

VECTORS = np.load(Path(__file__).parents[1] / "vectors_anole" / "chameleon.npz", allow_pickle=False)
NUM_CODES, VOCAB = 16, 34
LOWEST = torch.finfo(torch.float32).min
VQ = {
    "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8, "embed_dim": 4,
    "num_embeddings": NUM_CODES, "resolution": 8, "attn_resolutions": [],
}  # fmt: skip


def code_name(code: int) -> str:
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


VOCABULARY = {
    "<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{code_name(c): c + 4 for c in range(NUM_CODES)},
    "<eoss>": 20, "<racm3:break>": 21, "<reserved08706>": 22, "<image>": 23, **{f"w{i}": i for i in range(24, VOCAB)},
}  # fmt: skip


def tensor(name: str) -> torch.Tensor:
    return torch.from_numpy(np.array(VECTORS[name]))


def tiny_config(**changes) -> ChameleonConfig:
    settings = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "vq_config": VQ, "vocabulary_map": VOCABULARY, "pad_token_id": 1, "bos_token_id": 1, **changes,
    }  # fmt: skip
    return ChameleonConfig(**settings)


@pytest.fixture(scope="module")
def recorded() -> ChameleonForConditionalGeneration:
    sizes = {name: VECTORS[f"cfg/{name}"].item() for name in ("vocab_size", "hidden_size", "intermediate_size")}
    model = ChameleonForConditionalGeneration(tiny_config(**sizes)).eval()
    weights = {n.removeprefix("weights/"): tensor(n) for n in VECTORS.files if n.startswith("weights/")}
    report = model.load_state_dict(weights, strict=False)
    assert not report.unexpected_keys and all(n.startswith("model.vqmodel.") for n in report.missing_keys)
    return model


def tiny(seed: int = 0) -> ChameleonForConditionalGeneration:
    """Random, with norms that differ from head to head."""
    torch.manual_seed(seed)
    model = ChameleonForConditionalGeneration(tiny_config(initializer_range=0.25)).eval()
    for name, weight in model.model.named_parameters():
        if "norm" in name:
            weight.data += 0.3 * torch.randn_like(weight)
    return model


close = partial(tensors.close, tolerance=1e-4)


def request(*text: int) -> ImageRequest:
    return ImageRequest(torch.tensor(text or (32, 28, 27, 25, 24)))


def close_where_allowed(found: torch.Tensor, recorded_masked: torch.Tensor) -> None:
    """Minus infinity where the recording has the lowest number, and nowhere else."""
    banned = recorded_masked == LOWEST
    assert torch.equal(found.isneginf(), banned) and banned.sum() == len(found) * (VOCAB - NUM_CODES)
    close(found[~banned], recorded_masked[~banned])


# ---- recorded numbers


@torch.no_grad()
def test_the_stock_forward_hides_image_scores_and_ours_does_not(recorded):
    ids = tensor("plain/input_ids")
    hidden = recorded.model(input_ids=ids).last_hidden_state
    close(hidden, tensor("plain/hidden"))
    close(AnoleTarget(recorded).scores(hidden), tensor("plain/raw_logits"))
    stock = recorded(input_ids=ids).logits
    hides = stock == LOWEST
    assert torch.equal(hides, tensor("plain/stock_logits") == LOWEST)
    assert hides[0, 0].nonzero().flatten().tolist() == tensor("image_code_ids").tolist()
    close(stock, tensor("plain/stock_logits"))


def test_one_row_without_guidance(recorded):
    """Prompt, then the recorded image tokens in one verification: states and scores of the plain sequence."""
    target, ids = AnoleTarget(recorded, guidance=Guidance(1.0)), tensor("plain/input_ids")
    session, step = target.prefill(request(), Taps(feature=True), capacity=8)
    assert torch.equal(step.prompt.ids, ids[:, :8]) and step.prompt.mask.all()
    follow = ids[0, 8:]
    verified = target.verify(session, int(follow[0]), chain(follow[1:]))
    close(torch.cat([step.feature, verified.feature], dim=1), tensor("plain/hidden"))
    logits = torch.cat([step.logits, verified.logits])
    codes = tensor("image_code_ids")
    close(logits[:, codes], tensor("plain/raw_logits")[0, 7:, codes])
    assert logits.isfinite().sum(-1).eq(NUM_CODES).all()


def test_the_guided_pair(recorded):
    target, length = AnoleTarget(recorded), int(VECTORS["guided/prompt_length"])
    session, step = target.prefill(request(), Taps(feature=True), capacity=8)
    prompt = step.prompt
    assert prompt.guidance == Guidance(float(VECTORS["guided/cfg_scale"]))
    assert torch.equal(prompt.ids, tensor("guided/input_ids")[:, :length])
    assert torch.equal(prompt.mask.long(), tensor("guided/attention_mask")[:, :length])
    assert torch.equal(prompt.positions, tensor("guided/position_ids")[:, :length])
    follow = tensor("guided/input_ids")[0, length:]
    verified = target.verify(session, int(follow[0]), chain(follow[1:]))
    hidden = torch.cat([step.feature, verified.feature], dim=1)
    seen = tensor("guided/attention_mask").bool()
    close(hidden[seen], tensor("guided/hidden")[seen])
    raw = target.scores(hidden[:, length - 1 :])
    close(raw, tensor("guided/raw_logits"))
    combined = target.guidance(raw, range(raw.shape[1]))
    close(combined, tensor("guided/combined_logits"))
    close_where_allowed(target.forbid(combined), tensor("guided/combined_masked"))
    close_where_allowed(torch.cat([step.logits, verified.logits]), tensor("guided/combined_masked"))


def test_greedy_decoding_gives_the_recorded_tokens(recorded):
    expected = tensor("guided/greedy_tokens").tolist()
    target = AnoleTarget(recorded)
    result = generate(target, None, request(), greedy(Chain(1), len(expected)))
    assert result.tokens == expected
    assert target.codes(result.tokens).tolist() == [token - 4 for token in expected]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_whole_sequences_have_the_recorded_states(recorded, attention):
    recorded.set_attn_implementation(attention)
    try:
        target, length = AnoleTarget(recorded), int(VECTORS["guided/prompt_length"])
        codes = (tensor("guided/input_ids")[0, length:] - 4).expand(2, -1)
        uncond = torch.tensor([False, True])
        batch = CodeBatch(codes, (request().condition,) * 2, uncond, torch.ones(2).bool(), ("a", "b"), 6)
        sequence = target.states(replace(batch, uncond=uncond), Taps(feature=True))
    finally:
        recorded.set_attn_implementation("sdpa")
    # Alone, row 1 is padded to the length of row 0, as the recording is.
    assert torch.equal(sequence.ids, tensor("guided/input_ids"))
    assert torch.equal(sequence.mask.long(), tensor("guided/attention_mask"))
    assert torch.equal(sequence.positions[0], tensor("guided/position_ids"))
    close(sequence.feature, tensor("guided/hidden"))
    assert sequence.num_generated == codes.shape[1]


# ---- against the slow way


@torch.no_grad()
def plain_states(model, ids: list[int]) -> torch.Tensor:
    return model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("guidance", [Guidance(3.0), Guidance(3.0, interval=2), Guidance(1.0)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_tree_verification_equals_one_path_at_a_time(seed, guidance):
    """Both rows, at every node, before and after commits: each against an unpadded run of its own."""
    dice, model = random.Random(seed), tiny(seed)
    target, text = AnoleTarget(model, guidance=guidance), [25, 31, 27][: seed + 1]
    prompts = [[0, *text, 22, 21], [0, 21]][: target.guidance.num_rows]
    session, step = target.prefill(request(*text), Taps(text_layers=(0, 1, 2), feature=True), capacity=40)
    for row, prompt in enumerate(prompts):
        close(step.feature[row, -len(prompt) :], plain_states(model, prompt), tolerance=2e-5)
    committed = [int(step.logits[-1].argmax())]
    checked = 0
    for _ in range(4):
        tree = random_tree(dice, dice.randrange(1, 9), NUM_CODES, first=4)
        step = target.verify(session, committed[-1], tree)
        assert step.layers.keys() == {0, 1, 2} and step.layers[2].shape == step.feature.shape
        for node in range(-1, tree.num_nodes):
            follow = [*committed, *(int(tree.tokens[n]) for n in path_to(tree, node))]
            expected = [plain_states(model, [*prompt, *follow])[-1] for prompt in prompts]
            close(step.feature[:, node + 1], torch.stack(expected), tolerance=2e-5)
            scores = [model.lm_head(state)[4:20] for state in expected]
            alone = len(scores) == 1 or 0 <= guidance.interval < len(follow) - 1
            guided = scores[0] if alone else scores[1] + guidance.scale * (scores[0] - scores[1])
            close(step.logits[node + 1, 4:20], guided, tolerance=2e-4)
            checked += 1
        kept = path_to(tree, dice.randrange(-1, tree.num_nodes))
        target.commit(session, kept)
        committed += [*(int(tree.tokens[n]) for n in kept), 4 + dice.randrange(NUM_CODES)]
    assert checked > 10


def test_padding_and_siblings_would_show():
    """Guards the test above: the random model does look at its text, and its rows do differ."""
    model = tiny()
    target = AnoleTarget(model)
    _, one = target.prefill(request(25, 31), Taps(feature=True), capacity=1)
    _, two = target.prefill(request(26, 31), Taps(feature=True), capacity=1)
    assert (one.feature[0, -1] - two.feature[0, -1]).abs().max() > 0.1
    close(one.feature[1, -1], two.feature[1, -1], tolerance=1e-6)
    assert (one.feature[0, -1] - one.feature[1, -1]).abs().max() > 0.1


def test_sequences_of_unequal_texts_equal_their_prefills():
    model = tiny(1)
    target = AnoleTarget(model)
    texts = (torch.tensor([25]), torch.tensor([30, 24, 27, 33]), torch.tensor([28, 29]))
    codes = torch.randint(0, NUM_CODES, (3, 5), generator=torch.Generator().manual_seed(0))
    uncond = torch.tensor([False, False, True])
    batch = CodeBatch(codes, texts, uncond, torch.ones(3).bool(), ("a", "b", "c"), 5)
    sequence = target.states(batch, Taps(feature=True))
    assert sequence.ids.shape == (3, 4 + 3 + 5) and not sequence.feature[~sequence.mask].any()
    for row, text in enumerate(texts):
        prompt = [0, 21] if uncond[row] else [0, *text.tolist(), 22, 21]
        whole = [*prompt, *(codes[row] + 4).tolist()]
        assert sequence.ids[row].tolist() == [1] * (12 - len(whole)) + whole
        close(sequence.feature[row, -len(whole) :], plain_states(model, whole), tolerance=2e-5)
        assert sequence.positions[0][row, -len(whole) :].tolist() == list(range(len(whole)))


@pytest.mark.parametrize("policy", [Chain(3), Static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])])
def test_a_head_drafts_and_greedy_output_stays_the_targets(policy):
    target = AnoleTarget(tiny(2), num_image_tokens=16)
    torch.manual_seed(0)
    config = EagleConfig(kind="eagle")
    head = config.build(target)
    for seed in range(3):
        asked = request(24 + seed, 31)
        plain = generate(target, None, asked, greedy(policy, target.num_codes))
        drafted = generate(target, config.drafter(head, target), asked, greedy(policy, target.num_codes))
        assert drafted.tokens == plain.tokens and len(plain.tokens) == 16
        assert all(4 <= token < 20 for token in plain.tokens)


def test_the_targets_weights_do_not_move():
    model = tiny()
    with tensors.unchanged(model):
        target = AnoleTarget(model)
        generate(target, None, request(), greedy(Chain(1), 4))
    assert not any(weight.requires_grad for weight in model.parameters()) and not model.training
    assert target.embedding is model.model.embed_tokens.weight


# ---- ids


def test_ids_come_from_the_vocabulary_and_default_to_the_published():
    assert read_ids(tiny_config()) == AnoleIds(0, 1, 20, 21, 22, 4, 16)
    names = {code_name(code): code + 4 for code in range(8192)}
    assert read_ids(tiny_config(vocab_size=65536, vocabulary_map=names)) == AnoleIds()
    assert code_name(12) == "IMGIMGBCZ"


CODES_ALONE = {name: number for name, number in VOCABULARY.items() if name.startswith("IMGIMG")}


@pytest.mark.parametrize(("vocabulary", "problem"), [
    (VOCABULARY | {code_name(3): 8, code_name(4): 7}, "image code 3 has id 8, expected 7"),
    (VOCABULARY | {code_name(16): 24}, "image code 16 has id 24, expected 20"),
    (VOCABULARY | {code_name(40): 24}, "image code 16 has id none"),
    (VOCABULARY | {"<eoss>": 34}, "end_of_image 34"),
    ({"<image>": 23}, "names no image code"),
    (CODES_ALONE, "outside the model's 34: end_of_image 8196"),
])  # fmt: skip
def test_a_wrong_vocabulary_is_refused(vocabulary, problem):
    fails_with(re.escape(problem), read_ids, tiny_config(vocabulary_map=vocabulary))


def test_special_ids_in_a_text_are_refused():
    fails_with(re.escape("special ones (0, 22)"), AnoleTarget(tiny()).prefill, request(0, 25, 22), Taps(), capacity=1)


# ---- files and recipes


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("anole")
    tiny(3).save_pretrained(folder)
    return folder


def test_a_saved_target_comes_back(saved):
    target = load_anole(saved, dtype=torch.float32, guidance=Guidance(2.0))
    expected = tiny(3).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in target.model.state_dict().items())
    assert target.guidance == Guidance(2.0) and target.ids.num_codes == NUM_CODES
    assert load_anole(saved).embedding.dtype == torch.bfloat16


def test_what_cannot_be_loaded_is_refused(saved, tmp_path):
    fails_with(r"target\.path: cannot read the config", load_anole, tmp_path / "nothing")
    LlamaConfig().save_pretrained(tmp_path / "llama")
    fails_with("is a llama, expected a chameleon", load_anole, tmp_path / "llama")
    model = tiny(3)
    pickled = tmp_path / "pickled"
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    fails_with("cannot load", load_anole, pickled)
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path / "less", state_dict=state)
    fails_with(re.escape("model.norm.weight is missing"), load_anole, tmp_path / "less")


def test_recipe_section():
    config = AnoleTargetConfig(kind="anole")
    assert config.guidance == Guidance(3.0) and config.num_codes == (config.image_size // 16) ** 2
    assert config.provides() == {"target", "text", "vq"}
    assert AnoleTargetConfig(kind="anole", vq_path=None).provides() == {"target", "text"}
    placed = config.placed({"vq": Path("here")})
    assert (placed.path, placed.vq_path) == (config.path, "here"), "the weights stay where they were"
    fails_with("top_k", AnoleTargetConfig, kind="anole", top_k=2000, error=ValidationError)


def test_the_pinned_config_has_the_published_size():
    config = AnoleTargetConfig(kind="anole").model_config_of()
    with torch.device("meta"):
        model = ChameleonForConditionalGeneration(config)
    assert sum(p.numel() for p in model.parameters()) == 7_043_090_432
    assert model.model.layers[0].self_attn.q_norm.weight.shape == (32, 128)


def test_lumina_is_refused_with_its_reason(saved, tmp_path):
    values = json.loads((saved / "config.json").read_text())
    values["architectures"] = ["ChameleonXLLMXForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    fails_with(r"Lumina-mGPT is not supported.*row-end tokens", load_anole, tmp_path)
