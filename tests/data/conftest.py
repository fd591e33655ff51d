"""A processor of the real classes with a tokenizer trained on a few words, and a folder of pictures to tell apart."""

from pathlib import Path

import pytest
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.families.llava import LLAVA
from draftsmith.data.shapes.tokenizer import train_tokenizer
from PIL import Image


@pytest.fixture(scope="session")
def processor():
    """24 pixels in patches of 8, so 9 ids a picture; CLIP's image statistics."""
    texts = ["USER: ASSISTANT:\n", *(f"USER: Which picture? ASSISTANT: It is picture {n}." for n in range(10))] * 3
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return LLAVA.new(train_tokenizer(texts, 420), image_size=24, patch_size=8, image_mean=mean, image_std=std)


@pytest.fixture
def folder(tmp_path) -> Path:
    """`images/<n>.png` for n below 6: gray, each lighter than the one before."""
    (tmp_path / "images").mkdir()
    for number in range(6):
        Image.new("RGB", (30, 20), (40 * number,) * 3).save(tmp_path / "images" / f"{number}.png")
    return tmp_path


@pytest.fixture
def open_data(processor):
    """Opens files of one folder; the log and the index cache lie in its `run` folder."""

    def open_data(*paths: Path, form: PromptFormat | None = None, **settings) -> ConversationDataset:
        config = ConversationData(path=[str(p) for p in paths], **settings)
        run = paths[0].parent / "run"
        return ConversationDataset(config, form or PromptFormat(system=""), processor, files=list(paths),
                                   skipped_log=run / "skipped.jsonl", cache=run / "cache")  # fmt: skip

    return open_data
