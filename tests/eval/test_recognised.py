"""Small generators' metrics: names by the nearest real picture, and FID on EfficientNet-Lite0's features."""

import json

import numpy as np
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.eval.quality.convolutional import lite0_features
from draftsmith.eval.quality.extractors import captioned_pictures
from draftsmith.eval.quality.measure import QualityConfig, measure
from draftsmith.eval.quality.statistics import named
from draftsmith.models.lite0 import EfficientNetLite0Config, EfficientNetLite0Model
from PIL import Image

NAMES = ["apple", "apple", "boat", "boat", "cup", "cup"]


def at(*degrees):
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float32))
    return torch.stack([angles.cos(), angles.sin(), torch.ones_like(angles)], 1)


def test_a_picture_is_recognised_by_its_nearest_real_one_of_another_manner():
    real = at(0, 5, 120, 150, 152, 170)
    captions = [f"{name}, {'flat' if number % 2 else '3d'}" for number, name in enumerate(NAMES)]
    # The second is a copy of the first cup, which counts for nothing beside the flat boat.
    wanted = ["apple, flat", "cup, 3d", "boat, 3d", "cup, flat"]
    generated = at(2, 152, 3, 160)
    found, ceiling = named(real, captions, generated, wanted)
    assert found.tolist() == [1.0, 0.0, 0.0, 1.0]
    # Both apples; of the boats the 3d one, and of the cups the flat one: a flat boat and a 3d cup are neighbours.
    assert ceiling == pytest.approx(4 / 6)
    moved, same = named(real * 5 + 3, captions, generated * 5 + 3, wanted)
    assert moved.tolist() == found.tolist() and same == ceiling, "mean and deviation are taken off"
    plain = [caption.split(",")[0] for caption in captions]
    assert named(real, plain, generated, ["apple", "cup", "boat", "cup"])[0].tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.fixture
def folder(tmp_path):
    """Six pictures of three colours with captions, and a Lite0 of random weights."""
    torch.manual_seed(0)
    shape = EfficientNetLite0Config(rows=[[3, 1, 1, 8, 1], [3, 2, 2, 12, 1]], stem_channels=8, head_channels=16)
    EfficientNetLite0Model(shape).save_pretrained(tmp_path / "lite0")
    rng, images, annotations = np.random.default_rng(0), [], []
    for at, name in enumerate(NAMES):
        colour = np.array([[255, 30, 30], [30, 255, 30], [30, 30, 255]][at // 2])
        noisy = np.clip(colour + rng.integers(-20, 20, (40, 40, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(tmp_path / f"{at}.png")
        images.append({"id": at, "file_name": f"{at}.png"})
        annotations.append({"id": at, "image_id": at, "caption": f"{name}, {'flat' if at % 2 else '3d'}"})
    (tmp_path / "real.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return tmp_path


def test_pictures_are_compared_at_the_generators_size_and_by_their_captions(folder):
    file, weights = str(folder / "real.json"), {"lite0": str(folder / "lite0")}
    pictures, captions = captioned_pictures(file, 16)
    assert {p.shape for p in pictures} == {(16, 16, 3)} and captions[:2] == ["apple, 3d", "apple, flat"]
    config = QualityConfig(metrics=("name_recall", "fid_lite0"), names=file, reference=file, weights=weights)
    result = measure(config, pictures, captions=captions)
    assert result["name_recall"].value == 1.0 and result["name_recall"].n == 6
    assert "of 3 names" in result["name_recall"].what and "real: 100%" in result["name_recall"].what
    assert "biased" in result["fid_lite0"].caution
    wrong = measure(config, pictures, captions=captions[2:] + captions[:2])
    assert wrong["name_recall"].value == 0.0 and wrong["fid_lite0"].value == result["fid_lite0"].value
    noise = [np.random.default_rng(at).integers(0, 255, (16, 16, 3)).astype(np.uint8) for at in range(6)]
    assert measure(config, noise, captions=captions)["fid_lite0"].value > 100 * result["fid_lite0"].value
    extractor = lite0_features(folder / "lite0", "cpu", pooled=False)
    network = EfficientNetLite0Model.from_pretrained(folder / "lite0").eval()
    pixels = torch.from_numpy(extractor.prepare(pictures[0]).copy()).permute(2, 0, 1)[None]
    with torch.no_grad():
        expected = network.features((pixels / 255 - 0.498) / 0.502)
        torch.testing.assert_close(extractor.features(pixels), expected, rtol=1e-4, atol=0)
        last = lite0_features(folder / "lite0", "cpu", pooled=True).features(pixels)
        torch.testing.assert_close(last, expected[:, :16], rtol=1e-4, atol=0)


def test_what_is_missing_is_said_before_anything_is_drawn(folder):
    weights, file = {"lite0": str(folder / "lite0")}, str(folder / "real.json")
    images = [np.zeros((16, 16, 3), np.uint8)] * 2
    for metric, key in (("name_recall", "names"), ("fid_lite0", "reference")):
        with pytest.raises(UserError, match="captioned pictures") as error:
            measure(QualityConfig(metrics=(metric,), weights=weights), images, captions=["a", "b"])
        assert error.value.where == key
    with pytest.raises(UserError, match="draftsmith fetch lite0"):
        measure(QualityConfig(metrics=("fid_lite0",), reference=file, weights={"lite0": "nowhere"}), images)
    with pytest.raises(UserError, match="needs a caption for each"):
        measure(QualityConfig(metrics=("name_recall",), names=file, weights=weights), images)
    (folder / "none.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(UserError, match="no picture can be read"):
        captioned_pictures(str(folder / "none.json"), 16)
