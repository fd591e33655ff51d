"""How drawn pictures are judged by a synthetic dataset's reader: as captioned, and by FID against other pictures."""

import numpy as np
import pytest
import torch
from draftsmith.data.captioned.prompts import PromptSource, read_prompts
from draftsmith.data.shapes.captioned import COLORS, SHAPES, write_captioned
from draftsmith.eval.quality import statistics
from draftsmith.models.shapes_reader import ShapesReader
from draftsmith.trainers.evaluate.judge import Judge, real_pictures


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tar of 30 pictures, and a reader with random weights."""
    folder = tmp_path_factory.mktemp("judged")
    write_captioned(folder / "world", seed=0, image_size=16, grain=5.0, pairs=0.0, splits={"test": 30})
    torch.manual_seed(0)
    ShapesReader(len(COLORS), len(SHAPES), width=4).save(folder / "reader")
    return folder


def judge(world, count):
    tar = world / "world" / "test-00000.tar"
    prompts = read_prompts(PromptSource(path=str(tar), max_samples=count))
    return Judge(None, prompts, reader=world / "reader", real=tar, size=16, device=torch.device("cpu"))


def test_fid_is_against_the_pictures_behind_the_prompts_own(world):
    mine = judge(world, 10)
    pictures = [np.asarray(p) for p in real_pictures(world / "world" / "test-00000.tar", 16, 30)]
    reader = ShapesReader.load(world / "reader")
    with torch.no_grad():
        features = reader.features(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)).mean(1)
    wanted = statistics.frechet_distance(features[10:], features[:10])
    scores = mine(pictures[:10])["fid_of_reader"]
    assert scores["value"] == pytest.approx(wanted, rel=1e-4) and scores["n"] == 10
    assert "against 20 real images" in scores["what"]
    # The prompts' own pictures are what a perfect generator draws; noise is further away.
    assert mine.fid_of_real() == scores["value"]
    noise = np.random.default_rng(0).integers(0, 256, (10, 16, 16, 3), dtype=np.uint8)
    assert mine(list(noise))["fid_of_reader"]["value"] > 2 * wanted


@pytest.mark.parametrize("count", [20, 30])
def test_with_too_few_others_the_prompts_own_pictures_are_the_reference(world, count):
    mine = judge(world, count)
    pictures = [np.asarray(p) for p in mine.real]
    scores = mine(pictures)["fid_of_reader"]
    assert f"against {count} real images" in scores["what"] and scores["value"] == pytest.approx(0, abs=1e-6)
    assert mine.fid_of_real() is None
