"""Published sets of videos, pictures and texts that heads are measured on: Hub ids, columns, and where clips are.

Sparrow and SAGE decode long descriptions of them. The sets' own prompts ask for a letter or a word (one or two tokens:
nothing to speculate on), so there are two ways to ask: `describe` for speed, `stock` for questions that are scored.
Of sets of conversations, rows' `turns` are asked one after another, with the target's answers between.
Sources: Sparrow, appendices B and E; SAGE, section 5.1; columns as the sets have them on the Hub; MMSpec (arXiv
2603.14989) and its repository; SPEED-Bench (arXiv 2604.09557), its card on the Hub and NVIDIA's specdec_bench.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...core.errors import UserError, did_you_mean

Medium = Literal["video", "image", "text"]
# own: the row's question; describe: a description of the video or picture in its place; explain: the question and its
# options, and an answer with an explanation; letter, word: the question (and options), and how short the answer is.
Ask = Literal["own", "describe", "explain", "letter", "word"]
SAMPLES, SEED = 100, 42  # as SpecVLM, ViSpec and Sparrow draw them


@dataclass(frozen=True)
class Join:
    """Pictures that another configuration of the same repository holds, by their `id`."""

    config: str
    split: str
    key: str  # column of the questions


@dataclass(frozen=True)
class BenchmarkSet:
    """Rows of the Hub."""

    medium: Medium
    ids: tuple[str, ...]  # repositories of the same rows, tried in turn: the sets have moved
    split: str
    describe: Ask
    stock: Ask
    configs: tuple[str | None, ...] = (None,)
    revision: str | None = None
    question: tuple[str, ...] = ("question",)  # columns, of which the first that says something counts
    options: tuple[str, ...] = ()  # one column with a list, or a column for each; "N/A" fills up
    answer: tuple[str, ...] = ("answer",)  # columns; a list is several good answers
    # With options: the option's text, its letter, or its place from 0.
    answer_is: Literal["text", "letter", "index"] = "text"
    hint: str | None = None
    join: Join | None = None
    clip: str | None = None  # column that names the clip
    # Where clips lie below the set's folder of media, tried in turn; {config} is replaced.
    folders: tuple[str, ...] = ("",)
    config_folders: tuple[tuple[str, str], ...] = ()  # configuration -> such a folder, for sets that have one for each
    aliases: tuple[str, ...] = ()


# A twentieth task, episodic_reasoning, has folders of frames in place of clips and is left out.
_MVBENCH = (
    ("object_interaction", "star/Charades_segment"),
    ("action_sequence", "star/Charades_segment"),
    ("action_prediction", "star/Charades_segment"),
    ("action_localization", "sta/sta_video_segment"),
    ("moving_count", "clevrer/video_validation"),
    ("moving_direction", "clevrer/video_validation"),
    ("moving_attribute", "clevrer/video_validation"),
    ("counterfactual_inference", "clevrer/video_validation"),
    ("object_existence", "clevrer/video_validation"),
    ("fine_grained_pose", "nturgbd_convert"),
    ("character_order", "perception/videos"),
    ("object_shuffle", "perception/videos"),
    ("state_change", "perception/videos"),
    ("action_count", "perception/videos"),
    ("egocentric_navigation", "vlnqa"),
    ("fine_grained_action", "Moments_in_Time_Raw/videos"),
    ("scene_transition", "scene_qa/video"),
    ("action_antonym", "ssv2_video_mp4"),
    ("unexpected_action", "FunQA_test/test"),
)
_CHATGPT = ("Test_Videos", "videochatgpt/Test_Videos", "")  # one archive serves three sets


def _moved(group: str, name: str) -> tuple[str, str]:
    """A repository that moved: today's id and the one before."""
    return f"{group}/{name}", f"lmms-lab/{name}"


BENCHMARK_SETS: dict[str, BenchmarkSet] = {
    "VideoDetailCaption": BenchmarkSet(
        "video", ("lmms-lab/VideoDetailCaption", "lmms-eval/VideoDetailCaption"), "test", "own", "own",
        clip="video_name", folders=_CHATGPT, aliases=("VideoDetailedCaption", "VDC"),
    ),
    "VideoDetailDescription": BenchmarkSet(
        "video", ("lmms-lab/VideoDetailDescription", "lmms-eval/VideoDetailDescription"), "test", "own", "own",
        clip="video_name", folders=_CHATGPT, aliases=("VDD",),
    ),
    "VideoChatGPT": BenchmarkSet(
        "video", _moved("lmms-eval", "VideoChatGPT"), "test", "own", "own",
        configs=("Generic", "Temporal", "Consistency"), question=("question", "question_1", "question_2"),
        clip="video_name", folders=_CHATGPT,
    ),
    "MVBench": BenchmarkSet(
        "video", ("OpenGVLab/MVBench",), "train", "describe", "letter", revision="video",
        configs=tuple(task for task, _ in _MVBENCH), options=("candidates",), clip="video",
        folders=("{config}", "data0613/{config}", "video/{config}"), config_folders=_MVBENCH,
    ),
    "LongVideoBench": BenchmarkSet(
        "video", ("longvideobench/LongVideoBench",), "validation", "describe", "letter",
        options=tuple(f"option{i}" for i in range(5)), answer=("correct_choice",), answer_is="index",
        clip="video_path", folders=("videos", ""),
    ),
    "VideoMME": BenchmarkSet(
        "video", _moved("lmms-eval", "Video-MME"), "test", "describe", "letter",
        options=("options",), answer_is="letter", clip="videoID", folders=("data", ""), aliases=("Video-MME",),
    ),
    "MLVU": BenchmarkSet(  # the options stand in the question
        "video", ("sy1998/MLVU_dev",), "test", "describe", "letter",
        answer_is="letter", clip="video_name", folders=("", "video", "videos"), aliases=("MVLU",),
    ),
    "MLVU-Test": BenchmarkSet(
        "video", ("sy1998/MLVU_Test",), "test", "describe", "letter",
        answer_is="letter", clip="video_name", folders=("", "video", "videos"),
    ),
    "TextVQA": BenchmarkSet(
        "image", _moved("lmms-lab-encoder", "textvqa"), "validation", "explain", "word", answer=("answers",)
    ),
    "GQA": BenchmarkSet(
        "image", _moved("lmms-lab-encoder", "GQA"), "testdev", "explain", "word",
        configs=("testdev_balanced_instructions",), join=Join("testdev_balanced_images", "testdev", "imageId"),
    ),
    "ChartQA": BenchmarkSet("image", _moved("lmms-lab-encoder", "ChartQA"), "test", "explain", "word"),
    "SEED-Bench": BenchmarkSet(
        "image", _moved("lmms-lab-encoder", "SEED-Bench"), "test", "explain", "letter",
        options=tuple(f"choice_{letter}" for letter in "abcd"), answer_is="letter", aliases=("SEED", "SEEDBench"),
    ),
    "COCO": BenchmarkSet(
        "image", (*_moved("lmms-lab-encoder", "COCO-Caption2017"),), "val", "describe", "describe",
        question=(), aliases=("COCO caps", "COCO captions"),
    ),
    "MME": BenchmarkSet("image", _moved("lmms-lab-encoder", "MME"), "test", "explain", "own"),
    "ScienceQA": BenchmarkSet(
        "image", _moved("lmms-lab-encoder", "ScienceQA"), "test", "explain", "letter", configs=("ScienceQA-IMG",),
        options=("choices",), answer_is="index", hint="hint", aliases=("SQA",),
    ),
    "MM-Vet": BenchmarkSet("image", _moved("lmms-lab-encoder", "MMVet"), "test", "explain", "own"),
    "AI2D": BenchmarkSet(
        "image", _moved("lmms-lab-encoder", "ai2d"), "test", "explain", "letter", options=("options",),
        answer_is="index",
    ),
    "GSM8K": BenchmarkSet(
        "text", ("openai/gsm8k", "gsm8k"), "test", "explain", "own", configs=("main",)
    ),
    "HumanEval": BenchmarkSet(
        "text", ("openai/openai_humaneval", "openai_humaneval"), "test", "own", "own",
        question=("prompt",), answer=("canonical_solution",),
    ),
}  # fmt: skip


def names_of(medium: Medium) -> list[str]:
    """The published sets of one medium, in the order of the tables."""
    return [name for name, about in BENCHMARK_SETS.items() if about.medium == medium]


def set_name(called: str) -> str:
    """The set of this name, other name or Hub id, old or new. Raises `UserError`: no set is called so."""
    known = {name: name for name in BENCHMARK_SETS}
    for name, about in BENCHMARK_SETS.items():
        known |= dict.fromkeys((*about.aliases, *about.ids), name)
    folded = {key.casefold(): name for key, name in known.items()}
    if called.casefold() not in folded:
        raise UserError(f"{called!r} is no published set", hint=did_you_mean(called, known))
    return folded[called.casefold()]


LETTERS = "ABCDEFGH"
DESCRIBE: dict[Medium, str] = {
    "video": "Describe the video in detail.",
    "image": "Describe the image in detail.",
    "text": "",
}
EXPLAIN = "Please answer with an explanation."
LETTER = "Answer with the option's letter from the given choices directly."
WORD = "Answer the question using a single word or phrase."
_YES_NO = "Please answer yes or no."  # in MME's questions, which would end the answer there


def wording(
    way: Ask, question: str, options: tuple[str, ...] = (), *, describe: str, explain: str = EXPLAIN, hint: str = ""
) -> str:
    """The text of a prompt, without its marks and with options without letters; `describe` asks for a description, and
    `explain` stands after a question that is to be answered with an explanation.
    """
    if way == "describe" or not question:
        return describe
    if way == "own":
        return question
    if way == "explain":
        question = question.replace(_YES_NO, "").strip()
    choices = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    instruction = {"explain": explain, "letter": LETTER, "word": WORD}[way]
    lines = [f"Context: {hint}" if hint else "", question, *choices, instruction]
    return "\n".join(line for line in lines if line)


LABELS = ("category", "sub_category", "difficulty")  # what tables group by


@dataclass(frozen=True)
class TurnSet:
    """A set's names of the parts of its rows."""

    medium: Medium
    files: str  # pattern of its files, JSON lines or parquet, in a folder as it is published
    labels: Mapping[str, str]  # of `LABELS` -> the column that has it
    cure: str  # how to get the set, or whole rows of it
    size: str  # what dry runs say of it
    id: str = "id"
    images: str | None = None  # the folder, beside the file, of the pictures that `image` names; None: texts alone
    repository: str | None = None  # on the Hub; None: it is published as files alone
    config: str | None = None
    split: str = "test"
    placeholder: str | None = None  # how a turn begins whose text its authors may not hand on


TURN_SETS: dict[str, TurnSet] = {
    "MMSpec": TurnSet(
        "image", "mmspec.jsonl", {"category": "topic", "sub_category": "category"}, images="images",
        cure="clone github.com/killthefullmoon/MMSpec, and give its folder dataset/MMSpec/test (or testmini) as path",
        size="600 conversations, 723 turns",
    ),
    "SPEED-Bench": TurnSet(
        "text", "*.parquet", {name: name for name in LABELS}, id="question_id",
        repository="nvidia/SPEED-Bench", config="qualitative", placeholder="FULL BENCHMARK DATA SHOULD BE FETCHED",
        cure="write whole rows with examples/specdec_bench/prepare_data.py of NVIDIA's Model-Optimizer (--dataset "
        "speed --config qualitative), and give the folder that it writes as path",
        size="880 conversations in the qualitative split",
    ),
}  # fmt: skip


def turn_set(called: str) -> str | None:
    """The name of the set of conversations that is called by it or by a Hub id; None: it is none of them."""
    known = {key.casefold(): name for name, about in TURN_SETS.items() for key in (name, about.repository or name)}
    return known.get(called.casefold())
