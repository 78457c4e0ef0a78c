#!/bin/bash
# Two ranks on two GPUs of one host, by the real commands. Usage: two_gpus.sh DIRECTORY PART...
#
# Parts: tokens (float32 tokens of the bundled model, one GPU against two), one (decode on one GPU), two (the same on two),
# large (a 70B shape on two). Each leaves its reports in DIRECTORY, as far as it came.
set -u
out=$1
shift
mkdir -p "$out"
python=${PYTHON:-python3}
backend=${BACKEND:-cuda}
shape=${SHAPE_8B:-llama-3.1-8b}
large=${SHAPE_70B:-llama-3.1-70b}
batches=${BATCHES:-1,32}
prompt="def fibonacci(n):"

run() { # name, seconds, arguments of outrider
    local name=$1 limit=$2
    shift 2
    local began=$SECONDS
    timeout -s INT -k 10 "$limit" "$python" -m outrider.cli.main "$@" --backend "$backend" --json >"$out/$name.json" 2>"$out/$name.err"
    echo "$name: exit code $?, $((SECONDS - began)) s"
    [ -s "$out/$name.err" ] && tail -c 600 "$out/$name.err"
}

show() { # names of bench reports
    "$python" - "$out" "$@" <<'P'
import json, sys
for name in sys.argv[2:]:
    try:
        found = json.load(open(f"{sys.argv[1]}/{name}.json"))
    except (OSError, ValueError):
        continue
    for row in found.get("results", ()):
        kept = ("batch", "collectives", "collectives_ms", "iteration_ms", "tokens_per_s", "limit_ms", "ratio_to_limit", "device_idle_fraction", "host_ms")
        print(name, found["mode"], {key: row.get(key) for key in kept})
P
}

decode=(bench decode --shape "$shape" --draft-tokens 3 --accept-length 2.98 --batch "$batches" --prompt-tokens 64 --new-tokens 200)
for part in "$@"; do
    case $part in
    tokens)
        run tokens-1 60 generate --prompt "$prompt" --max-tokens 64 --dtype float32
        run tokens-2 90 generate --prompt "$prompt" --max-tokens 64 --dtype float32 --tensor-parallel 2
        [ "${DATA:-}" ] && run tokens-d 90 generate --prompt "$prompt" --max-tokens 64 --dtype float32 --data-parallel 2
        "$python" - "$out" <<'P'
import json, sys
found = [json.load(open(f"{sys.argv[1]}/tokens-{name}.json")).get("token_ids") for name in "12"]
print("tokens equal those of one GPU:", [bool(each) and each == found[0] for each in found[1:]])
P
        ;;
    one)
        run one 100 "${decode[@]}"
        show one
        ;;
    two)
        run two 120 "${decode[@]}" --tensor-parallel 2
        show two
        ;;
    kernels)
        run kernels 120 "${decode[@]}" --tensor-parallel 2 --by-kernel
        "$python" - "$out" <<'P'
import json, sys
for row in json.load(open(f"{sys.argv[1]}/kernels.json")).get("results", ()):
    print("batch", row["batch"], row["profiled_iteration_ms"])
    for each in row["by_kernel"][:24]:
        print("   ", round(each["us"], 1), each["calls"], each["kernel"][:100])
P
        ;;
    large)
        run large 170 bench decode --shape "$large" --draft-tokens 3 --accept-length 2.98 --batch 1 --prompt-tokens 64 --new-tokens 100 --tensor-parallel 2
        show large
        ;;
    esac
done
