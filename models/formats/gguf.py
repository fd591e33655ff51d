"""A language model in llama.cpp's one-file layout (GGUF), as a folder that recipes and transformers read.

transformers reads the file and spells quantised weights out; tokenizer, chat template and end tokens come from it, too.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from ...core.errors import UserError
from ...core.finite import check_module
from ...core.pretrained import check_all_read, check_config, name_accelerator, reading_pretrained

_MAGIC = b"GGUF"
# Keys of the file under which ids stand that end an answer: of the text, of a turn, of a message.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def check_file(source: Path) -> None:
    """Raises `UserError`: it is no GGUF, or the package that reads one is missing."""
    if not source.is_file() or source.open("rb").read(len(_MAGIC)) != _MAGIC:
        raise UserError("the file is no GGUF", where=str(source), hint="name a .gguf file of a language model")
    if importlib.util.find_spec("gguf") is None:
        problem, hint = "the package that reads a GGUF is not installed", 'pip install "draftsmith[gguf]", or gguf'
        raise UserError(problem, where=str(source), hint=hint)


def to_ours(source: Path, folder: Path, *, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """Write the model, its tokenizer, chat template and generation config to `folder`. Returns notes. `dtype`: to
    store. What is spelt out of a quantised file is exact in float32 alone. Raises `UserError`: it is no GGUF, the
    package that reads it is missing, or its architecture, type of weights or tokenizer is none that transformers reads.
    """
    check_file(source)
    from gguf import GGUFReader

    name_accelerator()
    with tempfile.TemporaryDirectory() as alone:  # transformers would read a config.json that lies beside the file
        (Path(alone) / source.name).symlink_to(source.resolve())
        reading: dict[str, Any] = {"gguf_file": source.name}
        hint = "use a file that transformers' list of GGUF architectures has, or the model's own repository"
        with reading_pretrained(f"{source.name} (GGUF)", "transformers cannot read", hint=hint, where=str(source)):
            tokenizer = AutoTokenizer.from_pretrained(alone, **reading)
            read: Any = AutoModelForCausalLM.from_pretrained(
                alone, dtype=torch.float32, output_loading_info=True, **reading
            )
            reader: Any = GGUFReader(source)
            keys = [key for key in (f"tokenizer.ggml.{name}" for name in _ENDS) if key in reader.fields]
            ends = list(dict.fromkeys(int(reader.fields[key].contents()) for key in keys))
    if not ends:
        raise UserError("names no token that ends an answer", where=str(source), hint="use another file of this model")
    model, info = read
    check_all_read(info, source)
    check_config(model.config.to_dict(), source)
    held = {str(one.name): int(one.n_elements) for one in reader.tensors if not str(one.name).startswith("rope_")}
    taken = sum(p.numel() for p in model.parameters())
    if sum(held.values()) > taken:  # transformers passes over what its model of the header has no place for
        raise UserError(
            f"holds {sum(held.values()):,} numbers, and the model that its header describes has {taken:,}, of "
            f"{model.config.num_hidden_layers} layers (the file's last tensor: {[*held][-1]})",
            where=str(source), hint="block_count or the architecture is not these weights': use another file",
        )  # fmt: skip
    check_module(model, source)
    # Without a sign of its file: transformers refuses to save what it has read of one.
    config: PreTrainedConfig = model.config
    del config.quantization_config
    config.name_or_path, config.dtype = "", dtype
    with torch.device("meta"):
        written = type(model)(config)
    written.load_state_dict({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, assign=True)
    written.tie_weights()
    written.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    written.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    notes = [f"{sum(p.numel() for p in written.parameters()):,} parameters, stored as {str(dtype).split('.')[1]}"]
    words = tokenizer.convert_ids_to_tokens(ends)
    notes.append(f"answers end at {' or '.join(words)}")
    if not tokenizer.chat_template:
        notes.append("the file has no chat template: name a recipe's format.template")
    return tuple(notes)
