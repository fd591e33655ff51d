"""The settings that cached states depend on. A cache stores them, and a reader with other settings gets an error that
names the field.

A head that trains on states of another target, template or image processor learns without an error and drafts badly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from ...core.errors import UserError
from ...core.json_types import JsonMapping, JsonObject, difference
from ...core.states import Taps
from ...core.weights_identity import weights_identity
from ..conversations import PromptFormat
from ..dataset import ConversationData
from ..families.processor import Processor
from .storage import StatesDtype

# Fields that may differ between a cache and its reader where the recipe says so (`accept`): the user knows better.
Acceptable = Literal["transformers", "image_backend", "template", "target", "processor", "pictures", "engine"]
# Fields that caches which are read together may differ in.
_OWN = ("samples", "grouping", "pictures", "template")


def states_identity(
    *,
    target: JsonMapping,
    processor: Processor,
    form: PromptFormat | None,
    data: ConversationData | None,
    wanted: Taps,
    dtype: StatesDtype | None,
    engine: JsonMapping | None = None,
) -> JsonObject:
    """Return the settings that cached states depend on, as JSON. A None is not known: it is left out and not compared;
    no `engine` is the target's own passes. `target` is of `target_identity`.
    """
    import transformers

    template = pictures = None
    if form is not None:
        settings = form.model_dump(mode="json")
        read = [settings, processor.tokenizer.chat_template] if form.template == "chat" else settings
        template = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()
    if data is not None:
        pictures = data.model_dump(mode="json", include={"aspect", "anyres_convention", "video"})
    known = {
        "target": dict(target),
        "processor": processor_settings(processor),
        "template": template,
        "pictures": pictures,
        "transformers": transformers.__version__,
        "states": wanted.stored,
        "dtype": dtype,
        "image_backend": image_backend(processor),
        "engine": None if engine is None else dict(engine),
    }
    return json.loads(json.dumps({name: value for name, value in known.items() if value is not None}))


def image_backend(processor: Processor) -> str:
    """What resizes pictures: PIL and torchvision differ in the last bits, and states in more than those."""
    names = {parent.__name__ for parent in type(processor.image_processor).__mro__}
    return "torchvision" if names & {"TorchvisionBackend", "BaseImageProcessorFast"} else "pil"


def processor_settings(processor: Processor) -> JsonObject:
    """Everything that decides which ids and pixels a sample becomes."""
    images = processor.image_processor
    settings = vars(processor) | {
        "tokenizer": processor.tokenizer_hash,
        "image_processor": str(images) if images is None else images.to_dict(),
        "family": processor.family,
    }
    del settings["picture_family"]
    return json.loads(json.dumps(settings, default=str))


def target_identity(source: str | Path, *, path: str | None, revision: str | None) -> JsonObject:
    """A target's weights: published ones by path, revision and commit, a directory by its files alone."""
    from huggingface_hub import try_to_load_from_cache

    if (folder := Path(source)).is_dir():
        return {"weights": weights_identity(folder)}
    cached = try_to_load_from_cache(str(source), "config.json", revision=revision)
    commit = Path(cached).parent.name if isinstance(cached, str) else None  # None: nothing was fetched
    return {"path": path, "revision": revision, "commit": commit}


def check_identity(held: JsonMapping, expected: JsonMapping, folder: Path, accept: Iterable[str]) -> None:
    """Compare a cache with what its reader would compute online. Raises `UserError` that names a field, but those of
    `accept`, which differs, or states that are wanted and not held.
    """
    stored, wanted, lacks = held.get("states", {}), expected["states"], []
    for name in ("text_layers", "visual_layers"):
        lacks += [f"{name} lacks layer {layer}" for layer in sorted(set(wanted[name]) - set(stored.get(name, ())))]
    for name, problem in (("feature", "is not kept"), ("everywhere", "is false: visual tokens have no H")):
        lacks += [f"{name} {problem}"] if wanted[name] and not stored.get(name) else []
    if lacks:  # a cache may hold more than is needed: a Sparrow cache also serves a head that reads no visual states
        raise UserError(f"states.{lacks[0]}", where=str(folder),
                        hint="make the cache for this drafter: it keeps what the head reads")  # fmt: skip
    for name, value in expected.items():
        if name == "states" or name in accept:
            continue
        apart = difference(held.get(name), value, name)
        if apart is None:
            continue
        field, was, now = apart
        hint = "make the cache again, or restore what it was made with"
        if name in get_args(Acceptable):
            hint += f"; source.accept: [{name}] reads it all the same"
        raise UserError(
            f"the states were made with another {field}: {was!r}, now {now!r}", where=str(folder), hint=hint
        )


def check_together(identities: Sequence[JsonMapping], folders: Sequence[Path], accept: Iterable[str] = ()) -> None:
    """Check that caches which are read together come from one target, by one engine, and store the same states. Raises
    `UserError` that names field and folder; fields of `accept` may differ.
    """
    for held, folder in zip(identities[1:], folders[1:], strict=True):
        for name in {**identities[0], "engine": None}:
            apart = difference(held.get(name), identities[0].get(name), name)
            if name in _OWN or name in accept or apart is None:
                continue
            hint = "read caches together that were made alike, or make one of them again"
            if name == "engine":
                hint += "; source.accept: [engine] reads them all the same"
            raise UserError(
                f"{apart[0]} is {apart[1]!r}, and {apart[2]!r} in {folders[0]}", where=str(folder), hint=hint
            )
