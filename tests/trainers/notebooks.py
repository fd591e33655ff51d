"""Runs a notebook of docs/notebooks in this process."""

import json
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs" / "notebooks"


def code_of(name: str) -> list[str]:
    """The code cells, which are kept without outputs."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), f"{name} has outputs"
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(monkeypatch, name: str, pictures: Path, **settings) -> tuple[dict, list]:
    """The names that its cells leave and the figures that they showed, which are kept as PNG."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    shown = []

    def show():
        figure = plt.gcf()
        figure.savefig(pictures / f"{name}-{len(shown)}.png")
        shown.append(figure)
        plt.close(figure)

    for key, value in settings.items():
        monkeypatch.setenv(f"DRAFTSMITH_{key.upper()}", str(value))
    monkeypatch.setattr(plt, "show", show)
    names: dict = {}
    for code in code_of(name):
        exec(compile(code, name, "exec"), names)
    return names, shown
