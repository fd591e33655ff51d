"""Quality of answers: OCRBench's accuracy, tables of injected scores, and what is said where a library is missing."""

import sys
import types

import pytest
import torch
from draftsmith.eval.text_quality import QUALITY_MODULES, contains, meteor, scorers
from fails import fails_with


def record(*references, **more):
    turns = [{"from": "human", "value": "<image>\nWhich word?"}, {"from": "gpt", "value": references[0]}]
    return {"id": "OCRBench/0000", "conversations": turns, "references": list(references), **more}


@pytest.mark.parametrize(
    ("answer", "found", "right"),
    [
        ("The image has the word Friend written on it.", record("friend"), 1),
        ("It says fiend.", record("friend"), 0),
        ("new\nyork", record("New York"), 1),
        ("the sign reads B", record("a", "b"), 1),
        ("x ^ { 2 } + 1", record("x^{2}", dataset="HME100k"), 1),
        ("X^{2}", record("x^{2}", dataset="HME100k"), 0),  # formulas are compared as they are written
        ("x ^ { 2 }", record("x^{2}", dataset="IIIT5K"), 0),
    ],
)
def test_accuracy_is_containment(answer, found, right):
    assert contains(answer, found) == right


def test_accuracy_needs_no_library(monkeypatch):
    for name in QUALITY_MODULES.values():
        monkeypatch.setitem(sys.modules, name, None)
    assert scorers(["OCRBench"]) == {"accuracy": contains}


@pytest.mark.parametrize(("name", "library"), [("Spot", "torchmetrics"), ("TextCaps", "nltk")])
def test_a_missing_library_is_named_with_its_extra(name, library, monkeypatch):
    for module in QUALITY_MODULES.values():
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    caught = fails_with(f"needs {library}", scorers, [name])
    assert "draftsmith[metrics]" in caught.hint


def test_rouge_is_asked_as_the_library_documents_it(monkeypatch):
    asked = []

    def rouge_score(preds, target, accumulate, rouge_keys):
        asked.append((preds, target, accumulate, rouge_keys))
        return {"rougeL_fmeasure": torch.tensor(0.25)}

    stub = types.SimpleNamespace(rouge_score=rouge_score)
    monkeypatch.setitem(sys.modules, QUALITY_MODULES["ROUGE-L"], stub)
    score = scorers(["Spot"])["ROUGE-L"]
    assert score("x" * 600, {"references": ["a", "b"]}) == 0.25
    assert asked == [(["x" * 512], [["a", "b"]], "best", "rougeL")]
    assert score(" ", {"references": ["a"]}) == 0 and len(asked) == 1


def test_meteor_takes_words_and_says_when_wordnet_is_missing(monkeypatch):
    asked = []

    def meteor_score(references, hypothesis):
        if missing:
            raise LookupError("wordnet")
        asked.append((references, hypothesis))
        return 0.5

    stub = types.SimpleNamespace(meteor_score=meteor_score)
    monkeypatch.setitem(sys.modules, QUALITY_MODULES["METEOR"], stub)
    tokenize = types.SimpleNamespace(wordpunct_tokenize=str.split)
    monkeypatch.setitem(sys.modules, "nltk", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nltk.tokenize", tokenize)
    missing = True
    caught = fails_with("WordNet", meteor)
    assert "nltk.downloader" in caught.hint
    missing = False
    assert meteor()("The Cat", {"references": ["A Cat", "dogs"]}) == 0.5
    assert asked[-1] == ([["a", "cat"], ["dogs"]], ["the", "cat"])
