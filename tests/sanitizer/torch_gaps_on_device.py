"""Plain torch programs on a CUDA device, under our sanitizer and under torch's own: what each finds, and what it costs.

Run it as a program: ``python tests/sanitizer/torch_gaps_on_device.py [SECONDS]``. It prints JSON lines and ends within
SECONDS (150); the exit code is 1 unless every racy program was found by ours and every right one was clean.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAMS = Path(__file__).parent / "torch_gaps"
NAMES = ("views", "reuse", "replay", "pinned", "threads", "kernel", "flood", "accelerator", "backward")
OURS = (
    sys.executable,
    "-c",
    "from outrider.cli.main import main; raise SystemExit(main())",
    "sanitize",
    "--backend",
    "cuda",
    "--json",
    "--",
)
REPEATS = 2


def run(command: Sequence[str], until: float, **environment: str) -> tuple[int, str, str, float]:
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, until - begun), env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        return -1, "", "it didn't end in time", time.monotonic() - begun
    return done.returncode, done.stdout, done.stderr, time.monotonic() - begun


def ours(name: str, word: str, until: float) -> dict[str, object]:
    code, out, error, seconds = run([*OURS, str(PROGRAMS / f"{name}.py"), word], until)
    row: dict[str, object] = {"program": name, "variant": word, "by": "ours", "exit": code, "seconds": round(seconds, 1)}
    try:
        said = json.loads(out[out.index("{") :])
        report = said["reports"][0]
        row |= {"operations": report["operations"], "script_error": said["script_error"]}
        row["findings"] = [
            f"{found['kind']}: {found['first']['operation'] if found.get('first') else ''} at "
            f"{found['first']['location'] if found.get('first') else ''} / {found['second']['operation']} at "
            f"{found['second']['location']}"
            for found in report["findings"]
        ]
    except (ValueError, KeyError, IndexError, TypeError) as broken:
        row |= {"unreadable": repr(broken), "stdout": out[-600:], "stderr": error[-600:]}
    return row


def theirs(name: str, word: str, until: float) -> dict[str, object]:
    code, _, error, seconds = run([sys.executable, str(PROGRAMS / f"{name}.py"), word], until, TORCH_CUDA_SANITIZER="1")
    found = "CUDASanitizerErrors" in error or "CSAN detected" in error
    row: dict[str, object] = {"program": name, "variant": word, "by": "torch's", "exit": code, "found": found}
    if code and not found:
        row["stderr"] = error[-300:]
    return row | {"seconds": round(seconds, 1)}


def cost(way: str, until: float) -> float | str:
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder) / "ms", str(PROGRAMS / "decoding.py")
        environment = {"TORCH_CUDA_SANITIZER": "1"} if way == "torch's" else {}
        command = [*OURS] if way == "ours" else [sys.executable]
        code, out, error, _ = run([*command, program, str(file)], until, **environment)
        return float(file.read_text()) if file.exists() and not code else f"exit {code}: {(error or out)[-400:]}"


def main(seconds: float) -> int:
    until = time.monotonic() + seconds - 5
    # Torch's own can't tell a right program from a gap, so it is asked about both.
    tasks = [(how, name, word) for how in (ours, theirs) for name in NAMES for word in ("wrong", "right")]
    bad: list[tuple[object, object]] = []
    found: dict[str, dict[str, object]] = {}
    with ThreadPoolExecutor(max_workers=min(12, os.cpu_count() or 1)) as pool:
        for row in pool.map(lambda task: task[0](task[1], task[2], until), tasks):
            print(json.dumps(row), flush=True)
            seen = bool(row["found"] if row["by"] == "torch's" else row.get("findings"))
            found.setdefault(f"{row['program']} {row['variant']}", {})[str(row["by"])] = seen
            if row["by"] == "ours" and (row["exit"] != (1 if row["variant"] == "wrong" else 0) or not row.get("operations")):
                bad.append((row["program"], row["variant"]))
    print(json.dumps({"reported something": found}), flush=True)
    for repeat in range(REPEATS):
        for way in ("alone", "ours", "torch's"):
            print(json.dumps({"decoding, ms a step": cost(way, until), "way": way, "repeat": repeat}), flush=True)
    print(json.dumps({"not as expected": bad}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 150.0))
