"""`verl-covgrpo doctor`: what it finds, and what it says to do about it."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import cloudpickle
import pytest
from rich.console import Console
from verl_fixtures import child, fresh_environment

from verl_covgrpo import registry, seams, verl_hooks
from verl_covgrpo.cli.doctor import Report, make_probe

pytestmark = pytest.mark.verl

# By its full name: `verl_covgrpo.cli.doctor` is also the command's function.
doctor = import_module("verl_covgrpo.cli.doctor")


@pytest.fixture(scope="module")
def well() -> Report:
    """What the real probe finds in this process, which has loaded the plugin."""
    return make_probe()()


def examine(worker: Report, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Return the exit status and the text for a worker that reports `worker`."""
    monkeypatch.setattr(doctor, "_in_workers", lambda cluster: {"Ray worker": worker})
    text = io.StringIO()
    status = doctor.examine(cluster=False, console=Console(file=text, width=200))
    return status, text.getvalue()


def test_all_well(well: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    assert well["problems"] == []
    assert set(well["seams"].values()) == {"in place"}
    methods = [registry.get(name) for name in registry.names()]
    assert well["ours"] == {
        "estimators": [method.adv_estimator for method in methods if method.adv_estimator],
        "losses": [method.loss_mode for method in methods if method.loss_mode],
    }
    status, text = examine(well, monkeypatch)
    assert status == 0
    assert text.rstrip().endswith("all well")
    assert "problem" not in text
    assert text.count(well["versions"]["verl"]) >= 2


def test_a_worker_without_the_plugin(well: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "verl-covgrpo":
            raise PackageNotFoundError(name)
        return real(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", version)
        worker = make_probe()()
    status, text = examine(worker, monkeypatch)
    assert status == 1
    assert "Ray worker: verl-covgrpo is not installed here: install it as on the driver" in text
    assert "verl-covgrpo is missing on Ray worker" in text
    assert "all well" not in text


def test_a_worker_with_the_plugin_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(seams, "SEAMS", {})
        patch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
        worker = make_probe()()
    status, text = examine(worker, monkeypatch)
    assert status == 1
    assert "(VERL_USE_EXTERNAL_PLUGINS=none): unset it, or let it name covgrpo" in text


def test_a_worker_whose_plugin_did_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(verl_hooks, "LOAD_ERROR", RuntimeError("broken on purpose"))
        worker = make_probe()()
    status, text = examine(worker, monkeypatch)
    assert status == 1
    assert "could not be loaded: RuntimeError('broken on purpose')" in text


def test_a_moved_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        seam = seams.SEAMS["verl.workers.utils.losses.ppo_loss"]
        patch.setattr(seam, "error", "verl 9.9.9: ppo_loss takes (everything)")
        worker = make_probe()()
    status, text = examine(worker, monkeypatch)
    assert status == 1
    assert "verl 9.9.9: ppo_loss takes (everything)" in text
    assert "install that one" in text


def test_a_name_that_verl_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo import core_algos

    with monkeypatch.context() as patch:
        patch.delitem(core_algos.POLICY_LOSS_REGISTRY, "covgrpo")
        worker = make_probe()()
    status, text = examine(worker, monkeypatch)
    assert status == 1
    assert "not among verl's registered losses: covgrpo" in text


@pytest.mark.parametrize(
    "package", ["verl-covgrpo", "verl", "torch", "tensordict", "TransferQueue"]
)
def test_versions_that_disagree(
    package: str, well: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = {**well, "versions": {**well["versions"], package: "0.0.1"}}
    status, text = examine(worker, monkeypatch)
    assert status == 1
    assert f"{package} is 0.0.1 on Ray worker and {well['versions'][package]} here" in text
    assert "install the same on every node" in text


def test_a_worker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = examine({"problems": ["the worker did not answer: late"]}, monkeypatch)
    assert status == 1
    assert "Ray worker: the worker did not answer: late" in text


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (ImportError("ray"), "ray is not installed: pip install 'ray[default]'"),
        (ConnectionError("none"), "no running Ray cluster was found (none): ray start --head"),
    ],
)
def test_without_ray(error: Exception, mend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_workers(cluster: bool) -> dict[str, Report]:
        raise error

    monkeypatch.setattr(doctor, "_in_workers", in_workers)
    text = io.StringIO()
    assert doctor.examine(cluster=True, console=Console(file=text, width=200)) == 1
    assert mend in text.getvalue()


def test_the_probe_runs_where_the_package_is_missing(tmp_path: Path) -> None:
    sent = base64.b64encode(cloudpickle.dumps(make_probe())).decode()
    code = f"""
import base64, importlib.metadata, pickle, sys
sys.modules["verl_covgrpo"] = None  # importing it fails
real = importlib.metadata.version
def version(name):
    if name == "verl-covgrpo":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
print(pickle.loads(base64.b64decode({sent!r}))()["problems"])
"""
    done = child("-c", code, cwd=tmp_path)
    problem = "verl-covgrpo is not installed here: install it as on the driver"
    assert done.stdout.splitlines()[-1:] == [str([problem])], done.stderr


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

arguments = {"num_cpus": 1, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=arguments)
try:
    cluster.add_node(**arguments, env_vars={"VERL_USE_EXTERNAL_PLUGINS": "none"})
    print("ADDRESS", cluster.address, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""


@pytest.fixture
def cluster_of_two() -> Iterator[str]:
    """Address of a running Ray cluster whose second node has the plugin switched off."""
    folder = tempfile.mkdtemp(prefix="cov-", dir="/tmp")  # short: Ray's sockets go there
    (Path(folder) / "ray").mkdir()
    # In a process of its own: a Ray that another test ran here would get in its way.
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**fresh_environment(), "RAY_TMPDIR": folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        yield next(line.split()[1] for line in lines if line.startswith("ADDRESS"))
    finally:
        process.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def test_every_node_of_a_running_cluster_is_asked(cluster_of_two: str, tmp_path: Path) -> None:
    env = {"RAY_ADDRESS": cluster_of_two, "COLUMNS": "200"}
    done = child("-m", "verl_covgrpo", "doctor", "--cluster", cwd=tmp_path, **env)
    assert done.returncode == 1, done.stdout + done.stderr
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert len(problems) == 1, done.stdout
    assert "verl did not load the plugin (VERL_USE_EXTERNAL_PLUGINS=none)" in problems[0]
    assert done.stdout.splitlines()[1].count("node ") == 2


def test_a_local_ray_is_started_and_asked(tmp_path: Path) -> None:
    done = child("-m", "verl_covgrpo", "doctor", cwd=tmp_path, COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ray worker" in done.stdout
    assert done.stdout.rstrip().endswith("all well")
    assert done.stderr == ""
