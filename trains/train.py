"""The launcher: `deepspeed trains/train.py recipe=NAME key=value ...` (also plain `python`).

To follow a run: recipes/config/launch.py reads the recipe, trainers/run/run.py runs its stages,
trainers/stages/train.py trains.
"""

import sys
from pathlib import Path

try:
    import draftsmith
except ModuleNotFoundError:
    sys.exit("error: draftsmith is not installed in this environment\n  hint: pip install -c constraints.txt -e .")
from draftsmith.recipes.commands.cli import main

here, imported = Path(__file__).resolve().parents[1], Path(draftsmith.__file__).resolve().parent
if here != imported:
    sys.exit(
        f"error: this checkout is {here}, but the environment imports draftsmith from {imported}\n"
        f"  hint: pip install -e {here}"
    )
sys.exit(main())
