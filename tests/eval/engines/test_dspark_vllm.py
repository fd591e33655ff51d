"""DSpark in vLLM's own class (scripts/test_engines): its layout loads, and a block is drafted as our loop drafts it."""

from pathlib import Path

import pytest
import torch
from draftsmith.eval.engines.ours import Exported, make_requests
from draftsmith.eval.engines.program import find_python, run_program
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.export import Target, files_of
from draftsmith.models.formats.source import read_source
from heads_tiny import config_of
from published_tiny import block_folder
from served_pair import TAPS
from tensors import loud
from transformers import AutoModelForImageTextToText
from vllm_server import IN_VLLM

pytestmark = IN_VLLM


@pytest.mark.parametrize("more", [{"block_size": 4}, {"sample_from_anchor": False, "draft_vocab_size": 100}])
def test_its_dspark_class_drafts_as_our_loop(pair, tmp_path, monkeypatch, more):
    """Its runner of GPUs walks the class; here the walk is written out, on states of transformers' own pass."""
    settings = {"kind": "dspark", "block_size": 5, "num_layers": 1, "taps": TAPS, "mask_token_id": 0, "markov_rank": 6}
    settings |= more
    block_folder(tmp_path / "head", pair / "target", **settings)
    model = AutoModelForImageTextToText.from_pretrained(pair / "target")
    source = read_source(tmp_path / "head", Target(model.config, "org/name"))
    loud(source.head)
    write_folder(tmp_path / "out", *files_of("speculators", source))
    ours = Exported(pair / "eagle3")  # the loop beside this target, with another head
    monkeypatch.setattr(ours, "_drafter", lambda: config_of(**settings).drafter(source.head, ours.target))
    states, anchors, wanted = [], [], []
    for request in make_requests(ours.processor, tmp_path, pictures=False):
        said = ours.decode([request], 24)[request.name]
        ids = [*request.ids, *said.tokens]
        with torch.no_grad():
            layers = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        for emitted, chain in said.chains.items():
            place = len(request.ids) + emitted - 1
            states.append(torch.cat([layers[tap][0, :place] for tap in TAPS], -1))
            anchors.append(ids[place])
            wanted.append(chain)
    torch.save(states, tmp_path / "states.pt")
    asked = {"model": str(pair / "target"), "draft": str(tmp_path / "out"), "anchors": anchors, "count": 4}
    found = run_program(Path(__file__).with_name("dspark_program.py"), tmp_path, asked, python=find_python())
    assert len(wanted) > 40 and len({tuple(chain) for chain in wanted}) > 20
    assert [answer["tokens"][: len(chain)] for answer, chain in zip(found, wanted, strict=True)] == wanted
