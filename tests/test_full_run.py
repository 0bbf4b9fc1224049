"""The stock trainer on the CPU, for real: Ray, FSDP2, vLLM, weight sync after every step."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from verl_covgrpo import data
from verl_covgrpo.demo import launch, model
from verl_covgrpo.demo.settings import OUTPUT, TINY, WarmStart
from verl_covgrpo.verl_hooks import memory

pytestmark = pytest.mark.full_run

STEPS = 3


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model that has learnt little, and its problems."""
    folder = tmp_path_factory.mktemp("prepared")
    model._make_tiny(replace(WarmStart(), target_accuracy=0.05), folder, lambda *_: None)
    task = TINY.task
    entries = data.problems(task.name, 64, 1, task.config)
    rows = data.reasoning_rows(task.name, entries, "train")
    return {
        "demo": TINY,
        "model": folder,
        "train": data.write_parquet(rows, folder / "train.parquet"),
        "validation": data.write_parquet(rows[:32], folder / "validation.parquet"),
    }


@pytest.fixture(scope="module")
def finished(prepared: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three steps of covgrpo on two ranks, with a reference policy."""
    out = tmp_path_factory.mktemp("run") / "covgrpo"
    run = launch.Run(
        out,
        **prepared,
        method="covgrpo",
        steps=STEPS,
        seed=3,
        ranks=2,
        overrides=("actor_rollout_ref.actor.use_kl_loss=True",),
    )
    with run:
        rows = [row["data"] for row in run.rows() if row is not None]
    return {"run": run, "rows": rows, "steps": [row for row in rows if "actor/loss" in row]}


def test_every_step_reports_finite_metrics(finished: dict[str, Any]) -> None:
    assert len(finished["steps"]) == STEPS
    for row in finished["steps"]:
        ours = {key: value for key, value in row.items() if key.startswith("covgrpo/")}
        assert len(ours) == 10
        assert all(math.isfinite(value) for value in ours.values())
        watched = ("actor/loss", "actor/entropy", "actor/grad_norm", "critic/score/mean")
        assert all(math.isfinite(row[key]) for key in watched)
        assert row["actor/grad_norm"] > 0


def test_weights_have_mean_one(finished: dict[str, Any]) -> None:
    for row in finished["steps"]:
        # mean^2 / (mean^2 + std^2) is 1 / (1 + std^2) for mean 1 alone.
        expected = 1 / (1 + row["covgrpo/weight_std"] ** 2)
        assert row["covgrpo/effective_share"] == pytest.approx(expected, abs=1e-6)
    assert any(row["covgrpo/weight_std"] > 0.01 for row in finished["steps"])


def test_tokens_of_both_ranks_are_counted(finished: dict[str, Any]) -> None:
    responses = 16 * 8
    for row in finished["steps"]:
        tokens = row["response_length/mean"] * responses
        assert row["covgrpo/tokens"] == pytest.approx(tokens)


def test_rollout_and_actor_log_probs_agree(finished: dict[str, Any]) -> None:
    for row in finished["steps"]:
        assert row["training/rollout_probs_diff_max"] < 1e-4


def test_the_reference_policy_is_left_behind(finished: dict[str, Any]) -> None:
    first, *_, last = finished["steps"]
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert last["actor/kl_loss"] > 1e-6


def test_the_policy_changed(finished: dict[str, Any], prepared: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    trained = finished["run"].checkpoint / f"global_step_{STEPS}" / "actor" / "huggingface"
    before = load_file(Path(prepared["model"]) / "model.safetensors")
    after = load_file(trained / "model.safetensors")
    assert before.keys() == after.keys()
    moved = [float((before[name] - after[name].float()).abs().max()) for name in before]
    assert 0 < max(moved) < 0.1


def test_its_checkpoint_can_be_evaluated(
    finished: dict[str, Any], prepared: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "eval"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "verl_covgrpo", "eval"),
            *(str(finished["run"].checkpoint), str(prepared["validation"])),
            *("--samples", "16", "--k", "1", "--k", "4", "--limit", "32", "--output", str(out)),
            *("--temperature", "1", "--max-tokens", "8", "--max-model-len", "256"),
        ],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    results = summary["results"]["reasoning_gym/basic_arithmetic"]
    assert 0 <= results["pass@1"]["mean"] <= results["pass@4"]["mean"] <= 1
    assert results["avg@16"]["mean"] == pytest.approx(results["pass@1"]["mean"])
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 32
    assert all(len(sample["answers"]) == 16 for sample in samples)
    assert len({answer for sample in samples for answer in sample["answers"]}) > 4


def test_no_process_is_left_behind(finished: dict[str, Any]) -> None:
    assert launch.processes_with(launch.MARK, finished["run"]._mark) == []


def test_entropy_reference_and_a_policy_loss(prepared: dict[str, Any], tmp_path: Path) -> None:
    """ep_grpo reads entropy and reference; kl_cov_exact changes the loss, two updates a batch."""
    run = launch.Run(
        tmp_path / "run",
        **prepared,
        method="[ep_grpo,kl_cov_exact]",
        steps=2,
        seed=3,
        ranks=1,
        overrides=(
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            "actor_rollout_ref.actor.policy_loss.share=0.2",
        ),
    )
    with run:
        rows = [row["data"] for row in run.rows() if row is not None]
    first, second = (row for row in rows if "actor/loss" in row)
    for row in (first, second):
        ours = {k: v for k, v in row.items() if k.startswith(("ep_grpo/", "kl_cov_exact/"))}
        assert len(ours) == 12
        assert all(math.isfinite(value) for value in ours.values())
        assert row["kl_cov_exact/penalised_share"] * row["ep_grpo/tokens"] >= 1
        assert row["ep_grpo/tokens"] == row["kl_cov_exact/tokens"]
        assert row["ep_grpo/gate_std"] > 0.05
        # The first of the two updates has moved the policy, the penalty holds it.
        assert row["actor/kl_cov_exact_penalty"] > 0
        assert row["actor/grad_norm"] > 0
    # Before the first update the policy is the reference.
    assert first["ep_grpo/process_share"] == 0.0
    assert second["ep_grpo/process_share"] > 0.0


def test_a_demonstration_joins_its_group(prepared: dict[str, Any], tmp_path: Path) -> None:
    """Every second prompt has one; a judge by rules scores all of them."""
    task = TINY.task
    found = {entry["question"]: entry for entry in data.problems(task.name, 64, 5, task.config)}
    rows = data.reasoning_rows(task.name, list(found.values())[:16], "train")
    for row in rows:
        answer = row["reward_model"]["ground_truth"]
        row["extra_info"]["demonstration"] = f"= {answer}" if row["extra_info"]["index"] % 2 else ""
    run = launch.Run(
        tmp_path / "run",
        **prepared | {"train": data.write_parquet(rows, tmp_path / "train.parquet")},
        method="dagrpo",
        steps=1,
        seed=3,
        ranks=1,
        overrides=(
            "algorithm.dagrpo.score_key=judge",
            "algorithm.dagrpo.delta=1.0",
            "reward.custom_reward_function.path=pkg://verl_covgrpo.rewards.judge",
            "reward.custom_reward_function.name=rule_score",
            "actor_rollout_ref.rollout.agent.default_agent_loop=demonstration_agent",
            f"trainer.rollout_data_dir={tmp_path / 'dump'}",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
        ),
    )
    with run:
        (step,) = (row["data"] for row in run.rows() if row is not None)
    assert 0 <= step["dagrpo/kept_share"] <= 1
    assert math.isfinite(step["dagrpo/judge_gap"]) and math.isfinite(step["actor/loss"])
    lines = (tmp_path / "dump" / "1.jsonl").read_text().splitlines()
    groups: dict[str, list[str]] = {}
    for line in map(json.loads, lines):
        groups.setdefault(line["input"], []).append(line["output"])
    texts = {row["prompt"][0]["content"]: row["extra_info"]["demonstration"] for row in rows}
    assert len(groups) == 16
    for given, outputs in groups.items():
        (wanted,) = (texts[text] for text in texts if f"{text}" in given)
        shown = [output for output in outputs if output.startswith("= ")]
        assert len(outputs) == 8
        assert shown == ([wanted] if wanted else [])


def test_a_killed_run_goes_on_with_its_memory(prepared: dict[str, Any], tmp_path: Path) -> None:
    """Three steps, a hard kill in the fourth, and a second launch that resumes."""
    kept = tmp_path / "checkpoints"
    overrides = (
        f"trainer.default_local_dir={kept}",
        "trainer.save_freq=3",
        "trainer.resume_mode=auto",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
    )
    arguments = {**prepared, "method": "ha_dw", "seed": 3, "ranks": 1, "overrides": overrides}
    before = []
    with launch.Run(tmp_path / "first", steps=9, **arguments) as run:
        for row in run.rows():
            if row is not None:
                before.append(row)
                if row["step"] == 3:
                    break
        time.sleep(1)
        for process in launch.processes_with(launch.MARK, run._mark):
            process.kill()
    saved = json.loads((kept / "global_step_3" / memory.FILE).read_text())
    history = saved["states"]["ha_dw"]["history"]
    assert history == [row["data"]["ha_dw/right_share"] for row in before]
    assert len(history) == 3

    with launch.Run(tmp_path / "second", steps=5, **arguments) as run:
        after = [row for row in run.rows() if row is not None]
    assert [row["step"] for row in after] == [4, 5]
    assert after[0]["data"]["ha_dw/anchor"] == statistics.fmean(history)
    longer = [*history, after[0]["data"]["ha_dw/right_share"]]
    assert after[1]["data"]["ha_dw/anchor"] == statistics.fmean(longer)


def test_an_interrupted_run_ends_its_processes(prepared: dict[str, Any], tmp_path: Path) -> None:
    run = launch.Run(tmp_path / "run", **prepared, method="grpo", steps=1, seed=0, ranks=1)
    deadline = time.monotonic() + 180
    with pytest.raises(KeyboardInterrupt), run:
        while "Started a local Ray" not in run.log.read_text():
            assert time.monotonic() < deadline, run.log.read_text()
            time.sleep(0.2)
        time.sleep(2)
        assert len(launch.processes_with(launch.MARK, run._mark)) > 3  # the driver, and Ray's own
        raise KeyboardInterrupt
    assert launch.processes_with(launch.MARK, run._mark) == []
    assert not Path(run._tmp).exists()


def test_ctrl_c_stops_the_demo(
    prepared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(settings: WarmStart, folder: Path, progress: Any) -> None:
        shutil.copytree(prepared["model"], folder, dirs_exist_ok=True)

    monkeypatch.setattr(model, "_make_tiny", copied)
    model.prepare("tiny", tmp_path / OUTPUT / "cache", lambda *_: None)
    mine = uuid.uuid4().hex
    demo = subprocess.Popen(
        [sys.executable, "-m", "verl_covgrpo", "demo", "--steps", "1"],
        cwd=tmp_path,
        env={**os.environ, "VERL_COVGRPO_TEST": mine},
        stdout=subprocess.PIPE,
        text=True,
        # A shell that runs tests in the background lets them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = tmp_path / OUTPUT / "tiny-covgrpo-seed0" / "train.log"
    deadline = time.monotonic() + 180
    while not log.exists() or "Started a local Ray" not in log.read_text():
        assert time.monotonic() < deadline and demo.poll() is None
        time.sleep(0.2)
    demo.send_signal(signal.SIGINT)
    said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "stopped; no process of the run is left" in said
    assert launch.processes_with("VERL_COVGRPO_TEST", mine) == []


def test_a_failed_run_says_why(prepared: dict[str, Any], tmp_path: Path) -> None:
    run = launch.Run(
        tmp_path / "run",
        **prepared,
        method="covgrpo",
        steps=1,
        seed=0,
        ranks=1,
        overrides=("algorithm.covgrpo.scope=rows",),
    )
    with pytest.raises(launch.RunFailed, match=r"covgrpo\.scope is 'rows'"), run:
        list(run.rows())
