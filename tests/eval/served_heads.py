"""Heads with drawn weights beside a target on disk, loud enough that every part of them shows in what they draft."""

from pathlib import Path

import torch
from draftsmith.data.processor_files import load_processor
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.dflash import DflashConfig
from draftsmith.models.drafters.dflash_files import dflash_manifest
from draftsmith.models.drafters.dflash_module import DflashHead
from draftsmith.models.drafters.eagle import EagleConfig
from draftsmith.models.drafters.eagle3 import Eagle3Config
from draftsmith.models.drafters.head_files import manifest_of, save_head
from draftsmith.models.drafters.lvlm import LvlmConfig, build_drafter, save_lvlm
from draftsmith.models.drafters.medusa import MedusaConfig
from draftsmith.models.drafters.msd import MsdConfig
from draftsmith.models.drafters.peagle import PeagleConfig
from draftsmith.models.drafters.sparrow import SparrowConfig
from draftsmith.models.drafters.vispec import VispecConfig
from draftsmith.models.hub import read_config
from draftsmith.models.parts import TokenIds
from draftsmith.models.stored import stored_table
from draftsmith.models.targets.base import ShapeAlone, language_shape
from draftsmith.models.targets.load import load_lvlm

TAPS = (2, 4, 5)
_EAGLE1 = {
    "msd": MsdConfig(kind="msd"),
    "eagle": EagleConfig(kind="eagle", image="placeholder"),
    "sparrow": SparrowConfig(kind="sparrow", train_visual_share=0),
    "middle": SparrowConfig(kind="sparrow", vata=False, middle_layer=2),
    "vispec": VispecConfig(kind="vispec", positions="compact", num_queries=3),
}
_READ = {"taps": TAPS, "visual_slots": "read", "image": "placeholder"}


def save_drawn(kind: str, target: Path, folder: Path, num_layers: int = 1, **settings) -> None:
    """A head of `kind` (msd, eagle, sparrow, middle, vispec, eagle3, peagle, dflash, medusa) for a target, in a folder,
    in our own layout. Sparrow's is trained and decoded without pictures, "middle" is one that reads them, ViSpec's
    holds two vectors of each.

    Args:
        settings: of Medusa and EAGLE-3.
    """
    config = read_config(str(target), key="target")
    shape = language_shape(config.get_text_config())
    identity = TargetIdentity({"kind": "llava" if config.model_type == "llava" else "qwen2_5_vl", "path": str(target)})
    if kind == "dflash":
        section = DflashConfig(kind="dflash", block_size=5, num_layers=num_layers, taps=TAPS, mask_token_id=0)
        head = _drawn(DflashHead(section.shape(shape), None))
        drafter = section.model_dump(mode="json")
        section.save(head, folder, dflash_manifest(section, shape, identity, drafter=drafter))
        return
    if kind == "medusa":
        section = MedusaConfig(kind=kind, num_heads=3, num_layers=2, **settings)
        head = _drawn(section.build(ShapeAlone(shape)))
        for value in head.heads.parameters():
            value.data *= 0.2
        if head.draft_ids is not None:  # every other id, and the target's rows of them
            head.d2t.copy_(torch.arange(len(head.d2t)))
            head.lm_head.weight.data = stored_table("LM head", str(target), where="")[head.draft_ids].float()
        section.save(head, folder, section.manifest(ShapeAlone(shape), identity))
        return
    if kind in _EAGLE1:
        section = _EAGLE1[kind]
        head = _drawn(section.module(section.layer(shape), None))
        with torch.no_grad():  # a quiet layer on the state: drafts that the target often accepts
            width = shape.hidden_size
            head.fc.weight[:, :width] += 4 * torch.eye(width)
            head.fc.bias.mul_(0.2)
            if kind == "vispec":
                head.img_fc.weight[:, :width] += torch.eye(width)
            head.layers[0].self_attn.o_proj.weight.mul_(0.9 if kind == "middle" else 0.12)
            head.layers[0].mlp.down_proj.weight.mul_(0.06)
        save_head(head, folder, manifest_of(section, shape, identity, drafter=section.model_dump(mode="json")))
        return
    section = Eagle3Config(kind=kind, **_READ, **settings) if kind == "eagle3" else \
        PeagleConfig(kind=kind, parallel_tokens=4, mask_token_id=0, **_READ)  # fmt: skip
    head = _drawn(section.module(section.layer(shape), None))
    save_head(head, folder, manifest_of(section, shape, identity, drafter=section.model_dump(mode="json")))


@torch.no_grad()
def _drawn(head):
    generator = torch.Generator().manual_seed(0)
    for value in head.parameters():
        if value.dim() > 1:
            value.normal_(0, 0.15, generator=generator)
        else:  # norms, which differ from layer to layer
            value.uniform_(0.4, 1.6, generator=generator)
    return head


def save_draft(target: Path, folder: Path, **settings) -> None:
    """A draft LVLM with drawn weights, narrower than its target, on the target's projected features."""
    model = load_lvlm(target, revision=None, dtype=torch.float32, key="target", whole=True)
    ids = read_config(str(target), key="target")
    processor = load_processor(str(target))
    language = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 3, "max_position_embeddings": 512, "initializer_range": 0.3}  # fmt: skip
    made = {"kind": "lvlm", "language_model": language, "vision_tower": "target", "projector_input": "projected"}
    section = LvlmConfig.model_validate(made | {"first_token": False} | settings)
    torch.manual_seed(0)
    text = ids.text_config
    draft = build_drafter(
        section, model, TokenIds(text.vocab_size, processor.image_token_id, *(
            getattr(text, f"{name}_token_id") for name in ("bos", "eos", "pad"))), seed=0,
    )  # fmt: skip
    with torch.no_grad():  # pictures that show
        for layer in (draft.model.multi_modal_projector.linear_1, draft.model.multi_modal_projector.linear_2):
            layer.weight.normal_(0, 0.3)
        # Ids that stand for no text: our loop never proposes them, an engine does.
        draft.lm_head.weight[[processor.image_token_id, *range(processor.num_token_ids, text.vocab_size)]] = 0
    manifest = {"model": "drafter", "target": str(target), "tokenizer_hash": processor.tokenizer_hash}
    save_lvlm(draft, folder, manifest | {"drafter": section.model_dump(mode="json")})


def save_itself(target: Path, folder: Path) -> None:
    """The target as its own draft LVLM: in mode M all that it drafts must stand, in T on text."""
    model = load_lvlm(target, revision=None, dtype=torch.float32, key="target", whole=True)
    drafter = {"kind": "lvlm", "path": str(target)}
    about = {"model": "drafter", "target": str(target), "drafter": drafter}
    save_lvlm(model, folder, about | {"tokenizer_hash": load_processor(str(target)).tokenizer_hash})
