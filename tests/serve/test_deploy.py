"""What lies in examples/deploy: it names metrics, options and paths that the server has, and its tools accept it."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="not run: the extra serve isn't installed")
pytest.importorskip("yaml", reason="not run: PyYAML isn't installed")

import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from outrider.serve.command import serve
from outrider.serve.config import ServeConfig
from outrider.serve.connection.engine_process import EngineThread
from outrider.serve.http.metrics import ServerMetrics
from outrider.speculative.eagle import EagleProposer
from outrider_proof import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
DEPLOY = EXAMPLES / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


@pytest.fixture(scope="module")
def metrics():
    """Metrics that a server exports, as Prometheus parses them: names of samples, with the names of their labels."""

    async def main():
        client = EngineThread(lambda: tiny.engine(EagleProposer(tiny.eagle_head(), draft_tokens=2), max_requests=1))
        await client.start()
        while client.snapshot is None:
            await asyncio.sleep(0.01)
        made = ServerMetrics(client, ServeConfig(names=("m",)))
        made.record_first_token(0.1)
        made.record_output(0.1, 2, 1, 2)
        made.record_finished(0.1, 3, 4)
        made.count_samples(["stop"])
        made.count_tokens(3, 4)
        made.count_response("/v1/completions", 200)
        text = made.text().decode()
        await client.close()
        return text

    found = {}
    for family in text_string_to_metric_families(asyncio.run(main())):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_of_the_dashboard_is_exported_with_its_labels(metrics):
    board = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 25
    named = set()
    for expression in expressions:
        assert expression.count("(") == expression.count(")")
        for name, selector in re.findall(r"\b((?:outrider|vllm:)[a-z_:]*)(\{[^}]*\})?", expression):
            named.add(name)
            assert name in metrics, f"{name}, in {expression}"
            labels = set(re.findall(r"([a-z_]+)=~?\"", selector)) | set(re.findall(r"by \(([a-z_]+)\)", expression))
            assert labels - {"instance"} <= metrics[name], f"{name}, in {expression}"  # Prometheus adds the instance
    assert {name.removesuffix("_bucket") for name in named} >= {
        "outrider_time_to_first_token_seconds",
        "outrider_inter_token_seconds",
        "outrider_accepted_tokens_total",
        "outrider_requests_waiting",
        "outrider_kv_cache_usage",
        "outrider_device_wait_seconds_total",
    }


def test_panels_of_the_dashboard_have_a_place_of_their_own():
    board = json.loads((DEPLOY / "grafana.json").read_text())
    taken, ids = set(), set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["id"] not in ids
        ids.add(panel["id"])
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__rate_interval", "__all"}
    assert used == variables


def test_the_names_that_llm_d_reads_are_exported(metrics):
    assert {f"vllm:{name}" for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")} <= set(
        metrics
    )
    assert {"block_size", "num_gpu_blocks"} <= metrics["vllm:cache_config_info"]


def options(arguments):
    """Parse options of ``outrider serve``; none of them is run. Files of the deployed machine stand for files of this one."""
    here = [each.replace("%d/keys", __file__).replace("=/model", "=.") for each in arguments]
    command = typer.main.get_command(_app())
    return command.make_context("serve", here, resilient_parsing=False).params


def _app():
    app = typer.Typer()
    app.command()(serve)
    return app


def entry(dockerfile):
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile.read_text(), re.MULTILINE)
    return json.loads(found)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_somebody_else_and_are_checked(dockerfile):
    text = dockerfile.read_text()
    last = text[text.rindex("\nFROM ") :]
    (user,) = re.findall(r"^USER (\S+)$", last, re.MULTILINE)
    assert int(user) > 0
    assert f"--uid {user}" in last
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", last, re.MULTILINE)
    assert ":8000/health" in json.loads(check)[2]
    compile(json.loads(check)[2], "HEALTHCHECK", "exec")
    program, command, *arguments = entry(dockerfile)
    assert (program, command) == ("outrider", "serve")
    given = options(arguments)
    assert (given["host"], given["port"]) == ("0.0.0.0", 8000)
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (EXAMPLES.parent / source).exists()


def test_what_an_image_is_built_from_is_there():
    """.dockerignore leaves all out but what the build reads: the wheel's packages, and files that pyproject names."""
    root = EXAMPLES.parent
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert all((root / name).exists() for name in kept)
    pyproject = (root / "pyproject.toml").read_text()
    (packages,) = re.findall(r"^packages = \[\n(.*?)\]", pyproject, re.MULTILINE | re.DOTALL)
    assert {package.split("/")[0] for package in re.findall(r'"(.*?)"', packages)} <= kept
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= kept


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(dockerfile):
    # Beside Python in an environment that nobody activated.
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("not run: hadolint isn't installed")
    found = subprocess.run([hadolint, str(dockerfile)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_unit_is_right(tmp_path):
    text = (DEPLOY / "outrider.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, name, *arguments = command.split()
    assert (program, name) == ("/opt/outrider/bin/outrider", "serve")
    given = options(arguments)
    assert given["host"] == "127.0.0.1"
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(patience) > given["drain_seconds"] + 10
    if shutil.which("systemd-analyze") is None:
        pytest.skip("not run: the rest, since systemd-analyze isn't here")
    unit = tmp_path / "outrider.service"
    unit.write_text(text.replace(program, "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def documents(kind):
    return [each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text()) if each["kind"] == kind]


def test_manifests_fit_kubernetes_schema():
    validate = pytest.importorskip("kubernetes_validate", reason="not run: kubernetes-validate isn't installed")
    own = [each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text()) if "k8s.io" not in each["apiVersion"]]
    assert len(own) >= 5
    for each in own:
        validate.validate(each, validate.latest_version(), strict=True)


def test_deployments_ask_for_what_the_server_has():
    for deployment in documents("Deployment"):
        pod = deployment["spec"]["template"]
        labels = pod["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (container,) = pod["spec"]["containers"]
        image = container["image"].removeprefix("outrider:")
        given = options([*entry(DEPLOY / f"{image}.Dockerfile")[2:], *container["args"]])
        assert pod["spec"]["terminationGracePeriodSeconds"] > given["drain_seconds"] + 10
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001
        probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
        assert {name: probe["path"] for name, probe in probes.items()} == {
            "startup": "/ready",
            "readiness": "/ready",
            "liveness": "/health",
        }
        assert {"name": "http", "containerPort": given["port"]} in container["ports"]
        if given["kv_events"]:
            assert int(given["kv_events"].rpartition(":")[2]) in [port["containerPort"] for port in container["ports"]]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["spec"]["volumes"]}
        chosen = [service for service in documents("Service") if service["spec"]["selector"].items() <= labels.items()]
        assert len(chosen) == 1
    (pool,) = documents("InferencePool")
    assert any(
        pool["spec"]["selector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
        for each in documents("Deployment")
    )


def test_rays_config_fits_its_settings_and_rays_schema():
    pytest.importorskip("ray.serve", reason="not run: the extra ray isn't installed")
    from ray.serve.schema import ServeDeploySchema

    from outrider.integrations.ray import RaySettings

    given = yaml.safe_load((EXAMPLES / "ray" / "serve.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(given).applications
    assert application.import_path == "outrider.integrations.ray:app"
    assert RaySettings(**application.args).max_replicas == 4
    words = re.findall(r"serve run outrider\.integrations\.ray:app (.*)", (EXAMPLES / "ray" / "README.md").read_text())
    for each in words:
        RaySettings(**dict(word.split("=") for word in each.split()))
