"""Of which code a run was."""

import subprocess

from draftsmith.recipes.config import alike


def test_a_wheel_in_an_environment_inside_a_users_own_checkout_does_not_name_its_commit(tmp_path, monkeypatch):
    package = tmp_path / ".venv" / "site-packages" / "draftsmith"
    (package / "recipes" / "config").mkdir(parents=True)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "theirs"], check=True)
    theirs = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(alike, "__file__", str(package / "recipes" / "config" / "alike.py"))
    assert alike.versions()["git"] == {"commit": None, "changed_files": 0}

    (package / "theirs.py").touch()
    # The package that is the checkout itself: a clone.
    monkeypatch.setattr(alike, "__file__", str(tmp_path / "recipes" / "config" / "alike.py"))
    assert alike.versions()["git"] == {"commit": theirs, "changed_files": 1}
