"""Targets with up to four end tokens: whatever writes or measures answers ends where `transformers.generate` ends.

The target is a folder as it is published, whose `generation_config.json` names the ends; transformers reads them there.
"""

import copy
import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from draftsmith.core.errors import UserError
from draftsmith.core.results import BEGUN, Mark, read_mark, write_mark
from draftsmith.data.conversations import PromptFormat, end_ids
from draftsmith.data.dataset import ConversationData, ConversationDataset
from draftsmith.data.processor_files import load_processor
from draftsmith.data.shards.shards import ShardReader
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.measured_rows import PLAIN, Row
from draftsmith.eval.policies import Chain, Draw, Static
from draftsmith.eval.rules import Greedy
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.drafters.independent import IndependentProposal
from draftsmith.models.targets.llava.model import LlavaDecoder
from draftsmith.models.targets.load import load_target
from draftsmith.trainers.evaluate.resume_log import ResumeLog
from draftsmith.trainers.run.precision import ENDS, record_ends
from draftsmith.trainers.run.stage import Planned
from draftsmith.trainers.stages.evaluate import EvaluateStage
from draftsmith.trainers.stages.regenerate import RegenerateStage
from draftsmith.trainers.stages.train import TrainRecords, TrainStates
from draftsmith.trainers.train import drafter
from engines_in_place import in_place
from fails import fails_with
from states_run import context
from states_run import stage as train
from transformers import LlavaForConditionalGeneration

LENGTH, FORM = 20, PromptFormat()
POLICIES = {"chain": Chain(4), "tree": Static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)])}


@pytest.fixture(scope="module")
def asked(made):
    data = ConversationData(**made.data)
    processor = load_processor(made.folder / "target")
    dataset = ConversationDataset(data, FORM, processor, files=[made.folder / "data.json"], skipped_log=None,
                                  cache=made.folder / "cache")  # fmt: skip
    return [dataset.request(number)[0] for number in range(len(dataset))]


def theirs(folder, asked, **settings) -> list[list[int]]:
    """What transformers writes; its ends are the folder's own unless they are given."""
    model, processor = LlavaForConditionalGeneration.from_pretrained(folder), load_processor(folder)
    never = [processor.image_token_id, *range(processor.num_token_ids, model.config.text_config.vocab_size)]
    answers = []
    for one in asked:
        pixels = {} if one.pixels is None else {"pixel_values": one.pixels}
        out = model.generate(
            input_ids=one.ids[None], attention_mask=torch.ones_like(one.ids[None]), **pixels, do_sample=False,
            max_new_tokens=LENGTH, suppress_tokens=never, **settings,
        )  # fmt: skip
        answers.append(out[0, len(one.ids) :].tolist())
    return answers


@pytest.fixture(scope="module")
def common(made, asked):
    """Three tokens, each of which would end some of the answers inside, the others not before it."""
    free = theirs(made.folder / "target", asked, eos_token_id=[])
    assert not any(2 in answer for answer in free)
    chosen: list[int] = []
    for token in sorted({token for answer in free for token in answer[2:]}):
        ended = {next((t for t in answer if t in (*chosen, token)), None) for answer in free}
        if ended >= {*chosen, token}:
            chosen.append(token)
    return chosen[:3]


@pytest.fixture
def ending(made, common, tmp_path):
    """The folders of a target with so many ends, the tokenizer's among them where there are several."""

    def ending(count: int):
        shutil.copytree(made.folder, tmp_path / "world")
        path = tmp_path / "world" / "target" / "generation_config.json"
        ends = [*common[:count]] if count == 1 else [*common[: count - 1], 2]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
        result = copy.copy(made)
        result.folder, result.data = tmp_path / "world", made.data | {"path": str(tmp_path / "world" / "data.json")}
        return result, ends

    return ending


@pytest.mark.parametrize("count", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3)), 4])
def test_answers_are_those_of_transformers_and_nothing_is_drafted_behind_an_end(ending, asked, count):
    made, ends = ending(count)
    folder = made.folder / "target"
    processor = load_processor(folder)
    assert end_ids(processor, FORM) == tuple(sorted({*ends, processor.eos_id}))
    section = context(made, made.folder / "run").target
    target = load_target(section, folder, num_token_ids=processor.num_token_ids,
                         image_token_id=processor.image_token_id, device=torch.device("cpu"))  # fmt: skip
    draft = copy.deepcopy(target.decoder.model)
    decoder = LlavaDecoder(draft, num_token_ids=processor.num_token_ids, never=(processor.image_token_id,))
    expected, seen = theirs(folder, asked), Counter()
    assert {answer[-1] for answer in expected} >= {*ends[: max(1, count - 1)]}, "some answers end at each of them"
    for policy in (None, *POLICIES.values()):
        decoding = Decoding(policy or Chain(1), Greedy(), Draw("top-k"), Warp(), LENGTH, end_ids(processor, FORM))
        for one, answer in zip(asked, expected, strict=True):
            drafter = None if policy is None else Watched(decoder)
            assert generate(target, drafter, one, decoding).tokens == answer
            for tree in () if drafter is None else drafter.trees:
                last = {node for node, token in enumerate(tree.tokens.tolist()) if token in decoding.eos_ids}
                assert not last & set(tree.parents), "a node stands below an end token"
                seen.update(int(tree.tokens[node]) for node in last)
    assert {*seen} >= {*ends[: max(1, count - 1)]}, "each of them was drafted"


class Watched(IndependentProposal):
    """A copy of the target that keeps the trees that were grown on it."""

    def __init__(self, decoder):
        super().__init__(decoder, "M", newline_id=5)
        self.trees = []

    def accept(self, verified):
        self.trees.append(verified.tree)
        super().accept(verified)


def answers(made, folder, **settings) -> list[list[int]]:
    stage = RegenerateStage(kind="regenerate", data=made.data, max_new_tokens=LENGTH, batch_size=4, **settings)
    asked = context(made, folder)
    with asked.opened:
        stage.run(asked)
    reader = ShardReader(folder / "answers")
    for _, tensors, info in map(reader.__getitem__, range(len(reader))):
        assert info["stop"] == ("length" if len(tensors["ids"]) == LENGTH else "eos")
    return [reader[n][1]["ids"].tolist() for n in range(len(reader))]


def test_regenerated_answers_of_our_own_passes_and_of_an_engine(ending, asked, tmp_path, monkeypatch):
    made, _ = ending(3)
    expected = theirs(made.folder / "target", asked)
    assert answers(made, tmp_path / "ours") == expected
    in_place(monkeypatch)
    assert answers(made, tmp_path / "served", engine={"kind": "vllm", "max_num_seqs": 4}) == expected


def test_an_evaluation_and_a_decoding_check_end_as_transformers_does(ending, asked, tmp_path):
    made, _ = ending(3)
    expected = theirs(made.folder / "target", asked)
    data = made.data | {"aspect": "pad"}
    stage = EvaluateStage(
        kind="evaluate", benchmarks={"mine": {"data": data}}, drafters={"own": {"kind": "pruned", "ratio": 0.0}},
        methods={"chain": {"drafter": "own", "tree": {"kind": "chain", "gamma": 3}}}, max_new_tokens=LENGTH, warmup=0,
    )  # fmt: skip
    run = context(made, tmp_path / "evaluate")
    stage.run(run)
    log = ResumeLog(run.folder / "rows" / "mine" / f"T0-{LENGTH}").values
    for number, answer in enumerate(expected):
        rows = [Row.from_json(value, where=run.folder) for value in log[str(number)]]
        assert [(row.method, list(row.tokens)) for row in rows] == [(PLAIN, answer), ("chain", answer)]
    # A head that is trained for no step drafts little; what its check emits are the target's answers.
    check = {"every": 1, "data": data, "tree": {"kind": "chain", "gamma": 2}, "max_new_tokens": LENGTH}
    head = context(made, tmp_path / "head")
    emitted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "generate", lambda *given: emitted.append(result := generate(*given)) or result)
        train(made, steps=1, decoding=check).run(head)
    assert [generation.tokens for generation in emitted] == expected


def test_the_ends_are_the_targets_where_the_processor_lies_elsewhere(ending, made, tmp_path):
    """A run's synthetic data brings the tokenizer, and what the run trains has the target's files."""
    several, ends = ending(3)
    plain = context(made, tmp_path / "stage", inputs={"processor": made.folder / "target"})
    assert plain.processor().generation_ends == (2,)
    of_path = context(several, tmp_path / "stage", inputs={"processor": made.folder / "target"})
    assert of_path.processor().generation_ends == tuple(sorted(ends))
    trained = {"processor": made.folder / "target", "target": several.folder / "target"}
    assert context(made, tmp_path / "stage", inputs=trained).processor().generation_ends == tuple(sorted(ends))


# ---- stages that go on


def begun(made, stage, folder, **mark):
    """A stage's context, its folder begun."""
    asked = context(made, folder)
    write_mark(folder / BEGUN, Mark("f", settings={}, **({"resolved": {}} | mark)))
    return asked, Planned("answers", stage, {}, "f", None)


STAGE = RegenerateStage(kind="regenerate", data={"path": "x.json", "max_length": 64})


def test_a_stage_goes_on_with_the_ends_that_it_was_begun_with(ending, made, tmp_path):
    several, ends = ending(3)
    asked, planned = begun(several, STAGE, tmp_path / "answers", resolved={"target.dtype": "float32"})
    record_ends(asked, planned)
    listed = ", ".join(map(str, sorted(ends)))
    assert read_mark(asked.folder / BEGUN).resolved == {"target.dtype": "float32", ENDS: listed}
    (asked.folder / "answers").mkdir()
    (asked.folder / "answers" / "shard-000000.tar").touch()
    record_ends(asked, planned)  # the same go on
    with pytest.raises(UserError, match=rf"answers end at id {listed}, and here they end at 2\n"):
        record_ends(replace(asked, target=context(made, tmp_path / "other").target), planned)


def test_what_a_version_before_began_with_one_end_is_refused_where_there_are_several(ending, tmp_path):
    several, ends = ending(2)
    listed = ", ".join(map(str, sorted(ends)))
    for number, resolved in enumerate(({}, None)):
        asked, planned = begun(several, STAGE, tmp_path / f"answers{number}", resolved=resolved)
        (asked.folder / "shard").touch()
        words = rf"answers end at id 2, and here they end at {listed}\n.*\n.*restart=answers"
        fails_with(words, record_ends, asked, planned)


def test_only_stages_whose_answers_end_are_held_to_it(made, tmp_path):
    data = {"path": "x.json", "max_length": 64}
    common = {"kind": "evaluate", "benchmarks": {"mine": {"data": data}}, "methods": {"chain": {"tree": "chain"}}}
    assert EvaluateStage(**common).answer_format == FORM
    assert EvaluateStage(**common, stop_at_end=False).answer_format is None
    train = {"kind": "train", "data": data, "batch_size": 2, "micro_batch_size": 1, "steps": 1, "optim": {"lr": 1.0}}
    records = train | {"trainable": ["projector"]}
    assert TrainStates(**train).answer_format is None and TrainRecords(**records).answer_format is None
    assert TrainStates(**train, decoding={"every": 1, "data": data, "tree": "chain"}).answer_format == FORM
    draft = {"objective": {"kind": "distill"}, "answers": {"shares": {"draft": 1.0}}}
    assert TrainRecords(**records, **draft).answer_format == FORM
    pictures = RegenerateStage(kind="regenerate", prompts={"path": "x.txt"})
    assert pictures.answer_format is None and STAGE.answer_format == FORM
