"""Stands where the wandb package would: what it was given, and what of it fails."""

import types
from pathlib import Path

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"


class FakeWandb(types.ModuleType):
    """Its call `fails` raises, and where it is `dead` no server answers."""

    def __init__(self, fails: str | None = None, dead: bool = False):
        super().__init__("wandb")
        self.fails, self.dead = fails, dead
        self.inits, self.lines, self.artifacts, self.codes = [], [], [], []
        self.Settings, self.Image = dict, Path

    def Table(self, columns, data, allow_mixed_types):
        return (columns, data)

    def Artifact(self, name, type, metadata):
        files: list[str] = []
        keep = lambda path: files.append(Path(path).name)  # noqa: E731
        return types.SimpleNamespace(name=name, type=type, metadata=metadata, files=files, add_file=keep, add_dir=keep)

    def init(self, **arguments):
        self._call("init")
        self.inits.append(arguments)
        if self.dead and arguments["mode"] == "online":
            raise ConnectionError("no route to host")
        return self

    def log(self, values, step=None):
        self._call("log")
        self.lines.append((step, values))

    def log_artifact(self, artifact, aliases):
        self.artifacts.append((artifact, aliases))

    def finish(self, exit_code=0):
        self._call("finish")
        self.codes.append(exit_code)

    def _call(self, name):
        if name == self.fails:
            raise ConnectionError(f"{name}: no route to https://me:hunter2hunter2@host with {TOKEN}")
