"""Exported pairs in a real vLLM (scripts/test_engines): every chain as here, and each kind of mistake is flagged."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from draftsmith.core.errors import UserError
from draftsmith.eval.engines import verify
from draftsmith.eval.engines.ours import Exported
from draftsmith.eval.engines.program import PYTHON, VLLM, find_python, run_program
from draftsmith.eval.engines.prompts import make_requests
from served_pair import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason="no vLLM: scripts/test_engines makes its environment"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    build(folder)
    return folder


def verified(folder, tmp_path):
    scratch = Path(tempfile.mkdtemp(dir=tmp_path))
    return verify.verify_engine(folder, scratch, python=find_python(), max_new_tokens=32)


def test_every_chain_is_as_here(pair, tmp_path):
    found = verified(pair / "eagle3", tmp_path)
    assert not found.faults and len(found.cells) == 4
    assert all(cell.chains > 30 and cell.accepted[0] == cell.accepted[1] > 10 for cell in found.cells)


def copy(pair, tmp_path, change):
    folder = tmp_path / "changed"
    shutil.copytree(pair / "eagle3", folder)
    change(folder)
    return folder


def test_wrong_taps_are_flagged(pair, tmp_path, monkeypatch):
    """By our own reader where it reads the changed folder, and by the chains where only the engine does."""

    def change(folder):
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}))

    folder = copy(pair, tmp_path, change)
    with pytest.raises(UserError, match="trained with layers that it reads"):
        verified(folder, tmp_path)
    opened = Exported._drafter

    def as_exported(self):
        served, self.folder = self.folder, pair / "eagle3"
        try:
            return opened(self)
        finally:
            self.folder = served

    monkeypatch.setattr(Exported, "_drafter", as_exported)
    found = verified(folder, tmp_path)
    assert found.cells[0].plain == found.cells[0].requests and not found.cells[0].good
    assert "tapped layers" in " ".join(hint for _, hint in found.faults)


def test_another_input_at_pictures_is_flagged(pair, tmp_path):
    """A head that was trained on projected pictures, beside an engine that embeds the placeholder."""

    def change(folder):
        manifest = json.loads((folder / "draftsmith.json").read_text())
        manifest["drafter"]["image"] = "projected"
        manifest["reads"]["visual_embedding"] = "projected"
        (folder / "draftsmith.json").write_text(json.dumps(manifest))

    found = verified(copy(pair, tmp_path, change), tmp_path)
    by_group = {cell.group: cell for cell in found.cells}
    assert by_group["text"].good and not by_group["one picture"].good
    assert "another row for the placeholder, or projected pictures" in " ".join(hint for _, hint in found.faults)


def test_swapped_pictures_are_flagged(pair, tmp_path, monkeypatch):
    def swapped(*arguments, **named):
        return [
            asked if len(asked.pictures) < 2 else type(asked)(**vars(asked) | {"pictures": asked.pictures[::-1]})
            for asked in make_requests(*arguments, **named)
        ]

    monkeypatch.setattr(verify, "make_requests", swapped)
    found = verified(pair / "eagle3", tmp_path)
    by_group = {cell.group: cell for cell in found.cells}
    assert by_group["one picture"].good and by_group["two pictures"].plain < by_group["two pictures"].requests
    assert "swapped" in " ".join(hint for _, hint in found.faults)


def test_a_text_draft_that_is_the_target_stands_whole(pair, tmp_path):
    exported = Exported(pair / "eagle3")
    requests = [{"name": a.name, "ids": a.ids, "pictures": []}
                for a in make_requests(exported.processor, tmp_path, pictures=False)]  # fmt: skip
    draft = {"method": "draft_model", "model": str(pair / "text"), "num_speculative_tokens": 3}
    asked = {"model": str(pair / "target"), "engine": {"dtype": "float32", "max_model_len": 128},
             "speculative": draft, "max_new_tokens": 24, "requests": requests}  # fmt: skip
    _, *answers = run_program(VLLM, tmp_path, asked, python=find_python())
    for answer in answers:
        chains = verify.by_start(answer["tokens"], answer["chains"])
        whole = {start: chain for start, chain in chains.items() if start + len(chain) <= len(answer["tokens"])}
        assert len(whole) >= 5
        assert all(answer["tokens"][start : start + len(chain)] == chain for start, chain in whole.items())
