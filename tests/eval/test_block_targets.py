"""Block drafts and P-EAGLE heads beside every language target: training's blocks are those that decoding drafts.

Training reads all states from one batch (`Target.states`), decoding those of a prefill and of verifications: ids,
states, positions and pictures must stand alike in both. What comes out is plain decoding's.
"""

from copy import copy
from dataclasses import replace

import pytest
import tiny
import tiny_qwen
import torch
from decodings import greedy
from draftsmith.core.batch import TEXT, Request
from draftsmith.data.collate import Sample, collate
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Product
from draftsmith.models.decoding.tree import Expansions
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.dflash_module import Before
from draftsmith.models.drafters.dflash_training import draw_blocks
from draftsmith.models.drafters.peagle import PeagleProposal
from draftsmith.models.targets.causal.section import CausalTarget
from heads_tiny import config_of
from tensors import loud
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

LENGTH = 14
DFLASH = {"kind": "dflash", "block_size": 4, "num_layers": 2, "taps": [1, 2, 4]}
DSPARK = DFLASH | {"kind": "dspark", "markov_rank": 6}
PEAGLE = {"kind": "peagle", "taps": [1, 2, 3], "parallel_tokens": 3, "visual_slots": "read"}
DRAFTERS = {
    "dflash": DFLASH,
    "dflash, text alone": DFLASH | {"visual_slots": "none", "positions": "compact"},
    "dspark": DSPARK,
    "dspark, gated": DSPARK | {"markov_head_type": "gated", "sample_from_anchor": False},
    "dspark, rnn": DSPARK | {"markov_head_type": "rnn", "draft_vocab_size": 40},
    "dflash2": DFLASH | {"kind": "dflash2", "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4},
    "peagle": PEAGLE | {"image": "projected"},
    "peagle, text alone": PEAGLE | {"visual_slots": "none", "positions": "compact"},
}
TEXTS = ("llama", "qwen3")
TARGETS = (*TEXTS, "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def text_model(kind):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25,
    }  # fmt: skip
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**sizes, layer_types=["full_attention"] * 4)).eval()


@pytest.fixture(scope="module", params=TARGETS)
def answered(request):
    """A target, a request to it (two pictures where it sees), and what it answers."""
    kind = request.param
    if kind in TEXTS:
        target, asked = CausalTarget(text_model(kind), num_token_ids=60), tiny.request(3, 0)
    elif kind == "llava":
        target, asked = tiny.target(tiny.llava(0, layers=4)), tiny.request(3, 2)
    else:
        target = tiny_qwen.target(tiny_qwen.model(kind))
        asked = tiny_qwen.request(kind, images=((4, 6), (4, 4)))
    return target, asked, generate(target, None, asked, greedy(Chain(1), LENGTH)).tokens


def draft(name, target):
    config = config_of(**DRAFTERS[name])
    torch.manual_seed(1)
    head = config.build(target, count_tokens=lambda: torch.ones(target.vocab_size, dtype=torch.int64))
    loud(head)
    return config, head


def batch_of(asked: Request, answer):
    ids, modality = [*asked.ids.tolist(), *answer], [*asked.modality.tolist(), *[TEXT] * len(answer)]
    supervised = [n >= len(asked.ids) for n in range(len(ids))]
    sample = Sample(ids, supervised, modality, asked.pixels, asked.name, asked.pictures)
    return replace(collate([sample], pad_id=0, image_size=16), seeds=(0,))


@torch.no_grad()
def trained(config, head, target, batch):
    """Anchor -> [K,V] chances of its block, as training computes them."""
    states = target.states(batch, config.taps_for(target.shape, training=True))
    training = config.training_objective(head, target).eval()
    if config.kind == "peagle":
        blocks = draw_blocks(batch.loss_mask, batch.seeds, 99, config.parallel_tokens)
        outputs = training.outputs(batch, states, blocks.anchors)[0]
        scores = head.draft_scores(outputs, target.scores, target.embedding.dtype)
    else:
        count = head.shape.num_drafts
        rows, blocks = training.sequences(batch, states), draw_blocks(batch.loss_mask, batch.seeds, 99, count)
        outputs = training.outputs(rows, states, blocks).unflatten(1, (-1, config.block_size))[:, :, -count:]
        read, found = head.for_loss(outputs, rows.before(blocks.anchors, count))[0], []
        training.lm(read.flatten(0, 1), lambda piece, ours: (found.append(ours), (ours.sum(), torch.zeros(())))[1])
        scores = head.vocabulary(torch.cat(found))
        if config.kind == "dflash2":
            before = rows.before(blocks.anchors, count)
            given = Before(before.tokens[0].flatten())
            scores, _ = head.conditioned(scores, outputs.flatten(1, 2), given, None, lambda added: added[0])
        scores = scores.unflatten(0, read.shape[:2])
    return dict(zip(blocks.anchors[0].tolist(), scores.softmax(-1), strict=True))


def walked(drafter):
    """Tokens of the answer -> [K,V] chances of this cycle's block along them."""
    if isinstance(drafter, PeagleProposal):
        levels = drafter._answers.q
        return lambda tokens: levels
    kept = copy(drafter._answers)

    def along(tokens):
        answers = copy(kept)
        answers._expansions, q = Expansions(), [answers.root()]
        if hasattr(answers, "_states"):
            answers._states = None
            q = [answers.root()]
        for place in range(1, drafter.head.shape.num_drafts):
            if place > len(tokens):
                break
            q.append(answers.expand([place - 2], torch.tensor(tokens[place - 1 : place]))[0])
        return torch.stack(q)

    return along


@pytest.mark.parametrize("name", DRAFTERS)
def test_training_and_decoding_agree_on_every_block(answered, name):
    """The chances of each cycle's block, walked along the answer, beside those of training's block after the same
    token.
    """
    target, asked, plain = answered
    config, head = draft(name, target)
    by_anchor, levels = trained(config, head, target, batch_of(asked, plain)), []
    drafter = config.drafter(head, target)
    root = drafter.root
    drafter.root = lambda: (root(), levels.append(walked(drafter)))[0]
    result = generate(target, drafter, asked, greedy(Chain(3), LENGTH))
    assert result.tokens == plain and len(levels) == len(result.cycles)
    place, compared = len(asked.ids), 0
    for cycle, found in zip(result.cycles, levels, strict=True):
        if place in by_anchor:  # the answer's last token is no anchor
            q = found(plain[place - len(asked.ids) + 1 :])
            torch.testing.assert_close(q, by_anchor[place][: len(q)], atol=5e-5, rtol=1e-3)
            compared += 1
        place += cycle.num_emitted
    assert compared >= 3
    tree = generate(target, config.drafter(head, target), asked, greedy(Product(8, 3, 3), LENGTH))
    assert tree.tokens == plain


@pytest.mark.parametrize("name", ["dflash", "dspark", "peagle"])
@pytest.mark.parametrize("answered", [kind for kind in TARGETS if kind not in TEXTS], indirect=True)
def test_other_pictures_are_other_drafts(answered, name):
    """A draft that were blind would not notice."""
    target, asked, _ = answered
    config, head = draft(name, target)
    first = []
    for pixels in (asked.pixels, asked.pixels.flip(0)):
        drafter = config.drafter(head, target)
        _, step = target.prefill(replace(asked, pixels=pixels), drafter.taps, capacity=20)
        drafter.start(asked, step, Warp(1.0), capacity=20)
        drafter.begin(9)
        first.append(drafter.root())
    assert float((first[0] - first[1]).abs().max()) > 1e-3
