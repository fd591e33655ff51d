"""Visual tokens as frames: the papers' numbers, and the count of the reader itself."""

from types import SimpleNamespace

import pytest
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.pictures.videos import FrameTokens, VideoSettings, label, tile_frames, visual_tokens
from draftsmith.trainers.evaluate.requests import at_length
from fails import fails_with

PRESETS = ("0.5k", "1.5k", "4.5k", "6k", "13k", "15k", "17k", "25k")  # of Sparrow and SAGE


def test_the_papers_25k_are_128_frames():
    onevision = tile_frames(VideoSettings(), 27)
    assert onevision == FrameTokens(196, per_clip=1)
    assert onevision.frames("25k") == 128 and onevision.total(128) == 25_089
    assert [onevision.frames(preset) for preset in PRESETS] == [3, 8, 23, 31, 66, 77, 87, 128]


@pytest.mark.parametrize("settings", [
    VideoSettings(), VideoSettings(newline="grid"), VideoSettings(newline="none", pooling="average"),
    VideoSettings(newline="none", pooling="none"),
])  # fmt: skip
def test_frames_are_counted_as_the_reader_counts_them(settings):
    """No other number of frames is nearer to the budget."""
    for patches in (27, 6, 3):
        family = tile_frames(settings, patches)
        for budget in (1, 500, 777, 17_000):
            frames = family.frames(budget)
            assert family.total(frames) == settings.picture(frames, patches).num_tokens
            for other in (frames - 1, frames + 1):
                if other > 0:
                    assert abs(family.total(frames) - budget) <= abs(family.total(other) - budget)


def test_steps_of_two_frames():
    family = FrameTokens(11 * 15, frames_per_step=2)
    assert family.total(7) == 4 * 165
    assert family.frames("17k") == 206 and family.total(206) == 16_995


def test_budgets_are_any_number():
    assert visual_tokens("0.5k") == 500 and visual_tokens(777) == 777 and visual_tokens(" 25K ") == 25_000
    assert [label(value) for value in ("0.5k", 25_000, 777, 1500, 40)] == ["0.5k", "25k", "777", "1.5k", "40"]
    for wrong in ("many", 0, -5, "nan", "inf", "k"):
        fails_with("no number of visual tokens", visual_tokens, wrong)


def test_settings_take_frames_at_equal_distances():
    processor = SimpleNamespace(picture_family=LLAVA, patches=27)
    settings, _ = at_length(VideoSettings(fps=1.0, num_frames=32), "25k", processor, [])
    assert (settings.num_frames, settings.fps) == (128, None)
    one, _ = at_length(VideoSettings(min_frames=2), "1", processor, [])
    assert (one.num_frames, one.min_frames) == (1, 1)
