"""The speculators package reads what is exported for it and is read, where it is installed: pip install --no-deps
speculators==0.9.0 hs-connectors==0.9.0 openai jiter distro loguru pydantic-settings python-dotenv.
"""

import importlib.util

import pytest
import torch
from dflash_tiny import draft, walked
from draftsmith.models.attention import attend
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.peagle import rollout_mask
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.export import files_of
from draftsmith.models.formats.expressible import check_expressible
from draftsmith.models.formats.heads import import_head
from draftsmith.models.formats.source import Target, read_source
from draftsmith.models.stored import stored_table
from draftsmith.models.targets.base import ShapeAlone, language_shape
from draftsmith.scripts.minutes import SpeculatorsEagle3
from heads_tiny import case_for
from published_tiny import exported
from served_pair import build
from tensors import loud
from tiny import llava
from tiny import request as ask
from tiny import target as language
from torch.nn import functional as F
from transformers import AutoConfig, LlamaConfig, Qwen3Config

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


# The settings of a run of the package that names none of them (speculators 0.9, train/config/schema.py).
DEFAULTS = {
    "eagle3": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "peagle": {"norm_before_residual": True, "mask_token_id": 41, "embed_requires_grad": True},
    "dflash": {"block_size": 8, "mask_token_id": 41},
    "dspark": {"block_size": 8, "mask_token_id": 41, "markov_rank": 6, "sample_from_anchor": True},
}
BLOCKS = ("dflash", "dspark")


def trained_there(kind, folder, target, window):
    """A loud draft of theirs beside `target`, as their trainer makes its config, written by their own code."""
    from speculators import SpeculatorModelConfig
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.model import SpeculatorModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    text, layers = AutoConfig.from_pretrained(target).get_text_config(), 2 if kind in BLOCKS else 1
    made = (LlamaConfig if kind == "eagle3" else Qwen3Config)(
        **{name: getattr(text, name) for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "max_position_embeddings", "rms_norm_eps", "rope_parameters",
        )},
        head_dim=text.hidden_size // text.num_attention_heads, num_hidden_layers=layers, hidden_act="silu",
        tie_word_embeddings=False, sliding_window=window, use_sliding_window=True,
        layer_types=["sliding_attention"] * layers,
    )  # fmt: skip
    made._attn_implementation = "eager"
    taps = "aux_hidden_state_layer_ids" if kind in BLOCKS else "eagle_aux_hidden_state_layer_ids"
    proposal = SpeculatorsConfig(
        algorithm=kind, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
        default_proposal_method="greedy", verifier=VerifierConfig.from_pretrained(str(target)),
    )  # fmt: skip
    config = SpeculatorModelConfig.registry[kind](
        transformer_layer_config=made, draft_vocab_size=20, speculators_config=proposal,
        **{taps: [1, 2, 4]}, **DEFAULTS[kind],
    )  # fmt: skip
    torch.manual_seed(3)
    theirs = SpeculatorModel.registry[kind](config).float()
    loud(theirs, norms=0.2)
    ids = torch.arange(20) * 2
    theirs.d2t, theirs.t2d = ids - torch.arange(20), torch.isin(torch.arange(text.vocab_size), ids)
    with torch.no_grad():
        rows = rows_of(target)
        theirs.embed_tokens.weight.copy_(rows + 0.1 * rows.std() * torch.randn_like(rows) if kind == "peagle" else rows)
    theirs.save_pretrained(folder)
    return theirs.eval()


def rows_of(target):
    return stored_table("token embedding", str(target), where="target").float()


def read_there(kind, folder, target):
    image = {} if kind in BLOCKS else {"image": "placeholder"}
    text = AutoConfig.from_pretrained(target).get_text_config()
    return import_head(kind, str(folder), text, embedding=rows_of(target), **image)


@pytest.fixture
def target(tmp_path):
    llava(0, layers=5).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("kind", DEFAULTS)
def test_what_the_package_trains_by_default_goes_both_ways(tmp_path, target, kind):
    """Their folder, read here and written back: the same tensors, keys of their config and model of theirs."""
    from speculators import SpeculatorModelConfig

    theirs = trained_there(kind, tmp_path / "theirs", target, 9)
    read = read_there(kind, tmp_path / "theirs", target)
    identity = TargetIdentity({"kind": "llava", "path": str(target)})
    beside = ShapeAlone(language_shape(AutoConfig.from_pretrained(target).get_text_config()))
    read.config.save(read.head, tmp_path / "ours", read.config.manifest(beside, identity))
    source = read_source(tmp_path / "ours", Target(AutoConfig.from_pretrained(target), str(target)))
    check_expressible("speculators", source, "text")
    write_folder(tmp_path / "back", *files_of("speculators", source))
    (was, first), (now, then) = exported(tmp_path / "theirs"), exported(tmp_path / "back")
    assert all(torch.equal(then[name], value) for name, value in first.items() if name in then)
    assert ("embed_tokens.weight" in then) is (kind == "peagle")
    assert first.keys() - then.keys() <= {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    for name in (*DEFAULTS[kind], "speculators_model_type", "draft_vocab_size", "sliding_window_non_causal"):
        assert now.get(name) == was.get(name), name
    layer, others = now["transformer_layer_config"], was["transformer_layer_config"]
    for name in ("layer_types", "sliding_window", "use_sliding_window", "model_type", "rms_norm_eps"):
        assert layer.get(name) == others.get(name), name
    assert SpeculatorModelConfig.from_pretrained(str(tmp_path / "back")).speculators_model_type == kind
    again = type(theirs).from_pretrained(str(tmp_path / "back"), attn_implementation="eager").state_dict()
    for name, value in theirs.state_dict().items():
        assert ("embed" in name and kind != "peagle") or "verifier" in name or torch.equal(again[name], value), name


@pytest.mark.parametrize("window", [3, 99])
def test_eagle3s_passes_there_are_those_of_a_decoding_here(tmp_path, target, window):
    """Their training forward of three passes, and at each place a chain of three drafts after the inputs up to it."""
    theirs = trained_there("eagle3", tmp_path / "theirs", target, window)
    head = read_there("eagle3", tmp_path / "theirs", target).head
    states, ids, scores = torch.randn(1, 9, 96), torch.randint(4, 60, (1, 9)), []
    theirs.lm_head.register_forward_hook(lambda module, inputs, outputs: scores.append(outputs[0]))
    with torch.no_grad():
        theirs(states, ids, torch.zeros_like(ids), ttt_steps=3)
        embeds = F.embedding(ids, rows_of(target))
        for count in range(1, 7):
            seen = torch.ones(count + 2, count + 2, dtype=torch.bool).tril()
            for row in range(count + 2):
                seen[row, : max(0, min(row, count - 1) - window + 1)] = False
            fused = head.fuse(states[:, :count])
            for n in range(3):
                rows = seen[: count + n, : count + n]
                out = head(embeds[:, : count + n], fused, torch.arange(count + n)[None], rows)
                ours = head.lm_head(head.hidden(out[0, -1]))
                torch.testing.assert_close(ours, scores[n][count - 1], atol=2e-4, rtol=1e-3)
                fused = torch.cat([fused, out[:, -1:]], 1)


def test_a_parallel_heads_mask_is_the_packages():
    from speculators.models.peagle.attention import create_peagle_mask_mod

    anchors = torch.tensor([2, 5, 6])
    at = torch.cat([torch.arange(9), anchors.repeat_interleave(3)])
    depth = torch.cat([torch.zeros(9, dtype=torch.int64), torch.arange(1, 4).repeat(3)])
    for window in (4, 6, 99):
        sees = create_peagle_mask_mod(at, depth, torch.zeros(12, dtype=torch.int64), window)
        index = torch.arange(18)
        ours = rollout_mask(torch.ones(1, 9, dtype=torch.bool), anchors[None], 3, window)[0]
        assert torch.equal(ours, sees(0, 0, index[:, None], index[None]))


@pytest.mark.parametrize("kind", BLOCKS)
def test_causal_blocks_there_are_those_here(tmp_path, target, kind):
    """The backbone at one anchor; the package counts a window from there, and this one is longer than the prompt."""
    theirs = trained_there(kind, tmp_path / "theirs", target, 30)
    read = read_there(kind, tmp_path / "theirs", target)
    assert read.config.causal and read.config.sliding_window == 30
    states, ids, anchor = torch.randn(1, 20, 96), torch.randint(4, 60, (1, 20)), 9
    with torch.no_grad():
        hidden, *_ = theirs._backbone_forward(
            states, ids, (torch.arange(20) == anchor).float()[None], states[..., :32], torch.zeros_like(ids),
            max_anchors=1,
        )  # fmt: skip
        head, mask = read.head, torch.ones(8, anchor + 8, dtype=torch.bool).tril(anchor)
        blocks = head.blocks(ids[:, anchor : anchor + 1], rows_of(target))
        places = torch.arange(anchor + 8)[None]
        ours = head(blocks, head.context(states[:, :anchor]), places, lambda _, q, k, v: attend(q, k, v, mask))
    torch.testing.assert_close(ours, hidden, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("norms", [False, True])
def test_their_training_forward_has_our_gradients(passes, norms, monkeypatch):
    """Two samples in one row, of a target that bans no id, where both count the same inputs."""
    big = language(llava(0, layers=5))
    monkeypatch.setattr(type(big), "scores", lambda self, states: F.linear(states, self.decoder.model.lm_head.weight))
    settings = {"taps": [1, 2, 4], "mtp_steps": passes - 1, "visual_slots": "read", "norm_before_fc": norms,
                "norm_before_residual": norms, "norm_output": norms,
                "objective": {"token": 1.0, "decay": 1.0, "noise": 0.0}}  # fmt: skip
    ours, theirs = Eagle3Config(kind="eagle3", **settings), SpeculatorsEagle3(**settings)
    torch.manual_seed(0)
    head, gradients = ours.build(big), []
    batch, states = case_for(ours, big, ("ttttttaaaaaaaaa", "tttttaaaaaa"))
    for config in (ours, theirs):
        head.zero_grad()
        loss = config.training_objective(head, big).train()(batch, states)
        (loss.loss_sum / loss.num_tokens).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in head.named_parameters()})
    for name, own in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], own, atol=5e-6 * float(own.abs().max()), rtol=0)
