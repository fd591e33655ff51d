"""What both sides are asked, and our side: what the exported folder drafts in our own loop, cycle by cycle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from pydantic import TypeAdapter

from ...core.batch import Request
from ...core.errors import UserError
from ...core.files import checked
from ...core.json_types import JsonObject
from ...core.pictures import one_placeholder_each
from ...data.conversations import PromptFormat
from ...data.families.processor import Processor
from ...data.families.table import TEMPLATES
from ...models.decoding.tree import Tree
from ...models.decoding.warp import Distributions, Warp
from ...models.drafters.base import DraftingOptions
from ...models.drafters.manifest import MANIFEST, read_manifest
from ...models.drafters.modes import ImageSubstitutes
from ...models.drafters.outside import load_start
from ...models.folders import opened_target
from ...models.formats import eagle, lvlm
from ...models.formats.export import read_export
from ...models.formats.heads import LANGUAGE_HEADS, load_published
from ...models.formats.source import named_target
from ...models.hub import read_config
from ...models.targets.table import TargetConfig, family_of
from ..loop import Decoding, generate
from ..pair import open_pair, trained_section
from ..policies import Chain, Draw
from ..published import read_request
from ..published_section import ImageSettings, UserRequest
from ..rules import Greedy, Verified

TEXTS = (
    "What is in the picture?",
    "Tell me where the red circle is, and what lies beside it.",
    "Count the shapes, one by one.",
    "Write a short story about a lighthouse.",
)
TEXT, ONE, TWO, RESIZED = "text", "one picture", "two pictures", "resized picture"
# All but the resized ones again: three at once, and three at once whose prompts are read in pieces (chunked prefill).
TOGETHER, PIECES = "three at once", "prompts in pieces"
_PER_GROUP = 4


@dataclass(frozen=True)
class CheckRequest:
    """One request, as our loop and as the engine get it."""

    name: str
    group: str
    ours: Request  # every picture's placeholders in full
    ids: list[int]  # one placeholder for a picture, which the engine expands itself: more would be expanded again
    pictures: list[str]  # files in the folder of the requests

    @property
    def prompt_tokens(self) -> int:
        """Length of the expanded prompt, which the engine must count, too."""
        return len(self.ours.ids)


def make_requests(processor: Processor, folder: Path, *, pictures: bool, seed: int = 0) -> list[CheckRequest]:
    """Requests of all groups; drawn pictures are written into `folder` as PNG. `pictures`: False: texts alone."""
    rng, groups = random.Random(seed), {TEXT: 0}
    if pictures and processor.reads_pictures:
        groups |= {ONE: 1, TWO: 2, RESIZED: 1}
    side = processor.image_size * (10 if processor.reads_whole else 1)
    requests = []
    for group, count in groups.items():
        size = (side * 3 // 2 + 5, side + 3) if group == RESIZED else (side, side)
        for number in range(_PER_GROUP):
            names = [f"{group.replace(' ', '-')}-{number}-{index}.png" for index in range(count)]
            for name in names:
                _draw(rng, size).save(folder / name)
            user = UserRequest(text=TEXTS[number], pictures=names)
            reader = ImageSettings(aspect="square").image_reader(processor)
            request = read_request(user, folder, _format(processor), reader)
            ids = one_placeholder_each(request.ids.tolist(), request.modality.tolist(), request.pictures)
            requests.append(CheckRequest(f"{group} {number + 1}", group, request, ids, names))
    return requests


def _format(processor: Processor) -> PromptFormat:
    """A template that fits the tokenizer. Which one does not matter: both sides get the same ids."""
    end = processor.tokenizer.eos_token
    plain = {name: template.end for name, template in TEMPLATES.items() if not template.surrounds}
    fits = [name for name, its_end in plain.items() if its_end == end]
    template = processor.picture_family.template or (fits or [*plain])[0]
    return PromptFormat.model_validate({"template": template, "system": "", "image_rule": "verbatim"})


def _draw(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    """A ground and four rectangles in loud colours, so that pictures are not taken for each other."""
    picture = Image.new("RGB", size, _color(rng))
    draw = ImageDraw.Draw(picture)
    for _ in range(4):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        draw.rectangle((x, y, x + size[0] // 2, y + size[1] // 3), fill=_color(rng))
    return picture


def _color(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


_TARGET: TypeAdapter[TargetConfig] = TypeAdapter(TargetConfig)
_SERVED = ("vllm", "speculators", "gguf")  # layouts that vLLM reads, and llama.cpp's
# Kinds whose chains vLLM 0.32 does not show.
_UNCOMPARED = {
    **dict.fromkeys(("dspark", "dflash2"), "vLLM 0.32 has it in model runner V2 alone, and chains are read from V1"),
    "mtp": "on a CPU vLLM 0.32 runs recurrent layers in bfloat16 alone, and chains are compared in float32",
}
NUM_DRAFTED = 4  # of drafters that draft token by token


@dataclass(frozen=True)
class Drafted:
    """A request's answer, and by number of tokens before it each cycle's drafted chain."""

    tokens: list[int]
    chains: dict[int, list[int]]
    prompt_tokens: int = 0

    def until(self, ends: Sequence[int]) -> Drafted:
        """The answer up to its first token that ends one, and the chains before it."""
        count = next((place for place, token in enumerate(self.tokens, 1) if token in ends), len(self.tokens))
        chains = {start: chain for start, chain in self.chains.items() if start < count}
        return Drafted(self.tokens[:count], chains, self.prompt_tokens)


@dataclass
class Noting:
    """Greedy acceptance that keeps every tree's tokens."""

    chains: dict[int, list[int]] = field(default_factory=dict)
    emitted: int = 1  # the prefill's token
    name: str = "greedy"

    def __call__(self, tree: Tree, p: Distributions, uniforms: Sequence[float] = ()) -> Verified:
        verified = Greedy()(tree, p, uniforms)
        if tree.num_nodes:
            self.chains[self.emitted] = tree.tokens.tolist()
        self.emitted += verified.num_accepted + 1
        return verified


class Exported:
    """An exported folder of `draftsmith export` in a layout that vLLM reads, or llama.cpp, opened beside its target.
    Raises `UserError`: no such export for vLLM, a target that nobody can find, or files that do not fit it.

    Args:
        target: Hub id or directory; None: as the manifest names it.
    """

    def __init__(self, folder: Path, target: str | None = None):
        manifest = read_manifest(folder)
        self.folder = folder
        export = read_export(folder)
        if export is None or export[0].engine not in _SERVED:
            raise UserError("this is no folder that draftsmith export wrote for vLLM or llama.cpp",
                            where=str(folder / MANIFEST),
                            hint="export the drafter first: draftsmith export FOLDER OUT --to vllm")  # fmt: skip
        self.in_llama = export[0].engine == "gguf"
        # Of a GGUF, which our loop does not read, what it was written of is decoded.
        self.weights = Path(export[0].trained) if self.in_llama else folder
        if not self.in_llama and (why := _UNCOMPARED.get(str(manifest.get("method")))):
            raise UserError(f"chains of a {manifest['method']} drafter cannot be compared here: {why}",
                            where=str(folder), hint="measure it in vLLM from outside: draftsmith audit")  # fmt: skip
        self.made, self.prompts = export
        section, path = named_target(folder, target)
        self.target_path = opened_target(path, where="target")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = read_config(self.target_path, key="target")
        self.model_type = str(model.model_type)
        # What a recipe spells out of a model, its folder says, and whether it sees; chains are compared in float32.
        seen = section.get("kind") if model.get_text_config() is not model else None
        section = {**section, "kind": seen or family_of(model).kind}
        placed = {"kind": section["kind"], "path": self.target_path, "dtype": "float32"}
        config = checked(placed, _TARGET, where=f"{folder / MANIFEST}, target", hint="export it anew")
        pair = open_pair(config, {"target": self.target_path}, device=device, section=section)
        assert pair.processor is not None
        self.target, self.processor, self._identity = pair.target, pair.processor, pair.identity
        self.config = trained_section(folder, hint="export it anew")
        self.kind = "draft_model" if self.config is None else self.config.kind
        if self.kind == "lvlm" and not self.made.plugin:  # its language model alone
            self.kind = "draft_model"

    @property
    def pictures(self) -> bool:
        """Whether the export promises prompts with pictures, and the engine's are compared."""
        return self.prompts == "all" and self.processor.reads_pictures and not self.in_llama

    @property
    def speculative(self) -> JsonObject:
        """vLLM's speculative_config for this folder, or the like of a GGUF."""
        return self.made.speculative(NUM_DRAFTED)

    @property
    def num_drafted(self) -> int:
        """Tokens drafted in a cycle."""
        return self.made.chain if self.made.at_once else NUM_DRAFTED

    def decode(self, requests: Sequence[CheckRequest], max_new_tokens: int) -> dict[str, Drafted]:
        """Greedy answers of our loop, with every chain that the folder's weights draft."""
        drafter = self._drafter()
        answers = {}
        for request in requests:
            noting = Noting()
            decoding = Decoding(Chain(self.num_drafted), noting, Draw("top-k"), Warp(0.0), max_new_tokens, ())
            generation = generate(self.target, drafter, request.ours, decoding)
            answers[request.name] = Drafted(generation.tokens, noting.chains, request.prompt_tokens)
        return answers

    def _drafter(self) -> Any:
        if self.config is None or self.kind == "draft_model":
            raise UserError("a draft model is no head: its chains are not compared", where=str(self.folder),
                            hint="serve it, and read the accepted tokens in the engine's metrics")  # fmt: skip
        if self.kind == "lvlm":
            draft = lvlm.from_plugin(self.folder, self.target.decoder.model)
            options = DraftingOptions(ImageSubstitutes(self.processor.newline_id))
            return self.config.drafter(draft, self.target, options)
        if self.made.patched or self.kind not in LANGUAGE_HEADS:
            module: Any = eagle.from_export(self.folder, self.config, self.target.shape).to(self.target.device)
            return self.config.drafter(module, self.target)
        module = load_start(self.config, self.weights, self.target, self._identity, load_published)
        return self.config.drafter(module.eval(), self.target)
