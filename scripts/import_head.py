#!/usr/bin/env python
r"""Turn a published drafter into a folder that recipes read, with what its files leave unsaid filled in or asked for.

    scripts/import_head.py lucylyn/MSD-LLaVA1.5-7B weights/msd --as msd --target llava-hf/llava-1.5-7b-hf
    scripts/import_head.py downloads/vispec weights/vispec --as vispec --target Qwen/Qwen2.5-VL-7B-Instruct
    scripts/import_head.py Rayzl/qwen2.5-vl-7b-eagle3-sgl weights/eagle3 --as eagle3 --image projected \
        --target Qwen/Qwen2.5-VL-7B-Instruct
    scripts/import_head.py jadohu/llamagen_drafter weights/lantern --as lantern --target weights/llamagen-t2i-xl-256
    scripts/import_head.py mjbooo/lvlm68m weights/lvlm68m --as lvlm --target llava-hf/llava-1.5-7b-hf

Weights are read from safetensors, or from a pickle without running anything in it. The recipe's `drafter` section is
printed. The destination must not exist; it appears whole or not at all.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from draftsmith.core.errors import UserError
from draftsmith.core.files import new_folder
from draftsmith.core.pretrained import reading_pretrained
from draftsmith.core.results import check_written
from draftsmith.core.secrets import redact
from draftsmith.data.processor import load_processor
from draftsmith.eval.timing import options
from draftsmith.models.drafters.base import TargetIdentity
from draftsmith.models.drafters.eagle_images import save_eagle
from draftsmith.models.drafters.head_files import manifest_of, save_head
from draftsmith.models.drafters.lvlm import save_llava
from draftsmith.models.drafters.made_for import tested_with
from draftsmith.models.hub import read_config, target_embedding
from draftsmith.models.imports import LANGUAGE_HEADS, import_head, import_lantern, import_lvlm
from draftsmith.models.llamagen.files import lantern_config
from draftsmith.models.llamagen.folders import find_folder, read_values
from draftsmith.models.llamagen.lantern_layout import is_lantern
from draftsmith.models.llamagen.transformer import LlamaGenConfig
from draftsmith.models.qwen import QWEN_KINDS
from draftsmith.models.targets.base import language_shape
from transformers import AutoTokenizer


def recipe_kind(model_type: str, sees: bool) -> str:
    """What a recipe calls a target."""
    family = next((kind for kind, types in QWEN_KINDS.items() if model_type in types), model_type)
    return family if sees else "causal_lm"


def origin(options) -> dict:
    """Where the drafter came from, for its manifest."""
    return {"source": options.source, "revision": options.revision, "as": options.kind}


def heads(given, folder: Path):
    """Write a head that reads hidden states to `folder`. Returns the recipe's drafter section and notes."""
    config, revision = read_config(given.target, key="--target", revision=given.target_revision), given.target_revision
    text = config.get_text_config()
    sees = text is not config
    embedding = None if given.no_weights else target_embedding(given.target, where="--target", revision=revision)
    imported = import_head(given.kind, given.source, text, embedding=embedding, image=given.image, sees=sees,
                           revision=given.revision)  # fmt: skip
    target = {"kind": recipe_kind(config.model_type, sees), "path": given.target, "revision": revision}
    manifest = manifest_of(imported.config, language_shape(text), TargetIdentity(target),
                           drafter=imported.config.model_dump(mode="json"), imported=origin(given))  # fmt: skip
    save_head(imported.head, folder, manifest)
    return imported.settings, imported.notes


def lantern(options, folder: Path):
    """Write an image generator's EAGLE head to `folder`. Returns the recipe's drafter section and notes."""
    published = find_folder(options.target, options.target_revision, files=("config.json",))
    values = read_values(published)
    if values.get("model_type") == "chameleon":
        target: Any = read_config(str(published), key="--target")
        named = {"target": {"kind": "anole", "path": options.target, "revision": options.target_revision}}
    else:
        where = str(published / "config.json")
        own = {name: value for name, value in values.items() if name != "model_type"}
        target = lantern_config(values, where=where) if is_lantern(values) else LlamaGenConfig.model_validate(own)
        named = {}  # config.json holds the shape of what it mirrors
    head, settings, notes = import_lantern(options.source, target, revision=options.revision)
    about = {"method": "eagle", "imported": origin(options) | {"target": options.target}, "tested_with": tested_with()}
    save_eagle(head, folder, about | named, with_embedding=True)
    return settings, notes


def own_words(options, tokenizer) -> list[str]:
    """Compare the draft's words with the target's: as many rows are no sign of the same tokenizer (Mistral's)."""
    try:
        with reading_pretrained(options.source, "cannot load the head's tokenizer", weights=False):
            own = AutoTokenizer.from_pretrained(options.source, revision=options.revision)
    except UserError:
        return ["brings no tokenizer that can be read: whether its words are the target's was not compared"]
    theirs, added = tokenizer.get_vocab(), own.get_added_vocab()
    words = {word: place for word, place in own.get_vocab().items() if word not in added}
    other = [word for word, place in words.items() if theirs.get(word) != place]
    if other:
        raise UserError(
            f"{len(other)} of its {len(words)} words have other ids in the target's tokenizer ({other[0]!r}): what it "
            "drafts would be noise", where=options.source, hint="give a target of its tokenizer: TABED's are Vicuna's",
        )  # fmt: skip
    return []


def lvlm(options, folder: Path):
    """Write a draft LVLM to `folder`. Returns the recipe's drafter section and notes."""
    target = read_config(options.target, key="--target", revision=options.target_revision)
    model, notes = import_lvlm(options.source, target, revision=options.revision)
    processor = load_processor(options.target, revision=options.target_revision)
    notes = (*notes, *own_words(options, processor.tokenizer))
    manifest = {
        "model": "drafter", "target": options.target, "target_revision": options.target_revision,
        "tokenizer_hash": processor.tokenizer_hash, "imported": origin(options), "tested_with": tested_with(),
    }  # fmt: skip
    save_llava(model, folder, manifest)
    processor.save(folder)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"dtype": dtype} if dtype != "float32" else {}, notes


def main(argv: list[str] | None = None) -> int:
    """Imports as the command line says. Returns the exit code: 0, or 2 after an error of the user."""
    parser = options(__doc__)
    parser.add_argument("source", help="Hub id or directory of the published drafter")
    parser.add_argument("destination", help="a directory that does not exist yet")
    parser.add_argument(
        "--as", dest="kind", choices=(*LANGUAGE_HEADS, "lantern", "lvlm"), required=True, help="what it is"
    )
    parser.add_argument("--target", required=True, help="Hub id or directory of the model that it drafts for")
    parser.add_argument("--image", choices=("placeholder", "projected"),
                        help="eagle, eagle3: what stood at pictures in its training")  # fmt: skip
    parser.add_argument("--revision", help="of the drafter")
    parser.add_argument("--target-revision", help="of the target")
    parser.add_argument(
        "--no-weights", action="store_true", help="do not compare embeddings: the target's config is enough"
    )
    given = parser.parse_args(argv)
    try:
        for name in (given.source, given.target):
            if Path(name).is_dir():  # of a run: as its stage left it
                check_written(Path(name))
        with new_folder(Path(given.destination)) as folder, torch.random.fork_rng(devices=[]):
            settings, notes = {"lantern": lantern, "lvlm": lvlm}.get(given.kind, heads)(given, folder)
    except UserError as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return 2
    print(f"written  {given.destination}")
    for note in notes:
        print(f"note     {note}")
    section = {**settings, "path": given.destination}
    key = "drafters" if given.kind == "lvlm" else "drafter"
    said = {key: {Path(given.destination).name: section}} if given.kind == "lvlm" else {key: section}
    print(yaml.safe_dump(said, default_flow_style=None, sort_keys=False).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
