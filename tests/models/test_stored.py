"""What `dtype: auto` becomes: the type of most stored parameters on a GPU, float32 on a CPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.pretrained import Checkpoint
from draftsmith.models.stored import resolved_dtype
from fails import fails_with
from safetensors.torch import save_file

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A GPU that computes in bfloat16, unless a test says otherwise."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


def weights(folder, *parts, config=None):
    """One file for each part (type, parameters), beside an index where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["model.safetensors"] if len(parts) == 1 else [f"part-{n}.safetensors" for n in range(len(parts))]
    for number, (name, (dtype, size)) in enumerate(zip(names, parts, strict=True)):
        save_file({f"w{number}": torch.zeros(size).to(dtype)}, folder / name)
    if len(parts) > 1:
        index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def auto(dtype="auto", **more):
    return SimpleNamespace(dtype=dtype, revision=None, **more)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(BF16, 4)], "bfloat16"),
        ([(FP16, 4)], "float16"),
        ([(FP32, 4)], "float32"),
        ([(FP64, 4)], "float32"),
        ([(FP32, 4), (BF16, 9)], "bfloat16"),  # a tower in float32 beside a larger language model
        ([(FP32, 9), (BF16, 4)], "float32"),
        ([(FP32, 3), (BF16, 3), (FP16, 4)], "float16"),
    ],
)
def test_a_gpu_holds_what_is_stored_and_a_cpu_float32(tmp_path, parts, expected):
    """Whatever config.json says: it is often wrong, and the weights are here."""
    folder = weights(tmp_path, *parts, config={"dtype": "float8"})
    assert resolved_dtype(auto(), folder, GPU, key="target") == expected
    assert resolved_dtype(auto(), folder, CPU, key="target") == "float32"
    assert resolved_dtype(auto(device_map="cpu"), folder, GPU, key="target") == "float32"
    for explicit in ("float32", "bfloat16", "float16"):
        assert resolved_dtype(auto(explicit), folder, GPU, key="target") == explicit
        assert resolved_dtype(auto(explicit), folder, CPU, key="target") == explicit


@pytest.mark.parametrize(("parts", "config", "problem"), [
    ([(FP8, 9), (BF16, 4)], {}, "most parameters are stored in F8_E4M3"),
    ([(torch.int32, 9), (FP16, 4)], {}, "most parameters are stored in I32"),
    ([(BF16, 4)], {"quantization_config": {"bits": 4}}, "the weights are quantised"),
])  # fmt: skip
def test_quantised_weights_want_a_type_to_compute_in(tmp_path, parts, config, problem):
    folder = weights(tmp_path, *parts, config=config)
    with pytest.raises(UserError, match=f"drafter.model.dtype is auto.*{problem}") as error:
        resolved_dtype(auto(), folder, GPU, key="drafter.model")
    assert "drafter.model.dtype=bfloat16, float16 or float32" in str(error.value)
    assert resolved_dtype(auto("bfloat16"), folder, GPU, key="drafter.model") == "bfloat16"


def test_a_gpu_without_bfloat16_is_not_given_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(UserError, match="stored in bfloat16, and this GPU does not compute in it"):
        resolved_dtype(auto(), weights(tmp_path / "a", (BF16, 4)), GPU, key="target")
    assert resolved_dtype(auto(), weights(tmp_path / "b", (FP16, 4)), GPU, key="target") == "float16"


@pytest.mark.parametrize(("config", "expected"), [
    ({"torch_dtype": "float16"}, "float16"),
    ({"dtype": "torch.bfloat16"}, "bfloat16"),
    ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
    ({"text_config": {}}, None),
    ({"dtype": "float8_e4m3fn"}, None),
])  # fmt: skip
def test_pickles_and_hub_ids_are_what_their_config_says(tmp_path, monkeypatch, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    fetched = []

    def fetch(self, name):
        fetched.append((self.source, name))
        return tmp_path / name if (tmp_path / name).is_file() else None

    monkeypatch.setattr(Checkpoint, "file", fetch)
    for source in (tmp_path, "some/model"):
        if expected is None:
            fails_with("says no type that auto knows", resolved_dtype, auto(), source, GPU, key="target")
        else:
            assert resolved_dtype(auto(), source, GPU, key="target") == expected
            assert ("some/model", "model.safetensors") not in fetched, "no weights are fetched for the question"


def test_a_hub_id_that_cannot_be_asked_is_told(monkeypatch):
    monkeypatch.setattr(Checkpoint, "file", lambda self, name: None)
    fails_with(r"cannot read config.json of 'some/model'", resolved_dtype, auto(), "some/model", GPU, key="target")
