"""The plugin for vLLM without vLLM: it reads what exports write, refuses versions by name, and its wheel is built."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from draftsmith.models.formats.plugin import MODULE, PACKAGE, PATCHES, drops_inputs, is_patched, served_by_plugin

FOLDER = Path(__file__).resolve().parents[2] / "serving" / PACKAGE


def module(name):
    spec = importlib.util.spec_from_file_location(f"plugin_{name}", FOLDER / MODULE / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


section, refusals = module("section"), module("refusals")
LLAMA = {"hidden_size": 8}
GOOD = {
    "msd": {"fc_bias": True}, "lvlm": {"language_model": LLAMA}, "lvlm-m": {"projector_input": "tower"},
    "lvlm-t": {"newline_id": 3}, "window": {"fc_bias": True, "input_norm": True},
    "middle": {"fc_bias": True, "input_norm": True},
    "vispec": {"fc_bias": True, "input_norm": False, "num_queries": 3, "num_held": 2},
}  # fmt: skip


@pytest.mark.parametrize("drafter", GOOD)
def test_what_an_export_writes_is_what_the_plugin_reads(drafter):
    values = served_by_plugin({"hidden_size": 8}, drafter, **GOOD[drafter])
    read = section.read(values, drafter)
    assert read == section.read(SimpleNamespace(**values), drafter)
    assert vars(read) == {"input_norm": False} | GOOD[drafter]
    classes = (FOLDER / MODULE / "__init__.py").read_text()
    assert f'"{values["architectures"][0]}": "{MODULE}.' in classes
    assert is_patched(values) == (drafter not in ("msd", "lvlm", "middle"))
    assert drops_inputs(values) == (drafter in ("lvlm-t", "window", "vispec"))
    assert section.reads_tower(values) == (drafter == "lvlm-m")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "draftsmith.format is 2, and this draftsmith-vllm reads 1"),
        ({"drafter": "lvlm"}, "draftsmith.drafter is 'lvlm', not 'msd'"),
        ({"window": "none"}, "draftsmith.window: no such key"),
        ({"fc_bias": None}, "draftsmith.fc_bias is missing"),
        (None, "no section draftsmith"),
    ],
)
def test_other_sections_are_refused_by_their_key(changes, words):
    values = served_by_plugin({}, "msd", fc_bias=True)
    values["draftsmith"] = None if changes is None else values["draftsmith"] | changes
    with pytest.raises(section.WrongSection, match=words):
        section.read(values, "msd")


@pytest.mark.parametrize("found", ["0.33.0", "0.31.9", "1.0", "0.320.1", None])
def test_versions_that_were_not_tried_are_refused_by_name(monkeypatch, found):
    monkeypatch.setattr(refusals, "version", lambda: found)
    with pytest.raises(refusals.OtherVersion, match=rf"tried with vLLM 0.32, and this is {found or 'no vLLM'}:"):
        refusals.check()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_patches_of_a_tried_minor_version_are_taken(found):
    assert refusals.refusal(found) is None


def test_a_cut_prompt_ends_where_its_piece_does():
    """Known tokens by row: of a piece one past its end, of a whole prompt and of an answer as before. A request that
    comes back after it was preempted is read anew in pieces, its answer too.
    """
    ends_of_pieces = module("repairs").ends_of_pieces
    known = np.array([50, 50, 61, 7, 80, 80])
    requests = {
        "a": SimpleNamespace(num_computed_tokens=12, num_prompt_tokens=50, num_tokens=50),
        "b": SimpleNamespace(num_computed_tokens=38, num_prompt_tokens=50, num_tokens=50),
        "c": SimpleNamespace(num_computed_tokens=60, num_prompt_tokens=50, num_tokens=61),
        "back": SimpleNamespace(num_computed_tokens=48, num_prompt_tokens=50, num_tokens=80),
        "whole": SimpleNamespace(num_computed_tokens=68, num_prompt_tokens=50, num_tokens=80),
    }
    lengths = {"a": 12, "b": 12, "c": 1, "back": 12, "whole": 12}
    ends = ends_of_pieces(known, ["a", "b", "c", "gone", "back", "whole"], requests, lengths)
    assert ends.tolist() == [25, 50, 61, 7, 61, 80] and known.tolist() == [50, 50, 61, 7, 80, 80]


def test_top_k_of_no_rows_ends_no_engine(monkeypatch):
    """A pass without drafted tokens brings zero rows; other rows are masked as before, and a repair is made once."""

    def apply_top_k_only(logits, k):  # raises for no rows, as vLLM 0.32's does
        return logits.masked_fill(logits < logits.topk(int(k.max()), dim=1).values[:, -1:], -float("inf"))

    ops = ModuleType("topk_topp_sampler")
    ops.apply_top_k_only = apply_top_k_only
    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.sample.ops"].topk_topp_sampler = ops
    none, no_k = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        ops.apply_top_k_only(none, no_k)
    repairs = module("repairs")
    repairs.repair_top_k()
    repaired = ops.apply_top_k_only
    assert repaired(none, no_k).shape == (0, 5)
    rows = torch.tensor([[3.0, 1.0, 2.0]])
    assert repaired(rows, torch.tensor([2])).tolist() == [[3.0, -float("inf"), 2.0]]
    repairs.repair_top_k()
    assert ops.apply_top_k_only is repaired
    assert "repairs.repair_top_k()" in (FOLDER / MODULE / "__init__.py").read_text()


@pytest.fixture
def patches(monkeypatch):
    """The module beside a vLLM whose runner is V1."""
    vllm = ModuleType("vllm")
    vllm.envs = SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=False)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setenv(PATCHES, "1")
    loaded = module("patches")
    assert loaded.VARIABLE == PATCHES
    return loaded


def engine(**changes):
    """vLLM's config, as far as `patches.check` reads it, without anything that is refused."""
    of_target = SimpleNamespace(uses_mrope=changes.pop("uses_mrope", False))
    unpadded = changes.pop("disable_padded_drafter_batch", False)
    cache = SimpleNamespace(enable_prefix_caching=changes.pop("enable_prefix_caching", False))
    speculative = SimpleNamespace(target_model_config=of_target, disable_padded_drafter_batch=unpadded)
    return SimpleNamespace(**{"speculative_config": speculative, "cache_config": cache, "use_v2_model_runner": False,
                              "kv_transfer_config": None} | changes)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({"kv_transfer_config": object()}, "without --kv-transfer-config"),
        ({"uses_mrope": True}, "own loop"),
        ({"disable_padded_drafter_batch": True}, "remove disable_padded_drafter_batch"),
    ],
)
def test_what_would_serve_a_window_wrongly_is_refused_with_its_cure(patches, changes, cure):
    patches.check(engine(), drops_inputs=True)
    patches.check(engine(**changes))  # no window: pictures are in the cache as the target's are
    with pytest.raises(patches.Refused, match=cure):
        patches.check(engine(**changes), drops_inputs=True)


def test_patches_are_asked_for_and_are_of_runner_v1(patches, monkeypatch):
    for value in (None, True):
        sys.modules["vllm"].envs.VLLM_USE_V2_MODEL_RUNNER = value
        with pytest.raises(patches.Refused, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            patches.check(engine())
    sys.modules["vllm"].envs.VLLM_USE_V2_MODEL_RUNNER = False
    with pytest.raises(patches.Refused, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        patches.check(engine(use_v2_model_runner=True))
    monkeypatch.delenv(PATCHES)
    assert not patches.are_on()
    with pytest.raises(patches.Refused, match=f"which are off: serve it with {PATCHES}=1"):
        patches.check(engine())


def test_a_draft_models_mask_of_pictures_has_a_place_for_each_drawn_token():
    mask = torch.tensor([False, True, True, False, True])
    found = module("pictures").one_more_each(mask, [0, 4, 5])
    assert found.tolist() == [False, True, True, False, False, True, False]


class Metadata(SimpleNamespace):
    def batch_size(self):
        return len(self.seq_lens)

    def replace(self, **changes):
        return Metadata(**vars(self) | changes)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 20])
@pytest.mark.parametrize(("shift", "newline", "last"), [(0, 7, 0), (1, None, 0), (1, None, 2)])
def test_a_window_is_the_shorter_prompt_however_it_is_cut(shift, piece, newline, last):
    """Ids, positions and slots, pass by pass, end as those of the prompt without its pictures, read in one pass."""
    window = module("window")
    ids = torch.tensor([1, 10, *[99] * 4, 11, 12, *[99] * 3, 13])
    pictures = [(2, 4), (8, 3)]  # offset, length
    request = SimpleNamespace(mm_features=[
        SimpleNamespace(mm_position=SimpleNamespace(offset=at, length=length)) for at, length in pictures
    ])  # fmt: skip
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a"]), requests={"a": request})
    kept = window.Window(newline=newline, last=last)
    blocks, written = torch.tensor([[5, 3, 8, 6]]), {}
    for start in range(0, len(ids), piece):
        stop = min(start + piece, len(ids))
        request.num_computed_tokens = start
        proposer = SimpleNamespace(pass_hidden_states_to_model=bool(shift), block_size=4,
                                   draftsmith_pass=(runner, {"a": stop - start}))  # fmt: skip
        places = torch.arange(start, stop)
        given = {
            "target_token_ids": ids[start:stop], "target_positions": places, "target_hidden_states": places[:, None],
            "token_indices_to_sample": torch.tensor([stop - start - 1]), "common_attn_metadata": Metadata(
                seq_lens=torch.tensor([stop]), query_start_loc_cpu=None, seq_lens_cpu_upper_bound=None,
                block_table_tensor=blocks, slot_mapping=blocks[0, places // 4] * 4 + places % 4,
            ),
        }  # fmt: skip
        given |= window.narrow(proposer, given, kept)
        metadata, count = given["common_attn_metadata"], len(given["target_positions"])
        held = given["target_token_ids"].tolist()
        if shift:  # as the proposer does
            held = [*held[1:], int(ids[stop]) if stop < len(ids) else 50]
        states = given["target_hidden_states"][:, 0].tolist()
        for at, token, state, slot in zip(
            given["target_positions"].tolist(), held, states, metadata.slot_mapping.tolist(), strict=True
        ):  # fmt: skip
            assert slot == blocks[0, at // 4] * 4 + at % 4
            written[at] = token, state
        assert given["token_indices_to_sample"].tolist() == [count - 1]
        assert int(metadata.seq_lens) == int(given["target_positions"][-1]) + 1
    inputs = [(int(token), place) for place, token in enumerate([*ids[shift:], 50][: len(ids)])]
    expected = []
    for token, place in inputs:
        runs = [(at - shift, at - shift + length) for at, length in pictures]
        inside = next((run for run in runs if run[0] <= place < run[1]), None)
        if inside is None or place >= inside[1] - last:
            expected.append((token, place))
        elif newline is not None and place == inside[0]:
            expected.append((newline, place))
    assert [written[at] for at in range(len(expected))] == expected
    assert max(written) < len(expected) + (piece < 20)


def test_values_of_requests_are_repeated_for_their_drafted_tokens():
    """As vLLM's docstring has it, of any type, where a request has none too."""
    repeated = module("repairs").repeated
    values, sums = torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert repeated(values, sums, 5, replace_to=1).tolist() == pytest.approx([0.7, 0.7, 1.5, 1.5, 1.5])
    assert repeated(values, torch.tensor([1, 2, 3]), 3, replace_to=1).tolist() == pytest.approx([0.7, 1.0, 1.5])
    assert repeated(torch.tensor([4, -1], dtype=torch.int32), torch.tensor([1, 3]), 3, -1, 9).tolist() == [4, 9, 9]


def test_it_imports_nothing_of_draftsmith_and_vllm_only_where_it_is_called():
    for path in (FOLDER / MODULE).glob("*.py"):
        tree = ast.parse(path.read_text())
        names = [n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
        assert not any(name.split(".")[0] == "draftsmith" for name in names)
        top = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom) and node.level == 0]
        # The others are imported where a folder names them.
        if path.stem not in ("msd", "middle", "lvlm", "windowed", "tower"):
            assert not any(name.split(".")[0] in ("vllm", "torch") for name in top), path


def test_the_wheel_has_the_entry_point_and_every_module(tmp_path):
    copied = tmp_path / "source"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run(["cp", "-r", str(FOLDER), str(copied)], check=True)  # a build leaves files behind
    subprocess.run([*command, str(copied)], check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("draftsmith_vllm-*.whl")
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        points = next(held.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert "[vllm.general_plugins]\ndraftsmith = draftsmith_vllm:register" in points
    assert {f"{MODULE}/{path.name}" for path in (FOLDER / MODULE).glob("*.py")} <= set(names)
    assert tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["dependencies"] == []


def test_a_weight_that_a_folder_lacks_is_named():
    """vLLM fuses projections and exempts linear layers from its own check."""
    parameters = ["embed_tokens.weight", "fc.weight", "layers.0.self_attn.qkv_proj.weight",
                  "layers.0.mlp.gate_up_proj.weight"]  # fmt: skip
    files = ["fc.weight", *(f"layers.0.{part}.weight" for part in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"))]  # fmt: skip
    held = [(name, number) for number, name in enumerate(files)]
    assert list(refusals.every(iter(held), parameters, without=("embed_tokens.",))) == held
    for lost in files:
        rest = [pair for pair in held if pair[0] != lost]
        with pytest.raises(refusals.MissingWeights, match=rf"lacks {re.escape(lost)}: export"):
            list(refusals.every(iter(rest), parameters, without=("embed_tokens.",)))
    with pytest.raises(refusals.MissingWeights, match=r"lacks embed_tokens\.weight and 1 more"):
        list(refusals.every(iter(held[1:]), parameters))
