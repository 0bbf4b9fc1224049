"""What the set-up decides, for machines that are not at hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("covgrpo_bootstrap", ROOT / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("running", [(3, 11), (3, 12)])
def test_a_python_with_wheels_is_kept(bootstrap: ModuleType, running: tuple[int, int]) -> None:
    assert bootstrap.choose_python(running, "/here/python", lambda _: "/other") == "/here/python"


@pytest.mark.parametrize(
    ("on_path", "chosen"),
    [
        (["python3.11", "python3.12"], "/bin/python3.12"),
        (["python3.11"], "/bin/python3.11"),
    ],
)
@pytest.mark.parametrize("running", [(3, 10), (3, 13)])
def test_another_python_is_looked_for(
    bootstrap: ModuleType, running: tuple[int, int], on_path: list[str], chosen: str
) -> None:
    def find(name: str) -> str | None:
        return f"/bin/{name}" if name in on_path else None

    assert bootstrap.choose_python(running, "/here/python", find) == chosen


def test_without_a_fitting_python_it_says_which(bootstrap: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"Python 3\.11 or 3\.12 is needed, this is 3\.14"):
        bootstrap.choose_python((3, 14), "/here/python", lambda _: None)


@pytest.mark.parametrize(
    ("system", "machine", "build"),
    [
        ("Linux", "x86_64", "+cpu"),
        ("Linux", "AMD64", "+cpu"),
        ("Linux", "aarch64", "+cpu"),
        ("Linux", "arm64", "+cpu"),
        ("Darwin", "arm64", ""),
    ],
)
def test_the_build_of_torch(bootstrap: ModuleType, system: str, machine: str, build: str) -> None:
    assert bootstrap.torch_requirement(system, machine) == f"torch=={bootstrap.TORCH}{build}"


@pytest.mark.parametrize("where", [("Windows", "AMD64"), ("Linux", "riscv64")])
def test_a_machine_without_wheels_is_named(bootstrap: ModuleType, where: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match=f"no wheel for {where[0]} on {where[1]}"):
        bootstrap.torch_requirement(*where)


def test_the_index_is_added_only_where_pip_finds_nothing(bootstrap: ModuleType) -> None:
    index = ["--extra-index-url", bootstrap.CPU_INDEX]
    asked: list[list[str]] = []

    def asking(*answers: bool) -> list[str]:
        asked.clear()
        given = iter(answers)

        def probe(command: Sequence[str]) -> bool:
            asked.append(list(command))
            return next(given)

        return bootstrap.index_options(["pip"], "torch==1", probe)

    assert asking(True) == []
    assert asking(False, True) == index
    assert [bootstrap.CPU_INDEX in command for command in asked] == [False, True]
    assert all("--dry-run" in command and command[-1] == "torch==1" for command in asked)
    with pytest.raises(SystemExit, match="pip finds torch==1 neither by itself nor at"):
        asking(False, False)


def test_the_fingerprint_follows_what_is_installed(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    for name in ("pyproject.toml", "bootstrap.py"):
        tmp_path.joinpath(name).write_text("first")
    first = bootstrap.fingerprint("python3.12")
    assert bootstrap.fingerprint("python3.12") == first
    assert bootstrap.fingerprint("python3.11") != first
    for name in ("pyproject.toml", "bootstrap.py"):
        tmp_path.joinpath(name).write_text("second")
        assert bootstrap.fingerprint("python3.12") != first
        tmp_path.joinpath(name).write_text("first")


def test_an_environment_that_fits_is_left_alone(
    bootstrap: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stamp = tmp_path / "installed"
    monkeypatch.setattr(bootstrap, "STAMP", stamp)
    monkeypatch.setattr(bootstrap, "choose_python", lambda *_: "python")
    stamp.write_text(bootstrap.fingerprint("python"))
    monkeypatch.setattr(bootstrap.venv, "create", lambda *_, **__: pytest.fail("set up again"))
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: pytest.fail("ran something"))
    bootstrap.main()
    assert capsys.readouterr().out == ""
