"""The ready sections of docs/data.md, against small sets in the published layouts (on the Hub in November 2026)."""

import json
import re
from pathlib import Path

import datasets
import pytest
from draftsmith.data.dataset import ConversationDataset
from draftsmith.recipes.config.load import load
from PIL import Image
from small_records import talk

PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"
BLOCK = re.compile(r"^```yaml run (\S+)\n(.*?)^```$", re.M | re.S)


def turns(mark: str, answer: str) -> list[dict]:
    return talk(f"{mark}Which picture?", answer)


def picture(path: Path) -> dict:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (30, 20), (90, 9, 9)).save(path)
    return {"bytes": path.read_bytes(), "path": path.name}


def onevision(path: Path, rows: list[dict]) -> None:
    """Features as the dataset cards of LLaVA-OneVision-Data, LLaVA-NeXT-Data and LLaVA-ReCap-* list them."""
    text = datasets.Value("string")
    features = {"id": text, "image": datasets.Image(), "conversations": [{"from": text, "value": text}],
                "data_source": text}  # fmt: skip
    path.mkdir(parents=True)
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    table.to_parquet(path / "train-00000-of-00001.parquet")


@pytest.fixture
def open_stage(tmp_path, monkeypatch, processor):
    """Opens the data of a stage of a recipe on the page, with the page's files in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for name, text in BLOCK.findall(PAGE.read_text()):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)

    def open_stage(recipe: str, stage: str) -> ConversationDataset:
        section = load([f"recipe={recipe}"]).recipe.stages[stage]
        return ConversationDataset(section.data, section.format, processor, files=[section.data.path],
                                   skipped_log=tmp_path / "skipped.jsonl", cache=tmp_path / "cache")  # fmt: skip

    return open_stage


def supervised(dataset: ConversationDataset) -> int:
    return sum(any(dataset[index].loss_mask) for index in range(len(dataset)))


def test_llava15(open_stage):
    picture(Path("data/LLaVA-Pretrain/images/00453/004539375.jpg"))
    row = {"id": "004539375", "image": "00453/004539375.jpg", "conversations": turns("<image>\n", "a red card")}
    Path("data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json").write_text(json.dumps([row]))
    assert supervised(open_stage("llava15.yaml", "pretrain")) == 1
    picture(Path("data/coco/train2017/000000033471.jpg"))
    mixed = [
        {
            "id": "000000033471",
            "image": "coco/train2017/000000033471.jpg",
            "conversations": turns("<image>\n", "A bus."),
        },
        {"id": 158, "model": "", "conversations": turns("", "Text alone.")},  # ids are texts and numbers
    ]
    Path("data/llava_v1_5_mix665k.json").write_text(json.dumps(mixed))
    finetune = open_stage("llava15.yaml", "finetune")
    assert supervised(finetune) == 2 and finetune.column("images").tolist() == [1, 0]


def test_onevision(open_stage):
    shown = picture(Path("a.jpg"))
    rows = [
        {"id": f"r{n}", "image": shown if n else None, "conversations": turns("<image>\n" if n else "", "A bus."),
         "data_source": "ai2d"} for n in range(10)
    ]  # fmt: skip
    base = Path("onevision/lmms-lab")
    for name in ("ai2d(cauldron,llava_format)", "aokvqa(cauldron,llava_format)", "chrome_writting"):
        onevision(base / "LLaVA-OneVision-Data" / name, rows)
    for name in ("LLaVA-NeXT-Data", *(f"LLaVA-ReCap-{part}" for part in ("558K", "118K", "CC3M"))):
        onevision(base / name / "data", rows)
    several = {"id": 1, "image": ["a.jpg", "a.jpg"], "conversations": turns("<image>\n<image>\n", "Two.")}
    Path("onevision/m4_instruct_annotations.json").write_text(json.dumps([several] * 1))
    picture(Path("onevision/a.jpg"))
    single = open_stage("onevision.yaml", "single_image")
    assert len(single) == supervised(single) == 10 + 10 + 2 + 1 + 1
    assert single.column("images").tolist() == [*([0] + [1] * 9) * 2, 0, 1, 0, 2]
    assert single.record(3)["data_source"] == "ai2d"
    middle = open_stage("onevision.yaml", "knowledge")
    assert len(middle) == supervised(middle) == 30


def test_sharegpt(open_stage):
    """Turns of other speakers stand in the published set; parts of long conversations begin with an answer, others with
    a system message of their own.
    """
    folder = Path("Aeala/ShareGPT_Vicuna_unfiltered")
    folder.mkdir(parents=True)
    said = turns("", "It is picture 3.")
    rows = [{"id": "a_0", "conversations": said}, {"id": "a_1", "conversations": [said[1], *said]},
            {"id": "b_0", "conversations": [{"from": "bing", "value": "Be brief."}, *said]},
            {"id": "c_0", "conversations": [{"from": "system", "value": "Be brief."}, *said]}]  # fmt: skip
    (folder / "ShareGPT_unfiltered.json").write_text(json.dumps(rows))
    data = open_stage("heads.yaml", "text_states")
    assert [data.record(index)["id"] for index in range(len(data))] == ["a_0", "a_1", "c_0"]
    assert "unknown role" in Path("skipped.jsonl").read_text()
