# Sourced by scripts/demo and scripts/test, with what to install (".[gguf]" or ".[dev]"): makes the virtual environment once and
# installs the pinned stack in it. One environment serves both: what a command lacks is added to it.
# DRAFTSMITH_VENV chooses its folder (default .venv beside the README, where relative paths begin), PYTHON the
# interpreter (default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
asked=$1
venv=${DRAFTSMITH_VENV:-.venv}
case "$venv" in /*) ;; *) venv=$PWD/$venv ;; esac
stamp="$venv/.draftsmith-installed"
# Two lines: of which pins and folder the environment is, and what was asked for.
pins=$(cat pyproject.toml constraints.txt | cksum)$PWD
here=() # nothing is installed, or of other pins
if [ -f "$stamp" ]; then mapfile -t here < "$stamp"; fi
if [ "${here[0]:-}" != "$pins" ]; then here=(); fi
case "${here[1]:-}" in
    "$asked" | ".[dev]") ;;
    *)
    if [ ${#here[@]} = 0 ]; then echo "installing into $venv (once; about two minutes)"; else echo "adding what the tests need to $venv"; fi
    python=${PYTHON:-python3}
    if [ -x "$venv/bin/python" ]; then python=$venv/bin/python; fi
    "$python" -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "draftsmith needs Python 3.11 or 3.12; name one with PYTHON=python3.11")'
    if ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
        echo "error: $python has no ensurepip, which makes virtual environments (Debian, Ubuntu: apt install python3-venv)" >&2
        exit 2
    fi
    # torch and the rest come to 2 GB on a CPU, beside the packages on their way; what is there already counts.
    disk=$venv held=0
    while [ ! -d "$disk" ]; do disk=$(dirname "$disk"); done
    if [ -d "$venv" ]; then held=$(du -skx "$venv" | cut -f1); fi
    free=$(df -Pk "$disk" | awk 'NR == 2 { print $4 }')
    if [ $((free + held)) -lt 3000000 ]; then
        echo "error: $((free / 1000)) MB are free where $venv lies, and an environment takes 3000 (DRAFTSMITH_VENV names another place)" >&2
        exit 2
    fi
    if [ "$asked" = ".[dev]" ] && ! command -v "${CXX:-c++}" > /dev/null; then
        echo "note: there is no C++ compiler (${CXX:-c++}), without which tests/pretend_cuda is skipped (Debian, Ubuntu: apt install g++)"
    fi
    rm -f "$stamp"
    # A package that was cut on its way lacks its list of files, and pip would take it for installed.
    for info in "$venv"/lib/python3*/site-packages/*.dist-info; do
        if [ -d "$info" ] && [ ! -f "$info/RECORD" ]; then rm -r "$info"; fi
    done
    if [ ${#here[@]} = 0 ]; then
        "$python" -m venv "$venv"
        # torch first and alone: the exact pin takes the CPU build where one lies at hand, and nothing else may ask for another.
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$asked"
    printf '%s\n' "$pins" "$asked" > "$stamp"
    ;;
esac
export PATH="$venv/bin:$PATH"
export TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1
