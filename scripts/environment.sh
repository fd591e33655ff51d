# Sourced by scripts/demo and scripts/test: makes the virtual environment once and installs the pinned stack in it.
# DRAFTSMITH_VENV chooses its folder (default .venv beside the README), PYTHON the interpreter (default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DRAFTSMITH_VENV:-.venv}
stamp="$venv/.draftsmith-installed"
wanted=$(cat pyproject.toml constraints.txt | cksum)$PWD
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    echo "installing into $venv (once; about two minutes)"
    "${PYTHON:-python3}" -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "draftsmith needs Python 3.11 or 3.12; name one with PYTHON=python3.11")'
    "${PYTHON:-python3}" -m venv "$venv"
    # torch first and alone: the exact pin takes the CPU build where one lies at hand, and nothing else may ask for another.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$1"
    printf '%s' "$wanted" > "$stamp"
fi
export PATH="$PWD/$venv/bin:$PATH"
case "$venv" in /*) export PATH="$venv/bin:$PATH" ;; esac
export TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1
