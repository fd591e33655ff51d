"""DSpark in vLLM's own class (scripts/test_engines): its layout loads, and a block is drafted as our loop drafts it."""

from pathlib import Path

import pytest
import tiny_gemma
import torch
from draftsmith.eval.engines.ours import Drafted, Exported, Noting, make_requests
from draftsmith.eval.engines.program import find_python, run_program
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.folders import write_folder
from draftsmith.models.formats.export import Target, files_of
from draftsmith.models.formats.expressible import check_expressible
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
    said = [(r.ids, ours.decode([r], 24)[r.name]) for r in make_requests(ours.processor, tmp_path, pictures=False)]
    check_chains(tmp_path, pair / "target", model, TAPS, said, count=4)


def test_its_dspark_class_of_gemma_drafts_as_our_loop(tmp_path):
    """Its layers, table and cap on scores are Gemma 4's."""
    model = tiny_gemma.model("large", initializer_range=0.2)
    # Ids that stand for no text score nothing: the engine takes no list of them.
    model.get_input_embeddings().weight.data[[tiny_gemma.IMAGE_ID, *range(tiny_gemma.TOKENS, tiny_gemma.VOCAB)]] = 0
    model.save_pretrained(tmp_path / "target")
    settings = {"kind": "dspark", "target_layers": True, "block_size": 5, "num_layers": 1, "taps": (1, 3),
                "mask_token_id": 0, "markov_rank": 6}  # fmt: skip
    block_folder(tmp_path / "head", tmp_path / "target", **settings)
    source = read_source(tmp_path / "head", Target(model.config, None, str(tmp_path / "target")))
    loud(source.head)
    check_expressible("vllm", source, "text")
    write_folder(tmp_path / "out", *files_of("vllm", source, model.get_input_embeddings().weight.data))
    target = tiny_gemma.target(model)
    drafter, said = config_of(**settings).drafter(source.head, target), []
    for seed in range(4):
        asked, noting = tiny_gemma.request((), seed), Noting()
        decoding = Decoding(Chain(5), noting, Draw("top-k"), Warp(0.0), 24, ())
        tokens = generate(target, drafter, asked, decoding).tokens
        said.append((asked.ids.tolist(), Drafted(tokens, noting.chains)))
    check_chains(tmp_path, tmp_path / "target", model, (1, 3), said, count=5)


def check_chains(folder, target, model, taps, said, count):
    """`said`: prompts, and what our loop drafted after them; the class is given transformers' own states."""
    states, anchors, wanted = [], [], []
    for prompt, drafted in said:
        ids = [*prompt, *drafted.tokens]
        with torch.no_grad():
            layers = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        for emitted, chain in drafted.chains.items():
            place = len(prompt) + emitted - 1
            states.append(torch.cat([layers[tap][0, :place] for tap in taps], -1))
            anchors.append(ids[place])
            wanted.append(chain)
    torch.save(states, folder / "states.pt")
    asked = {"model": str(target), "draft": str(folder / "out"), "anchors": anchors, "count": count}
    found = run_program(Path(__file__).with_name("dspark_program.py"), folder, asked, python=find_python())
    assert len(wanted) > 40 and len({tuple(chain) for chain in wanted}) > 20
    assert [answer["tokens"][: len(chain)] for answer, chain in zip(found, wanted, strict=True)] == wanted
