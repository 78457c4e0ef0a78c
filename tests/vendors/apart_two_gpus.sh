#!/bin/bash
# Prefill on one GPU, decode on another one of the same host. Usage: apart_two_gpus.sh DIRECTORY [TRANSPORT...]
#
# For each transport: the tokens of drawn programs against one engine, then how fast a link is. Each leaves a file in DIRECTORY.
# PREFILL and DECODE name other backends, SECONDS_EACH how long programs are begun.
set -u
out=$1
shift
mkdir -p "$out"
python=${PYTHON:-python3}
: "${SECONDS_EACH:=60}"
prefill=${PREFILL:-cuda:0} decode=${DECODE:-cuda:1}
root=$(cd "$(dirname "$0")/../.." && pwd)
# The entry points of this tree, also where nothing is installed.
"$python" - "$root/pyproject.toml" "$out/entry/outrider-0.1.0.dist-info" <<'P'
import pathlib, sys, tomllib
found = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]["entry-points"]
to = pathlib.Path(sys.argv[2])
to.mkdir(parents=True, exist_ok=True)
(to / "METADATA").write_text("Metadata-Version: 2.1\nName: outrider\nVersion: 0.1.0\n")
groups = (f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for group, points in found.items())
(to / "entry_points.txt").write_text("\n".join(groups))
P
parts=$root/core:$root/kernels:$root/tools
for backend in "$root"/backends/*; do parts=$parts:$backend; done
export PYTHONPATH=$out/entry:$parts:${PYTHONPATH:-}
for transport in "${@:-nixl}"; do
    began=$SECONDS
    timeout -k 2 "${LINK_S:-40}" "$python" "$root/tests/vendors/link_bandwidth.py" "$transport" "$prefill" "$decode" 256 2048 8192 \
        >"$out/link-$transport.jsonl" 2>"$out/link-$transport.err"
    echo "link, $transport: exit code $?, $((SECONDS - began)) s"
    cat "$out/link-$transport.jsonl"
    tail -c 500 "$out/link-$transport.err"
    [ "$SECONDS_EACH" = 0 ] && continue
    began=$SECONDS
    PYTHONPATH="$root/tests" timeout -k 5 $((SECONDS_EACH + 90)) "$python" -m proof.disaggregation --models bundled --backends "$prefill" "$decode" \
        --transport "$transport" --programs 200 --seconds "$SECONDS_EACH" >"$out/apart-$transport.json" 2>"$out/apart-$transport.err"
    echo "programs, $transport: exit code $?, $((SECONDS - began)) s"
    head -c 900 "$out/apart-$transport.json"
    tail -c 700 "$out/apart-$transport.err"
done
