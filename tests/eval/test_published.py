"""What `open_published` gives to somebody in Python: its refusals, and what it shows of an answer."""

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.eval.loop import Cycle, Generation
from draftsmith.eval.published import Answer, Speculator


def test_a_picture_that_is_missing_is_told_without_a_data_section(tmp_path):
    """In Python there is none, and the hint named its folder of images."""
    speculator = Speculator(*[None] * 6)
    for picture in (tmp_path / "nothere.png", str(tmp_path)):
        with pytest.raises(UserError, match="no such picture") as caught:
            speculator("What is here?", picture)
        assert caught.value.where == str(picture) and "data section" not in str(caught.value)


def test_an_answer_shows_in_a_line():
    cycle = Cycle(4, 4, 2, 3, 0.123456789012345678, 0.1, 0.2)
    generation = Generation([1, 2, 3, 4], [cycle], 0.1, 0.1, 0.5, "eos")
    assert repr(Answer("A red cross.", generation)) == "Answer('A red cross.', 4 tokens in 1 cycles, tau 3.00)"
    assert str(Answer(torch.zeros(3, 8, 8), generation)).startswith("Answer(picture (3, 8, 8), ")
    assert "tau nan" in repr(Answer("", Generation([1], [], 0.1, 0.1, 0.5, "eos")))
