"""Tiled pictures, several pictures and clips become the tokens that transformers' classes make of them."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.core.batch import Batch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import TEXT, VIDEO, Picture, TileGrid
from draftsmith.data.collate import Sample, collate
from draftsmith.data.pictures.tiles import Tiling, next_resolutions, onevision_resolutions, tiled_picture
from draftsmith.models.parts import PARTS
from draftsmith.models.pictures import flat_view, pictures_of, pooled_view
from draftsmith.models.targets.llava.model import LlavaDecoder, LlavaTraining
from draftsmith.models.targets.llava.packing import pack
from tiled import model, published, request
from transformers import LlavaForConditionalGeneration, LlavaNextModel

VECTORS = np.load(Path(__file__).parents[1] / "data" / "vectors" / "lvlm" / "anyres_pool.npz", allow_pickle=False)
# Of NeXT every picture is tiled, of OneVision one that stands alone; 300 x 300 meets the cap of nine tiles.
ASKED = {
    "llava_next": [([(40, 30)], 0), ([(24, 24)], 0), ([(90, 20), (30, 31)], 0)],
    "llava_onevision": [([(40, 30)], 0), ([(300, 300)], 0), ([(90, 20), (30, 31)], 0), ([], 3), ([(33, 50)], 2)],
}
CASES = [(family, sizes, frames) for family, asked in ASKED.items() for sizes, frames in asked]
MODELS = {family: model(family) for family in ASKED}


def logits(llava, asked) -> torch.Tensor:
    decoder = LlavaDecoder(llava, num_token_ids=440)
    with torch.no_grad():
        embeds = decoder.embed(asked.ids[None], asked.modality[None], asked.pixels, asked.pictures)
        places = torch.arange(len(asked.ids))[None]
        return llava.lm_head(decoder.forward(embeds, decoder.new_cache(len(asked.ids)), places).feature)[0]


@pytest.mark.parametrize(("family", "sizes", "frames"), CASES)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_logits_are_those_of_the_published_class(family, sizes, frames, side_by_side):
    llava, asked = MODELS[family], request(family, sizes, frames=frames, side_by_side=side_by_side)
    with torch.no_grad():
        expected = llava(**published(family, asked, sizes)).logits[0]
    assert torch.equal(logits(llava, asked), expected)
    # Every tile is seen.
    for tile in range(len(asked.pixels)):
        other = asked.pixels.clone()
        other[tile] = -other[tile]
        changed = (logits(llava, replace(asked, pixels=other)) - expected).abs().amax(1) > 1e-3
        first = int((asked.modality != TEXT).nonzero()[0, 0])
        assert changed.any() and not changed[:first].any()


@pytest.mark.parametrize("family", ASKED)
@pytest.mark.parametrize("size", [(1, 5000), (5000, 1), (3, 5000), (5000, 3), (1, 300)])
def test_extreme_shapes_are_what_the_published_class_makes_of_them(family, size):
    """No row or no column of the grid is left, as in transformers: of 1 x 5000 pixels the newlines alone stay."""
    llava, asked = MODELS[family], request(family, [size])
    with torch.no_grad():
        expected = llava(**published(family, asked, [size])).logits[0]
    assert torch.equal(logits(llava, asked), expected)
    for pool in (2, 3):
        pooled = pooled_view(asked, pool)
        assert all(n >= 0 for p in pooled.pictures for n in p.grid.final) and pooled.pixels is not None


@pytest.mark.parametrize(("size", "left"), [((1, 5000), (24, 0)), ((5000, 1), (0, 48))])
def test_a_grid_without_rows_or_columns_is_packed_as_transformers_packs_it(size, left):
    """Of LLaVA-1.6's own sizes, whose 24 patches are cut in halves; no token of the grid stays but newlines."""
    picture = tiled_picture(size, Tiling(336, 24, next_resolutions(336)))
    assert picture.grid.final == left
    features, newline = torch.randn(picture.num_tiles, 24**2, 2), torch.randn(2)
    vision = SimpleNamespace(image_size=336, patch_size=14)
    pinpoints = [list(pair) for pair in next_resolutions(336)]
    model = SimpleNamespace(config=SimpleNamespace(image_grid_pinpoints=pinpoints, vision_config=vision))
    expected, _ = LlavaNextModel.pack_image_features(
        model, [features], torch.tensor([[size[1], size[0]]]), "default", image_newline=newline
    )
    assert torch.equal(pack(features, [picture], newline), expected[0])
    assert len(expected[0]) == picture.num_tokens == 24**2 + left[0]


def test_the_cap_is_met():
    grid = request("llava_onevision", [(300, 300)]).pictures[0].grid
    assert grid.final == (9, 9) and grid.unpadded == (18, 18)


def test_recorded_pooling():
    frames = torch.from_numpy(VECTORS["frame_features"])
    for pooling, name in (("bilinear", "pooled_bilinear"), ("average", "pooled_average")):
        clip = Picture(27, len(frames), VIDEO, pooling=pooling)
        result = pack(frames, [clip], None).unflatten(0, (len(frames), -1))
        torch.testing.assert_close(result, torch.from_numpy(VECTORS[name]), atol=1e-6, rtol=0)


def test_newlines_of_a_clip():
    """By frame and row, against a loop; one at the end; none."""
    frames, newline = torch.randn(2, 9, 4), torch.randn(4)
    rows = [row for frame in frames for r in range(3) for row in (*frame[3 * r : 3 * r + 3], newline)]
    assert torch.equal(pack(frames, [Picture(3, 2, VIDEO, newline="grid")], newline), torch.stack(rows))
    ended = pack(frames, [Picture(3, 2, VIDEO, newline="one_token")], newline)
    assert torch.equal(ended, torch.cat([frames.flatten(0, 1), newline[None]]))
    assert torch.equal(pack(frames, [Picture(3, 2, VIDEO)], newline), frames.flatten(0, 1))


@pytest.mark.parametrize("size", [(70, 45), (20, 90), (24, 24), (61, 60), (2000, 3)])
def test_a_grid_is_stitched_unpadded_and_ended_by_newlines(size):
    """Against a loop over rows and columns, with features that name their place."""
    layout = tiled_picture(size, Tiling(24, 3, next_resolutions(24)))
    down, across = layout.grid.tiles
    place = torch.arange(down * 3 * across * 3, dtype=torch.float32).view(down * 3, across * 3, 1)
    tiles = [place[3 * r : 3 * r + 3, 3 * c : 3 * c + 3].reshape(9, 1) for r in range(down) for c in range(across)]
    features = torch.stack([-torch.ones(9, 1), *tiles])
    rows, columns = layout.grid.unpadded
    top, left = (down * 3 - rows) // 2, (across * 3 - columns) // 2
    expected = [-1.0] * 9
    for r in range(top, top + rows):
        expected += [float(place[r, c, 0]) for c in range(left, left + columns)] + [0.5]
    assert pack(features, [layout], torch.tensor([0.5])).flatten().tolist() == expected


def test_a_model_without_a_newline_refuses_what_needs_one():
    with pytest.raises(UserError, match="the model has learned none"):
        pack(torch.randn(3, 9, 4), [Picture(3, 3, VIDEO, newline="one_token")], None)


def test_first_tiles_read_as_the_flat_class_reads_them():
    """The setting of TABED's released code: NeXT's weights in LLaVA-1.5's class, with one tile and no newline."""
    llava = MODELS["llava_next"]
    flat = model("llava", seed=1)
    state = {n: w for n, w in llava.state_dict().items() if "image_newline" not in n}
    flat.load_state_dict(state)
    asked = flat_view(request("llava_next", [(40, 30), (90, 20)]))
    assert asked.pictures == (Picture(3), Picture(3)) and len(asked.pixels) == 2
    assert int((asked.modality != TEXT).sum()) == 18
    assert isinstance(flat, LlavaForConditionalGeneration)
    with torch.no_grad():
        expected = flat(input_ids=asked.ids[None], pixel_values=asked.pixels).logits[0]
    assert torch.equal(logits(llava, asked), expected)


def test_views_keep_text_and_order():
    """Adjacent runs of different lengths are told apart; what is between pictures stays."""
    asked = request("llava_onevision", [(33, 50)], frames=2, side_by_side=True)
    image, clip = asked.pictures
    asked = replace(asked, ids=torch.arange(len(asked.ids)))
    before = int((asked.modality != TEXT).nonzero()[0, 0])
    flat = flat_view(asked)
    assert flat.pictures == (Picture(3), replace(clip, newline="none"))
    run = [*range(before, before + 9), *range(before + image.num_tokens, before + image.num_tokens + 8)]
    after = range(before + image.num_tokens + clip.num_tokens, len(asked.ids))
    assert flat.ids.tolist() == [*range(before), *run, *after]
    assert torch.equal(flat.pixels, asked.pixels[[0, -2, -1]])
    assert flat_view(flat) is flat


@pytest.mark.parametrize("size", [(40, 30), (90, 20), (17, 61), (300, 300)])
def test_a_pooled_view_counts_what_packing_makes(size):
    """Tiles of 6 patches pooled 2 x 2 are tiles of 3: about a quarter of the tokens."""
    layout = tiled_picture(size, Tiling(48, 6, onevision_resolutions(48), max_tiles=9))
    several, clip = Picture(6, newline="one_token"), Picture(6, 3, VIDEO, newline="grid", pooling="bilinear")
    pictures = (layout, several, clip)
    runs = [p.num_tokens for p in pictures]
    modality = torch.cat([torch.full((p.num_tokens,), p.modality, dtype=torch.int8) for p in pictures])
    asked = replace(request("llava", []), ids=torch.arange(sum(runs)), modality=modality, pictures=pictures,
                    pixels=torch.zeros(sum(p.num_tiles for p in pictures), 3, 48, 48))  # fmt: skip
    pooled = pooled_view(asked, 2)
    features, newline = torch.randn(len(asked.pixels), 9, 4), torch.randn(4)
    assert len(pack(features, pooled.pictures, newline)) == len(pooled.ids) == int((pooled.modality != TEXT).sum())
    assert [p.patches for p in pooled.pictures] == [3, 3, 3]
    assert all(new.num_tokens <= 0.5 * old for new, old in zip(pooled.pictures, runs, strict=True))


def test_of_a_grid_that_was_shrunk_pooling_leaves_a_row_and_a_column():
    layout = tiled_picture((300, 300), Tiling(24, 3, onevision_resolutions(24), max_tiles=3))
    assert layout.grid.final == (5, 5) != layout.grid.unpadded
    asked = replace(request("llava", []), ids=torch.arange(layout.num_tokens), pictures=(layout,),
                    modality=torch.full((layout.num_tokens,), layout.modality, dtype=torch.int8),
                    pixels=torch.zeros(layout.num_tiles, 3, 24, 24))  # fmt: skip
    assert [pooled_view(asked, pool).pictures[0].grid.final for pool in (2, 3)] == [(2, 2), (1, 1)]


def test_a_request_that_names_no_pictures_has_plain_ones():
    asked = replace(request("llava", [(9, 9), (30, 8)]), pictures=())
    assert pictures_of(asked) == (Picture(3), Picture(3))


def batch(family: str, asked) -> Batch:
    samples = []
    for sizes, frames in asked:
        result = request(family, sizes, frames=frames)
        mask = [False] * (len(result.ids) - 4) + [True] * 4
        samples.append(Sample(result.ids.tolist(), mask, result.modality.tolist(), result.pixels, "s", result.pictures))
    return collate(samples, pad_id=3, image_size=24)


@pytest.mark.parametrize("family", ASKED)
def test_a_training_batch_is_what_each_row_is_alone(family):
    asked, llava = [*ASKED[family], ([], 0)], MODELS[family]
    made, training = batch(family, asked), LlavaTraining(llava, (), gradient_checkpointing=False).eval()
    with torch.no_grad():
        together = llava.lm_head(training.hidden_states(made))
    for row, (sizes, frames) in enumerate(asked):
        alone = logits(llava, request(family, sizes, frames=frames))
        assert torch.allclose(together[row, : len(alone)], alone, atol=2e-5)


@pytest.mark.parametrize("asked", [[([(40, 30)], 0)], [([], 0)]], ids=["tiles", "text"])
def test_the_newline_is_in_every_graph_and_learns_from_tiles(asked):
    """A rank without a picture has a zero gradient for it, not none: ranks would wait for each other."""
    training = LlavaTraining(model("llava_onevision"), PARTS, gradient_checkpointing=False)
    loss = training(batch("llava_onevision", asked))
    loss.loss_sum.backward()
    newline = training.model.model.image_newline
    assert [n for n, p in training.parts()["projector"] if p is newline] == ["projector.1.image_newline"]
    assert newline.grad is not None and bool(newline.grad.any()) == (asked != [([], 0)])
    frozen = LlavaTraining(model("llava_onevision"), ["language_model"], gradient_checkpointing=False)
    assert not frozen.model.model.image_newline.requires_grad


def test_the_number_of_tokens_follows_from_the_layout():
    grid = TileGrid((2, 3), (6, 7), (6, 7))
    assert Picture(3, 7, grid=grid, newline="grid").num_tokens == 9 + 6 * 8
    assert Picture(27, 2, VIDEO, pooling="bilinear").side == math.ceil(27 / 2)
