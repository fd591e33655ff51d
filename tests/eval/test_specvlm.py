"""Drafting with pruned visual tokens through the loop: the output stays, and what is drafted is right."""

import copy
from dataclasses import replace

import pytest
import tiny_qwen
import torch
from draftsmith.core.pictures import TEXT
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import CHOICES, Chain, Draw, Sage, SageTree, Static
from draftsmith.eval.rules import Sampling
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.pruned import PrunedConfig, PrunedProposal, keep_visual, visual_scores
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.llava.section import LlavaTarget
from test_contract import compare, greedy, not_vacuous
from test_trees import Checked
from tiny import IMAGE_ID, TOKENS, llava, near, proposal, request, target

POLICIES = pytest.mark.parametrize(
    "policy", [Chain(3), Static(CHOICES["mc_sim_7b_63"]), Sage(SageTree(kind="sage"))], ids=lambda p: p.name
)


@pytest.fixture(scope="module")
def big():
    return target(llava(0))


@pytest.fixture(scope="module")
def sibling(big):
    return target(near(big.decoder.model))


def pruned(reader, big, **given):
    return PrunedProposal(reader, big, PrunedConfig(kind="pruned", **given))


@POLICIES
def test_greedy_output_is_plain_decoding(big, sibling, policy):
    not_vacuous(compare(lambda: big, pruned(sibling, big, ratio=0.5), policy, seeds=2, images=3))
    not_vacuous(compare(lambda: big, pruned(big, big, ratio=0.9), policy, seeds=2, images=3))


def test_the_target_itself_drafts_what_it_says():
    """With nothing removed a copy accepts every drafted token: the two prompts and caches are alike."""
    big = target(llava(3))
    for drafter in (pruned(big, big, ratio=0.0), pruned(target(copy.deepcopy(big.decoder.model)), big, ratio=0.0)):
        cycles = compare(lambda: big, drafter, Chain(4), seeds=2, images=2)
        assert all(c.num_accepted == c.num_drafted for c in cycles)
        assert sum(c.num_accepted for c in cycles) > 20


class Fresh(Checked):
    """Every distribution is that of a fresh pass over the prompt with the removed tokens cut out."""

    def __init__(self, drafter, model, kept):
        super().__init__(model)
        self.inner, self.kept, self.taps = drafter, kept, drafter.taps

    def fresh(self, tokens):
        asked, extra = self.request, torch.tensor(tokens)
        embeds = self.model.get_input_embeddings()(torch.cat([asked.ids, extra]))
        images = self.inner.decoder.embed(asked.ids[None], asked.modality[None], asked.pixels)[0]
        embeds = torch.cat([images[self.kept], embeds[len(asked.ids) :]])[None]
        positions = torch.arange(len(asked.ids))[self.kept]
        behind = len(asked.ids)
        if self.inner.config.positions == "compact":
            positions, behind = torch.arange(len(self.kept)), len(self.kept)
        positions = torch.cat([positions, behind + torch.arange(len(extra))])[None]
        hidden = self.model.model.language_model(inputs_embeds=embeds, position_ids=positions).last_hidden_state
        scores = self.model.lm_head(hidden[0, -1]).clone()
        scores[[IMAGE_ID, *range(TOKENS, len(scores))]] = float("-inf")
        return scores


@pytest.mark.parametrize("positions", ["compact", "target"])
@pytest.mark.parametrize("shares", [True, False], ids=["target", "sibling"])
@torch.inference_mode()
def test_the_drafter_sees_what_was_kept(big, sibling, shares, positions):
    """Through prefill, trees, commits and rejections."""
    asked, reader = request(1, 3), big if shares else sibling
    _, step = big.prefill(asked, Taps(prefill_attention=(0, 1)), capacity=4)
    visual = (asked.modality != TEXT).nonzero().flatten()
    stays = asked.modality == TEXT
    stays[visual[keep_visual(visual_scores(step.attention, asked.modality), 6)]] = True
    drafter = pruned(reader, big, ratio=0.5, positions=positions)
    checked = Fresh(drafter, reader.decoder.model, stays.nonzero().flatten())
    not_vacuous(generate(big, checked, asked, greedy(Static(CHOICES["mc_sim_7b_63"]), 12)).cycles)
    assert checked.checked > 15
    assert drafter.num_visual == 12 and drafter.num_kept == 6
    assert drafter.last_position(asked, 12) == len(asked.ids) + 12 - (6 if positions == "compact" else 0)


def test_the_attention_decides(big, sibling):
    """Another question, other tokens."""
    kept = set()
    for seed in range(4):
        asked = request(seed, 3)
        asked = replace(asked, pixels=request(0, 3).pixels)
        _, step = big.prefill(asked, pruned(sibling, big).taps, capacity=4)
        kept.add(tuple(keep_visual(visual_scores(step.attention, asked.modality), 5).tolist()))
    assert len(kept) > 1


def test_without_pictures_and_without_pruning(big, sibling):
    drafter = pruned(sibling, big, ratio=0.0)
    assert drafter.taps.prefill_attention == ()
    plain = compare(lambda: big, proposal(sibling.decoder.model), Chain(3), images=2)
    cycles = compare(lambda: big, drafter, Chain(3), images=2)
    assert [c.num_accepted for c in cycles] == [c.num_accepted for c in plain]
    not_vacuous(compare(lambda: big, pruned(sibling, big), Chain(3), seeds=2, images=0))


@pytest.mark.parametrize("draw", ["top-k", "sample"])
def test_sampling_repeats_and_fits_another_vocabulary(big, draw):
    """A sibling may have more rows of the vocabulary than the target, or fewer; those have no token."""
    for rows in (62, 70):
        small = llava(0)
        small.resize_token_embeddings(rows)
        drafter = pruned(target(near(small)), big, ratio=0.5)
        decoding = Decoding(Chain(3), Sampling(), Draw(draw), Warp(1.0, top_k=20), 16, ())
        results = [generate(big, drafter, request(2, 2), decoding, torch.Generator().manual_seed(5)) for _ in range(2)]
        assert results[0].tokens == results[1].tokens
        assert max(results[0].tokens) < TOKENS
        assert any(c.num_accepted for c in results[0].cycles)


@pytest.mark.parametrize("rows", [62, 70])
@POLICIES
def test_greedy_output_with_a_sibling_of_another_padded_vocabulary_is_plain_decoding(big, policy, rows):
    small = llava(0)
    small.resize_token_embeddings(rows)
    sibling = LlavaTarget(near(small), num_token_ids=TOKENS, image_token_id=IMAGE_ID)
    not_vacuous(compare(lambda: big, pruned(sibling, big, ratio=0.5), policy, seeds=2, images=2))


def test_what_loads(big):
    config = PrunedConfig(kind="pruned")
    drafter = config.drafter(config.load(None, big), big)
    assert drafter.decoder is big.decoder, "shared weights"
    result = generate(big, drafter, request(0, 2), greedy(Chain(3), 12))
    assert drafter.pruning_s > 0 and result.draft_prefill_s > drafter.pruning_s


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_qwen(kind):
    """Three coordinates, and Qwen3-VL's visual states between layers: pruned with the tokens that they belong to."""
    model = tiny_qwen.model(kind)
    own, other = tiny_qwen.target(model), tiny_qwen.target(copy.deepcopy(model))
    asked = tiny_qwen.request(kind, ((4, 6),), (5, 4, 4))
    plain = generate(own, None, asked, greedy(Chain(3), 14))
    for reader in (own, other):
        for positions in ("compact", "target"):
            whole = pruned(reader, own, ratio=0.0, positions=positions)
            cycles = generate(own, whole, asked, greedy(Chain(3), 14)).cycles
            assert all(c.num_accepted == c.num_drafted for c in cycles)
            drafter = pruned(reader, own, ratio=0.5, positions=positions)
            result = generate(own, drafter, asked, greedy(Static(CHOICES["mc_sim_7b_63"]), 14))
            assert result.tokens == plain.tokens
            assert any(c.num_accepted for c in result.cycles)
            assert drafter.num_kept == round(drafter.num_visual / 2)
