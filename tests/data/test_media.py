"""Records with tiled pictures, several pictures and clips, through the dataset to samples and requests."""

import json

import numpy as np
import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.pictures import IMAGE, TEXT, VIDEO, Picture
from draftsmith.data.conversations import encode
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.pictures.videos import Clip, VideoSettings, write_clip
from draftsmith.data.processor_files import with_own_image_processor
from fails import fails_with
from PIL import Image
from small_records import talk
from tiled import FORMS, layouts, picture, pixels, processor

UNIFORM = {"fps": None, "num_frames": 4}


@pytest.fixture
def folder(tmp_path):
    for number, size in enumerate([(40, 30), (90, 20), (24, 24)]):
        picture(size, number).save(tmp_path / f"{number}.png")
    frames = [Image.fromarray(np.full((32, 32, 3), 20 + 8 * n, np.uint8)) for n in range(9)]
    write_clip(tmp_path / "clip.mp4", frames, fps=5)
    return tmp_path


def turns(question: str, answer: str = "It is picture 3.") -> list[dict[str, str]]:
    return talk(question, answer)


def dataset(folder, records, family="llava_onevision", drafter_processor=None, form=None, **settings):
    (folder / "data.json").write_text(json.dumps(records))
    config = ConversationData(
        path="data.json", **({"aspect": "anyres_max_9", "video": UNIFORM, "on_error": "strict"} | settings)
    )
    return ConversationDataset(
        config, form or FORMS[family], processor(family), files=[folder / "data.json"],
        skipped_log=folder / "skipped.jsonl", cache=folder / "cache", drafter_processor=drafter_processor,
    )  # fmt: skip


def runs(ids: list[int], modality: list[int]) -> list[tuple[int, int]]:
    """(kind, length) of the stretches that are no text."""
    result: list[tuple[int, int]] = []
    for kind, before in zip(modality, [TEXT, *modality], strict=False):
        if kind != TEXT:
            result = [*result[:-1], (kind, result[-1][1] + 1)] if kind == before else [*result, (kind, 1)]
    return result


RECORDS = {
    "tiled": ({"image": "0.png", "conversations": turns("<image>\nWhich?")}, [(IMAGE, 37)]),
    "several": ({"image": ["0.png", "1.png"], "conversations": turns("<image>\n<image>\nWhich?")}, [(IMAGE, 10)] * 2),
    "clip": ({"video": "clip.mp4", "conversations": turns("<video>\nWhich?")}, [(VIDEO, 17)]),
    "clip, published mark": ({"video": "clip.mp4", "conversations": turns("<image>\nWhich?")}, [(VIDEO, 17)]),
    "clip first": (
        {"image": "1.png", "video": "clip.mp4", "conversations": turns("<video>\nand\n<image>\nWhich?")},
        [(VIDEO, 17), (IMAGE, 48)],
    ),
    "text": ({"conversations": turns("Which <video> tag is this?")}, []),
}


@pytest.mark.parametrize(("record", "expected"), RECORDS.values(), ids=RECORDS)
def test_each_mark_becomes_its_own_run(folder, record, expected):
    data = dataset(folder, [record])
    sample, (asked, answer) = data[0], data.request(0)
    for ids, modality, tiles, pictures in (
        (sample.ids, sample.modality, sample.pixels, sample.pictures),
        (asked.ids.tolist(), asked.modality.tolist(), asked.pixels, asked.pictures),
    ):
        assert runs(ids, modality) == expected
        assert [(p.modality, p.num_tokens) for p in pictures] == expected
        assert (0 if tiles is None else len(tiles)) == sum(p.num_tiles for p in pictures)
        made = data.processor
        placeholders = {IMAGE: made.image_token_id, VIDEO: made.video_token_id}
        assert all(i == placeholders[m] for i, m in zip(ids, modality, strict=True) if m != TEXT)
    assert answer == "It is picture 3." and sample.ids[: len(asked.ids)] == asked.ids.tolist()
    assert not any(kept for kept, m in zip(sample.loss_mask, sample.modality, strict=True) if m != TEXT)


def test_pixels_follow_the_order_of_the_marks(folder):
    record = RECORDS["clip first"][0]
    data = dataset(folder, [record])
    frames = Clip(folder / "clip.mp4", VideoSettings(**UNIFORM)).frames()
    made = data.processor
    image = pixels([picture((90, 20), 1)], made, "anyres_max_9")
    assert torch.equal(data[0].pixels, torch.cat([pixels(frames, made, "square"), image]))


def test_lengths_need_no_pixels(folder):
    """A picture whose data is broken has a size all the same; a plain tile's is not even looked at."""
    whole = (folder / "0.png").read_bytes()
    (folder / "0.png").write_bytes(whole[: len(whole) // 2])
    record = {"image": "0.png", "conversations": turns("<image>\nWhich?")}
    assert dataset(folder, [record]).num_ids(0) > 37
    missing = {"image": "none.png", "conversations": turns("<image>\nWhich?")}
    dataset(folder, [missing], aspect="pad").num_ids(0)
    with pytest.raises(UserError, match="corrupt image"):
        dataset(folder, [record])[0]
    fails_with("missing image", dataset(folder, [missing]).num_ids, 0)


@pytest.mark.parametrize("damage", ["missing", "broken", "short"])
def test_a_broken_clip_is_like_a_broken_picture(folder, damage):
    """strict stops and names file and record; skip keeps the place, supervises nothing and lists it."""
    records = [RECORDS["clip"][0], RECORDS["tiled"][0]]
    settings = {}
    if damage == "missing":
        (folder / "clip.mp4").unlink()
    elif damage == "broken":
        (folder / "clip.mp4").write_bytes((folder / "clip.mp4").read_bytes()[:900])
    else:
        settings["video"] = {"fps": None, "num_frames": 16, "min_frames": 12}
    with pytest.raises(UserError, match=r"data\.json, record 0[\s\S]*clip\.mp4"):
        dataset(folder, records, **settings)[0]
    skipping = dataset(folder, records, on_error="skip", **settings)
    left_out = skipping[0]
    assert left_out.pixels is None and left_out.pictures == () and not any(left_out.loss_mask)
    assert any(skipping[1].loss_mask)
    (listed,) = (json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines())
    assert listed["record"] == 0 and "clip" in listed["reason"]


def test_the_draft_s_own_image_processor_come_with_the_request(folder):
    """The same prompt in tiles of another size and statistics."""
    made = processor("llava")
    own_processor = with_own_image_processor(
        made, None, image_size=32, patch_size=8, family="llava_onevision", revision=None
    )
    assert (own_processor.image_size, own_processor.patches, own_processor.tokenizer) == (32, 4, made.tokenizer)
    record = {"image": "0.png", "conversations": turns("<image>\nWhich?")}
    data = dataset(folder, [record], "llava", own_processor, aspect="pad", drafter_aspect="anyres_max_9")
    asked, _ = data.request(0)
    view = asked.drafter_view
    assert asked.pictures == (Picture(3),) and asked.pixels.shape == (1, 3, 24, 24)
    assert view.pictures == layouts([(40, 30)], own_processor, "anyres_max_9") and view.pixels.shape[2:] == (32, 32)
    assert view.ids[view.modality == TEXT].tolist() == asked.ids[asked.modality == TEXT].tolist()
    assert dataset(folder, [record], "llava", aspect="pad").request(0)[0].drafter_view is None


def test_a_flat_family_takes_clips_without_newlines(folder):
    record = RECORDS["clip"][0]
    settings = {"aspect": "pad", "video": UNIFORM | {"newline": "none", "pooling": "average"}}
    sample = dataset(folder, [record], "llava", **settings)[0]
    made = processor("llava")
    assert made.video_token_id is None and sample.ids.count(made.image_token_id) == 4
    assert sample.pictures[0].newline == "none" and sample.modality.count(VIDEO) == 4


@pytest.mark.parametrize("join", ["official", "hf"])
@pytest.mark.parametrize("family", ["llava", "llava_onevision"])
def test_a_clip_s_mark_is_found_whether_the_tokenizer_knows_it_or_not(family, join):
    form = FORMS[family].model_copy(update={"image_join": join})
    pictures = (Picture(3), Picture(3, 2, VIDEO, pooling="bilinear"), Picture(2))
    asked = "<image><video>\nthen <image>?"
    encoded = encode(turns(asked), form, processor(family), pictures=pictures)
    assert runs(encoded.ids, encoded.modality) == [(IMAGE, 9), (VIDEO, 8), (IMAGE, 4)]
    plain = encode(turns(asked.replace("<video>", "<image>")), form, processor(family), pictures=[Picture(3)] * 3)
    text = [i for i, m in zip(encoded.ids, encoded.modality, strict=True) if m == TEXT]
    assert text == [i for i, m in zip(plain.ids, plain.modality, strict=True) if m == TEXT]
