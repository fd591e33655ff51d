"""Which entries a head's input has, and their positions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.batch import IMAGE, TEXT, VIDEO
from draftsmith.models.drafters.head_training import base_positions, layout_of, with_gaps
from draftsmith.models.drafters.vispec import spread


def laid_out(row: str, visual: str, **more):
    modality = torch.tensor([[IMAGE if c == "v" else TEXT for c in row]])
    return layout_of(visual, modality, torch.ones_like(modality).bool(), **more)


@pytest.mark.parametrize(("visual", "more", "expected"), [
    ("none", {}, [3, 4, 8, 9]),
    ("direct", {}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ("compressed", {"num_vectors": 1}, [2, 3, 4, 7, 8, 9]),
    ("compressed", {"num_vectors": 9}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ("direct", {"keep": torch.tensor([[0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]]).bool()}, [0, 3, 4, 6, 8, 9]),
])  # fmt: skip
def test_which_slots_are_kept(visual, more, expected):
    layout = laid_out("tvvvttvvvtt", visual, **more)
    assert layout.index[0].tolist() == expected and layout.runs == ((0, 1, 4), (0, 6, 9))


def test_a_padded_batch_is_aligned_as_eagles():
    """Rows of both lengths, and one cut: f_t beside x_(t+1), f_(t+1) to predict. EAGLE's last input has neither."""
    with np.load(Path(__file__).parents[1] / "vectors_heads" / "eagle_data.npz") as file:
        given = {n.removeprefix("align/"): torch.from_numpy(file[n]) for n in file.files if n.startswith("align/")}
    stored = [{name: given[f"seq{n}/{name}"] for name in ("tokens", "features")} for n in (0, 1)]
    cut = stored[int(given["truncated/sequence_index"])]
    cut = {name: rows[: int(given["truncated/max_len"])] for name, rows in cut.items()}
    for rows, name, seen in (
        (stored, "batch", given["batch/attention_mask"]),
        ([cut], "truncated", given["truncated/attention_mask"][None]),
    ):
        tokens, features = (
            torch.nn.utils.rnn.pad_sequence([row[part] for row in rows], batch_first=True) for part in cut
        )
        layout = layout_of("read", torch.full_like(tokens, TEXT), seen.bool())
        aligned = {"token_in": layout.pick(tokens, 1), "feature_in": layout.pick(features),
                   "target_feature": layout.pick(features, 1)}  # fmt: skip
        assert torch.equal(layout.real, seen[:, 1:].bool())
        for part, found in aligned.items():
            wanted = given[f"{name}/{part}"].view(len(rows), tokens.shape[1], *found.shape[2:])[:, :-1]
            assert torch.equal(found[layout.real], wanted[layout.real])


def test_a_prompt_that_begins_with_a_picture():
    layout = laid_out("vvtt", "compressed", num_vectors=1)
    assert layout.index[0].tolist() == [0, 1, 2] and layout.visual[0].tolist() == [True, False, False]
    assert laid_out("vvv", "none").real.tolist() == [[False]]


def test_a_clip_right_behind_a_picture_has_its_own_vectors():
    modality = torch.tensor([[TEXT, IMAGE, IMAGE, VIDEO, VIDEO, VIDEO, TEXT]])
    layout = layout_of("compressed", modality, modality >= 0, num_vectors=2)
    assert layout.runs == ((0, 1, 3), (0, 3, 6))
    vectors = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    assert spread(layout, vectors)[0, :, 0].tolist() == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("visual", ["none", "direct", "compressed"])
def test_gaps(visual):
    layout = laid_out("ttvvvtvvvvtt", visual, num_vectors=1)
    flat = layout.index
    for gap in (0, 4, 100):
        moved = with_gaps(flat, layout, [gap])[0]
        # The text token between the pictures is that of input 4, the one after the last picture that of input 9.
        between, behind = (int(moved[layout.index[0] == entry]) for entry in (4, 9))
        assert behind - between == gap + 1
        assert torch.equal(moved[layout.index[0] < 9], flat[0][layout.index[0] < 9])
        assert moved[-1] - behind == 1
    assert torch.equal(with_gaps(flat, layout, [4]), flat), "its own gap"
    assert torch.equal(with_gaps(flat, layout, [None]), flat)
    text = laid_out("tttt", visual)
    assert torch.equal(with_gaps(text.index, text, [50]), text.index)


def test_positions_of_a_window_are_compact_for_any_picture():
    short, long = (laid_out("tt" + n * "v" + "ttt", "none") for n in (1, 50))
    for layout in (short, long):
        assert base_positions("compact", layout, None, visual_held=True)[0].tolist() == [0, 1, 2, 3]
