"""Our plugin in a real vLLM (scripts/test_engines): chains as here, cut prompts repaired, mistakes flagged."""

import json
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from draftsmith.eval.engines import engine_check as verify
from draftsmith.eval.engines.ours import Exported
from draftsmith.eval.engines.program import find_python, run_program
from draftsmith.models.drafters.manifest import MANIFEST
from draftsmith.models.formats.export import export_drafter
from safetensors.torch import load_file, save_file
from served_heads import save_draft, save_drawn
from vllm_server import IN_VLLM, start, wait

pytestmark = IN_VLLM
DRAWN = Path(__file__).with_name("drawn_program.py")
_REPAIRS = "DRAFTSMITH_VLLM_REPAIRS"


def verified(folder, tmp_path, max_new_tokens=16):
    scratch = Path(tempfile.mkdtemp(dir=tmp_path))
    found = verify.verify_engine(folder, scratch, python=find_python(), max_new_tokens=max_new_tokens)
    return found, {cell.group: cell for cell in found.cells}


def exported(kind, target, tmp_path, **settings):
    if kind == "lvlm":
        save_draft(target, tmp_path / "draft", **settings)
    else:
        save_drawn(kind, target, tmp_path / "draft", **settings)
    export_drafter(tmp_path / "draft", tmp_path / "out", "vllm")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("medusa", {}), ("medusa", {"draft_vocab_size": 150}), ("msd", {}), ("middle", {}), ("lvlm", {})],
)
def test_every_chain_is_as_here(target, tmp_path, kind, settings):
    """Alone, three at once, and with prompts in pieces, which middle states refuse; the draft LVLM is narrower than its
    target.
    """
    found, cells = verified(exported(kind, target, tmp_path, **settings), tmp_path)
    assert not found.faults and len(cells) == 6 - (kind == "middle")
    assert all(cell.chains > 30 and cell.equal == cell.chains for cell in cells.values() if cell.group[:3] != "res")


def test_cut_prompts_are_the_engines_fault_and_the_plugin_repairs_it(target, tmp_path, monkeypatch):
    """Of an EAGLE head in vLLM's own class. If the first half fails, vLLM is repaired."""
    folder = exported("eagle", target, tmp_path)
    monkeypatch.setenv(_REPAIRS, "0")
    found, cells = verified(folder, tmp_path)
    assert cells["text"].good and cells["three at once"].good and not cells["prompts in pieces"].good
    ((_, hint),) = found.faults
    assert "the engine's fault" in hint and "Our plugin repairs it" in hint
    monkeypatch.delenv(_REPAIRS)
    assert not verified(folder, tmp_path)[0].faults


def test_a_preempted_request_comes_back_and_drafts_as_before(target, tmp_path, monkeypatch):
    """Three at once in a cache of six blocks: one is preempted, and its prompt and answer are read anew in pieces.
    Where the plugin repairs pieces of prompts alone, its later chains differ.
    """
    save_drawn("eagle", target, tmp_path / "draft")
    export_drafter(tmp_path / "draft", tmp_path / "out", "vllm", prompts="text")
    tight = {"max_num_batched_tokens": 24, "enable_chunked_prefill": True, "block_size": 32,
             "num_gpu_blocks_override": 7}  # fmt: skip
    monkeypatch.setattr(verify._Side, "_pieces", lambda self, together: tight)
    cells = verified(tmp_path / "out", tmp_path, 48)[1]
    (answers,) = tmp_path.glob("*/answers.jsonl")
    lines = [json.loads(line) for line in answers.read_text().splitlines()[1:]]
    assert any([] in line["chains"] for line in lines), "none was preempted"
    assert cells["prompts in pieces"].equal == cells["prompts in pieces"].chains > 100


def test_pictures_that_enter_otherwise_are_flagged(target, tmp_path):
    """MSD whose folder names vLLM's own EAGLE class: text is as here where no bias is lost, and pictures are not."""
    save_drawn("msd", target, tmp_path / "draft")
    export_drafter(tmp_path / "draft", tmp_path / "out", "vllm")
    export_drafter(tmp_path / "draft", tmp_path / "text", "vllm", prompts="text")
    for name in ("config.json", "model.safetensors"):  # an EAGLE head of the same weights, under MSD's manifest
        shutil.copy2(tmp_path / "text" / name, tmp_path / "out" / name)
    found, cells = verified(tmp_path / "out", tmp_path)
    assert cells["text"].good and not cells["one picture"].good and not cells["two pictures"].good
    assert found.faults


def test_another_layer_at_pictures_is_flagged_and_cut_prompts_are_refused(target, tmp_path):
    """A Sparrow head with pictures: text is as here, pictures are not where our loop reads the layer before."""
    folder = exported("middle", target, tmp_path)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["drafter"]["middle_layer"] -= 1
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found, cells = verified(folder, tmp_path)
    assert cells["text"].good and not cells["one picture"].good and found.faults
    manifest["export"]["served"]["whole_prompts"] = False
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(verify.UserError, match="--no-enable-chunked-prefill"):
        verified(folder, tmp_path)


def test_a_draft_with_the_first_token_is_flagged(target, tmp_path):
    """The same weights, told by our loop's side that they read the first token."""
    folder = exported("lvlm", target, tmp_path)
    from draftsmith.models.formats import lvlm

    plain = lvlm.Reading
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lvlm, "Reading", lambda reads, first, width: plain(reads, True, width))
        found, cells = verified(folder, tmp_path)
    assert not cells["text"].good and found.faults


def drawn(target, tmp_path, speculative, temperature=1.0, top_k=0, count=3000):
    """How often each token was drawn second, behind any first one: `count` answers to one prompt."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    asked = {"model": str(target), "speculative": speculative, "prompts": [[1, 20, 31, 42, 27, 33]],
             "count": count, "max_new_tokens": 3, "temperature": temperature, "top_k": top_k,
             "first_seed": 0 if speculative is None and temperature == 1 else 10_000}  # fmt: skip
    return Counter(line["tokens"][1] for line in run_program(DRAWN, folder, asked, python=find_python()))


def farther_than_chance(one, other):
    """Standard deviations by which the chi-square of two counts exceeds its mean (Wilson and Hilferty's root)."""
    rare = {key for key in one + other if one[key] + other[key] < 20}
    pairs = [(one[key], other[key]) for key in {*one, *other} - rare]
    pairs.append((sum(one[key] for key in rare), sum(other[key] for key in rare)))
    free = len(pairs) - 1
    assert free >= 20, "too few outcomes to tell"
    chi = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    return ((chi / free) ** (1 / 3) - 1 + 2 / (9 * free)) / (2 / (9 * free)) ** 0.5


@pytest.mark.parametrize("kind", ["eagle", "lvlm"])
def test_drawn_answers_have_plain_decodings_distribution(target, tmp_path, kind):
    """At temperature 1, by chi-square against vLLM without a drafter; a temperature of 1.2 is told from it."""
    folder, plain = exported(kind, target, tmp_path), drawn(target, tmp_path, None)
    assert farther_than_chance(plain, drawn(target, tmp_path, Exported(folder, str(target)).speculative)) < 3
    assert farther_than_chance(plain, drawn(target, tmp_path, None, temperature=1.2)) > 5


def test_temperatures_of_drafts_are_the_engines_fault_and_the_plugin_repairs_it(target, tmp_path, monkeypatch):
    """On a CPU, of an EAGLE head in vLLM's own class. If this fails, vLLM is repaired."""
    folder, plain = exported("eagle", target, tmp_path), drawn(target, tmp_path, None)
    monkeypatch.setenv(_REPAIRS, "0")
    assert farther_than_chance(plain, drawn(target, tmp_path, Exported(folder, str(target)).speculative)) > 5


def test_top_k_ends_the_engine_and_the_plugin_repairs_it(target, tmp_path, monkeypatch):
    """On a CPU, of one drawn request beside an EAGLE-3 head. If the second half fails, vLLM is repaired."""
    speculative = Exported(exported("eagle3", target, tmp_path), str(target)).speculative
    top = {"top_k": 3, "count": 1}
    assert sum(drawn(target, tmp_path, speculative, **top).values()) == 1
    monkeypatch.setenv(_REPAIRS, "0")
    with pytest.raises(verify.UserError, match="ended with exit code 1"):
        drawn(target, tmp_path, speculative, **top)


def test_another_version_is_refused_by_name(target, tmp_path):
    """The class's own import refuses it, in vLLM's environment."""
    code = "from draftsmith_vllm import refusals\nrefusals.version = lambda: '0.33.1'\nfrom draftsmith_vllm import msd"
    done = subprocess.run([find_python(), "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "tried with vLLM 0.32, and this is 0.33.1" in done.stderr


def test_a_section_of_another_format_is_refused(target, tmp_path):
    folder = exported("msd", target, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    values["draftsmith"]["format"] = 9
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(verify.UserError, match=r"draftsmith.format is 9"):
        verified(folder, tmp_path)


def test_a_folder_without_a_weight_is_refused_by_its_name(pair, target, tmp_path):
    """vLLM leaves linear layers out of its check: without fc nothing that was drafted was accepted."""
    folder = exported("msd", target, tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["fc.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (pair / "chat.jinja").write_text("{{ messages }}")
    speculative = {"method": "eagle", "model": str(folder), "num_speculative_tokens": 3}
    process, url = start(pair, speculative)
    with pytest.raises(AssertionError, match="the server ended"):
        wait(process, url)
    assert (
        "model.safetensors lacks fc.weight: export the drafter anew"
        in (pair / f"{url.rpartition(':')[2]}.log").read_text()
    )
