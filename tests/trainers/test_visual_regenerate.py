"""Pictures that a target draws for its head: guided draws by seed, kept with all that they were made from."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draftsmith.core.batch import ImageRequest
from draftsmith.data.captioned.prompts import ImagePrompt, PromptSource
from draftsmith.data.shards.codes import ShardData, ShardSamples
from draftsmith.data.shards.shards import ShardReader
from draftsmith.eval.loop import Decoding, generate
from draftsmith.eval.policies import Chain, Draw
from draftsmith.eval.rules import RULES
from draftsmith.models.decoding.warp import Warp
from draftsmith.models.targets.drawing import Generator
from draftsmith.trainers.run.progress import StageLine
from draftsmith.trainers.run.stopping import Stop
from draftsmith.trainers.stages import regenerate
from draftsmith.trainers.stages import regenerate as pictures
from visual_run import context, with_target
from visual_tiny import anole

CAPTIONS = [f"picture number {n} of something" for n in range(5)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("made")
    (folder / "prompts.txt").write_text("\n".join(CAPTIONS))
    return SimpleNamespace(folder=folder, **vars(with_target(folder)))


def stage(made, **changes) -> regenerate.RegenerateStage:
    settings = {"prompts": {"path": str(made.folder / "prompts.txt")}, "repeats": 2, "samples_per_shard": 3, "top_k": 9}
    return regenerate.RegenerateStage.model_validate({"kind": "regenerate", **settings, **changes})


def run(made, folder: Path, chosen=None, **changes) -> ShardReader:
    (chosen or stage(made)).run(context(folder, made.target, made.inputs, **changes))
    return ShardReader(folder / regenerate.CODES)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / regenerate.CODES).iterdir()}


def test_a_record_holds_what_draws_it_again(made, tmp_path):
    reader = run(made, tmp_path)
    generator = made.target.generator(made.inputs, device=torch.device("cpu"))
    warp, target = Warp(1.0, 9), generator.target
    assert target.guidance.num_rows == 2
    decoding = Decoding(Chain(1), RULES["sampling"], Draw("top-k"), warp, target.num_codes, ())
    drawn = []
    for number in range(10):
        key, tensors, info = reader[number]
        assert key == f"{number:09d}" and info["caption"] == CAPTIONS[number // 2] and info["label"] is None
        assert info["stop"] == "length" and info["target"] == "inline@f" and info["seed"] == number
        request = generator.request(info["caption"], None, "")
        again = generate(target, None, request, decoding, torch.Generator().manual_seed(info["seed"]))
        assert tensors["ids"].tolist() == tensors["codes"].tolist() == again.tokens
        assert torch.equal(tensors["features"], request.condition)
        drawn.append(tuple(again.tokens))
    assert len(reader) == 10 and len(set(drawn)) == 10, "repeats have luck of their own"
    # A head reads them as it reads encoded pictures.
    sample = ShardSamples(tmp_path / regenerate.CODES, ShardData())[3]
    assert torch.equal(made.target.sample_condition()(sample), reader[3][1]["features"])


def test_other_seeds_and_no_guidance_draw_other_pictures(made, tmp_path):
    first = [run(made, tmp_path / "a")[n][1]["ids"].tolist() for n in range(10)]
    other = [run(made, tmp_path / "b", seed=1)[n][1]["ids"].tolist() for n in range(10)]
    alone = SimpleNamespace(**vars(made) | {"target": made.target.model_copy(update={"cfg_scale": 1.0})})
    unguided = [run(alone, tmp_path / "c")[n][1]["ids"].tolist() for n in range(10)]
    assert first != other and first != unguided


@pytest.mark.parametrize("size", [1, 2, 8])
def test_files_do_not_depend_on_the_batch_size(made, tmp_path, size):
    run(made, tmp_path / "alone", stage(made, batch_size=1))
    run(made, tmp_path / "out", stage(made, batch_size=size, samples_per_shard=3))
    assert files(tmp_path / "out") == files(tmp_path / "alone")


def test_a_run_killed_on_two_ranks_goes_on_alone_with_another_batch_size(made, tmp_path, monkeypatch):
    """Rank 1 of 2 finished its shards and rank 0 none: memory ran out, say. The result is a whole run's, byte by
    byte, and what was finished is not drawn again.
    """
    run(made, tmp_path / "alone")
    with monkeypatch.context() as patch:
        patch.setattr(regenerate.ranks, "rank", lambda: 1)
        patch.setattr(regenerate.ranks, "world_size", lambda: 2)
        patch.setattr(regenerate.ranks, "is_main", lambda: False)
        stage(made, batch_size=3).run(context(tmp_path / "out", made.target, made.inputs))
    kept = files(tmp_path / "out")
    assert [name for name in sorted(kept) if name.startswith("shard-")] == [
        f"shard-00000{index}.safetensors" for index in (1, 3)
    ]
    drawn, real = [], pictures.draw_pictures
    monkeypatch.setattr(
        pictures, "draw_pictures", lambda t, asked, *a, **k: drawn.append(len(asked)) or real(t, asked, *a, **k)
    )
    run(made, tmp_path / "out", stage(made, batch_size=2))
    # Shards of 3, 3, 3 and 1 pictures; the first and the third were left to draw, two at a time.
    assert drawn == [1, 2, 1, 2]
    assert files(tmp_path / "out") == files(tmp_path / "alone") and kept.items() <= files(tmp_path / "out").items()


def test_answers_of_anole_are_ids_and_their_codes(monkeypatch):
    """Greedily and guided: the text stands for what it was asked by, and no features are kept."""
    target = anole()
    texts = {"one": torch.tensor([25, 27, 31]), "two": torch.tensor([30])}
    generator = Generator(target=target, condition=lambda caption, label: texts[caption],
                          pictures=lambda codes: codes, codebook=torch.zeros(16, 4), first_id=4)  # fmt: skip
    section = SimpleNamespace(check_labels=list, generator=lambda *_, **__: generator)
    monkeypatch.setattr(pictures, "image_section", lambda target: section)
    monkeypatch.setattr(pictures, "read_prompts", lambda source: [ImagePrompt(t, t) for t in texts])
    named = SimpleNamespace(target=SimpleNamespace(path="hub/anole", revision=None), fingerprint="f" * 40, seed=2,
                            stop=Stop(), progress=StageLine("answers"), inputs={}, device=lambda: None)  # fmt: skip
    target.config._commit_hash = "c0ffee"
    drawn = pictures.Pictures(PromptSource(path="a.txt"), named, warp=Warp(0.0), repeats=1, batch_size=16)
    answers = [*drawn.answers(range(2))]
    decoding = Decoding(Chain(1), RULES["greedy"], Draw("top-k"), Warp(), target.num_codes, ())
    for number, (answer, text) in enumerate(zip(answers, texts.values(), strict=True)):
        assert answer.ids == generate(target, None, ImageRequest(text), decoding).tokens
        assert answer.tensors["codes"].tolist() == [i - 4 for i in answer.ids] and set(answer.tensors) == {"codes"}
        assert (answer.target, answer.seed) == ("hub/anole@c0ffee", 2_000_006 + number)
    assert len(answers[0].ids) == 16 and all(4 <= i < 20 for a in answers for i in a.ids)
