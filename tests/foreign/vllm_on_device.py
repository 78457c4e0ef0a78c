"""An unmodified vLLM 0.26 on a CUDA device: bare, under this sanitizer, under torch's, and with orderings taken out.

    python tests/foreign/vllm_on_device.py [SECONDS] [--logs FOLDER] [--only WORD] [--workers N]

Outrider, vLLM, torch, Triton and transformers are on the path. Each stage is a process of its own (``vllm_decoding.py``).
They start side by side and are timed one at a time. One line of JSON a stage, as each ends, and a last line with what it
comes to; the whole ends within SECONDS (240). Exit code 1 unless some runner was watched and clean, and a planted race was
found at its line. A stage that fails says where it was and how its errors end; FOLDER gets the whole output of each.
``--only``: those stages alone whose name has WORD.

Findings that have a page in ``docs/findings`` are counted by page; a run is clean without others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHILD = HERE / "vllm_decoding.py"
SANITIZE = (
    sys.executable,
    "-c",
    "from outrider.cli.main import main; raise SystemExit(main())",
    "sanitize",
    "--backend",
    "cuda",
    "--json",
)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1", "VLLM_PLUGINS": "", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2",
}  # fmt: skip
FILES = {"v2": "gpu/async_utils.py", "v1": "gpu_model_runner.py"}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A finding that was looked into: its kind, and the ends of the places of its two accesses (empty: any).

    More often than ``most`` it's another finding: what a warm-up does once, served steps would do each time.
    """

    page: str
    kind: str
    first: str
    second: str
    most: int | None = None

    def fits(self, finding: dict[str, Any]) -> bool:
        sites = [(finding[name] or {}).get("location", "") for name in ("first", "second")]
        near = all(where in site for where, site in zip((self.first, self.second), sites, strict=True))
        return near and finding["kind"] == self.kind and (self.most is None or finding["count"] <= self.most)


JUDGED = (
    Judged(page="vllm-counts-freed-early", kind="reuse",
           first="v1/worker/gpu_model_runner.py:4905", second="v1/spec_decode/llm_base_proposer.py:10"),
    Judged(page="vllm-computed-tokens-corrected", kind="write_after_read",
           first="v1/worker/gpu_model_runner.py:2140", second="v1/worker/gpu_model_runner.py:1534"),
    Judged(page="vllm-backup-tokens-one-buffer", kind="write_after_read",
           first="v1/utils.py:14", second="v1/spec_decode/llm_base_proposer.py:1067"),
    Judged(page="vllm-counts-freed-early", kind="reuse",
           first="v1/worker/gpu_model_runner.py:4905", second="v1/spec_decode/ngram_proposer_gpu.py:432"),
    Judged(page="vllm-outputs-dropped-in-warmup", kind="reuse", first="v1/outputs.py:7", second="v1/worker/gpu/"),
    Judged(page="vllm-outputs-dropped-in-warmup", kind="reuse",
           first="v1/worker/gpu/async_utils.py:110", second="v1/worker/gpu/buffer_utils.py:37", most=4),
    Judged(page="vllm-temperatures-rewritten", kind="write_after_read",
           first="v1/worker/gpu/spec_decode/speculator.py:313", second="v1/worker/gpu/buffer_utils.py:78"),
    Judged(page="vllm-temperatures-rewritten", kind="write_after_read",
           first="v1/worker/gpu/spec_decode/speculator.py:314", second="v1/worker/gpu/buffer_utils.py:78"),
)  # fmt: skip
"""Lines are those of vLLM 0.26.0."""


def judge(findings: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The findings that have no page; and by page how often the others were met."""
    left: list[dict[str, Any]] = []
    judged: dict[str, int] = {}
    for finding in findings:
        page = next((known.page for known in JUDGED if known.fits(finding)), None)
        if page is None:
            left.append(finding)
        else:
            judged[page] = judged.get(page, 0) + finding["count"]
    return left, judged


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process. ``way``: ``bare``, ``ours`` or ``torch's``."""

    runner: str
    method: str
    graphs: str
    way: str
    plant: str = ""

    @property
    def name(self) -> str:
        return "-".join(
            word for word in (self.runner, self.method, self.graphs, self.way.replace("'", ""), self.plant) if word
        )


def stages() -> list[Stage]:
    """Most telling first: what time doesn't reach is left out."""
    runs = [("v2", "eagle", "graphs"), ("v2", "eagle", "eager"), ("v1", "eagle", "graphs")]
    planted = [("v2", "copy"), ("v2", "await"), ("v1", "copy")]
    found = [Stage(runner=r, method=m, graphs=g, way=way) for r, m, g in runs for way in ("bare", "ours")]
    found += [Stage(runner=r, method="eagle", graphs="eager", way="ours", plant=plant) for r, plant in planted]
    found += [Stage(runner="v2", method="eagle", graphs=g, way="torch's") for g in ("eager", "graphs")]
    more = [("none", "bare"), ("none", "ours"), ("ngram_gpu", "bare"), ("ngram_gpu", "ours")]
    found += [Stage(runner="v1", method=m, graphs="eager", way=way) for m, way in more]
    return found


def ends(text: str, count: int) -> str:
    return text[-count:].strip()


def reported(out: str) -> dict[str, Any] | None:
    """What ``sanitize --json`` wrote, whatever the program wrote before it."""
    decoder, at = json.JSONDecoder(), out.find("{")
    while at >= 0:
        try:
            found, _ = decoder.raw_decode(out, at)
            if isinstance(found, dict) and "reports" in found:
                return found
        except ValueError:
            pass
        at = out.find("{", at + 1)
    return None


def short(place: str) -> str:
    return "/".join(place.split("/")[-3:])


def told(finding: dict[str, Any]) -> str:
    sites = [f"{s['operation']}@{s['actor']} {short(s['location'])}" for s in (finding["first"], finding["second"]) if s]
    return f"{finding['count']}x {finding['kind']}: " + " / ".join(sites) + f" [{finding['memory'][:240]}]"


def run(stage: Stage, folder: Path, until: float, logs: Path | None) -> dict[str, Any]:
    """One stage as a row. It never raises, and ends by ``until``."""
    row: dict[str, Any] = {"stage": stage.name}
    left = until - time.monotonic()
    if left < 25:
        return row | {"left out": "no time"}
    begun = time.monotonic()
    command = [sys.executable]
    if stage.way == "ours":
        wanted = ["operations", "streams"] + ["replays"] * (stage.graphs == "graphs")
        command = [*SANITIZE, *(f"--require={name}" for name in wanted), "--"]
    command += [
        str(CHILD),
        str(folder),
        stage.name,
        stage.runner,
        stage.method,
        stage.graphs,
        *([stage.plant] * bool(stage.plant)),
    ]
    if stage.way != "ours":
        command.insert(1, "-u")
    environment = os.environ | ENVIRONMENT
    environment |= {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(stage.runner == "v2")),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "VLLM_DECODING_LIMIT": str(int(left - 12)),
    }
    if stage.method == "ngram_gpu":  # its proposer is compiled, whatever the model is
        environment.pop("TORCH_COMPILE_DISABLE")
    if stage.way == "torch's":
        environment["TORCH_CUDA_SANITIZER"] = "1"
    out_file, error_file = folder / f"{stage.name}.out", folder / f"{stage.name}.err"
    with out_file.open("w") as out, error_file.open("w") as error:
        process = subprocess.Popen(command, stdout=out, stderr=error, env=environment, cwd=folder, start_new_session=True)
        try:
            code = process.wait(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = -9
    row |= {"exit": code, "wall_s": round(time.monotonic() - begun, 1)}
    said, errors = out_file.read_text(errors="replace"), error_file.read_text(errors="replace")
    if logs is not None:
        (logs / f"{stage.name}.out").write_text(said[-400_000:])
        (logs / f"{stage.name}.err").write_text(errors[-200_000:])
    try:
        row |= json.loads((folder / f"{stage.name}.json").read_text())
    except (OSError, ValueError) as broken:
        row["never began"] = repr(broken)
    report = reported(said) if stage.way == "ours" else None
    if report is not None:
        each = [finding for part in report["reports"] for finding in part["findings"]]
        row |= {"watched": report["watched"], "not_watched": report["not_watched"], "script_error": report["script_error"]}
        left, row["judged"] = judge(each)
        row["findings"], row["new"], row["list"] = len(each), len(left), [told(finding) for finding in left[:12]]
        row["at the plant"] = [told(f) for f in left if FILES[stage.runner] in json.dumps([f["first"], f["second"]])][:2]
    if stage.way == "torch's":
        row["torch's found"] = errors.count("CSAN detected")
        if "CSAN detected" in errors:
            row["torch's says"] = errors[errors.index("CSAN detected") :][:900]
    failed = row.get("phase") != "over" or (stage.way == "ours" and report is None) or (stage.way != "ours" and code)
    if failed:
        row["stderr"] = ends(errors, 1500)
        if stage.way == "ours" and report is None:
            row["stdout"] = ends(said, 400)
    return row


def comes_to(rows: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Slowdowns, what was clean, and which planted races were found."""
    found: dict[str, Any] = {"slowdown": {}, "clean": {}, "planted": {}, "same tokens": {}}
    for name, row in rows.items():
        base = rows.get(name.replace("-torchs", "-bare").replace("-ours", "-bare"), {})
        if row.get("phase") == "over" and "-bare" not in name and row.get("seconds") and base.get("seconds"):
            found["slowdown"][name] = round(row["seconds"] / base["seconds"], 2)
            found["same tokens"][name] = row["hash"] == base["hash"]
        if name.endswith("-ours"):
            found["clean"][name] = row.get("phase") == "over" and row.get("new") == 0 and not row.get("not_watched")
        if name.endswith(("-copy", "-await")):
            found["planted"][name] = bool(row.get("at the plant")) and (row.get("skipped") or 0) > 0
    good = any(found["clean"].values()) and bool(found["planted"]) and any(found["planted"].values())
    return found, good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", nargs="?", type=float, default=240.0)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=max(1, min(7, (os.cpu_count() or 2) // 2)))
    given = parser.parse_args()
    until = time.monotonic() + given.seconds - 6
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(max_workers=given.workers) as pool:
        chosen = [stage for stage in stages() if given.only in stage.name]
        running = {pool.submit(run, stage, Path(place), until, given.logs): stage for stage in chosen}
        for done in as_completed(running):
            name = running[done].name
            try:
                rows[name] = done.result()
            except Exception as broken:  # a fault of this script must not hide the other stages
                rows[name] = {"stage": name, "fault": repr(broken)}
            print(json.dumps(rows[name]), flush=True)
    found, good = comes_to(rows)
    print(json.dumps(found | {"good": good}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
