"""A model's files in a folder or on the Hub: what they hold, and transformers' errors with the file's name.

`Checkpoint` is the one reader of such files beside transformers. Both check little of what they read: a cut or edited
file ends in a KeyError, a TypeError, or a bare Exception somewhere inside them, so files are checked first.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import UserError, first_line
from .files import open_regular, read_json
from .finite import check_weights
from .json_types import JsonMapping, JsonObject, listed, value_at, walk
from .weights_identity import file_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CPU = torch.device("cpu")
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
RESTORE = "restore the file: fetch the folder again, or run the stage that wrote it again"
# JSON objects that transformers and tokenizers read by their names.
_OBJECTS = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json",
)  # fmt: skip
# Sizes of which a config has at least one, with the most that a model has: meta tensors of any size can be made, and a
# million layers take hours, or all memory.
MOST_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "depth"), 256),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 4096),
    **dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size", "d_model", "d_ff", "d_kv"), 1 << 20),
    **dict.fromkeys(("head_dim", "projection_dim", "num_channels"), 1 << 16),
    **dict.fromkeys(("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size"), 1 << 16),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 1 << 28),
}  # fmt: skip
# Numbers of a config of which none is nan or infinite, with the least that a model has.
_LEAST = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"), 0.0),
    **dict.fromkeys(("rope_theta", "rope_base", "rotary_emb_base", "rope_local_base_freq"), 1.0),
}  # fmt: skip
# What is called before transformers reads a model: it registers ours there, whose code takes seconds to import.
REGISTRATIONS: list[Callable[[], None]] = []
_MAX_BYTES = 256 << 20  # of one of them: a tokenizer of 260,000 tokens has 33 MB
# Of `generation_config.json`: what changes scores beside temperature and truncation -> the value that changes nothing.
_PENALTIES = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys((
        "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "forced_bos_token_id",
        "forced_eos_token_id", "exponential_decay_length_penalty", "watermarking_config", "stop_strings",
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Index:
    """What `model.safetensors.index.json` holds: tensor -> file."""

    weight_map: dict[str, str]


@contextmanager
def without_bars(*, in_terminals: bool = False) -> Iterator[None]:
    """Without transformers' bars over the tensors that it loads, noise in a log; `in_terminals`: nor there."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled() and (in_terminals or not sys.stderr.isatty())
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def check_pretrained(source: str | Path, *, weights: bool = True) -> None:
    """Raises `UserError` with the file where one that loaders pick up by its name is cut, not JSON or not an object; of
    `weights` where the header is damaged, or the data cut. A Hub id passes.
    """
    folder = Path(source)
    ggufs = [folder] if folder.suffix == ".gguf" and folder.is_file() else sorted(folder.glob("*.gguf"))
    if ggufs and not (folder / "config.json").is_file():
        raise UserError("a GGUF is a model in one file of llama.cpp's, which recipes do not read", where=str(ggufs[0]),
                        hint=f"draftsmith import {ggufs[0]} {ggufs[0].stem} --as target")  # fmt: skip
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter, JsonObject, hint=RESTORE).get("base_model_name_or_path")
        problem = "the folder holds a PEFT adapter (LoRA or the like), not a model"
        hint = f"merge it into {base} first (merge_and_unload), and copy the tokenizer and the processor there"
        if (folder / CONFIG).is_file():
            problem = "a PEFT adapter lies beside a model: transformers would add it, and vLLM not"
            hint = f"if it is merged, move adapter_* away; else {hint}"
        raise UserError(problem, where=str(folder), hint=hint)
    for name in _OBJECTS:
        if (folder / name).is_file():
            values = read_json(folder / name, JsonObject, hint=RESTORE, max_bytes=_MAX_BYTES)
            if name == "config.json":
                check_config(values, folder / name)
    if weights and folder.is_dir():
        Checkpoint(folder).weights()
        for path in sorted(folder.glob("*.safetensors")):
            with opened(path):
                pass


def check_config(values: JsonMapping, path: Path) -> None:
    """Raises `UserError` for a size, an epsilon or a rotary base in a model's config that no model has, at any level.
    Others are its class's.
    """
    for place, value in walk(values):
        most = MOST_SIZES.get(place[-1]) if place else None
        if most is not None and isinstance(value, int | float) and not 0 <= value <= most:
            problem = f"{'.'.join(place)} is {value:,}, and models have up to {most:,}"
            raise UserError(problem, where=str(path), hint=RESTORE)
        least = _LEAST.get(place[-1]) if place else None
        if least is not None and isinstance(value, int | float) and not least <= value < math.inf:
            problem = f"{'.'.join(place)} is {value}, expected a number of at least {least:g}"
            raise UserError(problem, where=str(path), hint=RESTORE)


# Tables that follow from the config: older checkpoints hold them.
_DERIVED = ("position_ids", "rotary_emb.inv_freq")
# The last part of names under which quantisers store scales, zero points and packed weights (ModelOpt, DeepSeek's FP8,
# compressed-tensors, GPTQ, AWQ, bitsandbytes). `logit_scale` is CLIP's own.
_OF_QUANTISER = re.compile(
    r"(?!logit_scale$)(.*scales?(_\w+)?|.*zero_?points?|q(weight|zeros)|g_idx|.*packed|absmax|.*quant_\w+)$"
)


def _layers_of(name: str) -> str:
    """What the names of a model's layers begin with; "": of another tensor."""
    match = re.match(r".*?\blayers\.(?=\d+\.)", name)
    return match[0] if match else ""


def check_all_read(
    info: JsonMapping, source: str | Path, *, key: str | None = None, whole: bool = False,
    model: PreTrainedModel | None = None,
) -> None:  # fmt: skip
    """Raises `UserError` where weights do not fit their config: transformers draws a missing tensor at random.

    Args:
        info: the loading info of a `from_pretrained`.
        whole: refuse tensors that the config has no place for, too.
        model: of whose layers and beside whose tensors they are refused in any case, unless it is quantised: a deeper
            model has them, or one that computes more (norms of queries and keys, biases).
    """
    names = () if model is None or getattr(model, "hf_quantizer", None) else (*model.state_dict(),)
    parts = {part for name in names for part in (_layers_of(name), name.rpartition(".")[0])} - {""}
    problems = [f"{name} is {[*shape]}, expected {[*wanted]}" for name, shape, wanted in info["mismatched_keys"]]
    problems += [f"{name} is missing" for name in info["missing_keys"]]
    unknown = [name for name in info["unexpected_keys"] if not name.endswith(_DERIVED)]
    unknown = [n for n in unknown if whole or _layers_of(n) in parts or n.rpartition(".")[0] in parts]
    problems += [f"{name} is not part of this model" for name in unknown]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        problem = f"the weights do not fit config.json: {min(problems)}{more}"
        raise UserError(f"{key}: {problem}" if key else problem, key=key, where=str(source),
                        hint="the two do not belong together: restore the one that was changed")  # fmt: skip


def check_quantised(model: PreTrainedModel, info: JsonMapping, source: str | Path, *, key: str | None = None) -> None:
    """Raise `UserError` where stored weights are quantised and transformers did not apply the method.

    It says so in a log line alone and goes on with weights that lack their scales: another model answers.

    Args:
        info: the loading info of the `from_pretrained` that made `model`.
        key: of the recipe, which names `source`.
    """
    unread = sorted(n for n in info["unexpected_keys"] if _OF_QUANTISER.match(n.rpartition(".")[2]))
    method = getattr(model.config, "quantization_config", None)
    if getattr(model, "hf_quantizer", None) is not None or (method is None and not unread):
        return
    problem = "the weights are quantised"
    if method is not None:
        problem += f" with {method.get('quant_method')!r}, which transformers does not apply"
    if unread:
        problem += f": {unread[0]}{f' and {len(unread) - 1} more' if len(unread) > 1 else ''} would not be read"
    raise UserError(
        f"{key}: {problem}" if key else problem, key=key, where=str(source),
        hint="give the unquantised weights, or those of a method that transformers reads",
    )  # fmt: skip


def read_safetensors(path: Path, *, hint: str = RESTORE) -> dict[str, Tensor]:
    """All tensors of a file. Raises as `opened`."""
    with opened(path, hint=hint) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextmanager
def opened(path: Path, *, hint: str = RESTORE) -> Iterator[Any]:
    """A safetensors file, whose header is read: `keys()`, `get_slice(name)` (type and shape), `get_tensor(name)`.

    Raises `UserError` where it is missing, its header is damaged, or it is not as long as the header says.
    """
    try:
        open_regular(path).close()  # safetensors would wait for a pipe
        with safe_open(path, "pt") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError("file not found", where=str(path), hint=hint) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"cannot be read as safetensors: {first_line(error)}", where=str(path), hint=hint) from error


def name_accelerator() -> None:
    """DeepSpeed, which `save_pretrained` imports where it is installed, takes the CPU that is named; else every process
    warns that it has looked for a GPU and takes it as well.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


@contextmanager
def reading_pretrained(
    source: str | Path,
    problem: str,
    *,
    key: str | None = None,
    hint: str = RESTORE,
    where: str | None = None,
    weights: bool = True,
) -> Iterator[None]:
    """Around one call of a `from_pretrained`: its files are checked, and what it raises becomes a `UserError`.

    Args:
        problem: begins the message, which goes on with the source: "cannot load".
        key: of the recipe, which names the source; it stands before the problem.
        where: of the error that transformers raises; None: `source`.
        weights: as of `check_pretrained`.
    """
    check_pretrained(source, weights=weights)
    for register in REGISTRATIONS:
        register()
    try:
        with without_bars():
            yield
    except UserError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: "
        message = f"{f'{key}: ' if key else ''}{problem} {str(source)!r}: {kind}{first_line(error)}"
        if isinstance(error, ImportError):  # of a quantiser, most often; the message names it
            hint = "install the package that it names, or give weights that need none"
        raise UserError(message, key=key, where=where or str(source), hint=hint) from error


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder, or one on the Hub of which only the files that are asked for are fetched.

    `key` and `where` are of errors, where another place than the source is at fault.
    """

    source: str | Path
    revision: str | None = None
    key: str | None = None
    where: str | None = None

    def file(self, name: str) -> Path | None:
        """Where a file lies; None: there is none. Raises `UserError` where the Hub cannot be asked."""
        if Path(self.source).is_dir():
            path = Path(self.source) / name
            return path if path.is_file() else None
        from transformers.utils import cached_file

        try:
            cached = cached_file(
                str(self.source), name, revision=self.revision, _raise_exceptions_for_missing_entries=False
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read {name} of {str(self.source)!r}: {first_line(error)}", key=self.key, where=self.where,
                hint="check the name and the network, or give a directory",
            ) from error  # fmt: skip
        return Path(cached) if cached else None

    def values(self, name: str = CONFIG) -> JsonObject:
        """What a JSON file says; nothing where there is none."""
        path = self.file(name)
        return read_json(path, JsonObject, hint=RESTORE) if path else {}

    def weights(self, wanted: Callable[[str], bool] = bool) -> list[Path]:
        """The safetensors that transformers would open, of several those with a wanted tensor; none: pickles alone.

        Raises `UserError` where the index is damaged, names a file that is missing or outside the folder, or as
        `refuse_two`.
        """
        self.refuse_two()
        if single := self.file(SINGLE):
            return [single]
        if (index := self.file(INDEX)) is None:
            return []
        files = read_json(index, Index, hint=RESTORE).weight_map
        paths = []
        for name in sorted({file for tensor, file in files.items() if wanted(tensor)}):
            if Path(name).name != name:
                raise UserError(f"names a file outside its folder: {name}", where=str(index), hint="do not use it")
            if (path := self.file(name)) is None:
                raise UserError("file not found", where=str(index.parent / name), hint=RESTORE)
            paths.append(path)
        return paths

    def refuse_two(self) -> None:
        """Raises `UserError` where shards stand beside a single file: readers of each run two models. Of the Hub its
        list tells, before a file is fetched; offline, what is here.
        """
        names = file_names(self.source, self.revision, SINGLE)
        index = self.file(INDEX) if {SINGLE, INDEX} <= names else None
        if index and names & {*read_json(index, Index, hint=RESTORE).weight_map.values()} - {SINGLE}:
            problem = f"there are {SINGLE} and shards of {INDEX}: transformers reads the first, vLLM the others"
            hint = "move the older away" if Path(self.source).is_dir() else "name a revision with one of them"
            raise UserError(problem, key=self.key, where=str(self.source), hint=hint)

    def tensors(self, wanted: Callable[[str], bool] = bool, device: torch.device = CPU) -> dict[str, Tensor]:
        """The tensors whose names are wanted, as they are stored; an empty dict: there are none of these names.

        Raises `UserError` where there are no safetensors, they cannot be read, or a tensor is not finite.
        """
        state, paths = dict[str, Tensor](), self.weights(wanted)
        if not paths and self.file(INDEX) is None:
            hint = "pickles of targets are not read; convert"
            raise UserError(f"{SINGLE} is missing", key=self.key, where=str(self.source), hint=hint)
        for path in paths:
            with opened(path) as file:
                part = {name: file.get_tensor(name).to(device) for name in file.keys() if wanted(name)}  # noqa: SIM118
            check_weights(part, path)
            state |= part
        return state

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, without it."""
        state = self.tensors(lambda name: name.startswith(prefix))
        return {name.removeprefix(prefix): value for name, value in state.items()}

    def headers(self) -> Iterator[tuple[Path, str, Any]]:
        """File, name and slice of each tensor: `get_dtype()` and `get_shape()` read the header alone."""
        for path in self.weights():
            with opened(path) as file:
                yield from ((path, name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118

    def generation_ends(self) -> tuple[int, ...]:
        """`eos_token_id` of `generation_config.json`, or where there is no such file of `config.json`, as transformers
        reads them; in ascending order, empty where they name none. Raises `UserError` for what is no id.
        """
        path, values = self._generation()
        ends = values.get("eos_token_id")
        if ends is None and path and path.name == CONFIG:
            ends = value_at(values, "text_config", "eos_token_id")
        ids = listed(ends)
        if wrong := [end for end in ids if type(end) is not int]:
            raise UserError(f"eos_token_id holds {wrong[0]!r}, expected the id of a token or a list of ids",
                            where=str(path), hint="write the ids as numbers, as the model was published")  # fmt: skip
        return tuple(sorted({end for end in ids if end >= 0}))  # -1 stands for none

    def penalties(self) -> str:
        """What the same file does to scores that no loop of this project does, as a sentence; "": nothing."""
        path, values = self._generation()
        named = (name for name, neutral in _PENALTIES.items() if values.get(name) not in (None, neutral, [], {}))
        listed = ", ".join(f"{name} {values[name]}" for name in named)
        if not listed or path is None:
            return ""
        return (
            f"{path.name} has {listed}, which is not applied here: transformers applies it, and vLLM's server "
            "repetition_penalty unless it is started with --generation-config vllm"
        )

    def _generation(self) -> tuple[Path | None, JsonObject]:
        path = self.file("generation_config.json") or self.file(CONFIG)
        return path, self.values(path.name) if path else {}
