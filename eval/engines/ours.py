"""Our side: the exported folder read back, and what it drafts in our own loop, cycle by cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ...core.errors import UserError
from ...core.files import checked
from ...core.json_types import JsonObject
from ...models.decoding.tree import Tree
from ...models.decoding.warp import Warp
from ...models.drafters.base import DraftingOptions
from ...models.drafters.manifest import MANIFEST, read_manifest
from ...models.drafters.modes import ImageSubstitutes
from ...models.drafters.outside import load_start
from ...models.folders import opened_target
from ...models.formats import eagle, lvlm, read_export
from ...models.formats.heads import LANGUAGE_HEADS, load_published
from ...models.formats.source import named_target
from ...models.hub import read_config
from ...models.targets.table import TargetConfig, family_of
from ..loop import Decoding, generate
from ..pair import open_pair, trained_section
from ..policies import Chain, Draw
from ..rules import Greedy
from .engine_prompts import Asked

_TARGET: TypeAdapter[TargetConfig] = TypeAdapter(TargetConfig)
_SERVED = ("vllm", "speculators")  # layouts that vLLM reads
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


@dataclass
class Noting:
    """Greedy acceptance that keeps every tree's tokens."""

    chains: dict[int, list[int]] = field(default_factory=dict)
    emitted: int = 1  # the prefill's token
    name: str = "greedy"

    def __call__(self, tree: Tree, p: Tensor, uniforms: Sequence[float] = ()) -> Any:
        verified = Greedy()(tree, p, uniforms)
        if tree.num_nodes:
            self.chains[self.emitted] = tree.tokens.tolist()
        self.emitted += verified.num_accepted + 1
        return verified


class Exported:
    """An exported folder of `draftsmith export` in a layout that vLLM reads, opened beside its target.

    Args:
        target: Hub id or directory; None: as the manifest names it.

    Raises:
        UserError: no export for vLLM, a target that nobody can find, or files that do not fit it.
    """

    def __init__(self, folder: Path, target: str | None = None):
        manifest = read_manifest(folder)
        self.folder = folder
        found = read_export(folder)
        if found is None or found[0].engine not in _SERVED:
            raise UserError("this is no folder that draftsmith export wrote for vLLM", where=str(folder / MANIFEST),
                            hint="export the drafter first: draftsmith export FOLDER OUT --to vllm")  # fmt: skip
        if why := _UNCOMPARED.get(str(manifest.get("method"))):
            raise UserError(f"chains of a {manifest['method']} drafter cannot be compared here: {why}",
                            where=str(folder), hint="measure it in vLLM from outside: draftsmith bench")  # fmt: skip
        self.made, self.prompts = found
        section, path = named_target(folder, target)
        self.target_path = opened_target(path, where="target")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = read_config(self.target_path, key="target")
        self.model_type = str(model.model_type)
        # What a recipe spells out of a model, its folder says; chains are compared in full precision.
        section = {**section, "kind": section.get("kind") or family_of(model).kind}
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
        """Whether the export promises prompts with pictures."""
        return self.prompts == "all" and self.processor.reads_pictures

    @property
    def speculative(self) -> JsonObject:
        """vLLM's speculative_config for this folder."""
        return self.made.speculative(NUM_DRAFTED)

    @property
    def num_drafted(self) -> int:
        """Tokens drafted in a cycle."""
        return self.made.chain if self.made.at_once else NUM_DRAFTED

    def decode(self, requests: Sequence[Asked], max_new_tokens: int) -> dict[str, Drafted]:
        """Greedy answers of our loop, with every chain that the folder's weights draft."""
        drafter = self._drafter()
        answers = {}
        for asked in requests:
            noting = Noting()
            decoding = Decoding(Chain(self.num_drafted), noting, Draw("top-k"), Warp(0.0), max_new_tokens, ())
            generation = generate(self.target, drafter, asked.ours, decoding)
            answers[asked.name] = Drafted(generation.tokens, noting.chains, asked.prompt_tokens)
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
        module = load_start(self.config, self.folder, self.target, self._identity, load_published)
        return self.config.drafter(module.eval(), self.target)
