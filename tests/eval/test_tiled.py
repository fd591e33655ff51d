"""LLaVA-NeXT and LLaVA-OneVision in the decoding loop: greedy identity and self-drafts on every kind of picture."""

import copy

import pytest
import torch
from decodings import as_plain, greedy
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import generate
from draftsmith.eval.policies import Chain, Static
from draftsmith.models.drafters.ensemble import EnsembleProposal
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.drafters.weights import FixedWeights, weights_of
from draftsmith.models.targets.llava.model import LlavaDecoder
from draftsmith.models.targets.llava.section import LlavaTarget
from family_checks import check_batches
from tiled import model, processor, published, request
from tiny import near

CASES = [
    ("llava_next", [(40, 30)], 0),
    ("llava_next", [(90, 20), (30, 31)], 0),
    ("llava_onevision", [(50, 20)], 0),
    ("llava_onevision", [(90, 20), (30, 31), (24, 24)], 0),
    ("llava_onevision", [], 3),
    ("llava_onevision", [(33, 50)], 2),
]
FAMILIES = ("llava", "llava_next", "llava_onevision")
MODELS = {family: model(family) for family in FAMILIES}
PROCESSORS = {family: processor(family) for family in FAMILIES}
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


def target(family: str, reads_tiles: bool | None = None) -> LlavaTarget:
    made = PROCESSORS[family]
    return LlavaTarget(
        MODELS[family], num_token_ids=len(made.tokenizer), image_token_id=made.image_token_id, reads_tiles=reads_tiles
    )


def draft(family: str, mode: str = "M", llava=None) -> IndependentProposal:
    made = PROCESSORS[family]
    decoder = LlavaDecoder(llava or copy.deepcopy(MODELS[family]), num_token_ids=len(made.tokenizer))
    return IndependentProposal(decoder, mode, newline_id=made.newline_id)


def expected(family: str, asked, sizes) -> list[int]:
    """transformers' own greedy decoding, with the same ids kept out."""
    made, llava = PROCESSORS[family], MODELS[family]
    never = [made.image_token_id, *range(len(made.tokenizer), llava.config.text_config.vocab_size)]
    never += [made.video_token_id] if made.video_token_id is not None else []
    output = llava.generate(**published(family, asked, sizes), max_new_tokens=16, do_sample=False,
                            suppress_tokens=never, eos_token_id=None, pad_token_id=3)  # fmt: skip
    return output[0, len(asked.ids) :].tolist()


@pytest.mark.parametrize(("family", "sizes", "frames"), CASES)
def test_plain_decoding_is_that_of_the_published_class(family, sizes, frames):
    asked = request(family, sizes, frames=frames)
    assert generate(target(family, True), None, asked, greedy(Chain(4), 16)).tokens == expected(family, asked, sizes)


@pytest.mark.parametrize(("family", "sizes", "frames"), CASES)
@pytest.mark.parametrize("policy", [Chain(4), Static(TREE)], ids=["chain", "static"])
def test_a_self_draft_is_accepted_whole(family, sizes, frames, policy):
    drafted = as_plain(target(family), draft(family), request(family, sizes, frames=frames), policy, 16)
    assert all(c.num_accepted == c.num_drafted for c in drafted.cycles)
    assert sum(c.num_accepted for c in drafted.cycles) >= 10


@pytest.mark.parametrize(("family", "sizes", "frames"), CASES)
@pytest.mark.parametrize("mode", ["M", "P", "T"])
def test_another_draft_changes_nothing(family, sizes, frames, mode):
    """A noisy copy, with the pictures, pooled ones or none."""
    asked = request(family, sizes, frames=frames)
    drafted = as_plain(target(family), draft(family, mode, near(MODELS[family])), asked, Chain(4), 16)
    assert any(c.num_accepted < c.num_drafted for c in drafted.cycles)


@pytest.mark.parametrize(("family", "sizes", "frames"), CASES)
def test_an_ensemble_of_modes_on_tiles(family, sizes, frames):
    """Rows of different lengths: tiles, pooled tiles, a newline for each picture."""
    asked, copied = request(family, sizes, frames=frames), draft(family)
    weights = weights_of(FixedWeights(kind="fixed"), 3)
    modes = EnsembleProposal(copied.decoder, ("M", "P", "T"), weights, newline_id=copied.newline_id)
    assert len({len(view.request.ids) for view in modes.views(asked)}) == 3
    as_plain(target(family), modes, asked, Chain(4), 16)


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_answers_written_together_are_those_written_alone(family):
    asked = [request(family, sizes, frames=frames) for name, sizes, frames in CASES if name == family]
    check_batches(target(family), [*asked, request(family, [])], 16, eos=())


def test_a_target_that_takes_one_tile():
    """`anyres: false`: what a draft with LLaVA-1.5's class and the same weights sees, so that it is accepted whole."""
    flat = model("llava", seed=1)
    flat.load_state_dict({n: w for n, w in MODELS["llava_next"].state_dict().items() if "image_newline" not in n})
    asked, first = request("llava_next", [(40, 30), (90, 20)]), target("llava_next", reads_tiles=False)
    drafted = as_plain(first, draft("llava_next", llava=flat), asked, Chain(4), 16)
    assert drafted.tokens != generate(target("llava_next", True), None, asked, greedy(Chain(4), 16)).tokens
    assert all(c.num_accepted == c.num_drafted for c in drafted.cycles)


def test_a_flat_draft_reads_the_first_tiles_of_a_tiled_target():
    """Its pictures are not the target's, its output is."""
    asked, flat = request("llava_next", [(40, 30), (90, 20)]), draft("llava")
    (view,) = flat.views(asked)
    assert [p.num_tokens for p in view.request.pictures] == [9, 9] and len(view.request.pixels) == 2
    as_plain(target("llava_next"), flat, asked, Chain(4), 16)


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_a_tiled_target_asks_for_tiles(family):
    asked = request(family, [(40, 30)], aspect="pad")
    with pytest.raises(UserError, match=r"reads pictures in tiles[\s\S]*aspect: anyres"):
        generate(target(family, True), None, asked, greedy(Chain(4), 16))
    generate(target(family, False), None, asked, greedy(Chain(4), 2))


def test_placeholders_of_images_and_clips_are_never_said():
    made, llava = PROCESSORS["llava_onevision"], copy.deepcopy(MODELS["llava_onevision"])
    decoder = LlavaDecoder(llava, num_token_ids=len(made.tokenizer))
    scores = decoder.logits(torch.randn(3, 32))
    assert scores[:, [made.image_token_id, made.video_token_id]].isneginf().all()
    assert scores.isfinite().sum(1).tolist() == [len(made.tokenizer) - 2] * 3
