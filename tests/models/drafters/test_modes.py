"""What each drafting mode is shown in place of a picture, id by id."""

from pathlib import Path

import pytest
import torch
from draftsmith.core.batch import Request
from draftsmith.core.pictures import IMAGE, VIDEO, Picture
from draftsmith.models.drafters.modes import MODES, ImageSubstitutes, picture_runs
from draftsmith.models.pictures import flat_view
from fails import fails_with
from tiny import IMAGE_ID
from transformers import AutoTokenizer

TOKENIZER = Path(__file__).parents[2] / "data" / "vectors" / "lvlm" / "tokenizer_a"


class Two:
    """As many captions as pictures."""

    def __init__(self, *said):
        self.said, self.asked = said, 0

    def captions(self, request):
        self.asked += 1
        return list(self.said)


STANDS = ImageSubstitutes(
    5, (20, 21, 22), (30, 31), lambda text: [40 + len(word) for word in text.split()], Two("a bc", "")
)


def side_by_side():
    """Two pictures of four tokens without a word between them, and text around."""
    ids = torch.tensor([1, 7, *[IMAGE_ID] * 8, 8, 9])
    return Request(ids, (ids == IMAGE_ID).to(torch.int8), torch.zeros(2, 3, 16, 16), "r")


@pytest.mark.parametrize(("mode", "between"), [
    ("M", [IMAGE_ID] * 8),
    ("P", [IMAGE_ID] * 2),
    ("T", [5, 5]),
    ("T-text", [20, 21, 22, 20, 21, 22]),
    ("T-raw", [IMAGE_ID, IMAGE_ID]),
    ("C", [30, 31, 41, 42, 30, 31]),
])  # fmt: skip
def test_two_pictures_side_by_side(mode, between):
    asked = side_by_side()
    view = STANDS.view(asked, mode)
    assert view.request.ids.tolist() == [1, 7, *between, 8, 9]
    sees = mode in ("M", "P")
    assert (view.request.pixels is not None) == sees
    assert (view.request.modality == IMAGE).tolist() == [i == IMAGE_ID and sees for i in view.request.ids.tolist()]
    assert view.pool == (2 if mode == "P" else 1)
    assert picture_runs(asked) == [(2, 6), (6, 10)]


@pytest.mark.parametrize("mode", MODES)
def test_text_alone_is_the_same_in_every_mode(mode):
    ids = torch.tensor([1, 7, 8])
    asked = Request(ids, torch.zeros(3, dtype=torch.int8), None)
    captioner = Two()
    stands = ImageSubstitutes(5, (20,), (30,), lambda text: [9], captioner)
    view = stands.view(asked, mode)
    assert view.request.ids.tolist() == [1, 7, 8] and view.request.pixels is None
    assert captioner.asked == 0


def test_runs_of_different_lengths_and_a_clip():
    """A tiled picture, a plain one and a clip: each becomes one substitute, also for a draft that reads no tiles."""
    layout = (
        Picture(2, num_tiles=2, newline="one_token"),
        Picture(2),
        Picture(2, num_tiles=3, modality=VIDEO, newline="one_token"),
    )
    lengths = [picture.num_tokens for picture in layout]
    assert lengths == [9, 4, 13]
    ids = torch.tensor([1, *[IMAGE_ID] * 13, 6, *[IMAGE_ID] * 13, 8])
    modality = torch.tensor([0, *[IMAGE] * 13, 0, *[VIDEO] * 13, 0], dtype=torch.int8)
    asked = Request(ids, modality, torch.zeros(6, 3, 16, 16), "r", layout)
    assert picture_runs(asked) == [(1, 10), (10, 14), (15, 28)]
    stands = ImageSubstitutes(
        5, captioner=Two("a", "bb", "ccc"), prefix_ids=(30,), encode=lambda text: [40 + len(text)]
    )
    for request in (asked, flat_view(asked)):
        assert stands.view(request, "T").request.ids.tolist() == [1, 5, 5, 6, 5, 8]
        assert stands.view(request, "C").request.ids.tolist() == [1, 30, 41, 30, 42, 6, 30, 43, 8]


def test_what_a_mode_needs_is_asked_for():
    fails_with("needs a captioner", ImageSubstitutes(5).check, "C")
    fails_with("are missing", ImageSubstitutes(5).check, "T-text", error=AssertionError)
    ImageSubstitutes(5).check("T")


def test_from_a_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    stands = ImageSubstitutes.of(tokenizer, newline_id=13)
    special = {tokenizer.convert_tokens_to_ids(token) for token in ("<image>", "<s>", "</s>")}
    assert tokenizer.decode(stands.literal_ids).strip() == "<image>"
    assert len(stands.literal_ids) > 1 and not special & {*stands.literal_ids}
    assert tokenizer.convert_ids_to_tokens(stands.prefix_ids)[-1] == "▁", "the blank is a token, as TABED's code has it"
    assert tokenizer.decode(stands.prefix_ids).strip() == "image:"
    # A caption can say anything and is text all the same.
    said = stands.encode("a sign: </s><image> <s>")
    assert not special & {*said}
    assert "</s>" in tokenizer.decode(said)
