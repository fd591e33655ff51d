"""Exported GGUFs in a real llama.cpp (xllamacpp): every chain as here, and a wrong file is flagged."""

import sys

import pytest
from draftsmith.eval.engines import engine_check as verify
from draftsmith.eval.engines.llama_program import chains_of
from draftsmith.eval.engines.ours import Drafted
from draftsmith.models.formats import gguf
from draftsmith.models.formats.export import export_drafter
from fails import fails_with
from gguf_files import write_target
from llama_server import IN_LLAMA
from served_heads import save_drawn
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def file(pair):
    return write_target(pair / "target.gguf", AutoModelForCausalLM.from_pretrained(pair / "twin"))


def verified(pair, file, tmp_path, kind="eagle3"):
    save_drawn(kind, pair / "target", tmp_path / "head")
    export_drafter(tmp_path / "head", tmp_path / "out", "gguf", prompts="text", target_gguf=file)
    (tmp_path / "scratch").mkdir()
    return verify.verify_engine(tmp_path / "out", tmp_path / "scratch", python=sys.executable, max_new_tokens=16)


@IN_LLAMA
@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_every_chain_is_as_here(pair, file, tmp_path, kind):
    found = verified(pair, file, tmp_path, kind)
    assert not found.faults and [cell.group for cell in found.cells] == ["text", "three at once"]
    assert all(cell.good and cell.plain == 4 and cell.equal == cell.chains > 40 for cell in found.cells)
    assert "llama.cpp 2026.10.11549 on cpu, runner without flash attention" in found.shown()


@IN_LLAMA
def test_a_file_of_other_rows_is_flagged(pair, file, tmp_path, monkeypatch):
    """Of a head whose queries and keys turn in halves, where llama.cpp turns neighbours."""
    monkeypatch.setattr(gguf, "_NEIGHBOURS", ())
    found = verified(pair, file, tmp_path)
    assert found.cells[0].plain == 4 and not found.cells[0].good
    assert all("its class" not in hint and "vLLM" not in hint for _, hint in found.faults)


LOG = """
0 I slot launch_slot_: id  1 | task 0 | processing task, is_child = 0
0 D spec draft:  - seq_id 1, draft candidate   0, pos   0:    124 (   0.752) 't124'
0 D spec draft:  - seq_id 1, draft candidate   1, pos   0:    999 (   0.1) 't999'
0 I slot launch_slot_: id  0 | task 3 | processing task, is_child = 0
0 D spec draft:  - seq_id 0, draft candidate   0, pos   1:      7 (   0.7) 't7'
0 D spec draft:  - seq_id 1, draft candidate   0, pos   1:    125 (   0.4) 't125'
0 D spec draft:  - seq_id 0, draft candidate   0, pos   1:      8 (   0.7) 't8'
0 D spec draft:  - seq_id 1, draft candidate   0, pos   0:    126 (   0.4) 't126'
0 I slot launch_slot_: id  1 | task 9 | processing task, is_child = 0
"""


def test_chains_of_slots_are_told_apart_in_a_log():
    """By their first place, which is 1 where masks alone draft, and by the request; a request may draft nothing."""
    assert chains_of(LOG) == {1: [[[124, 125], [126]], []], 0: [[[7], [8]]]}


def test_our_answer_ends_where_the_engine_ends_its_own():
    drafted = Drafted([5, 6, 2, 7], {1: [6, 9], 3: [8]}, 4)
    assert drafted.until([2]) == Drafted([5, 6, 2], {1: [6, 9]}, 4)
    assert drafted.until([]) == drafted


def test_patches_of_vllm_are_none_of_llama_cpp(pair, file, tmp_path):
    save_drawn("eagle3", pair / "target", tmp_path / "head")
    export_drafter(tmp_path / "head", tmp_path / "out", "gguf", prompts="text", target_gguf=file)
    fails_with("a GGUF runs in llama.cpp", verify.verify_engine, tmp_path / "out", tmp_path, python=sys.executable,
               without_known_faults=True)  # fmt: skip
