"""Which entries a head's input has, and their positions."""

import pytest
import torch
from draftsmith.core.batch import IMAGE, TEXT
from draftsmith.models.drafters.head_inputs import base_positions, lay_out, with_gaps


def laid_out(row: str, visual: str, **more):
    modality = torch.tensor([[IMAGE if c == "v" else TEXT for c in row]])
    return lay_out(visual, modality, torch.ones_like(modality).bool(), **more)


@pytest.mark.parametrize(
    ("visual", "more", "expected"),
    [
        ("none", {}, [3, 4, 8, 9]),
        ("direct", {}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("compressed", {"num_vectors": 1}, [2, 3, 4, 7, 8, 9]),
        ("compressed", {"num_vectors": 9}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("direct", {"keep": torch.tensor([[0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]]).bool()}, [0, 3, 4, 6, 8, 9]),
    ],
)
def test_which_slots_are_kept(visual, more, expected):
    layout = laid_out("tvvvttvvvtt", visual, **more)
    assert layout.index[0].tolist() == expected and layout.runs == ((0, 1, 4), (0, 6, 9))


def test_a_prompt_that_begins_with_a_picture():
    layout = laid_out("vvtt", "compressed", num_vectors=1)
    assert layout.index[0].tolist() == [0, 1, 2] and layout.visual[0].tolist() == [True, False, False]
    assert laid_out("vvv", "none").real.tolist() == [[False]]


@pytest.mark.parametrize("visual", ["none", "direct", "compressed"])
def test_gaps(visual):
    layout = laid_out("ttvvvtvvvvtt", visual, num_vectors=1)
    flat = layout.index
    for gap in (0, 4, 100):
        moved = with_gaps(flat, layout, [gap])[0]
        # The text token between the pictures is that of input 4, the one behind the last picture that of input 9.
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
