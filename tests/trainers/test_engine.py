"""How DeepSpeed is asked to sum gradients, and where TF32 is allowed."""

import pytest
import torch
import training
from draftsmith.trainers.run.context import EngineConfig
from draftsmith.trainers.train import fit
from draftsmith.trainers.train.engine import _gradient_sums, _tensor_cores
from draftsmith.trainers.train.fit import OptimConfig
from fails import fails_with

FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(("precision", "zero", "accumulation", "expected"), [
    ("fp32", 0, 4, (0, {})), ("bf16", 0, 1, (0, {})), ("bf16", 0, 2, (1, FP32)), ("bf16", 2, 1, (2, FP32)),
    ("bf16", 3, 4, (3, FP32)),
])  # fmt: skip
def test_under_bf16_micro_batches_are_summed_in_float32(precision, zero, accumulation, expected):
    assert _gradient_sums(EngineConfig(precision=precision, zero_stage=zero), accumulation) == expected


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_takes_it_at_every_stage(zero):
    built = training.engine(
        training.module(noisy=False), OptimConfig(lr=1e-3), steps=1, zero=zero, precision="bf16", accumulation=2
    )
    assert built._engine.get_data_types() == (torch.bfloat16, torch.float32)


def test_auto_is_bf16_where_a_gpu_computes_in_it_and_the_target_is_no_float32(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    native = {"answer": True}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native["answer"])
    for held, expected in (("bfloat16", "bf16"), ("float16", "bf16"), ("float32", "fp32")):
        assert EngineConfig().on(gpu, target_dtype=held).precision == expected
        assert EngineConfig().on(cpu, target_dtype=held).precision == "fp32"
        assert EngineConfig(precision="fp16").on(gpu, target_dtype=held).precision == "fp16"
    native["answer"] = False
    assert EngineConfig().on(gpu, target_dtype="bfloat16").precision == "fp32"


def test_tf32_is_allowed_inside_a_step_on_a_gpu_alone():
    before = torch.get_float32_matmul_precision()
    for device, allowed, inside in (("cuda", True, "high"), ("cuda", False, before), ("cpu", True, before)):
        with _tensor_cores(torch.device(device), allowed):
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == before
    assert EngineConfig().tf32 and "tf32" not in EngineConfig().model_dump(), "fingerprints of before hold"
    assert EngineConfig(tf32=False).model_dump()["tf32"] is False


def test_the_optimizer_is_built_where_the_weights_will_be(monkeypatch):
    """AdamW is fused where all its weights are on a GPU when it is built."""

    class Built(Exception):
        pass

    def build(parts, config):
        raise Built({p.device.type for named in parts.values() for _, p in named})

    monkeypatch.setattr(fit, "build_optimizer", build)
    monkeypatch.setattr(fit.ranks, "device", lambda: torch.device("meta"))
    stage = type("Stage", (), {"optim": OptimConfig(lr=1e-3)})()
    model = training.module(noisy=False)
    raised = fails_with("", fit.fit, stage, None, type("Training", (), {"module": model})(), error=Built)
    assert raised.args == ({"meta"},)
