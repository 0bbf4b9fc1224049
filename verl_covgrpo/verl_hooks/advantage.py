"""The advantage hook: hands the whole batch to a method inside verl's V1 trainer.

verl calls a registered estimator with rewards, mask and groups. What a method needs beyond that
(old log-probs, entropy, reference log-probs) is in the trainer's queue; the hook fetches it, holds
it while verl's own `_compute_advantage` runs, and afterwards hands metrics to verl's trackers and
writes back what a loss needs later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from verl_covgrpo import registry
from verl_covgrpo.errors import MethodError
from verl_covgrpo.registry import Method
from verl_covgrpo.rollout import Reweighted, Rollout
from verl_covgrpo.seams import on_import, replace_function
from verl_covgrpo.verl_hooks import base, selection

VERL_NAME = {
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_prob",
    "entropy": "entropy",
    "scores": "rm_scores",
}
"""Rollout field -> its name in verl's queue."""

ELSEWHERE = (
    "needs statistics of the whole batch, which only verl's V1 trainer hands to the plugin: launch "
    "`python3 -m verl.trainer.main_ppo` with trainer.use_v1=True (trainer modes sync, "
    "colocate_async and separate_async); one_step_off, fully_async and the V0 "
    "trainer have no such hook"
)


@dataclass
class Stage:
    """What one call of `_compute_advantage` hands to the registered estimator, and gets back."""

    method: Method
    fields: dict[str, Any]
    """Fields of the `Rollout` beyond rewards, mask and groups."""
    result: Reweighted | None = None


_STAGE: ContextVar[Stage | None] = ContextVar("verl_covgrpo_stage", default=None)


@contextmanager
def _holding(stage: Stage) -> Iterator[None]:
    token = _STAGE.set(stage)
    try:
        yield
    finally:
        _STAGE.reset(token)


def estimator(method: type[Method]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the function that verl's registry holds for an advantage method."""

    def compute(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Any = None,
        config: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stage = _STAGE.get()
        if stage is None or not isinstance(stage.method, method):
            raise MethodError(f"{method.name} {ELSEWHERE}")
        if index is None:
            raise MethodError(f"{method.name} needs uid, the prompt of each response, as `index`")
        rollout_fields = dict(stage.fields)
        returns = None
        if stage.method.base != "grpo":
            rollout_fields["base_advantages"], returns = base.compute(
                stage.method.base, token_level_rewards, response_mask, index, config
            )
        rollout = Rollout(
            rewards=token_level_rewards.sum(dim=-1),
            response_mask=response_mask,
            group=index,
            **rollout_fields,
        )
        stage.result = stage.method(rollout)
        if returns is None:
            A = stage.method.base_advantages(rollout)
            returns = torch.where(rollout.response_mask, A, 0)
        return stage.result.advantages, returns

    compute.__name__ = compute.__qualname__ = f"compute_{method.name}_advantage"
    compute.verl_covgrpo_method = method.name  # type: ignore[attr-defined]
    return compute


def last_output_rows(keys: Sequence[str]) -> torch.Tensor | None:
    """Row of each session's last output, (B,); None where every session has one output.

    verl's keys read "{uid}_{session}_{index}"; an agent loop may give several outputs per session.
    """
    last: dict[str, tuple[int, int]] = {}
    sessions = []
    for row, key in enumerate(keys):
        session, _, index = key.rpartition("_")
        sessions.append(session)
        if session not in last or last[session][0] < int(index):
            last[session] = (int(index), row)
    if len(last) == len(sessions):
        return None
    return torch.tensor([last[session][1] for session in sessions])


def methods_of(trainer: Any, selected: selection.Selection) -> dict[type[Method], Method]:
    """The trainer's own instances: built once, so that a method with memory keeps it."""
    held = trainer.__dict__.setdefault("_verl_covgrpo_methods", {})
    for method in selected.methods:
        if method not in held:
            held[method] = selection.build(method, trainer.config)
    return held


def _fetch(batch: Any, verl_names: Sequence[str]) -> tuple[Any, Any]:
    """Return the padded fields of the whole batch, and the nested response_mask."""
    import transfer_queue as tq

    data = tq.kv_batch_get(
        keys=batch.keys,
        partition_id=batch.partition_id,
        select_fields=list(dict.fromkeys(("response_mask", *verl_names))),
    )
    nested_mask = data["response_mask"]
    return data.to_padded_tensor(), nested_mask


def _rollout_fields(trainer: Any, batch: Any, method: Method) -> dict[str, Any]:
    wanted = [name for name in method.needs if name in VERL_NAME]
    if trainer.config.algorithm.use_kl_in_reward and "scores" not in wanted:
        wanted.append("scores")
    data, _ = _fetch(batch, [VERL_NAME[name] for name in wanted])
    fields: dict[str, Any] = {
        name: data[VERL_NAME[name]] for name in wanted if VERL_NAME[name] in data
    }
    if "scores" in fields:
        fields["scores"] = fields["scores"].sum(dim=-1)
    total_steps = getattr(trainer, "total_training_steps", None) or 0
    steps_done = max(0, trainer.global_steps - 1)
    steps_per_epoch = max(1, getattr(trainer, "steps_per_epoch", None) or 1)
    epochs = max(1, -(-total_steps // steps_per_epoch))
    fields.update(
        step=trainer.global_steps,
        progress=min(1.0, steps_done / total_steps) if total_steps else 0.0,
        epoch=min(steps_done // steps_per_epoch, epochs - 1),
        epochs=epochs,
        final_output=last_output_rows(batch.keys),
    )
    if key := getattr(method, "score_key", None):
        fields["extras"] = {key: _reward_extra(batch, key)}
    if "vocab_size" in method.needs:
        fields["vocab_size"] = _vocab_size(trainer)
    return fields


def _reward_extra(batch: Any, key: str) -> torch.Tensor:
    """What the reward function returned under a key, (B,).

    Raises:
        MethodError: a row lacks it; lists the keys found.
    """
    import transfer_queue as tq

    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
    )
    values = []
    for row, held in enumerate(data["extra_fields"]):
        extra_fields = getattr(held, "data", held)
        info = (extra_fields or {}).get("reward_extra_info") or {}
        if info.get(key) is None:
            raise MethodError(
                f"the reward function gave no {key!r} for row {row} of the batch; it gave "
                f"{', '.join(sorted(info)) or 'a number alone'}: let it return a dict with "
                f"'score' and {key!r}"
            )
        values.append(float(info[key]))
    return torch.tensor(values)


def _vocab_size(trainer: Any) -> int:
    """The size of the model's vocabulary, read as verl reads the model's configuration."""
    held = trainer.__dict__
    if "_verl_covgrpo_vocab_size" not in held:
        from verl.utils.config import omega_conf_to_dataclass

        hf_config = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.model).hf_config
        held["_verl_covgrpo_vocab_size"] = int(hf_config.get_text_config().vocab_size)
    return held["_verl_covgrpo_vocab_size"]


def _freeze_for_loss(trainer: Any, batch: Any, method: Method) -> Reweighted:
    """Let a loss-only method look at the batch once the launch's own estimator is done."""
    fields = _rollout_fields(trainer, batch, method)
    data, _ = _fetch(batch, ["advantages", "rm_scores", "uid"])
    rollout = Rollout(
        rewards=data["rm_scores"].sum(dim=-1),
        response_mask=data["response_mask"],
        group=list(data["uid"]),
        base_advantages=data["advantages"],
        **fields,
    )
    return method(rollout)


def _write_back(batch: Any, loss_fields: dict[str, torch.Tensor]) -> Any:
    """Put the fields of a loss into the queue: (B, T) ones as verl's own, others row by row."""
    import transfer_queue as tq
    from tensordict import TensorDict
    from verl.workers.utils.padding import response_to_nested

    data, nested_mask = _fetch(batch, [])
    width = data["response_mask"].shape[1]
    fields = {
        name: response_to_nested(value, nested_mask)
        if value.ndim == 2 and value.shape[1] == width and name.endswith("_BT")
        else value
        for name, value in loss_fields.items()
    }
    return tq.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(fields, batch_size=len(batch)),
    )


def _wrap_compute_advantage(original: Callable[..., Any]) -> Callable[..., Any]:
    def _compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        selected = selection.selection(self.config)
        if not selected:
            return original(self, batch, metrics)
        methods = methods_of(self, selected)
        results: dict[str, Reweighted] = {}
        if selected.estimator is None:
            batch = original(self, batch, metrics)
        else:
            method = methods[selected.estimator]
            stage = Stage(method, _rollout_fields(self, batch, method))
            with _holding(stage):
                batch = original(self, batch, metrics)
            if stage.result is None:
                raise MethodError(f"verl's trainer did not call the estimator of {method.name}")
            results[method.name] = stage.result
        if selected.loss is not None and selection.loss_only(selected.loss):
            method = methods[selected.loss]
            results[method.name] = _freeze_for_loss(self, batch, method)
        for name, result in results.items():
            prefix = method_prefix(name)
            metrics.update({f"{prefix}/{key}": value for key, value in result.metrics.items()})
            if result.loss_fields:
                batch = _write_back(batch, result.loss_fields)
        return batch

    return _compute_advantage


def method_prefix(name: str) -> str:
    """Metrics of both forms of a method go by one name: covgrpo_loss reports covgrpo/..."""
    method = registry.get(name)
    return method.adv_estimator or method.loss_mode or name


def _register(core_algos: ModuleType) -> None:
    """Put the advantage methods into verl's registry, under their own names."""
    for name in registry.names():
        method = registry.get(name)
        if method.adv_estimator is None:
            continue
        # A name that is taken stays taken: `checks` refuses a launch that selects it.
        if method.adv_estimator not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(method.adv_estimator)(estimator(method))


def install() -> None:
    replace_function(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._compute_advantage",
        _wrap_compute_advantage,
        parameters=("self", "batch", "metrics"),
    )
    on_import("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY", _register)
