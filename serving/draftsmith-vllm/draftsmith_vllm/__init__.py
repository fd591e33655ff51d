"""Drafters of draftsmith as model classes of vLLM, which finds them by the entry point `vllm.general_plugins`.

A folder of `draftsmith export --to vllm` names a class in `architectures`, and has a section `draftsmith` in its
`config.json`. Classes are imported when a folder names them, so that other models do not pay for them.
"""

import logging
import os

from . import patches, refusals

# Names on the EAGLE path get `Eagle` put before them unless they begin so.
CLASSES = {
    "EagleDraftsmithMsd": "draftsmith_vllm.msd:Msd",
    "Eagle3DraftsmithMiddle": "draftsmith_vllm.msd:Middle",
    "EagleDraftsmithLvlm": "draftsmith_vllm.lvlm:Lvlm",
    "EagleDraftsmithWindow": "draftsmith_vllm.windowed:TextWindow",
    "EagleDraftsmithVispec": "draftsmith_vllm.windowed:Vispec",
    "DraftsmithLvlmMForCausalLM": "draftsmith_vllm.lvlm:SeeingDraft",
    "DraftsmithLvlmTForCausalLM": "draftsmith_vllm.lvlm:TextDraft",
}
REPAIRS = "DRAFTSMITH_VLLM_REPAIRS"  # 0: vLLM stays as it is


def register() -> None:
    """Called in every process of vLLM, perhaps more than once.

    A vLLM that was not tried keeps working for other models; a folder of ours is refused when its class is imported.
    """
    from vllm import ModelRegistry

    for name, where in CLASSES.items():
        ModelRegistry.register_model(name, where)
    if reason := refusals.refusal(refusals.version()):
        logging.getLogger("vllm.draftsmith_vllm").warning(reason)
        return
    if os.environ.get(REPAIRS, "1") != "0":
        from . import repairs

        repairs.repair_cut_prompts()
        repairs.repair_drawn_tokens()
        repairs.repair_top_k()
        repairs.repair_medusa_ids()
    if patches.are_on():
        patches.apply()
