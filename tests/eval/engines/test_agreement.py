"""What two sides drafted, cell by cell, and what a difference points at."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import TEXT as WORDS
from draftsmith.core.batch import Request
from draftsmith.eval.engines import ours, vllm_program
from draftsmith.eval.engines.agreement import Cell, Engine, accepted, by_start, compare, faults
from draftsmith.eval.engines.ours import ONE, PIECES, RESIZED, TEXT, TOGETHER, TWO, CheckRequest, Drafted

GOOD = Cell(TEXT, 4, plain=4, same=4, chains=100, equal=100, accepted=(70, 70))
V1 = Engine("0.32.0", "cpu", "V1")


def asked(name, group=TEXT):
    request = Request(torch.tensor([1, 2, 3]), torch.full((3,), WORDS, dtype=torch.int8), None, name)
    return CheckRequest(name, group, request, [1, 2, 3], [])


def found(*cells, engine=V1, kind="eagle3", target="llava", layers=1):
    return faults(cells, engine, kind=kind, target=target, layers=layers)


def test_a_cycle_emits_what_stood_and_one_more():
    assert by_start([5, 6, 7, 8, 9], [[6, 7, 0], [9, 9, 9], [1, 1, 1]]) == {1: [6, 7, 0], 4: [9, 9, 9]}
    assert accepted([5, 6, 7], 1, [6, 7, 8]) == 2 and accepted([5, 6, 7], 1, [7, 7]) == 0


def test_chains_behind_the_same_tokens_are_compared_as_far_as_both_reach():
    ours = {"a": Drafted([5, 6, 7, 8], {1: [6, 0], 3: [8]})}
    engine = {"a": Drafted([5, 6, 7, 8], {1: [6, 0], 3: [8, 9]})}
    (cell,) = compare([asked("a")], ours, {"a": [5, 6, 7, 8]}, engine)
    assert cell == Cell(TEXT, 1, plain=1, same=1, chains=2, equal=2, accepted=(2, 2))
    other = {"a": Drafted([5, 6, 7, 8], {1: [6, 1], 3: [9, 9]})}
    (cell,) = compare([asked("a")], ours, {"a": [5, 6, 7, 8]}, other)
    assert (cell.equal, cell.accepted) == (0, (2, 1))
    # After other tokens nothing can be compared, and that is no agreement.
    elsewhere = {"a": Drafted([4, 4, 4, 4], {1: [6, 0], 3: [8]})}
    (cell,) = compare([asked("a")], ours, {"a": [4, 4, 4, 4]}, elsewhere)
    assert (cell.chains, cell.off, cell.plain, cell.good) == (0, 1.0, 0, False)


def test_two_percent_may_differ():
    assert not found(GOOD, replace(GOOD, equal=98))
    assert len(found(replace(GOOD, equal=97))) == 1


PICTURE = replace(GOOD, group=ONE)


@pytest.mark.parametrize(
    ("cells", "options", "words"),
    [
        ([replace(GOOD, equal=10)], {}, "tapped layers"),
        ([GOOD, replace(PICTURE, equal=10)], {}, "the placeholder's row"),
        ([GOOD, PICTURE, replace(GOOD, group=TWO, plain=1)], {}, "swapped"),
        ([GOOD, replace(GOOD, group=RESIZED, plain=3)], {}, "resized already"),
        ([replace(GOOD, plain=2)], {}, "runs other weights"),
        ([replace(GOOD, same=3)], {}, "must not change an answer"),
        ([GOOD, replace(PICTURE, equal=20)], {"target": "qwen2_5_vl"}, "vLLM's V1 runner"),
        ([replace(GOOD, equal=20)], {"kind": "dflash", "layers": 2}, "vLLM's norm op"),
    ],
)  # fmt: skip
def test_what_a_difference_points_at(cells, options, words):
    ((_, hint),) = found(*cells, **options)
    assert words in hint


AT_ONCE, CUT = replace(GOOD, group=TOGETHER), replace(GOOD, group=PIECES)
WRONG_CUT = replace(CUT, equal=90)


@pytest.mark.parametrize(("cells", "kind", "words"), [
    ([GOOD, AT_ONCE, WRONG_CUT], "eagle", "last state of each piece"),
    ([GOOD, AT_ONCE, WRONG_CUT], "dflash", "reads a prompt's later pieces otherwise"),
    ([GOOD, replace(AT_ONCE, equal=90), CUT], "eagle", "mixes up requests"),
])  # fmt: skip
def test_what_only_batches_or_pieces_show(cells, kind, words):
    ((_, hint),) = found(*cells, kind=kind)
    assert words in hint


@pytest.mark.parametrize(
    ("end", "template"), [("</s>", "v1"), ("<|im_end|>", "qwen"), ("<|endoftext|>", "plain"), (None, "plain")]
)
def test_requests_of_a_check_have_a_template_whatever_ends_the_tokenizers_texts(end, template):
    processor = SimpleNamespace(tokenizer=SimpleNamespace(eos_token=end), picture_family=SimpleNamespace(template=None))
    assert ours._format(processor).template == template


def test_a_pass_without_room_reads_a_part_of_a_chain(monkeypatch):
    """vLLM's scheduler cuts drafts to what a pass has left; the chains behind it are placed by what was read."""

    class Runner:
        input_batch, discard_request_mask = SimpleNamespace(req_ids=["a", "b"]), SimpleNamespace(np=[False, False])

        def propose_draft_token_ids(self, scheduled):
            return [[5, 6, 7], [8, 9, 9]]

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace(GPUModelRunner=Runner))
    drafts = vllm_program.watch()
    for read in ({}, {"a": [5], "b": [8, 9, 9]}, {"a": [5, 6, 7]}):
        Runner().propose_draft_token_ids(SimpleNamespace(scheduled_spec_decode_tokens=read))
    assert drafts == {"a": [[5], [5, 6, 7], [5, 6, 7]], "b": [[8, 9, 9], [], [8, 9, 9]]}
    # The target writes 6 behind 5 as well, which was drafted, and not read.
    assert by_start([4, 5, 6, 5, 6, 7, 2], drafts["a"]) == {1: [5], 3: [5, 6, 7]}
