"""Publishing a finished run: whether a publication that is there was made with the same settings."""

import json

import pytest
from draftsmith.core.results import DONE
from draftsmith.recipes.publish import _is_other
from draftsmith.trainers.results import BEGUN


def test_another_publication_is_known_by_its_record(tmp_path):
    assert not _is_other(tmp_path, "a")
    (tmp_path / BEGUN).write_text(json.dumps({"fingerprint": "a", "version": 3}))
    assert not _is_other(tmp_path, "a") and _is_other(tmp_path, "b")


@pytest.mark.parametrize("data", [b"", b'{"finger', b"\xff", b"[]", b"{}"])
def test_a_cut_record_is_no_traceback(tmp_path, data):
    """`done.json` tells then; without it nobody can, and the stage sets the folder aside by itself."""
    (tmp_path / BEGUN).write_bytes(data)
    assert not _is_other(tmp_path, "a")
    (tmp_path / DONE).write_text(json.dumps({"fingerprint": "a", "version": 3}))
    assert not _is_other(tmp_path, "a") and _is_other(tmp_path, "b")
