"""``outrider ci-matrix``: what plugins declare becomes the matrix of a workflow."""

import json
import tomllib
from pathlib import Path

from outrider.device import CiDeclaration
from outrider_conformance.commands.ci_matrix import declaration_fault

ROOT = Path(__file__).resolve().parents[2]
DECLARES = """
    from outrider.device.plugin import BackendInfo, CiDeclaration, hookimpl
    @hookimpl
    def backend_info():
        return BackendInfo(name="chip", description="", usable=False, reason="no device found", ci=CiDeclaration({ci}))
    @hookimpl
    def create_backend(ordinal, options):
        raise AssertionError("nothing is opened for a matrix")
"""


def chip(install, **ci):
    install("chip", DECLARES.format(ci=", ".join(f"{key}={value!r}" for key, value in ci.items())))


def by_name(result):
    return {row["job"]: row for row in result.json["rows"]}


def test_every_backend_in_the_tree_is_there(outrider):
    rows = by_name(outrider("ci-matrix", "--json"))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["outrider.backends"]
    assert set(rows) >= set(declared)
    assert all(rows[name]["status"] in ("runs", "not run") for name in declared)
    assert (rows["cpu"]["status"], rows["cpu"]["runner_labels"]) == ("runs", ["ubuntu-latest"])
    assert rows["cuda"]["status"] == "not run"
    assert "no runner with the labels" in rows["cuda"]["reason"]


def test_a_row_says_what_was_declared(outrider, install):
    chip(install, runner_labels=("self-hosted", "chip"), container="vendor/chip:9", torch="https://vendor/whl", level="L2")
    row = by_name(outrider("ci-matrix", "--json", "--runners", "self-hosted,gpu  self-hosted,chip,big"))["chip"]
    assert row == {
        "backend": "chip",
        "job": "chip",
        "title": "chip",
        "status": "runs",
        "reason": "",
        "runner_labels": ["self-hosted", "chip"],
        "container": "vendor/chip:9",
        "torch_index": "https://vendor/whl",
        "torch_requirement": "torch",
        "markers": [],
        "level": "L2",
        "device_count": 1,
        "distribution": "outrider-chip 1.0",
    }


def test_several_devices_have_a_job_of_their_own(outrider, install):
    chip(install, runner_labels=("self-hosted", "chip"), device_count=2, ranks_runner_labels=("self-hosted", "pair"))
    rows = by_name(outrider("ci-matrix", "--json", "--runners", "self-hosted,pair"))
    first, ranks = rows["chip"], rows["chip-ranks"]
    assert (first["level"], first["device_count"], first["status"]) == ("L4", 1, "not run")
    assert (ranks["level"], ranks["device_count"], ranks["status"]) == ("L6", 2, "runs")
    assert (ranks["backend"], ranks["title"], ranks["runner_labels"]) == ("chip", "chip-ranks", ["self-hosted", "pair"])
    assert by_name(outrider("ci-matrix", "--json"))["cuda-ranks"]["runner_labels"] == ["self-hosted", "gpu", "two-devices"]


def test_what_declares_nothing_runs_where_everybody_can(outrider, install):
    install("chip")
    row = by_name(outrider("ci-matrix", "--json"))["chip"]
    assert (row["status"], row["runner_labels"], row["level"]) == ("runs", ["ubuntu-latest"], "L4")
    assert (row["container"], row["torch_index"], row["torch_requirement"]) == ("", "", "torch")


def test_torch_may_be_a_requirement(outrider, install):
    chip(install, torch="torch==2.10.0")
    row = by_name(outrider("ci-matrix", "--json"))["chip"]
    assert (row["torch_index"], row["torch_requirement"]) == ("", "torch==2.10.0")


def test_a_runner_needs_every_label(outrider, install):
    chip(install, runner_labels=("self-hosted", "chip"))
    for runners in ("", "self-hosted", "chip", "self-hosted chip"):
        row = by_name(outrider("ci-matrix", "--json", "--runners", runners))["chip"]
        assert (row["status"], row["title"]) == ("not run", "chip: not run"), runners


def test_a_label_beside_a_hosted_one_is_no_hosted_runner(outrider, install):
    chip(install, runner_labels=("ubuntu-latest", "chip"))
    assert by_name(outrider("ci-matrix", "--json"))["chip"]["status"] == "not run"


def test_a_broken_plugin_is_listed_and_stops_nobody(outrider, install):
    install("broken", "import no_such_vendor_package")
    result = outrider("ci-matrix", "--json")
    assert result.code == 0
    rows = by_name(result)
    assert (rows["broken"]["status"], rows["broken"]["title"]) == ("broken", "broken: broken")
    assert "no_such_vendor_package" in rows["broken"]["reason"]
    assert result.json["broken"] == ["broken"]
    assert rows["cpu"]["status"] == "runs"
    assert "no_such_vendor_package" in outrider("ci-matrix").out


UNUSABLE = {
    "level": ("L9", 4.5),
    "runner_labels": ((), "ubuntu-latest", ("self hosted",), ("self-hosted,gpu",), ("",), None),
    "ranks_runner_labels": (("a\tb",),),
    "markers": (("graphs\nfast",), (" ",), "graphs"),
    "container": ("vendor/chip 9", "vendor/chip:9\nprivileged: true", ""),
    "torch": ("torch==2.10.0\n--pre", " "),
    "device_count": (0, True, "2"),
}


def test_a_declaration_that_no_workflow_can_use_is_broken(outrider, install):
    """Its row names the field, and holds none of the declared text."""
    for field, value in ((field, value) for field, values in UNUSABLE.items() for value in values):
        assert field in declaration_fault(CiDeclaration(**{field: value})), value
    assert "CiDeclaration" in declaration_fault(None)
    chip(install, markers=("graphs\nfast",), container="vendor/chip 9")
    row = by_name(outrider("ci-matrix", "--json"))["chip"]
    assert (row["status"], row["title"], row["markers"], row["container"]) == ("broken", "chip: broken", [], "")
    assert "markers=('graphs\\nfast',)" in row["reason"]


def test_select_by_name_and_by_marker(outrider, install):
    chip(install, markers=("warm",))
    assert set(by_name(outrider("ci-matrix", "--json", "--select", "warm", "--select", "cpu"))) == {"chip", "cpu"}
    result = outrider("ci-matrix", "--select", "cold")
    assert result.code == 1
    assert "no installed backend has that name or marker; there are" in result.err
    assert "warm" in result.err


def test_formats(outrider, install):
    chip(install)
    github = outrider("ci-matrix", "--format", "github", "--select", "chip").out
    assert github.count("\n") == 1, "a step's output takes one line"
    rows = json.loads(outrider("ci-matrix", "--format", "json", "--select", "chip").out)
    assert json.loads(github) == {"include": rows}
    assert rows[0]["backend"] == "chip"
    table = outrider("ci-matrix").out
    for word in ("backend", "chip", "cuda", "ubuntu-latest", "no runner with the labels"):
        assert word in table
