"""Patches of vLLM 0.32's V1 runner that some drafters need: asked for by their folder, and by an environment variable.

Without the variable nothing of vLLM is changed, and a folder that needs patches is refused. With it, each patch acts
beside a drafter whose class asks for it alone. `pictures.py`, `window.py` and `tower.py` are the patches.
"""

import os

VARIABLE = "DRAFTSMITH_VLLM_PATCHES"  # 1: patch


class Refused(RuntimeError):
    """This drafter cannot be served so; the message has the cure."""


def are_on() -> bool:
    return os.environ.get(VARIABLE) == "1"


def apply() -> None:
    """Wrap vLLM's methods, once a process."""
    from vllm import ModelRegistry

    from . import pictures, window

    ModelRegistry.register_model("LlavaForConditionalGeneration", "draftsmith_vllm.tower:Llava")
    pictures.patch()
    window.patch()


def check(config, *, drops_inputs: bool = False) -> None:
    """Raises `Refused` where a drafter that needs patches would not be served right. `config`: vLLM's, of the target or
    of the draft. `drops_inputs`: the draft's cache holds fewer inputs than the target's.
    """
    from vllm import envs

    target = config.speculative_config.target_model_config
    reasons = {
        f"this drafter needs patches of vLLM, which are off: serve it with {VARIABLE}=1": not are_on(),
        "runner V2 shows a draft model no pictures, and the patches are of V1: serve it with "
        "VLLM_USE_V2_MODEL_RUNNER=0": envs.VLLM_USE_V2_MODEL_RUNNER is not False or config.use_v2_model_runner,
        "its target is read with three positions (M-RoPE), which the patches do not count: serve it by LLaVA-1.5 or "
        "with draftsmith's own loop": drops_inputs and target.uses_mrope,
        "it leaves pictures out of its cache, so that cached prefixes of the target are not its own: serve it with "
        "--no-enable-prefix-caching": drops_inputs and config.cache_config.enable_prefix_caching,
        "it leaves pictures out of its cache, which cannot be handed to another engine: serve it without "
        "--kv-transfer-config": drops_inputs and config.kv_transfer_config is not None,
        "it leaves pictures out, which is done to padded batches alone: remove disable_padded_drafter_batch from the "
        "speculative config": drops_inputs and config.speculative_config.disable_padded_drafter_batch,
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise Refused(reason)
