#!/usr/bin/env bash
# What takes many cores, at once: bash tests/conformance/many_cores.sh DIRECTORY [SECONDS] [PART...]
#
#   programs   10,000 random programs on every right backend; on cuda too where there is a GPU
#   matrix     the generated mutants, three seeds
#   engine     changes of the engine, as many as there is time for
#   levels     L0 to L3, then L4, of the backends cpu, sim and threads, each on two cores of its own
#   gpu        drawn kernels and laws on the GPU, with its own kernels
#
# Parts share the cores; each writes DIRECTORY/PART.log. Nothing needs to be installed beside torch, pytest and hypothesis.
# In the environment: PROGRAMS and SAMPLE for fewer programs and changes, BACKEND and SEED for some programs alone, WITHOUT for
# mutants that aren't run.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
seconds=${2:-240}
shift; [ $# -gt 0 ] && shift
parts=${*:-levels gpu programs matrix engine}
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python}
cores=$(nproc)
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONPATH
PYTHONPATH=$(echo core kernels tools tests backends/* examples/threads_backend examples/toy_driver examples/toy_backend/src \
  | tr ' ' '\n' | sed "s|^|$PWD/|" | paste -sd:)
"$python" - "$out/installed" <<'END'
import sys, tomllib
from importlib.metadata import entry_points
from pathlib import Path

for name in (".", "examples/threads_backend", "examples/toy_backend"):
    project = tomllib.loads((Path(name) / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project.get("scripts", {}), **project["entry-points"]}
    known = entry_points(group="outrider.backends").names
    if set(groups["outrider.backends"]) <= known:
        continue
    place = Path(sys.argv[1]) / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [line for group, names in groups.items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()), "")]
    (place / "entry_points.txt").write_text("\n".join(lines))
END
PYTHONPATH=$out/installed:$PYTHONPATH
has() { case " $parts " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
gpu=$(command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -c . || echo 0)

levels() { # backend, level, two cores
  local file=$out/levels-$1-$2.log began=$SECONDS
  taskset -c "$3" timeout "$seconds" "$python" -m outrider.cli.main conform --backend "$1" --level "$2" >"$file" 2>&1
  echo "$1 $2 on two cores: exit $?, $((SECONDS - began)) s" | tee -a "$out/levels.log"
}

if has levels && [ "$cores" -ge 12 ]; then # cores that nothing else has
  rest=$(seq -s, 12 $((cores - 1)))
  levels cpu L3 0,1 & levels sim L3 2,3 & levels threads L3 4,5 &
  levels cpu L4 6,7 & levels sim L4 8,9 & levels threads L4 10,11 &
else
  rest=$(seq -s, 0 $((cores - 1)))
  if has levels; then levels cpu L3 "$rest"; fi
fi
left=$(echo "$rest" | tr , '\n' | wc -l)
on() { taskset -c "$rest" nice -n "$1" timeout $((seconds + 75)) "${@:2}"; }
if has gpu && [ "$gpu" -gt 0 ]; then
  TRITON_INTERPRET=0 on 0 "$python" -c "
from outrider_conformance.run import conform
r = conform('cuda', level='L4', extra=('-k', 'drawn or laws', '-q', '--kit-draws', '1', '--maxfail=12'))
print({level: found['counts'] for level, found in r['levels'].items()})
for t in r['tests']:
    if t['outcome'] == 'failed': print(t['id'], t['reason'][:800])" >"$out/gpu.log" 2>&1 &
fi
if has programs; then
  if [ "$gpu" -gt 0 ] && [ -z "${BACKEND:-}${SEED:-}" ]; then
    TRITON_INTERPRET=0 on 0 "$python" tests/conformance/long_programs.py --backend cuda --processes 6 --programs "${PROGRAMS:-10000}" --seconds "$seconds" \
      >"$out/programs-cuda.log" 2>&1 &
  fi
  on 2 "$python" tests/conformance/long_programs.py --processes "$left" --programs "${PROGRAMS:-10000}" --seconds "$seconds" \
    ${BACKEND:+--backend "$BACKEND"} ${SEED:+--seed "$SEED"} >"$out/programs.log" 2>&1 &
fi
if has matrix; then
  on 5 "$python" -m conformance.mutants.matrix --seeds 3 ${WITHOUT:+--without "$WITHOUT"} --jobs "$left" --seconds "$seconds" --record "$out/matrix.jsonl" \
    >"$out/matrix.log" 2>&1 &
fi
if has engine; then
  on 10 "$python" -m proof.mutants -n "$left" --sample "${SAMPLE:-2000}" --seconds $((seconds - 15)) --limit 60 \
    --out "$out/engine.jsonl" >"$out/engine.log" 2>&1 &
fi
wait
cd "$out" || exit 1
tail -n 14 levels.log gpu.log programs-cuda.log programs.log 2>/dev/null
grep -cE "^killed" matrix.log 2>/dev/null
grep -E "SURVIVES|UNREACHED" matrix.log 2>/dev/null
grep -E "killed$|tried,|survived:" engine.log 2>/dev/null
