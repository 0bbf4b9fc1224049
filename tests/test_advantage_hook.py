"""The advantage hook on verl's real trainer classes and its real queue, without training."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl_fixtures import compose

from verl_covgrpo import MethodError, Reweighted, Rollout, build, methods, registry
from verl_covgrpo.verl_hooks import memory

ray = pytest.importorskip("ray")
tq = pytest.importorskip("transfer_queue")

pytestmark = pytest.mark.verl

MODES = ("sync", "colocate_async", "separate_async")
GRPO = "algorithm.adv_estimator=grpo"
VOCABULARY = 300
_partitions = count()

Row = dict[str, Any]


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A small local Ray, whose workers load the plugin as those of a launch do."""
    folder = tempfile.mkdtemp(prefix="cov-ray-")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=folder,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"VERL_USE_EXTERNAL_PLUGINS": "auto"}},
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def queue(ray_session: None) -> Iterator[None]:
    """Verl's queue, started as its task runner starts it."""
    config = compose("transfer_queue.backend.SimpleStorage.num_data_storage_units=1")
    tq.init(config.transfer_queue)
    yield
    tq.close()


def rows(outputs: int = 1, seed: int = 0) -> list[Row]:
    """Ragged responses as verl queues them: three prompts, three sessions each, two padding rows.

    Masks have holes and one row of a real group has no valid token.
    """
    generator = torch.Generator().manual_seed(seed)

    def row(uid: str, session: int, index: int, length: int, reward: float) -> Row:
        mask = torch.ones(length, dtype=torch.int64)
        if length > 3:
            mask[1:3] = torch.randint(0, 2, (2,), generator=generator)
        scores = torch.zeros(length)
        scores[-1] = reward
        return {
            "key": f"{uid}_{session}_{index}",
            "uid": uid,
            "response_mask": mask,
            "rm_scores": scores,
            "old_log_probs": -torch.rand(length, generator=generator) * 2,
            "ref_log_prob": -torch.rand(length, generator=generator) * 2,
            "entropy": torch.rand(length, generator=generator),
            "extra_fields": {"reward_extra_info": {"judge": float(length)}},
        }

    made = []
    for uid in ("a_1", "b", "c"):
        for session in range(3):
            for index in range(outputs if session else 1):
                length = int(torch.randint(1, 9, (), generator=generator))
                reward = float(torch.randint(0, 4, (), generator=generator)) / 3
                made.append(row(uid, session, index, length, reward))
    made[4]["response_mask"].zero_()
    for session in range(2):
        padding = row("padx", session, 0, 1, 0.0)
        padding["response_mask"].zero_()
        made.append(padding)
    return made


def put(batch_rows: Sequence[Row]) -> Any:
    """Put rows into the queue, under a partition of their own."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    fields = [{name: row[name] for name in row if name != "key"} for row in batch_rows]
    return tq.kv_batch_put(
        keys=[row["key"] for row in batch_rows],
        partition_id=f"train-{next(_partitions)}",
        fields=list_of_dict_to_tensordict(fields),
        tags=[{} for _ in batch_rows],
    )


def get(batch: Any, field: str) -> torch.Tensor:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[field])
    return data.to_padded_tensor()[field]


def trainer(*overrides: str, mode: str = "sync") -> Any:
    """Return a trainer with what `_compute_advantage` reads, and nothing else."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    made = object.__new__(get_trainer_cls(mode))
    made.config = compose(f"trainer.v1.trainer_mode={mode}", *overrides)
    made.global_steps = 3
    made.total_training_steps = 10
    return made


def pad(batch_rows: Sequence[Row], name: str) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([row[name] for row in batch_rows], batch_first=True)


def rollout(batch_rows: Sequence[Row], **fields: Any) -> Rollout:
    return Rollout(
        rewards=pad(batch_rows, "rm_scores").sum(1),
        response_mask=pad(batch_rows, "response_mask"),
        group=[row["uid"] for row in batch_rows],
        old_log_probs=pad(batch_rows, "old_log_probs"),
        **fields,
    )


def unhooked(batch_rows: Sequence[Row], *overrides: str) -> torch.Tensor:
    """Advantages of verl's own trainer, the hook taken off."""
    plain = trainer(*overrides)
    batch = put(batch_rows)
    type(plain)._compute_advantage.__wrapped__(plain, batch, {})
    return get(batch, "advantages")


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def expected_metrics(result: Reweighted) -> set[str]:
    return {f"covgrpo/{key}" for key in result.metrics}


def test_a_worker_of_ray_knows_our_names(ray_session: None) -> None:
    @ray.remote(num_cpus=0)
    def registered() -> list[bool]:
        import verl  # noqa: F401
        from verl.trainer.ppo import core_algos

        return [name in core_algos.ADV_ESTIMATOR_REGISTRY for name in estimators] + [
            name in core_algos.POLICY_LOSS_REGISTRY for name in losses
        ]

    ours = [registry.get(name) for name in registry.names()]
    estimators = [method.adv_estimator for method in ours if method.adv_estimator]
    losses = [method.loss_mode for method in ours if method.loss_mode]
    assert "covgrpo" in estimators and "covgrpo" in losses
    assert all(ray.get(registered.remote(), timeout=120))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as the trainer reads one: configuration and tokenizer."""
    from transformers import Qwen2Config

    from verl_covgrpo.demo.model import byte_tokenizer

    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    Qwen2Config(vocab_size=VOCABULARY, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", methods())
def test_every_method_gets_what_it_needs(
    name: str, mode: str, queue: None, model_folder: Path
) -> None:
    batch_rows = rows()
    batch, metrics = put(batch_rows), {}
    path = f"actor_rollout_ref.model.path={model_folder}"
    own = [GRPO] if registry.get(name).adv_estimator is None else []
    parameters = {"score_key": "judge"} if name == "dagrpo" else {}
    set_too = [f"algorithm.{name}.{key}={value}" for key, value in parameters.items()]
    hooked = trainer(f"+method={name}", path, *own, *set_too, mode=mode)
    hooked._compute_advantage(batch, metrics)
    norm_by_std = hooked.config.algorithm.norm_adv_by_std_in_grpo
    result = build(name, norm_adv_by_std_in_grpo=norm_by_std, **parameters)(
        rollout(
            batch_rows,
            extras={"judge": torch.tensor([len(row["rm_scores"]) for row in batch_rows]).float()},
            ref_log_probs=pad(batch_rows, "ref_log_prob"),
            entropy=pad(batch_rows, "entropy"),
            vocab_size=VOCABULARY,
            step=hooked.global_steps,
        )
    )
    assert_same(get(batch, "advantages"), result.advantages)
    prefix = registry.get(name).adv_estimator or registry.get(name).loss_mode
    assert metrics.keys() == {f"{prefix}/{key}" for key in result.metrics}
    for field, value in result.loss_fields.items():
        found = get(batch, field)
        torch.testing.assert_close(found.to(value.dtype), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scope", ["batch", "group"])
def test_the_queue_gets_the_advantages_of_the_method(mode: str, scope: str, queue: None) -> None:
    batch_rows = rows()
    batch, metrics = put(batch_rows), {"somebody/elses": 1.0}
    hooked = trainer("+method=covgrpo", f"algorithm.covgrpo.scope={scope}", mode=mode)
    returned = hooked._compute_advantage(batch, metrics)
    result = build("covgrpo", scope=scope)(rollout(batch_rows))
    assert_same(get(batch, "advantages"), result.advantages)
    assert returned.keys == batch.keys
    assert "covgrpo_frozen" not in returned.fields
    assert metrics.keys() == {"somebody/elses", *expected_metrics(result)}
    for key, value in result.metrics.items():
        if key != "seconds":
            assert metrics[f"covgrpo/{key}"] == pytest.approx(value, rel=1e-6), key


def test_metric_names_are_averaged_by_verl() -> None:
    names = build("covgrpo")(rollout(rows())).metrics
    words = ("max", "min", "sum", "total")
    assert [name for name in names for word in words if word in f"covgrpo/{name}"] == []


def test_returns_are_those_of_the_base(queue: None) -> None:
    batch_rows = rows()
    batch = put(batch_rows)
    trainer("+method=covgrpo")._compute_advantage(batch, {})
    assert_same(get(batch, "returns"), unhooked(batch_rows, GRPO))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_none_of_ours_changes_nothing(mode: str, estimator: str, queue: None) -> None:
    batch_rows = rows(outputs=2)
    batch, metrics = put(batch_rows), {}
    override = f"algorithm.adv_estimator={estimator}"
    plain = trainer(override, mode=mode)
    attributes = set(vars(plain))
    returned = plain._compute_advantage(batch, metrics)
    assert torch.equal(get(batch, "advantages"), unhooked(batch_rows, override))
    assert metrics == {}
    assert set(vars(plain)) == attributes
    assert [field for field in returned.fields if "covgrpo" in field] == []


@pytest.mark.parametrize("scope", ["batch", "group"])
def test_the_loss_form_freezes_and_leaves_the_advantages_alone(scope: str, queue: None) -> None:
    batch_rows = rows()
    batch, metrics = put(batch_rows), {}
    hooked = trainer(
        GRPO, "+method=covgrpo_loss", f"actor_rollout_ref.actor.policy_loss.scope={scope}"
    )
    returned = hooked._compute_advantage(batch, metrics)
    advantages = get(batch, "advantages")
    assert torch.equal(advantages, unhooked(batch_rows, GRPO))
    result = build("covgrpo_loss", scope=scope)(rollout(batch_rows))
    assert {"covgrpo_frozen", "advantages", "returns"} <= set(returned.fields)
    frozen = get(batch, "covgrpo_frozen")
    assert frozen.shape == (len(batch_rows), 4)
    torch.testing.assert_close(frozen, result.loss_fields["covgrpo_frozen"], rtol=1e-5, atol=1e-6)
    assert metrics.keys() == expected_metrics(result)


def test_another_base(queue: None) -> None:
    batch_rows = rows()
    batch = put(batch_rows)
    trainer("+method=covgrpo", "algorithm.covgrpo.base=rloo")._compute_advantage(batch, {})
    base = unhooked(batch_rows, "algorithm.adv_estimator=rloo")
    assert_same(
        get(batch, "advantages"),
        build("covgrpo")(rollout(batch_rows, base_advantages=base)).advantages,
    )
    assert_same(get(batch, "returns"), base)


def test_without_the_std_as_in_dr_grpo(queue: None) -> None:
    batch_rows = rows()
    batch, setting = put(batch_rows), "algorithm.norm_adv_by_std_in_grpo=False"
    trainer("+method=covgrpo", setting)._compute_advantage(batch, {})
    base = unhooked(batch_rows, GRPO, setting)
    assert_same(
        get(batch, "advantages"),
        build("covgrpo")(rollout(batch_rows, base_advantages=base)).advantages,
    )


@pytest.mark.parametrize("form", ["estimator", "loss"])
def test_several_outputs_share_the_base_of_the_last(form: str, queue: None) -> None:
    batch_rows = rows(outputs=3)
    shuffled = torch.randperm(len(batch_rows), generator=torch.Generator().manual_seed(1))
    batch_rows = [batch_rows[i] for i in shuffled]
    base = unhooked(batch_rows, GRPO)
    batch = put(batch_rows)
    if form == "estimator":
        trainer("+method=covgrpo")._compute_advantage(batch, {})
        expected = build("covgrpo")(rollout(batch_rows, base_advantages=base)).advantages
        assert_same(get(batch, "advantages"), expected)
    else:
        trainer(GRPO, "+method=covgrpo_loss")._compute_advantage(batch, {})
        expected = build("covgrpo_loss")(rollout(batch_rows, base_advantages=base))
        frozen = expected.loss_fields["covgrpo_frozen"]
        torch.testing.assert_close(get(batch, "covgrpo_frozen"), frozen, rtol=1e-5, atol=1e-6)


def test_padding_and_masked_tokens_get_nothing(queue: None) -> None:
    batch_rows = rows()
    batch = put(batch_rows)
    trainer("+method=covgrpo")._compute_advantage(batch, {})
    advantages = get(batch, "advantages")
    assert int(advantages[-2:].count_nonzero()) == 0
    assert int(advantages[4].count_nonzero()) == 0
    for row, found in zip(batch_rows, advantages, strict=True):
        valid = torch.zeros(advantages.shape[1], dtype=torch.bool)
        valid[: len(row["response_mask"])] = row["response_mask"].bool()
        assert int(found[~valid].count_nonzero()) == 0
    without = put(batch_rows[:-2])
    trainer("+method=covgrpo")._compute_advantage(without, {})
    assert_same(get(without, "advantages"), advantages[:-2])


def test_the_order_of_rows_does_not_matter(queue: None) -> None:
    batch_rows = rows()
    order = torch.randperm(len(batch_rows), generator=torch.Generator().manual_seed(2)).tolist()
    batch, permuted = put(batch_rows), put([batch_rows[i] for i in order])
    for form in (batch, permuted):
        trainer("+method=covgrpo")._compute_advantage(form, {})
    assert_same(get(permuted, "advantages"), get(batch, "advantages")[order])


@pytest.mark.parametrize("form", ["covgrpo", "covgrpo_loss"])
def test_rejected_tokens_do_not_count(form: str, queue: None) -> None:
    correction = (
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold='0.8_1.25'",
    )
    batch_rows, kept = rows(), rows()
    for row, kept_row in zip(batch_rows, kept, strict=True):
        row["rollout_log_probs"] = row["old_log_probs"].clone()
        row["rollout_log_probs"][0] -= 3.0  # far from the trainer's own: verl masks the token
        kept_row["response_mask"][0] = 0
    batch, metrics = put(batch_rows), {}
    method = "adv_estimator=covgrpo" if form == "covgrpo" else "adv_estimator=grpo"
    trainer(f"+method={form}", *correction, f"algorithm.{method}")._compute_advantage(
        batch, metrics
    )
    result = build(form)(rollout(kept))
    assert metrics["covgrpo/tokens"] == result.metrics["tokens"]
    assert_same(get(batch, "advantages"), result.advantages)
    for name, expected in result.loss_fields.items():
        torch.testing.assert_close(get(batch, name), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["covgrpo", "covgrpo_loss"])
def test_a_kl_penalty_in_the_reward_reaches_the_base(form: str, queue: None) -> None:
    from verl.trainer.ppo.core_algos import FixedKLController

    batch_rows = rows()
    for row in batch_rows:
        row["ref_log_prob"] = row["old_log_probs"] - 0.3 * row["entropy"]
    setting = "algorithm.use_kl_in_reward=True"
    plain, hooked = (
        trainer(GRPO, setting),
        trainer(f"+method={form}", setting, *([GRPO] if form == "covgrpo_loss" else [])),
    )
    plain.kl_ctrl_in_reward = hooked.kl_ctrl_in_reward = FixedKLController(0.5)
    batch, plain_batch = put(batch_rows), put(batch_rows)
    hooked._compute_advantage(batch, {})
    type(plain)._compute_advantage.__wrapped__(plain, plain_batch, {})
    base = get(plain_batch, "advantages")
    assert not torch.allclose(base, unhooked(batch_rows, GRPO), atol=1e-3)
    result = build(form)(rollout(batch_rows, base_advantages=base))
    assert_same(get(batch, "advantages"), result.advantages)
    for name, expected in result.loss_fields.items():
        torch.testing.assert_close(get(batch, name), expected, rtol=1e-5, atol=1e-6)


def test_a_trainer_keeps_its_methods(queue: None) -> None:
    hooked = trainer("+method=covgrpo")
    for _ in range(2):
        hooked._compute_advantage(put(rows()), {})
    [held] = hooked._verl_covgrpo_methods.values()
    hooked._compute_advantage(put(rows()), {})
    assert list(hooked._verl_covgrpo_methods.values()) == [held]
    assert next(iter(hooked._verl_covgrpo_methods.values())) is held


def test_a_missing_field_is_named_with_its_setting(queue: None) -> None:
    batch_rows = [{k: v for k, v in row.items() if k != "old_log_probs"} for row in rows()]
    with pytest.raises(MethodError, match=r"needs old_log_probs.*bypass_mode=False"):
        trainer("+method=covgrpo")._compute_advantage(put(batch_rows), {})


def test_a_missing_judge_score_lists_the_keys_found(queue: None) -> None:
    batch_rows = rows()
    batch_rows[2]["extra_fields"] = {"reward_extra_info": {"acc": 1.0, "format": 0.0}}
    hooked = trainer("+method=dagrpo", "algorithm.dagrpo.score_key=judge")
    with pytest.raises(MethodError, match=r"no 'judge' for row 2 .* it gave acc, format"):
        hooked._compute_advantage(put(batch_rows), {})


def test_outside_the_hook_the_estimator_names_the_entry_points(queue: None) -> None:
    from verl.trainer.ppo import core_algos

    trainer("+method=covgrpo")._compute_advantage(put(rows()), {})  # leaves nothing behind
    ones = torch.ones(2, 3)
    with pytest.raises(MethodError, match=r"covgrpo needs .*main_ppo.*trainer\.use_v1=True"):
        core_algos.get_adv_estimator_fn("covgrpo")(
            token_level_rewards=ones, response_mask=ones, index=["a", "a"], config=None
        )


# Memory


class Saved:
    """What verl's own checkpoint code needs of a trainer, and the order of what it did."""

    def __init__(self, hooked: Any) -> None:
        self.order: list[str] = []
        hooked.trainer_mode = "sync"
        hooked.use_critic = False
        hooked.actor_rollout_wg = SimpleNamespace(
            save_checkpoint=self.saw, load_checkpoint=lambda **_: self.order.append("loaded")
        )
        hooked.train_dataloader = SimpleNamespace(
            state_dict=dict, load_state_dict=lambda _: self.order.append("data")
        )
        hooked.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
        self.root = Path(hooked.config.trainer.default_local_dir)

    def saw(self, path: str, *_: Any, **__: Any) -> None:
        ours = Path(path).parent / memory.FILE
        assert ours.is_file(), "verl saves its parts when ours is there"
        assert not (self.root / "latest_checkpointed_iteration.txt").exists()
        self.order.append("saved")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["ha_dw", "pos_adv"])
def test_memory_is_saved_first_and_restored_last(
    name: str, mode: str, queue: None, tmp_path: Path
) -> None:
    where = f"trainer.default_local_dir={tmp_path}"
    hooked = trainer(f"+method={name}", where, mode=mode)
    seen = Saved(hooked)
    hooked._compute_advantage(put(rows()), {})
    hooked._save_checkpoint()
    assert seen.order == ["saved"]
    (held,) = hooked._verl_covgrpo_methods.values()
    assert held.state_dict() != build(name).state_dict()

    resumed = trainer(f"+method={name}", where, mode=mode)
    seen = Saved(resumed)
    resumed._load_checkpoint()
    assert resumed.global_steps == 3
    assert seen.order == ["loaded", "data"]
    (restored,) = resumed._verl_covgrpo_methods.values()
    assert restored.state_dict() == held.state_dict()

    path = f"trainer.resume_from_path={tmp_path}/global_step_3"
    elsewhere = f"trainer.default_local_dir={tmp_path}/other"
    by_path = trainer(f"+method={name}", elsewhere, "trainer.resume_mode=resume_path", path)
    Saved(by_path)
    by_path._load_checkpoint()
    (restored,) = by_path._verl_covgrpo_methods.values()
    assert restored.state_dict() == held.state_dict()


def test_a_checkpoint_of_another_method_is_refused(queue: None, tmp_path: Path) -> None:
    where = f"trainer.default_local_dir={tmp_path}"
    for method in ("covgrpo", "pos_adv"):
        hooked = trainer(f"+method={method}", where)
        (tmp_path / "global_step_3").mkdir(exist_ok=True)
        (tmp_path / "latest_checkpointed_iteration.txt").unlink(missing_ok=True)
        if method == "pos_adv":
            memory.save(tmp_path / "global_step_3", [build("pos_adv")])
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
        other = trainer("+method=ha_dw", where)
        Saved(other)
        words = "holds the memory of pos_adv" if method == "pos_adv" else "holds no memory of ha_dw"
        with pytest.raises(MethodError, match=words):
            other._load_checkpoint()
        del hooked


def test_a_run_from_scratch_looks_for_no_memory(queue: None, tmp_path: Path) -> None:
    hooked = trainer("+method=ha_dw", f"trainer.default_local_dir={tmp_path}")
    Saved(hooked)
    hooked._load_checkpoint()
    assert hooked.global_steps == 0


def test_methods_without_memory_write_nothing(queue: None, tmp_path: Path) -> None:
    hooked = trainer("+method=covgrpo", f"trainer.default_local_dir={tmp_path}")
    Saved(hooked).saw = lambda *_, **__: None  # type: ignore[method-assign]
    hooked.actor_rollout_wg.save_checkpoint = lambda *_, **__: None
    hooked._save_checkpoint()
    assert not (tmp_path / "global_step_3" / memory.FILE).exists()
