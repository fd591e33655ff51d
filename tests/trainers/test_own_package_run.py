"""From training to a published folder with a drafter, a tree, a rule and a target of another package."""

import json
import os
import sys

import pytest
from draftsmith.core.import_paths import NotImported
from draftsmith.eval.published import open_published
from own_package import RECIPE, forget, write_package
from stages_run import load_spelled, run_loaded


def run(output, *settings, **more):
    return run_loaded(load_spelled(RECIPE, "own", output, *settings), output, **more)


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory):
    """A whole run; the fresh process that tries the published folder finds the package on PYTHONPATH."""
    package = write_package(tmp_path_factory.mktemp("elsewhere") / "her_package")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(package.parent))
        patch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
        output = tmp_path_factory.mktemp("run")
        run(output)
        yield output
    forget("her_package")


@pytest.fixture(name="folder")
def _folder(finished):
    """The published folder, whose package nobody has imported."""
    forget("her_package")
    return finished / "publish" / "repository"


def test_outputs_are_plain_decodings_and_the_report_names_what_drafted(finished):
    report = (finished / "evaluate" / "report.md").read_text()
    assert "her_package.others:Same" in report and "hers" in report and "2/2" in report
    assert "Relaxed acceptance" not in report, "her rule says that it is exact"
    rows = [json.loads(line) for line in (finished / "evaluate" / "rows.jsonl").read_text().splitlines()]
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    for name in ("head/draftsmith.json", "publish/repository/draftsmith.json"):
        assert len(json.loads((finished / name).read_text())["code"]["sha256"]) == 64, name


def test_opening_the_folder_imports_only_by_leave(finished, folder):
    target = finished / "target"
    with pytest.raises(NotImported, match=r"her_package.others is not imported(?s:.*)allow_import"):
        open_published(folder, target=target)
    assert "her_package" not in sys.modules
    speculator = open_published(folder, target=target, allow_import=True)
    assert type(speculator.drafter).__module__ == "her_package.recurrent"
    assert speculator("What is this?").generation.tokens == speculator("What is this?", plain=True).generation.tokens
    assert open_published(folder, target=target).drafter.taps.feature, "imported already"
