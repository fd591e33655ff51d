"""`python -m draftsmith ...`; for launchers `deepspeed --module draftsmith train NAME`, which needs no checkout."""

import sys

from draftsmith.recipes.commands.cli import main

sys.exit(main())
