"""The perceptual loss: a distance of how pictures look, of a frozen network, which tokenizers learn to make smaller."""

import torch
from draftsmith.core.batch import PictureBatch
from draftsmith.models.lite0 import EfficientNetLite0Config, EfficientNetLite0Model
from draftsmith.models.targets.drawing import PerceptualConfig
from draftsmith.models.targets.llamagen.training import PerceptualLoss, VqTraining, to_model
from draftsmith.models.targets.llamagen.vq import VqConfig, VqTokenizer
from draftsmith.recipes.config.load import load
from fails import fails_with
from safetensors.torch import load_file
from torch.nn import functional as F

ROWS = [[3, 1, 1, 8, 1], [3, 2, 2, 8, 1], [3, 2, 2, 12, 1], [3, 2, 2, 16, 2], [3, 2, 2, 24, 1]]


def tower() -> EfficientNetLite0Model:
    torch.manual_seed(5)
    return EfficientNetLite0Model(EfficientNetLite0Config(rows=ROWS, stem_channels=8, head_channels=16)).eval()


def loss(weight=1.0) -> PerceptualLoss:
    return PerceptualLoss(tower(), weight)


def stripes(count=6, side=32) -> torch.Tensor:
    """uint8 [B,3,S,S] of stripes as fine as pixels, which an average answers with grey."""
    draw = torch.Generator().manual_seed(0)
    phase = torch.randint(0, 2, (count, 3, 1, 1), generator=draw)
    rows = torch.arange(side)[:, None] + torch.randint(0, 2, (count, 3, side, 1), generator=draw)
    return (((rows // 2 + phase) % 2) * 200 + 20).expand(count, 3, side, side).to(torch.uint8)


def test_the_depths_are_one_for_each_stride_and_each_place_counts_by_its_direction():
    images, others = to_model(stripes()), to_model(stripes()).flip(2) * 0.7
    network = tower()
    maps = network.maps((images + 1) / 2)
    assert [(states.shape[1], states.shape[-1]) for states in maps] == [(8, 16), (8, 8), (12, 4), (16, 2)]
    normed = network.features(((images + 1) / 2 - 0.498) / 0.502)
    torch.testing.assert_close(F.adaptive_avg_pool2d(maps[-1], 4).flatten(1), normed[:, 16:])
    measured = loss(2.0)
    assert float(measured(images, images)) == 0 and len({float(measured(a, b)) for a, b in
                                                         ((images, others), (others, images))}) == 1  # fmt: skip
    with torch.no_grad():
        shown = [network.maps(0.5 * x + 0.5) for x in (images, others)]
        apart = [
            (F.normalize(a, dim=1) - F.normalize(b, dim=1)).square().sum(1).mean() for a, b in zip(*shown, strict=True)
        ]
        torch.testing.assert_close(measured(images, others), 2 * sum(apart) / 4)
        for layer in measured.tower.blocks[4].project_conv.parameters():
            layer.mul_(9.0)  # the deepest states grow, and what they count for does not
        assert float(measured(images, others)) < 4 * 2.0


def trained(perceptual, steps=60) -> tuple[VqTraining, torch.Tensor]:
    config = VqConfig(base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, z_channels=8, codebook_size=16, groups=4)
    model = VqTokenizer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    module = VqTraining(model, perceptual=perceptual).train()
    weights = [weight for part in module.parts().values() for _, weight in part]
    optimizer, pixels = torch.optim.Adam(weights, lr=3e-3), stripes()
    real = torch.ones(len(pixels), dtype=torch.bool)
    batch = PictureBatch(pixels, torch.zeros(len(pixels), 0, dtype=torch.int64), real, tuple("abcdef"))
    for _ in range(steps):
        optimizer.zero_grad()
        done = module(batch)
        (done.loss_sum / done.num_tokens).backward()
        optimizer.step()
    return module, to_model(pixels)


def test_a_tokenizer_that_learns_with_it_looks_closer_and_the_network_stays(tmp_path):
    apart = {}
    for name, perceptual in (("with", loss(3.0)), ("without", None)):
        module, images = trained(perceptual)
        with torch.no_grad():
            apart[name] = float(loss()(module.tokenizer(images)[0], images))
    assert apart["with"] < 0.8 * apart["without"], apart
    module, _ = trained(loss(3.0), steps=2)
    before, after = tower().state_dict(), module.perceptual.tower.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    module.save(tmp_path)
    assert not any("tower" in name for name in load_file(tmp_path / "model.safetensors"))


def test_it_is_a_tokenizers_and_a_missing_folder_says_how_to_fetch_it(tmp_path):
    words = ["recipe=demo/visual-ar", "stages.target.perceptual={path: weights/lite0}"]
    fails_with("is for image tokenizers", load, words)
    fails_with("nowhere", PerceptualLoss.load, PerceptualConfig(path=str(tmp_path / "nowhere")))
