"""Weights that come with the package: named, whole, small, and read like any published target."""

import hashlib
import json
import shutil

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.fields import PLACES
from draftsmith.data.processor_files import load_processor
from draftsmith.models.drafters.manifest import MANIFEST
from draftsmith.models.folders import ADAPTERS, FOLDER
from draftsmith.models.formats.export import export_drafter
from draftsmith.models.targets.llava.section import LlavaTargetConfig
from draftsmith.models.targets.load import load_target
from draftsmith.recipes.config.load import load
from pydantic import ValidationError
from safetensors.torch import load_file

NAME = "shipped:shapes-llava"
# Folder -> recipe that made it, and its most bytes; of emoji-vlm what is put on fetched halves.
SHIPPED = {
    "drawings": ("drawings/generator", 9_500_000),
    "drawings-vq": ("drawings/generator", 2_400_000),
    "emoji-vlm": ("emoji_vlm/target", 13_000_000),
    "shapes-llava": ("demo/lvlm", 4_000_000),
}


def test_the_files_are_those_that_were_recorded_and_small():
    folders = sorted(path.parent for path in FOLDER.glob("*/made.json"))
    assert [folder.name for folder in folders] == [*SHIPPED]
    for folder, (recipe, most) in zip(folders, SHIPPED.values(), strict=True):
        made, (weights,) = json.loads((folder / "made.json").read_text()), folder.glob("*.safetensors")
        assert hashlib.sha256(weights.read_bytes()).hexdigest() == made["sha256"]
        assert (len(made["commit"]), made["recipe"], made["seed"]) == (40, recipe, 0)
        assert folder.name in (FOLDER / "README.md").read_text()
        assert sum(path.stat().st_size for path in folder.iterdir()) < most
    assert load_processor(folder).tokenizer_hash == made["tokenizer_hash"], "of shapes-llava"
    adapters = load_file(FOLDER / "emoji-vlm" / ADAPTERS)
    names = [name.removesuffix(".up") for name in adapters if name.endswith(".up")]
    assert len(names) == 30 * 7 and adapters["vision_tower.mean"].shape == (3072,)
    assert all((FOLDER / name / "NOTICE").is_file() for name in SHIPPED if name != "shapes-llava")


def test_an_image_tokenizer_is_read_by_its_name():
    section = load(["recipe=demo/drawings"]).recipe.target
    dumped = section.model_dump(mode="json")
    assert dumped["vq"] == "shipped:drawings-vq" and type(section).model_validate(dumped) == section
    pixels, cpu = torch.full((1, 3, 64, 64), 255, dtype=torch.uint8), torch.device("cpu")
    pixels[:, :, 8:56, 8:56] = torch.tensor([255, 200, 40], dtype=torch.uint8)[:, None, None]  # yellow, as emoji are
    codes = section.picture_encoder({}, device=cpu)(pixels)
    seen = section.drawer({}, device=cpu).pictures(codes)
    assert codes.shape == (1, 64) and (seen.float() - pixels).abs().mean() < 10


def test_a_target_is_read_by_its_name_and_says_it_in_manifests():
    section = LlavaTargetConfig(kind="llava", path=NAME)
    assert section.path == str(FOLDER / "shapes-llava") and section.provides() == {"target", "processor"}
    dumped = section.model_dump(mode="json")
    assert dumped["path"] == NAME and not set(PLACES) - set(dumped)
    assert LlavaTargetConfig.model_validate(dumped) == section
    processor = load_processor(section.path)
    target = load_target(
        section, section.path, num_token_ids=processor.num_token_ids, image_token_id=processor.image_token_id,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert {p.dtype for p in target.decoder.model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in target.decoder.model.parameters()) == 1_946_432


@pytest.mark.parametrize("place", ["shipped:shapes-lava", "shipped:", "shipped:../configs", "shipped:shapes-llava/x"])
def test_a_name_that_does_not_ship_is_refused(place):
    with pytest.raises(ValidationError, match=r"come with draftsmith: .*shapes-llava"):
        LlavaTargetConfig(kind="llava", path=place)


def test_a_manifest_that_names_one_is_exported(tmp_path):
    """The name was asked of the Hub, and hid why engines cannot have the draft's pictures."""
    draft = shutil.copytree(FOLDER / "shapes-llava", tmp_path / "draft")
    (draft / MANIFEST).write_text(json.dumps({"model": "drafter", "target": NAME}))
    with pytest.raises(UserError, match="draft models read ids alone"):
        export_drafter(draft, tmp_path / "out", "sglang")
    exported = export_drafter(draft, tmp_path / "out", "vllm", prompts="text")
    assert f"vllm serve {FOLDER / 'shapes-llava'} " in exported.command, "an engine knows no shipped names"
    named = export_drafter(draft, tmp_path / "named", "vllm", prompts="text", target=NAME)
    assert named.target == exported.target
    with pytest.raises(UserError, match=r"no weights 'shipped:shapes-lava' come with draftsmith\n  where: --target"):
        export_drafter(draft, tmp_path / "other", "vllm", prompts="text", target="shipped:shapes-lava")
