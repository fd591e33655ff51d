"""Turn a published drafter into a folder that recipes read: what `draftsmith import` does.

Weights are read from safetensors, or from a pickle without running anything in it. What the files leave unsaid is
worked out from the target, or asked for.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoTokenizer

from ...core.errors import UserError, did_you_mean
from ...core.files import new_folder
from ...core.json_types import JsonObject
from ...core.pretrained import Checkpoint, reading_pretrained
from ...core.results import check_written
from ...data.processor_files import load_processor
from ...models.drafters.base import TargetIdentity
from ...models.drafters.eagle_images import save_eagle
from ...models.drafters.lvlm import save_lvlm
from ...models.drafters.manifest import tested_with
from ...models.folders import find_folder, opened_target, read_values, shipped_name
from ...models.formats import lantern, lvlm
from ...models.formats.dflash import BLOCK_KINDS
from ...models.formats.heads import LANGUAGE_HEADS, LanguageHead, import_head
from ...models.hub import read_config
from ...models.stored import stored_table
from ...models.targets.base import language_shape
from ...models.targets.table import IMAGE_SECTIONS, family_of, mirrored_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LANTERN, LVLM = "lantern", "lvlm"
KINDS = (*LANGUAGE_HEADS, LANTERN, LVLM)


def import_drafter(options: Namespace, destination: Path) -> tuple[JsonObject, tuple[str, ...]]:
    """Write the folder, whole or not at all. Returns the recipe's section for it, and notes. `options`: of the command
    line. Raises `UserError`: the destination exists, or the drafter is not of this kind or not of this target.
    """
    if options.kind not in KINDS:
        raise UserError(f"--as {options.kind}: no such kind of drafter; there are {', '.join(KINDS)}", where="--as",
                        hint=did_you_mean(options.kind, KINDS))  # fmt: skip
    options.target = opened_target(options.target, where="--target")
    for name in (options.source, options.target):
        if Path(name).is_dir():  # of a run: as its stage left it
            check_written(Path(name))
    with new_folder(destination) as folder, torch.random.fork_rng(devices=[]):
        settings, notes = {LANTERN: _lantern, LVLM: _lvlm}.get(options.kind, _head)(options, folder)
    section = {**settings, "path": str(destination)}
    return {"drafters": {destination.name: section}} if options.kind == LVLM else {"drafter": section}, tuple(notes)


def _origin(options: Namespace) -> JsonObject:
    """Where the drafter came from, for its manifest."""
    return {"source": options.source, "revision": options.revision, "as": options.kind}


def _head(options: Namespace, folder: Path) -> tuple[JsonObject, tuple[str, ...]]:
    """Write a head that reads hidden states to `folder`. Returns the recipe's drafter section and notes."""
    kind, revision = cast(LanguageHead, options.kind), options.target_revision
    config = read_config(options.target, key="--target", revision=revision)
    text = config.get_text_config()
    sees = text is not config
    embedding = None
    if kind not in (*BLOCK_KINDS, "medusa") and not options.no_weights:
        embedding = stored_table("token embedding", options.target, where="--target", revision=revision)
    imported = import_head(kind, options.source, text, embedding=embedding, image=options.image, sees=sees,
                           revision=options.revision)  # fmt: skip
    target = {"kind": family_of(config).kind, "path": shipped_name(options.target), "revision": revision}
    beside: Any = SimpleNamespace(shape=language_shape(text))
    manifest = imported.config.manifest(beside, TargetIdentity(target), imported=_origin(options))
    imported.config.save(imported.head, folder, manifest)
    return imported.settings, imported.notes


def _lantern(options: Namespace, folder: Path) -> tuple[JsonObject, tuple[str, ...]]:
    """Write an image generator's EAGLE head to `folder`. Returns the recipe's drafter section and notes."""
    published = find_folder(options.target, options.target_revision, files=("config.json",))
    kind, mirrored = mirrored_in(published, read_values(published))
    named: JsonObject = {}
    if IMAGE_SECTIONS[kind].is_named_by_path:
        named["target"] = {"kind": kind, "path": options.target, "revision": options.target_revision}
    head, settings, notes = lantern.to_ours(options.source, mirrored, revision=options.revision)
    about = {"method": "eagle", "imported": _origin(options) | {"target": options.target}, "tested_with": tested_with()}
    save_eagle(head, folder, about | named, with_embedding=True)
    return settings, notes


def _words_of(options: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Compare the draft's words with the target's: as many rows are no sign of the same tokenizer (Mistral's)."""
    try:
        with reading_pretrained(options.source, "cannot load the head's tokenizer", weights=False):
            source = AutoTokenizer.from_pretrained(options.source, revision=options.revision)
    except UserError:
        return ["brings no tokenizer that can be read: whether its words are the target's was not compared"]
    theirs, added = tokenizer.get_vocab(), source.get_added_vocab()
    words = {word: place for word, place in source.get_vocab().items() if word not in added}
    other = [word for word, place in words.items() if theirs.get(word) != place]
    if other:
        raise UserError(
            f"{len(other)} of its {len(words)} words have other ids in the target's tokenizer ({other[0]!r}): what it "
            "drafts would be noise", where=options.source, hint="give a target of its tokenizer: TABED's are Vicuna's",
        )  # fmt: skip
    return []


def _lvlm(options: Namespace, folder: Path) -> tuple[JsonObject, tuple[str, ...]]:
    """Write a draft LVLM to `folder`. Returns the recipe's drafter section and notes."""
    target = read_config(options.target, key="--target", revision=options.target_revision)
    ends = Checkpoint(options.target, options.target_revision).generation_ends()
    model, notes = lvlm.to_ours(options.source, target, revision=options.revision, ends=ends)
    processor = load_processor(options.target, revision=options.target_revision)
    notes = (*notes, *_words_of(options, processor.tokenizer))
    manifest = {
        "model": "drafter", "target": shipped_name(options.target), "target_revision": options.target_revision,
        "tokenizer_hash": processor.tokenizer_hash, "imported": _origin(options), "tested_with": tested_with(),
    }  # fmt: skip
    save_lvlm(model, folder, manifest)
    processor.save(folder)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"dtype": dtype} if dtype != "float32" else {}, notes
