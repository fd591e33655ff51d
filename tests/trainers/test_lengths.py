"""Lengths of clips: what tables call them is what the language model sees, and each set may have its own."""

import json

import numpy as np
import pytest
from draftsmith.core.pictures import TEXT
from draftsmith.data.conversations import PromptFormat
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.families.table import PICTURE_FAMILIES
from draftsmith.data.pictures.videos import write_clip
from draftsmith.data.shapes.tokenizer import train_tokenizer
from draftsmith.recipes.config.load import load
from draftsmith.trainers.evaluate.requests import Opening
from fails import fails_with
from PIL import Image
from small_records import talk

FORM = PromptFormat(template="qwen_vl", image_rule="verbatim")
# Width, height and frames of clips; Qwen's own limits (128 to 768 tokens of two frames) leave these sides as they are.
CLIPS = {"wide": (448, 252, 20), "square": (336, 336, 20), "tall": (252, 448, 20)}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def opening(request, tmp_path_factory):
    folder, kind = tmp_path_factory.mktemp("clips"), request.param
    records = []
    for name, (width, height, count) in CLIPS.items():
        write_clip(
            folder / f"{name}.mp4", [Image.new("RGB", (width, height), (9 * n, 90, 90)) for n in range(count)], fps=2
        )
        turns = talk("<video>\nWhich?", "One.")
        records.append({"id": name, "video": f"{name}.mp4", "conversations": turns})
    records.insert(1, records[0] | {"id": "gone", "video": "gone.mp4"})
    (folder / "data.json").write_text(json.dumps(records))
    tokenizer = train_tokenizer(["user assistant system\n Which? One."] * 3, 400)
    processor = PICTURE_FAMILIES[kind].new(
        tokenizer, patch_size=14 if kind == "qwen2_5_vl" else 16, min_pixels=64, max_pixels=10**6,
        image_mean=(0.5,) * 3, image_std=(0.25,) * 3,
    )  # fmt: skip

    class Opens(Opening):
        def dataset(self, data, files, form=None):
            return ConversationDataset(
                data, self.form, self.processor, files=files, skipped_log=None, cache=folder / "cache"
            )

    data = ConversationData(path=str(folder / "data.json"), max_length=9_999, on_error="skip")
    return lambda lengths, **more: Opens(None, processor, FORM, lengths)._at_lengths(
        "mine", data.model_copy(update=more), [folder / "data.json"]
    )


def seen(part, index):
    request, _ = part.dataset.request(index, pixels=False)
    return int((request.modality != TEXT).sum())


def test_the_label_is_what_the_language_model_sees_of_a_clip(opening):
    """Not what frames as large as allowed would come to: 1,536 and 6,144."""
    for part in opening([4, 16]):
        assert part.budget == str(int(np.median([seen(part, index) for index in (0, 2, 3)]))), part.budget
    assert [part.budget for part in opening([4, 16])] in (["288", "1152"], ["242", "968"])


def test_a_number_of_tokens_is_what_a_clip_has(opening):
    (part,) = opening(["700"])
    tokens = sorted(seen(part, index) for index in (0, 2, 3))
    assert part.budget == "0.7k" and abs(tokens[1] - 700) <= 150 / 2


def test_a_set_has_lengths_of_its_own(opening):
    assert [part.budget for part in opening({"mine": ["0.5k"], "another": ["1k"]})] == ["0.5k"]
    assert [part.budget for part in opening({"another": ["1k"]})] == [""], "decoded once, as they come"


def test_clips_that_cannot_be_read_stop_where_the_settings_say_so(opening):
    fails_with(r"gone\.mp4", opening, [4], on_error="strict")


def test_sparrows_table_3_has_the_papers_length_of_each_set():
    """17k, 13k and 15k visual tokens (its caption); every recipe of the table has them."""
    for name in ("sparrow", "msd", "vispec", "hivis"):
        stage = load([f"recipe={name}-qwen2.5-vl-7b"]).recipe.stages["evaluate"]
        assert stage.lengths == {"VideoDetailCaption": ["17k"], "MVBench": ["13k"], "LongVideoBench": ["15k"]}
        assert list(stage.benchmarks["sets"].sets) == [*stage.lengths] and stage.temperatures == [0.0, 1.0]
