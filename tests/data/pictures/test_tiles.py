"""Tiles and token counts: the recorded ones of both conventions, and the pixels of transformers' own processors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.pictures import IMAGE, VIDEO, Picture
from draftsmith.data.pictures.tiles import (
    Tiling,
    best_resolution,
    cut,
    next_resolutions,
    onevision_resolutions,
    tiled_picture,
)
from PIL import Image
from tiled import SIDE, layouts, picture, pixels, processor
from transformers import LlavaNextImageProcessorPil, LlavaOnevisionImageProcessorPil

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "lvlm" / "anyres.json").read_text())
SETTINGS = {"next336": (336, 24, None), "ov_anyres_max_9": (384, 27, 9)}
SIZES = [(40, 30), (24, 24), (90, 20), (17, 61), (300, 200), (7, 5), (1, 1), (1, 9), (2, 2)]


@pytest.mark.parametrize("convention", ["original", "hf"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_recorded_layouts(setting, convention):
    tile, patches, cap = SETTINGS[setting]
    assert VECTORS[setting]["tile"] == tile and VECTORS[setting].get("max_tiles") == cap
    resolutions = next_resolutions(tile) if cap is None else onevision_resolutions(tile)
    assert [list(pair) for pair in resolutions] == VECTORS[setting]["pinpoints_wh"]
    tiling, differing = Tiling(tile, patches, resolutions, convention, cap), 0
    for entry in VECTORS["sizes"]:
        size, expected = tuple(entry["size_wh"]), entry[setting][convention]
        actual = tiled_picture(size, tiling)
        down, across = actual.grid.tiles
        assert best_resolution(size, tiling) == tuple(expected["best_resolution_wh"])
        assert [across, down] == expected["tile_grid_wh"] and actual.num_tiles == 1 + across * down
        assert actual.grid.unpadded == tuple(expected["unpadded_grid_hw"])
        # transformers' final grid is not recorded: its tokens say the same.
        assert actual.grid.final == tuple(expected.get("final_grid_hw", actual.grid.final))
        assert actual.num_tokens == expected["tokens"]
        differing += entry[setting]["layout_differs"]
    assert differing, "conventions that never differ would test one of them twice"


def test_recorded_several_pictures_and_clips():
    for entry in VECTORS["multi_image"]:
        result = Picture(27, newline="one_token")
        assert result.num_tokens == entry["tokens_per_image"]
        assert entry["n_images"] * result.num_tokens == entry["tokens"]
    for entry in VECTORS["video"]:
        for newline, name in (("one_token", "one_token"), ("grid", "grid_newline"), ("none", "no_newline")):
            clip = Picture(27, entry["frames"], VIDEO, newline=newline, pooling="bilinear")
            assert clip.num_tokens == entry[name]
        plain = Picture(27, 1, VIDEO, pooling="average")
        assert plain.num_tokens == VECTORS["pooled_frame_shapes"]["average"][1]


@pytest.mark.parametrize("size", [*SIZES, (1, 500), (500, 1), (2, 1999)])
def test_tiles_are_those_of_transformers_next(size):
    """Bit for bit, the squeezed picture first."""
    made = processor("llava_next")
    pinpoints = [list(pair) for pair in next_resolutions(SIDE)]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=pinpoints,
        image_mean=made.image_processor.image_mean, image_std=made.image_processor.image_std,
    )  # fmt: skip
    expected = images(images=[picture(size)], return_tensors="pt")["pixel_values"][0]
    pixel_values = pixels([picture(size)], made, "anyres")
    assert torch.equal(pixel_values, expected)
    assert len(pixel_values) == layouts([size], made, "anyres")[0].num_tiles


@pytest.mark.parametrize("count", [1, 3])
def test_tiles_are_those_of_transformers_onevision(count):
    """One picture is tiled, each of several is padded into one."""
    made = processor("llava_onevision")
    pinpoints = [list(pair) for pair in onevision_resolutions(SIDE)]
    images = LlavaOnevisionImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=pinpoints, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    for start in range(0, len(SIZES), count):
        sizes = SIZES[start : start + count]
        asked = [picture(size) for size in sizes]
        given = images(images=[asked], return_tensors="pt")["pixel_values"]
        actual, layout = pixels(asked, made, "anyres_max_9"), layouts(sizes, made, "anyres_max_9")
        assert [p.num_tiles for p in layout] == ([len(actual)] if count == 1 else [1] * count)
        expected = given[0] if count == 1 else given[:, 0]
        assert torch.equal(actual, expected)


def test_a_cut_picture_can_be_put_together_again():
    image, tiling = picture((70, 45)), Tiling(24, 3, next_resolutions(24), "original")
    down, across = tiled_picture(image.size, tiling).grid.tiles
    whole, *tiles = cut(image, tiling, Image.Resampling.BICUBIC)
    assert len(tiles) == down * across and whole.size == (24, 24)
    rows = [np.concatenate([np.asarray(t) for t in tiles[r * across : (r + 1) * across]], 1) for r in range(down)]
    canvas = np.concatenate(rows)
    wide, high = best_resolution(image.size, tiling)
    fitted = np.asarray(image.resize((wide, -(-45 * wide // 70)), Image.Resampling.BICUBIC))
    top = (high - len(fitted)) // 2
    assert np.array_equal(canvas[top : top + len(fitted)], fitted)
    assert not canvas[:top].any() and not canvas[top + len(fitted) :].any()


def test_plain_pictures_are_one_tile():
    made = processor("llava")
    for aspect in ("square", "pad"):
        layout = layouts([(10, 90), (5, 5)], made, aspect)
        assert layout == (Picture(3), Picture(3))
        assert all(p.is_plain and p.num_tokens == made.num_image_tokens and p.modality == IMAGE for p in layout)
