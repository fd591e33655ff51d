"""Identity of weights: every byte of small files, every tensor of large ones, and no time of a file."""

import os
from pathlib import Path

import pytest
import torch
from draftsmith.core import weights_identity as weights
from draftsmith.core.weights_identity import weights_identity
from safetensors.torch import save_file

LARGE = 2**20  # bytes from which files are sampled here


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch):
    monkeypatch.setattr(weights, "_WHOLE", LARGE)
    weights._hash.cache_clear()
    yield
    weights._hash.cache_clear()


def put(file: Path, place: int, piece: bytes) -> None:
    with open(file, "r+b") as content:
        content.seek(place)
        content.write(piece)


def test_every_byte_of_a_small_file_counts(tmp_path):
    (tmp_path / "model.bin").write_bytes(bytes(LARGE))
    known = {weights_identity(tmp_path)}
    for place in (0, 12345, LARGE - 1):
        put(tmp_path / "model.bin", place, b"1")
        known.add(weights_identity(tmp_path))
    assert len(known) == 4


def test_every_tensor_of_a_large_file_counts(tmp_path):
    """One of three hundred tensors is trained further, by LoRA say; size and names stay."""
    state = {f"layers.{i}": torch.zeros(3000) for i in range(300)}
    file = tmp_path / "model.safetensors"
    save_file(state, file)
    assert file.stat().st_size > 3 * LARGE
    before = weights_identity(tmp_path)
    for name in ("layers.0", "layers.7", "layers.299"):
        save_file(state | {name: torch.full((3000,), 1e-3)}, file)
        assert weights_identity(tmp_path) != before, name
    # Quantised, or exchanged: the bytes are equal, and the header is not.
    save_file({name: value.view(torch.int32) for name, value in state.items()}, file)
    assert weights_identity(tmp_path) != before
    save_file(state, file)
    assert weights_identity(tmp_path) == before
    os.utime(file, (1, 1))
    assert weights_identity(tmp_path) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_large_files_of_other_formats_are_sampled_all_over(name, tmp_path):
    """A `.safetensors` that is none, too: its loader is the one to refuse it."""
    file = tmp_path / name
    file.write_bytes(b"\xff" * (16 * LARGE))
    known = {weights_identity(file)}
    for place in (0, 8 * LARGE, 16 * LARGE - 4096):
        put(file, place, bytes(20_000)[: 16 * LARGE - place])
        known.add(weights_identity(file))
    assert len(known) == 4


def test_what_is_no_weights_has_no_identity(tmp_path):
    (tmp_path / "records.txt").write_text("a")
    assert weights_identity(tmp_path) is weights_identity(tmp_path / "records.txt") is None
    assert weights_identity(tmp_path / "gone") is weights_identity(tmp_path / "records.txt" / "x") is None
    assert weights_identity(Path("a\0b")) is weights_identity(Path("x" * 5000)) is None


def test_hidden_files_and_notes_count_for_nothing(tmp_path):
    for known, added in (("config.json", "._config.json"), ("model.safetensors", "notes.json")):
        (tmp_path / known).write_text("{}")
        before = weights_identity(tmp_path)
        (tmp_path / added).write_text("{}")
        assert weights_identity(tmp_path) == before, added


@pytest.mark.parametrize("name", [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "chat_template.jinja", "vocab.json", "model.safetensors.index.json", "tokenizer.model", "draftsmith.json",
    "adapter_config.json", "pytorch_model.bin",
])  # fmt: skip
def test_every_file_that_a_loader_reads_counts(name, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    known = {weights_identity(tmp_path)}
    for content in ("{}", "[]"):
        (tmp_path / name).write_text(content)
        known.add(weights_identity(tmp_path))
    assert len(known) == 3
