"""LlamaGen's transformer: recorded numbers of the published modules, and the published sizes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.models.targets.llamagen.transformer import SIZES, LlamaGen, LlamaGenConfig, pad_left, published
from torch.nn import functional as F

FOLDER = Path(__file__).parents[1] / "vectors_llamagen"
CASES = [("t2i", "a"), ("t2i", "b"), ("c2i", "a"), ("c2i", "b")]


class Recorded:
    """One tiny model of the vectors with its inputs."""

    def __init__(self, kind: str, case: str):
        self.archive, self.case, self.text = np.load(FOLDER / f"{kind}.npz", allow_pickle=False), case, kind == "t2i"
        sizes = {n.split("/")[-1]: self.archive[n].item() for n in self.archive.files if n.startswith(f"{case}/cfg/")}
        if self.text:
            num_condition = sizes["cls_token_num"]
            condition = {"condition": "text", "caption_dim": sizes["caption_dim"], "caption_slots": num_condition}
        else:
            condition = {"condition": "class", "num_classes": sizes["num_classes"]}
        self.config = LlamaGenConfig(
            num_layers=sizes["n_layer"], num_heads=sizes["n_head"], dim=sizes["dim"], ffn_hidden=sizes["ffn_hidden"],
            vocab_size=sizes["vocab_size"], grid=sizes["grid"], norm_eps=sizes["norm_eps"],
            rope_base=sizes["rope_base"], dropout=0, **condition,
        )  # fmt: skip
        self.sizes, prefix = sizes, f"{case}/weights/"
        self.weights = {
            n.removeprefix(prefix): torch.from_numpy(self.archive[n])
            for n in self.archive.files
            if n.startswith(prefix)
        }
        self.model = LlamaGen(self.config).eval()
        self.model.load_state_dict(self.weights)

    def __call__(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self.archive[f"{self.case}/{name}"]))

    def captions(self) -> list[torch.Tensor]:
        """Unpadded features, as a text encoder gives them."""
        lengths = self("caption_mask_raw").sum(-1).int().tolist()
        return [rows[:n] for rows, n in zip(self("caption_features_raw"), lengths, strict=True)]

    def condition(self, side: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        uncond = torch.full((len(self("image_tokens")),), side == "uncond")
        if not self.text:
            return self.model.cls_embedding(self("labels"), uncond), None
        features, mask = pad_left(self.captions(), self.config.num_condition_tokens)
        return self.model.cls_embedding(features, uncond), mask

    def features(self, side: str) -> torch.Tensor:
        """[B,n,D]: entry t predicts code t."""
        condition, mask = self.condition(side)
        states = self.model.states(condition, self("image_tokens")[:, :-1], mask).feature
        return states[:, self.config.num_condition_tokens - 1 :]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def recorded(request) -> Recorded:
    return Recorded(*request.param)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def test_sizes_follow_from_the_config(recorded):
    config, sizes = recorded.config, recorded.sizes
    assert (config.num_condition_tokens, config.num_codes) == (sizes["cls_token_num"], sizes["block_size"])
    assert (config.head_dim, config.hidden) == (sizes["head_dim"], sizes["ffn_hidden"])


def test_rope_table(recorded):
    """Recorded over condition and image; ours has ten zero rows more, as the published table."""
    table, expected = recorded.model.rope(torch.device("cpu")), recorded("rope_table")
    close(table[: len(expected)], expected, 1e-6)
    assert not table[: recorded.config.num_condition_tokens].any() and not table[len(expected) :].any()
    assert len(table) == len(expected) + 10


@pytest.mark.parametrize("side", ["cond", "uncond"])
@torch.no_grad()
def test_teacher_forcing(recorded, side):
    features = recorded.features(side)
    close(features, recorded(f"feature_{side}"), 1e-4)
    close(recorded.model.output(features), recorded(f"logits_{side}"), 1e-4)


@torch.no_grad()
def test_loss(recorded):
    logits, codes = recorded.model.output(recorded.features("cond")), recorded("image_tokens")
    close(F.cross_entropy(logits.flatten(0, 1), codes.flatten()), recorded("loss"), 1e-5)
    each = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none").view(codes.shape)
    valid = recorded("valid")
    close((each * valid[:, None]).sum() / max(valid.sum() * codes.shape[1], 1), recorded("loss_valid"), 1e-5)


@torch.no_grad()
def test_states_at_all_positions_padded_slots_included():
    recorded = Recorded("t2i", "a")
    condition, mask = recorded.condition("cond")
    row = int(recorded("feature_cond_all_sample"))
    assert mask is not None and not mask[row].all()
    states = recorded.model.states(condition, recorded("image_tokens")[:, :-1], mask).feature[row]
    close(states, recorded("feature_cond_all"), 1e-4)


@pytest.mark.parametrize("case", ["a", "b"])
@torch.no_grad()
def test_captions_are_padded_on_the_left(case):
    recorded = Recorded("t2i", case)
    features, mask = pad_left(recorded.captions(), recorded.config.num_condition_tokens)
    assert torch.equal(features, recorded("cond")) and torch.equal(mask.float(), recorded("cond_mask"))
    condition, _ = recorded.condition("cond")
    close(condition[:, -6:], recorded("cond_embedding_tail"), 1e-4)
    assert not condition[~mask].any(), "padding stays zero behind the projection"


def test_long_captions_are_cut():
    features, mask = pad_left([torch.arange(8.0).view(4, 2)], 3)
    assert torch.equal(features[0], torch.arange(6.0).view(3, 2)) and mask.all()


def test_the_unconditional_features_are_a_buffer():
    model = Recorded("t2i", "a").model
    assert "cls_embedding.uncond_embedding" in dict(model.named_buffers())
    assert "cls_embedding.uncond_embedding" not in dict(model.named_parameters())


# Size -> parameters as its authors round them, head width, feed-forward width.
PUBLISHED = {
    "B": ("111M", 64, 2048),
    "L": ("343M", 64, 2816),
    "XL": ("775M", 64, 3584),
    "XXL": ("1.4B", 64, 4096),
    "XXXL": ("3.9B", 64, 6912),
    "1B": ("1.2B", 64, 5632),
    "3B": ("3.1B", 100, 8704),
    "7B": ("6.6B", 128, 11008),
}


def num_parameters(size: str, condition: str) -> int:
    with torch.device("meta"):
        model = LlamaGen(published(size, condition=condition, grid=16))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(size):
    count = num_parameters(size, "class")
    rounded = f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.1f}B"
    config = published(size)
    assert (rounded, config.head_dim, config.hidden) == PUBLISHED[size]


def test_xl_to_the_tenth_of_a_million():
    assert round(num_parameters("XL", "class") / 1e6, 1) == 774.7
    assert round(num_parameters("XL", "text") / 1e6, 1) == 777.7
