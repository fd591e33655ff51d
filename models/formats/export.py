"""One drafter into one engine's layout: refused, or written whole beside what it was made of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor

from ...core.errors import UserError, did_you_mean
from ...core.files import check_new, checked, new_folder
from ...core.json_types import JsonMapping, JsonObject, object_at
from ...core.pretrained import Checkpoint, name_accelerator
from ...core.results import check_sums, check_written
from ..drafters.lvlm import LvlmConfig, reading_of
from ..drafters.manifest import MANIFEST, read_manifest, tested_with
from ..drafters.mtp import MtpConfig
from ..folders import read_values, write_folder
from ..hub import is_tied, read_config
from ..stored import stored_table
from ..targets.table import family_of
from . import dflash, eagle, eagle3, gguf, lvlm, medusa
from .expressible import ENGINES, Engine, Prompts, check_expressible
from .lvlm import PatchedMode
from .plugin import INSTALL, NEEDS, PATCHES, SECTION, drops_inputs, is_patched, plugins_name
from .source import CHAIN, Files, Source, Target, find_target, kind_of, read_source, unserved
from .target import TOKENIZER, unserved_tower, with_mtp_head

# What is read of a folder: held against the list of the stage that wrote it, or against its checksums as published.
_READ = ("config.json", MANIFEST, "*.safetensors", "tokenizer*")
PROMPT = "prompt.jinja"  # a chat template
# Fields of `Exported` that say how it is served, which its manifest keeps.
_SERVED = ("method", "chain", "parallel", "runner", "patched", "drops_inputs", "whole_prompts", "plugin")


@dataclass(frozen=True)
class Exported:
    """A folder in an engine's layout: what the engine calls the method, and what the reader of the folder must know."""

    folder: Path
    engine: Engine
    method: str
    target: str | None
    notes: tuple[str, ...]
    chain: int = CHAIN  # tokens of a cycle
    parallel: bool = False  # drafted in one pass by a head of EAGLE-3's layer (P-EAGLE)
    runner: int | None = None  # vLLM's model runner that it needs; None: either
    overrides: JsonMapping = field(default_factory=dict)  # of the target's config, for vLLM alone
    patched: bool = False  # by our plugin, which is asked by a variable
    drops_inputs: bool = False  # cached prefixes of the target are not its own
    whole_prompts: bool = False  # none may be cut inside a picture
    plugin: bool = False  # our plugin for vLLM serves it, or repairs what it needs
    prompt: bool = False  # a file has the chat template that its prompts were trained with
    unpenalised: bool = False  # the target's generation config changes scores as no training did
    pixels: JsonMapping = field(default_factory=dict)  # least and most of a picture in training, where they were set
    target_gguf: str = ""  # beside a GGUF: the target's
    trained: str = ""  # beside a GGUF: the folder that it was written of

    @property
    def at_once(self) -> bool:
        """Whether vLLM drafts the whole chain in one pass, so that its length is no setting."""
        return self.parallel or self.method not in ("eagle", "eagle3", "draft_model")

    def speculative(self, num_tokens: int) -> JsonObject:
        """vLLM's speculative_config. `num_tokens`: of a cycle, where they are drafted one by one."""
        tokens = self.chain if self.at_once else num_tokens
        config = {"method": self.method, "model": str(self.folder.resolve()), "num_speculative_tokens": tokens}
        return config | ({"parallel_drafting": True} if self.parallel else {})

    @property
    def settings(self) -> JsonObject:
        """Arguments of vLLM's `LLM` that it needs."""
        over = {"hf_overrides": dict(self.overrides)} if self.overrides else {}
        return over | ({"enable_chunked_prefill": False} if self.whole_prompts else {})

    @property
    def asks(self) -> str:
        """Before commands that start vLLM with it."""
        return f"{PATCHES}=1 " if self.patched else ""

    @property
    def command(self) -> str:
        """The engine's command with it."""
        target, path = self.target or "TARGET", str(self.folder)
        if self.engine == "vllm":
            config = self.speculative(self.chain) | {"model": path}
            if self.method == "mtp":  # the target with its head
                target, _ = path, config.pop("model")
            runner = "" if self.runner is None else f"VLLM_USE_V2_MODEL_RUNNER={self.runner - 1} "
            over = f"--hf-overrides '{json.dumps(dict(self.overrides))}' " if self.overrides else ""
            over += "--no-enable-prefix-caching " if self.drops_inputs else ""
            over += ("--no-enable-chunked-prefill " if self.whole_prompts else "") + self._of_prompts
            return f"{self.asks}{runner}vllm serve {target} {over}--speculative-config '{json.dumps(config)}'"
        if self.engine == "gguf":
            words = "" if not self.prompt else f"--jinja --chat-template-file {self.folder / PROMPT} "
            return (
                f"llama-server --model {self.target_gguf} --spec-draft-model {(self.folder / gguf.DRAFT).absolute()} "
                f"--spec-type {self.method} --spec-draft-n-max {self.chain} {words}--no-spec-draft-backend-sampling "
                "--flash-attn off --metrics"
            )
        if self.engine == "speculators":
            return f"vllm serve {path} {self._of_prompts}".rstrip()
        if self.engine == "sglang":
            algorithm = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE"}[self.method]
            return (
                f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
                f"--speculative-draft-model-path {path} {self._of_prompts}"
            ).rstrip()
        return f"EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={path!r})"

    @property
    def _of_prompts(self) -> str:
        """Arguments of a server with which it reads and answers as in training."""
        is_vllm = self.engine != "sglang"
        words = f"--chat-template {self.folder / PROMPT} " if self.prompt else ""
        if self.unpenalised:
            words += "--generation-config vllm " if is_vllm else "--sampling-defaults openai "
        return words + (f"--mm-processor-kwargs '{json.dumps(dict(self.pixels))}' " if self.pixels and is_vllm else "")


def export_drafter(
    folder: str | Path,
    destination: str | Path,
    engine: Engine,
    *,
    target: str | None = None,
    prompts: Prompts = "all",
    mode: PatchedMode | None = None,
    prompt: str | None = None,
    target_gguf: Path | None = None,
) -> Exported:
    """Write a trained drafter as an engine reads it. Raises `UserError`: the engine cannot express this drafter; every
    reason is named. Or the stage that wrote the folder has not finished, or a file is not as it wrote it.

    Args:
        folder: of a stage that trained a head or a draft LVLM, of `draftsmith import`, or of a plain language model.
        destination: must not exist.
        target: Hub id or directory; None: as the drafter's manifest names it.
        prompts: text: the engine will only be asked without pictures.
        mode: of a draft LVLM in vLLM; None: as its settings say.
        prompt: the chat template of its training, where it is not the target's.
        target_gguf: the target in llama.cpp's layout, beside which `gguf` is written.
    """
    folder, destination = Path(folder), Path(destination)
    if engine not in ENGINES:
        raise UserError(f"no layout of {engine!r}", hint=did_you_mean(engine, ENGINES))
    check_new(destination)
    if read_export(folder) is not None:
        raise UserError("this folder is an export already", where=str(folder), hint="name the drafter that it is of")
    kind, manifest = kind_of(folder), read_manifest(folder)
    check_sums(folder, only=_READ)
    check_written(folder, only=_READ)
    if kind == "image_head":
        _refuse_visual(folder, engine, manifest)
    if mode is not None and (kind != "lvlm" or engine != "vllm" or prompts == "text"):
        raise UserError("--mode says what a draft LVLM is shown of pictures in vLLM", where=str(folder),
                        hint="leave it out")  # fmt: skip
    if target_gguf is not None and engine != "gguf":
        raise UserError("--target-gguf is read beside --to gguf alone", where=str(target_gguf), hint="leave it out")
    whose = find_target(folder, target)
    if Path(whose.place).is_dir():
        check_written(Path(whose.place), only=_READ)
    if tower := unserved_tower(whose.config):
        raise UserError(
            f"no engine has the target's tower ({tower}), and none can serve it with pictures", where=whose.place,
            hint="its language model can be served on text: --to vllm --prompts text --target FOLDER --target-to "
            "out/target writes it beside the drafter",
        )  # fmt: skip
    made = Exported(destination, engine, "draft_model", whose.place, ())
    write: Callable[[Path], object]  # into the new folder, beside the manifest
    if manifest.get("method") == "mtp":
        source = read_source(folder, whose)
        if reasons := source.config.exports(engine):
            problem = f"--to {engine} cannot express this head: {reasons[0]}"
            raise UserError(problem, where=str(folder), hint="--to vllm")
        chain = cast(MtpConfig, source.config).mtp_steps + 1
        made = replace(made, method="mtp", notes=(_STITCHED,), chain=chain)
        manifest, write = source.manifest, partial(with_mtp_head, source)
    elif engine == "gguf":
        made, manifest, write = _gguf(folder, made, whose, prompts, kind, target_gguf)
    elif kind == "language_head":
        made, manifest, write = _head(folder, made, whose, prompts)
    elif kind == "lvlm" and engine == "vllm" and prompts == "all" and whose.sees:
        made, manifest, write = _seeing(folder, made, whose, mode)
    else:
        draft, notes = lvlm.from_ours(folder, engine, prompts, whose, sees=kind == "lvlm")
        made, write = replace(made, notes=tuple(notes)), draft.save_pretrained
        name_accelerator()
    penalties = Checkpoint(whose.place, whose.revision).penalties()
    trained = read_manifest(folder) if prompts == "all" else {}
    pixels, aspect = object_at(trained, "pixels"), trained.get("aspect")
    cut = f"pictures were trained with aspect: {aspect}, and a server cuts them as the processor says: aspect: square"
    all_notes = (*made.notes, *([penalties] if penalties else []), *([cut] if aspect else []))
    made = replace(made, notes=all_notes, unpenalised=bool(penalties), prompt=prompt is not None, pixels=pixels or {})
    kept = (*_SERVED, "target_gguf", "trained") if engine == "gguf" else _SERVED
    served = {name: vars(made)[name] for name in kept} | {"overrides": dict(made.overrides)}
    about = {"engine": engine, "prompts": prompts, "notes": made.notes, "tested_with": tested_with(), "served": served}
    with new_folder(destination) as aside:
        write(aside)
        if prompt is not None:
            (aside / PROMPT).write_text(prompt, "utf-8")
        # Whole drafts are spoken to with their tokenizer, heads with their target's.
        if kind in ("lvlm", "causal") and not made.plugin:
            for file in filter(Path.is_file, (folder / name for name in TOKENIZER)):
                shutil.copy2(file, aside)
        (aside / MANIFEST).write_text(json.dumps(manifest | {"export": about}, indent=1, sort_keys=True))
    return made


# What was made, the manifest of what it is of, and what writes the other files into a folder.
_Written = tuple[Exported, JsonObject, Callable[[Path], object]]


def _head(folder: Path, made: Exported, whose: Target, prompts: Prompts) -> _Written:
    source, engine = read_source(folder, whose), made.engine
    check_expressible(engine, source, prompts)
    notes: list[str] = []
    pictures = prompts == "all" and whose.sees
    if source.config.kind == "vispec" and not (engine == "eagle" or (engine == "vllm" and pictures)):
        source = eagle.without_pictures(source)
    if source.layout == "dflash":
        source, notes = dflash.whole_blocks(source)
    if source.layout == "eagle3":
        notes += eagle3.lost_elsewhere(source)
    if engine == "speculators" and whose.name is None:  # vLLM starts from such a folder alone
        raise UserError("the speculators format names the target by its Hub id", hint="give it: --target ORG/NAME")
    copied: Tensor | None = None
    if (engine == "eagle" and source.layout == "eagle") or getattr(source.head.shape, "target_layers", False):
        copied = stored_table("token embedding", whose.place, where="target")
        notes.append(_COPIED.format("embedding"))
    is_medusa, is_middle = source.layout == "medusa", False
    if is_medusa and source.head.draft_ids is None:
        copied = stored_table("LM head", whose.place, where="target", tied=is_tied(whose.config))
        notes.append(_COPIED.format("LM head"))
    if engine == "vllm" and source.layout == "eagle" and pictures and plugins_name(source.config) == "middle":
        is_middle, copied = True, stored_table("final norm", whose.place, where="target")
        notes.append(_COPIED.format("final norm"))
    if is_medusa:
        notes.append("vLLM 0.32 drafts with Medusa under runner V1; 0.33 was read without it")
        if source.head.draft_ids is not None:
            notes += [INSTALL, "vLLM 0.32 does not load a part of the vocabulary (token_map): our plugin repairs it"]
    values, state = files_of(engine, source, copied, pictures=pictures)
    patched = is_patched(values)
    if SECTION in values:
        notes += [INSTALL, NEEDS] if patched else [INSTALL]
    elif engine == "vllm" and source.layout == "eagle" and "fc.bias" in source.head.state_dict():
        notes.append("vLLM's fc has no bias: it moved into the attention's biases, which gives the same numbers")
    if prompts == "text" and whose.sees:
        notes.append("for prompts without pictures: at a picture the engine runs something else than this head")
    elif family_of(whose.config).v1_misplaces_drafts and engine in ("vllm", "speculators") and not is_medusa:
        notes.append(V1_FAULT)
    parallel, shape = dict(source.config).get("parallel_tokens"), source.head.shape
    chain = shape.num_heads if is_medusa else shape.num_drafts if source.layout == "dflash" else parallel or CHAIN
    made = replace(
        made, notes=tuple(notes), patched=patched, drops_inputs=drops_inputs(values), whole_prompts=is_middle,
        method="eagle3" if is_middle else "dspark" if source.config.kind == "dspark" else source.layout,
        plugin=INSTALL in notes, runner=2 if V1_FAULT in notes else 1 if patched or is_medusa else None,
        chain=chain, parallel=parallel is not None,
        # vLLM looks for the vocabulary at the config's top.
        overrides={"vocab_size": whose.text.vocab_size} if is_medusa and whose.sees else {},
    )  # fmt: skip
    return made, source.manifest, partial(write_folder, values=values, state=state)


def _gguf(
    folder: Path, made: Exported, whose: Target, prompts: Prompts, kind: str, target_gguf: Path | None
) -> _Written:
    """A head, block draft or draft model as one file for llama.cpp."""
    method, chain, notes = "simple", CHAIN, list[str]()
    if kind == "language_head":
        source = read_source(folder, whose)
        check_expressible("gguf", source, prompts)
        draft = gguf.from_head(source)
        method = "dspark" if source.config.kind == "dspark" else source.layout
        if source.layout == "dflash":
            chain = source.head.shape.num_drafts
            notes.append(f"a cycle of fewer than {chain} tokens is a shorter block, which drafts otherwise")
            if prompts == "all" and whose.sees:
                notes.append("with pictures chains were not compared: llama.cpp's tower gives other features")
    else:
        model, notes = lvlm.from_ours(folder, "gguf", prompts, whose, sees=kind == "lvlm")
        draft = gguf.from_model(model, str(folder))
    reader = gguf.open_target(target_gguf, whose, hands=kind == "language_head")
    notes.append("flash attention (auto turns it on, on CPUs too) moves the target's scores by 1e-2: it is off")
    made = replace(made, method=f"draft-{method}", chain=chain, notes=tuple(notes),
                   target_gguf=str(target_gguf and target_gguf.resolve()), trained=str(folder.resolve()))  # fmt: skip
    return made, read_manifest(folder), lambda aside: gguf.write(draft, reader, aside / gguf.DRAFT)


def files_of(engine: Engine, source: Source, copied: Tensor | None = None, *, pictures: bool = False) -> Files:
    """`config.json` and tensors of a head or draft that `check_expressible` has let through.

    Args:
        copied: the tensor of the target that a layout holds a copy of: its embedding for EAGLE-1 in EAGLE's own
            layout and for DSpark with Gemma's layers, its LM head for Medusa, its final norm for a head of our plugin
            that reads a middle layer.
        pictures: prompts may have some.
    """
    if source.layout == "eagle":
        return eagle.from_ours(engine, source, copied, pictures=pictures)
    if source.layout == "medusa":
        return medusa.from_ours(source, copied)
    return dflash.from_ours(engine, source, copied) if source.layout == "dflash" else eagle3.from_ours(engine, source)


def read_export(folder: Path) -> tuple[Exported, Prompts] | None:
    """What `export_drafter` wrote into `folder`, and for which prompts; None: it holds no export. Raises `UserError`: a
    version wrote it that did not keep how it is served.
    """
    export = read_manifest(folder).get("export") if (folder / MANIFEST).is_file() else None
    if export is None:
        return None
    if object_at(export, "served") is None:
        raise UserError("the export does not say how it is served", where=str(folder / MANIFEST), hint="export it anew")
    served = dict(export["served"])
    if "plugin" not in served:  # earlier versions did not keep it
        served["plugin"] = SECTION in read_values(folder)
    return Exported(folder, export["engine"], target=None, notes=tuple(export["notes"]), **served), export["prompts"]


_COPIED = "holds a copy of the target's {}, as this layout wants it: the target's licence applies"
_STITCHED = "holds the whole target with this head in the place of its own: the target's licence applies"
V1_FAULT = (
    "vLLM's model runner V1 drafts wrongly after a Qwen-VL picture (a bug of its cache slots); serve with runner V2"
)


def _seeing(folder: Path, made: Exported, whose: Target, mode: PatchedMode | None) -> _Written:
    """A draft LVLM for our plugin: made for vLLM's EAGLE path, or as it was trained, with patches."""
    manifest = read_manifest(folder)
    drafter = dict(manifest.get("drafter") or {"kind": "lvlm", "path": str(folder)})  # imported drafts bring none
    drafter |= {} if mode is None else {"mode": mode}
    section = checked(drafter, LvlmConfig, where=f"{folder / MANIFEST}, drafter", hint="train it with this version")
    reading = reading_of(read_config(str(folder), key="drafter"))
    # On projected features and without the first token: for vLLM's EAGLE path.
    if section.mode.members == ("M",) and reading.projector_input == "projected" and not reading.first_token:
        values, state = lvlm.for_plugin(folder, whose)
        made = replace(made, method="eagle", notes=(INSTALL,))
    else:
        values, state = lvlm.for_patches(folder, section, whose)
        manifest |= {"drafter": section.model_dump(mode="json")}
        made = replace(made, notes=(INSTALL, NEEDS), runner=1, patched=True)
    made = replace(made, drops_inputs=drops_inputs(values), plugin=True)
    return made, manifest, partial(write_folder, values=values, state=state)


def _refuse_visual(folder: Path, engine: Engine, manifest: JsonObject) -> None:
    # An imported head's config has the shape of what it mirrors in place of a target.
    section = object_at(manifest, "target") or {}
    reasons = [
        "no engine decodes this target's pictures with a drafter: vLLM runs such models to understand, if at all"
    ]
    if manifest.get("method") == "medusa":
        reasons.append("vLLM 0.33 has no Medusa any more, SGLang never lists it")
    elif read_values(folder).get("rope") == "grid":
        reasons.append("its layer turns by row and column of the picture, and engines turn by the place alone")
    if section.get("cfg_scale", 1.0) != 1.0 or manifest.get("condition_dropout"):
        reasons.append(
            "it drafts with and without the condition and mixes both (classifier-free guidance): engines run one row"
        )
    raise unserved(f"--to {engine}: no engine can express this head", reasons, folder, "decode with our own loop")
