"""Positions in three coordinates against recorded ones, and a tiny Qwen2.5-VL with recorded weights and scores."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.core.batch import Request
from draftsmith.core.pictures import IMAGE, VIDEO, PatchGrid, whole_picture
from draftsmith.core.positions import FLAT, PositionScheme, place_positions
from draftsmith.models.decoding.tree import chain
from draftsmith.models.targets.base import Taps
from draftsmith.models.targets.qwen.model import see_patches
from draftsmith.models.targets.qwen.section import QwenTarget
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

FOLDER = Path(__file__).parent / "vectors"
ABOUT = json.loads((FOLDER / "qwen2_5_vl.json").read_text())
FOUND = dict(np.load(FOLDER / "qwen2_5_vl.npz"))
NAMES = {"longer_side": "", "max_plus_one": "_max_plus_one"}
resumes = pytest.mark.parametrize("resume", NAMES)
cases = pytest.mark.parametrize("case", ["image", "video"])


def scheme(resume: str) -> PositionScheme:
    return PositionScheme(3, ABOUT["config"]["vision"]["tokens_per_second"], resume)


def asked(case: str, more: int = 0) -> Request:
    """The recorded prompt with so many ids of its continuation."""
    ids = torch.from_numpy(np.concatenate([FOUND[f"{case}_input_ids"], FOUND[f"{case}_continuation_ids"][:more]]))
    kinds = torch.zeros(len(ids), dtype=torch.int8)
    kinds[: len(ids) - more] = torch.from_numpy(FOUND[f"{case}_mm_token_type_ids"]).to(torch.int8)
    seconds = float(FOUND["video_second_per_grid_ts"][0]) if case == "video" else 1.0
    grid = PatchGrid(*FOUND[f"{case}_{case}_grid_thw"][0].tolist(), seconds=seconds)
    pixels = torch.from_numpy(FOUND["image_pixel_values" if case == "image" else "video_pixel_values_videos"])
    return Request(ids, kinds, pixels, case, (whole_picture(grid, IMAGE if case == "image" else VIDEO),))


@pytest.fixture(scope="module")
def model():
    about = ABOUT["config"]
    vision = about["vision"]
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": about["hidden"], "num_hidden_layers": about["layers"], "vocab_size": about["vocab"],
            "num_attention_heads": about["heads"], "num_key_value_heads": about["kv_heads"],
            "intermediate_size": about["intermediate"], "rms_norm_eps": about["rms_norm_eps"],
            "rope_scaling": {
                "rope_type": "default", "mrope_section": about["mrope_section"], "rope_theta": about["rope_theta"],
            },
        },
        vision_config={
            "depth": vision["depth"], "hidden_size": vision["hidden"], "intermediate_size": vision["intermediate"],
            "num_heads": vision["heads"], "patch_size": vision["patch"],
            "temporal_patch_size": vision["temporal_patch"],
            "spatial_merge_size": vision["spatial_merge"], "window_size": vision["window"],
            "fullatt_block_indexes": vision["fullatt_blocks"], "tokens_per_second": vision["tokens_per_second"],
            "out_hidden_size": vision["out_hidden"], "hidden_act": vision["hidden_act"],
        },
        **{name: about[name] for name in about if name.endswith("token_id")},
    )  # fmt: skip
    made = Qwen2_5_VLForConditionalGeneration(config).eval()
    weights = {name[2:]: torch.from_numpy(FOUND[name]) for name in FOUND if name.startswith("w.")}
    made.load_state_dict(weights)
    return made


@resumes
@cases
def test_positions_of_a_prompt_and_behind_it(case, resume):
    one, whole = asked(case), asked(case, 3)
    for request, name in ((one, "position_ids" if resume == "longer_side" else None), (whole, "position_ids_full")):
        kinds = request.modality[None]
        result, behind = place_positions(
            kinds, torch.ones_like(kinds, dtype=torch.bool), request.pictures, scheme(resume)
        )
        if name is not None:
            suffix = NAMES[resume] if name.endswith("full") else ""
            assert result[:, 0].tolist() == FOUND[f"{case}_{name}{suffix}"].tolist()
        assert int(behind) == int(result[0, 0, -1]) + 1  # decoding goes on where the prompt ended


@cases
def test_where_decoding_goes_on(case):
    """The library's cached decoding goes on after the largest position, not where text after a clip does."""
    one, length = asked(case), len(FOUND[f"{case}_input_ids"])
    kinds, behind = one.modality[None], {}
    for resume in NAMES:
        result, after = place_positions(kinds, torch.ones_like(kinds, dtype=torch.bool), one.pictures, scheme(resume))
        behind[resume] = int(after)
        if resume == "longer_side":
            assert int(result.max()) + 1 - length == int(FOUND[f"{case}_rope_delta"])
    assert behind["max_plus_one"] - length == int(FOUND[f"{case}_rope_delta_max_plus_one"])
    agree = behind["longer_side"] == int(FOUND[f"{case}_decode_positions"][0])
    assert agree == ABOUT[case]["full_equals_decode"] == (case == "image")


@resumes
@pytest.mark.parametrize("number", range(len(ABOUT["video_position_table"])))
def test_position_table_of_clips(number, resume):
    row, suffix = ABOUT["video_position_table"][number], NAMES[resume]
    clip = whole_picture(PatchGrid(*row["grid_thw"], seconds=row["second_per_grid"]), VIDEO)
    before, run = row["text_before"], clip.num_tokens
    kinds = torch.tensor([[0] * before + [VIDEO] * run + [0] * row["text_after"]], dtype=torch.int8)
    result = place_positions(kinds, torch.ones_like(kinds, dtype=torch.bool), [clip], scheme(resume))[0][:, 0]
    assert result[:, before].tolist() == row["first_video"]
    assert result[:, before + run - 1].tolist() == row["last_video"]
    assert result[:, before + run].tolist() == row[f"first_text_after{suffix}"]
    assert int(result.max()) + 1 - kinds.shape[1] == row[f"rope_delta{suffix}"]
    assert kinds.shape[1] + row["rope_delta"] == row["next_decode_position"]


def test_positions_of_a_padded_batch():
    mask = torch.from_numpy(FOUND["padded_attention_mask"]).bool()
    kinds = (torch.from_numpy(FOUND["padded_input_ids"]) == ABOUT["config"]["image_token_id"]).to(torch.int8)
    grids = [whole_picture(PatchGrid(*grid)) for grid in FOUND["padded_image_grid_thw"].tolist()]
    result, behind = place_positions(kinds, mask, grids, scheme("longer_side"))
    assert torch.equal(result, torch.from_numpy(FOUND["padded_position_ids"]))
    assert (behind - mask.sum(1)).tolist() == FOUND["padded_rope_deltas"][:, 0].tolist()
    right, _ = place_positions(kinds.flip(1), mask.flip(1), grids, FLAT)
    assert right[0, 1].tolist() == [*range(int(mask[1].sum())), *[0] * int((~mask[1]).sum())]


@cases
def test_the_tower_sees_what_was_recorded(model, case):
    request = asked(case)
    with torch.no_grad():
        seen = see_patches(model, request.pixels, request.pictures)
    torch.testing.assert_close(
        seen.features, torch.from_numpy(FOUND[f"{case}_vision_features"]).float(), atol=3e-4, rtol=0
    )


@resumes
@cases
@pytest.mark.parametrize("chunk", [None, 5])
def test_scores_in_one_forward_and_step_by_step(model, case, resume, chunk):
    own = QwenTarget(model, num_token_ids=64, resume=resume, prefill_chunk=chunk)
    expected = torch.from_numpy(FOUND[f"{case}_logits_full{NAMES[resume]}"]).float()
    kept = torch.ones(own.vocab_size, dtype=torch.bool).index_fill(0, own.decoder._banned, False)
    _, step = own.prefill(asked(case, 3), Taps(feature=True), capacity=1)
    torch.testing.assert_close(own.scores(step.feature[0])[:, kept], expected[:, kept], atol=3e-4, rtol=0)
    session, first = own.prefill(asked(case), Taps(feature=True), capacity=4)
    if resume == "longer_side":
        prompt = torch.from_numpy(FOUND[f"{case}_logits_prefill"]).float()
        torch.testing.assert_close(own.scores(first.feature[0])[:, kept], prompt[:, kept], atol=3e-4, rtol=0)
    tokens = torch.from_numpy(FOUND[f"{case}_continuation_ids"])
    steps = [first.logits[-1]]
    for token in tokens.tolist():
        steps.append(own.verify(session, token, chain(torch.empty(0, dtype=torch.int64))).logits[0])
        own.commit(session, [])
    ours = torch.stack(steps)[:, kept]
    torch.testing.assert_close(ours, expected[-4:, kept], atol=3e-4, rtol=0)
    if resume == "longer_side":
        told = torch.from_numpy(FOUND[f"{case}_logits_decode_explicit_positions"]).float()[:, kept]
        torch.testing.assert_close(ours[1:], told, atol=3e-4, rtol=0)
    library = torch.from_numpy(FOUND[f"{case}_logits_decode"]).float()[:, kept]
    if case == "video" and resume == "longer_side":
        assert (ours[1:] - library).abs().max() > 1  # its own decoding goes on elsewhere
    without = torch.from_numpy(FOUND[f"{case}_logits_without_type_ids"]).float()[:, kept]
    assert (expected[:, kept] - without).abs().max() > 1  # and 1-D positions are noise
