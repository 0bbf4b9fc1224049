"""The loss hook inside verl's own `ppo_loss`, with the actor configurations of its workers."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl_fixtures import compose

from verl_covgrpo import MethodError, Rollout, build, methods, registry

pytestmark = pytest.mark.verl

BACKENDS = {"fsdp": [], "megatron": ["model_engine=megatron"]}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
PROMPTS = (2, 4, 1, 3, 2, 5)
RESPONSES = (5, 1, 7, 3, 6, 2)
SPLITS = {
    "one": [[[0, 1, 2, 3, 4, 5]]],
    "one row each": [[[0], [1], [2], [3], [4], [5]]],
    "three rows each": [[[0, 1, 2], [3, 4, 5]]],
    "uneven, mixed": [[[4, 0], [5], [2, 1, 3]]],
    "two ranks": [[[0, 1, 2]], [[3, 4, 5]]],
    "two ranks, mixed": [[[5], [0, 2]], [[4, 3], [1]]],
}
"""Ranks, each a list of micro-batches, each a list of rows."""


def nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


class Batch:
    """Responses to prompts in pairs, ragged, with a hole in a mask; old and current log-probs."""

    def __init__(
        self, seed: int = 0, responses: Sequence[int] = RESPONSES, drift: float = 0.6
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.responses = responses

        def rows() -> list[torch.Tensor]:
            return [torch.rand(n, generator=generator) for n in responses]

        self.old = [-2 * row for row in rows()]
        self.new = [old + drift * (row - 0.5) for old, row in zip(self.old, rows(), strict=True)]
        self.ref = [old + 0.4 * (row - 0.5) for old, row in zip(self.old, rows(), strict=True)]
        self.entropy = rows()
        self.mask = [torch.ones(n, dtype=torch.int64) for n in responses]
        self.mask[2][3] = 0
        self.group = [row // 2 for row in range(len(responses))]
        self.rewards = torch.tensor([1.0, 0.0, 0.3, 0.9, 0.0, 1.0] * 3)[: len(responses)]

    def rollout(self, **fields: Any) -> Rollout:
        pad = torch.nn.utils.rnn.pad_sequence
        given = {
            "old_log_probs": pad(self.old, batch_first=True),
            "ref_log_probs": pad(self.ref, batch_first=True),
            "entropy": pad(self.entropy, batch_first=True),
        }
        return Rollout(
            rewards=self.rewards,
            response_mask=pad(self.mask, batch_first=True),
            group=self.group,
            **given | fields,
        )

    def gradient(
        self,
        config: Any,
        split: list[list[list[int]]],
        advantages: torch.Tensor,
        fields: Mapping[str, torch.Tensor] | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> list[torch.Tensor]:
        """Gradient of the summed loss in each row's log-probs, averaged over the ranks.

        `fields` reach the loss as they do from the queue: nested where they are (B, T).
        """
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils import losses

        leaves = [row.clone().requires_grad_() for row in self.new]
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(leaves))]
        for rank in split:
            for rows in rank:
                travelled = {
                    name: nested([value[i, : self.responses[i]] for i in rows])
                    if name.endswith("_BT")
                    else value[rows]
                    for name, value in (fields or {}).items()
                }
                data = TensorDict(
                    {
                        "prompts": nested([torch.zeros(prompts[i]).long() for i in rows]),
                        "responses": nested([torch.zeros(self.responses[i]).long() for i in rows]),
                        "response_mask": nested([self.mask[i] for i in rows]),
                        "old_log_probs": nested([self.old[i] for i in rows]),
                        "advantages": nested([advantages[i, : self.responses[i]] for i in rows]),
                        "ref_log_prob": nested([self.ref[i] for i in rows]),
                        **travelled,
                    },
                    batch_size=len(rows),
                )
                tu.assign_non_tensor(
                    data,
                    dp_size=len(split),
                    batch_num_tokens=sum(int(mask.sum()) for mask in self.mask),
                    global_batch_size=len(self.responses),
                )
                # The model's output at a token is the log-prob of the next one.
                output = torch.cat(
                    [
                        part
                        for i in rows
                        for part in (torch.zeros(prompts[i] - 1), leaves[i], torch.zeros(1))
                    ]
                )
                lengths = torch.tensor([0] + [prompts[i] + self.responses[i] for i in rows])
                log_probs = torch.nested.nested_tensor_from_jagged(output, lengths.cumsum(0))
                value, metrics = (loss or losses.ppo_loss)(
                    config=config, model_output={"log_probs": log_probs}, data=data, dp_group=None
                )
                assert "actor/pg_loss" in metrics
                (value / len(split)).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]


def actor_config(*overrides: str) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(compose(*overrides).actor_rollout_ref.actor)


@pytest.fixture(scope="module", params=BACKENDS)
def loss_config(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes the configuration of an actor with the loss of covgrpo_loss."""

    def make(*overrides: str) -> Any:
        return actor_config("+method=covgrpo_loss", *BACKENDS[request.param], *overrides)

    return make


def vanilla(aggregation: str = "token-mean") -> Any:
    return actor_config(f"actor_rollout_ref.actor.loss_agg_mode={aggregation}")


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) == len(RESPONSES)
    assert max(float(row.abs().max()) for row in expected) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def weighted_by_hand(batch: Batch, advantages: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
    """A exp(-c^2 / (2 s^2)) N / sum(w), in plain floats, c of the current log-probs."""
    weighted = advantages.clone()
    for row, log_probs in enumerate(batch.new):
        mean_l, mean_a, inv_s, norm = frozen[row].tolist()
        for column, log_prob in enumerate(log_probs.tolist()):
            u = (log_prob - mean_l) * (float(advantages[row, column]) - mean_a) * inv_s
            weight = torch.tensor(-0.5 * u * u, dtype=torch.float64).exp() * norm
            weighted[row, column] *= float(weight)
    return weighted


@pytest.mark.parametrize("scope", ["batch", "group"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_loss_does_not_depend_on_the_split(
    aggregation: str, scope: str, loss_config: Callable[..., Any]
) -> None:
    config = loss_config(
        f"actor_rollout_ref.actor.loss_agg_mode={aggregation}",
        f"actor_rollout_ref.actor.policy_loss.scope={scope}",
    )
    batch = Batch()
    result = build("covgrpo_loss", scope=scope)(batch.rollout())
    advantages, frozen = result.advantages, result.loss_fields["covgrpo_frozen"]
    fields = result.loss_fields
    weighted = weighted_by_hand(batch, advantages, frozen)
    expected = batch.gradient(vanilla(aggregation), SPLITS["one"], weighted)
    for split in SPLITS.values():
        assert_same(batch.gradient(config, split, advantages, fields), expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_estimator_does_not_depend_on_the_split(aggregation: str) -> None:
    config, batch = vanilla(aggregation), Batch()
    advantages = build("covgrpo")(batch.rollout()).advantages
    expected = batch.gradient(config, SPLITS["one"], advantages)
    for split in SPLITS.values():
        assert_same(batch.gradient(config, split, advantages), expected)


@pytest.mark.parametrize("scope", ["batch", "group"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_both_forms_agree_before_the_first_update(aggregation: str, scope: str) -> None:
    batch = Batch()
    batch.new = batch.old
    result = build("covgrpo_loss", scope=scope)(batch.rollout())
    weighted = build("covgrpo", scope=scope)(batch.rollout()).advantages
    config = actor_config(
        "+method=covgrpo_loss", f"actor_rollout_ref.actor.loss_agg_mode={aggregation}"
    )
    assert_same(
        batch.gradient(config, SPLITS["three rows each"], result.advantages, result.loss_fields),
        batch.gradient(vanilla(aggregation), SPLITS["one"], weighted),
    )


def test_masked_tokens_get_no_gradient(loss_config: Callable[..., Any]) -> None:
    batch = Batch()
    batch.new = batch.old  # nothing is clipped
    result = build("covgrpo_loss")(batch.rollout())
    gradient = batch.gradient(loss_config(), SPLITS["one"], result.advantages, result.loss_fields)
    assert gradient[2][3] == 0
    assert int((gradient[2] != 0).sum()) == RESPONSES[2] - 1


def test_without_the_frozen_statistics_it_says_where_they_come_from(
    loss_config: Callable[..., Any],
) -> None:
    batch = Batch()
    advantages = build("covgrpo_loss")(batch.rollout()).advantages
    with pytest.raises(MethodError, match=r"covgrpo has no covgrpo_frozen; it needs .*main_ppo"):
        batch.gradient(loss_config(), SPLITS["one"], advantages)


def test_a_micro_batch_is_forgotten_after_its_loss() -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    batch = Batch()
    result = build("covgrpo_loss")(batch.rollout())
    config = actor_config("+method=covgrpo_loss")
    batch.gradient(config, SPLITS["one"], result.advantages, result.loss_fields)
    ones = torch.ones(2, 3)
    with pytest.raises(
        MethodError, match="policy loss covgrpo has no covgrpo_frozen; it needs statistics"
    ):
        get_policy_loss_fn("covgrpo")(
            old_log_prob=ones, log_prob=ones, advantages=ones, response_mask=ones, config=config
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", [False, True])
def test_verls_own_losses_stay_the_same_to_the_bit(backend: str, extra: bool) -> None:
    from verl.workers.utils.losses import ppo_loss

    batch = Batch()
    result = build("covgrpo_loss")(batch.rollout())
    fields = result.loss_fields if extra else None
    for mode in ("vanilla", "gspo"):
        config = actor_config(
            *BACKENDS[backend], f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}"
        )
        found, expected = (
            batch.gradient(config, SPLITS["two ranks, mixed"], result.advantages, fields, loss)
            for loss in (ppo_loss, ppo_loss.__wrapped__)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_loss_reports_the_mean_weight() -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from verl_covgrpo.verl_hooks import loss

    batch = Batch()
    rollout = batch.rollout()
    result = build("covgrpo_loss")(rollout)
    arguments: dict[str, Any] = {
        "old_log_prob": rollout.old_log_probs,
        "log_prob": rollout.old_log_probs,
        "advantages": result.advantages,
        "response_mask": rollout.response_mask,
    }
    config = actor_config("+method=covgrpo_loss")
    token = loss._DATA.set({"covgrpo_frozen": result.loss_fields["covgrpo_frozen"]})
    try:
        _, metrics = get_policy_loss_fn("covgrpo")(**arguments, config=config)
    finally:
        loss._DATA.reset(token)
    _, verls = get_policy_loss_fn("vanilla")(**arguments, config=vanilla())
    assert metrics.keys() - verls.keys() == {"actor/covgrpo_loss_weight"}
    assert metrics["actor/covgrpo_loss_weight"] == pytest.approx(1.0, rel=1e-6)


# Every loss


def micro_batches(rows: int, size: int, ranks: int = 1) -> list[list[list[int]]]:
    per_rank = rows // ranks
    return [
        [list(range(start, min(start + size, end))) for start in range(end - per_rank, end, size)]
        for end in range(per_rank, rows + 1, per_rank)
    ]


LOSSES = {name: registry.get(name) for name in methods() if registry.get(name).loss_mode}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_loss_depends_on_the_split(aggregation: str, backend: str, name: str) -> None:
    config = actor_config(
        f"+method={name}",
        *BACKENDS[backend],
        f"actor_rollout_ref.actor.loss_agg_mode={aggregation}",
    )
    batch = Batch()
    result = build(name)(batch.rollout())
    arguments = (result.advantages, result.loss_fields)
    expected = batch.gradient(config, SPLITS["one"], *arguments)
    for split in SPLITS.values():
        assert_same(batch.gradient(config, split, *arguments), expected)


def gradient_by_hand(
    batch: Batch, advantages: torch.Tensor, rule: Callable[..., float]
) -> list[torch.Tensor]:
    """The token-mean gradient, `rule` that of one token's loss in its log-prob, in plain floats."""
    tokens = sum(int(mask.sum()) for mask in batch.mask)
    return [
        torch.tensor(
            [
                rule(i, t, float(new[t]), float(old[t]), float(advantages[i, t])) / tokens
                if mask[t]
                else 0.0
                for t in range(len(new))
            ]
        )
        for i, (new, old, mask) in enumerate(zip(batch.new, batch.old, batch.mask, strict=True))
    ]


def test_reco_multiplies_the_policy_gradient_by_the_ratio_of_variances() -> None:
    batch = Batch()
    low, high = 0.9, 1.05

    def rule(i: int, t: int, new: float, old: float, advantage: float) -> float:
        p, p_old = math.exp(new), math.exp(old)
        r = p * max(1 - p, 1e-6) / (p_old * max(1 - p_old, 1e-6))
        return -min(max(r, low), high) * advantage

    result = build("reco")(batch.rollout())
    config = actor_config(
        "+method=reco",
        f"actor_rollout_ref.actor.policy_loss.ratio_low={low}",
        f"actor_rollout_ref.actor.policy_loss.ratio_high={high}",
    )
    found = batch.gradient(config, SPLITS["uneven, mixed"], result.advantages)
    assert_same(found, gradient_by_hand(batch, result.advantages, rule))


def test_kl_cov_penalises_the_selected_tokens() -> None:
    batch = Batch()
    settings: dict[str, Any] = {"share": 0.2, "coef": 0.3}
    result = build("kl_cov_exact", **settings)(batch.rollout())
    (selected,) = result.loss_fields.values()
    assert int(selected.sum()) == 4

    def rule(i: int, t: int, new: float, old: float, advantage: float) -> float:
        penalty = 0.3 * math.copysign(1.0, new - old) if selected[i, t] else 0.0
        return -advantage * math.exp(new - old) + penalty

    config = actor_config(
        "+method=kl_cov_exact",
        *(f"actor_rollout_ref.actor.policy_loss.{key}={settings[key]}" for key in settings),
    )
    found = batch.gradient(config, SPLITS["uneven, mixed"], result.advantages, result.loss_fields)
    assert_same(found, gradient_by_hand(batch, result.advantages, rule))


def test_sent_adds_its_kl_to_verls_clipped_loss() -> None:
    batch = Batch()
    settings: dict[str, Any] = {"beta_high": 0.7, "beta_low": 0.3}
    result = build("sent", **settings)(batch.rollout())
    (beta,) = result.loss_fields.values()
    assert {round(float(x), 6) for x in beta.flatten()} == {0.0, 0.3, 0.7}

    def rule(i: int, t: int, new: float, old: float, advantage: float) -> float:
        return float(beta[i, t]) * (1 - math.exp(float(batch.ref[i][t]) - new))

    config = actor_config(
        "+method=sent",
        *(f"actor_rollout_ref.actor.policy_loss.{key}={settings[key]}" for key in settings),
    )
    found = batch.gradient(config, SPLITS["uneven, mixed"], result.advantages, result.loss_fields)
    clipped = batch.gradient(vanilla(), SPLITS["one"], result.advantages)
    kl = gradient_by_hand(batch, result.advantages, rule)
    assert_same(found, [a + b for a, b in zip(clipped, kl, strict=True)])


@pytest.mark.parametrize("name", LOSSES)
def test_rollout_weights_reach_every_loss(name: str) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from verl_covgrpo.verl_hooks import loss

    batch = Batch()
    rollout = batch.rollout()
    result = build(name)(rollout)
    config = actor_config(f"+method={name}")
    values = []
    for weights in (None, torch.full_like(result.advantages, 2.0)):
        ref = torch.nn.utils.rnn.pad_sequence(batch.ref, batch_first=True)
        token = loss._DATA.set({**result.loss_fields, "ref_log_prob": ref})
        try:
            value, _ = get_policy_loss_fn(LOSSES[name].loss_mode)(
                old_log_prob=rollout.old_log_probs,
                log_prob=rollout.old_log_probs,
                advantages=result.advantages,
                response_mask=rollout.response_mask,
                config=config,
                rollout_is_weights=weights,
            )
        finally:
            loss._DATA.reset(token)
        values.append(float(value))
    if not LOSSES[name].own_kl:  # a KL term is not corrected
        assert values[1] == pytest.approx(2 * values[0])
    assert values[0] != 0 and values[1] != values[0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("where", ["old_log_prob", "log_prob", "advantages", "rollout_is_weights"])
def test_what_is_masked_reaches_neither_loss_nor_gradient(
    name: str, aggregation: str, where: str
) -> None:
    """One nan there would be in every weight of the model."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from verl_covgrpo.verl_hooks import loss

    batch = Batch()
    rollout = batch.rollout()
    mask_BT = rollout.response_mask
    result = build(name)(rollout)
    ref = torch.nn.utils.rnn.pad_sequence(batch.ref, batch_first=True)
    config = actor_config(f"+method={name}", f"actor_rollout_ref.actor.loss_agg_mode={aggregation}")
    given = {
        "old_log_prob": rollout.old_log_probs,
        "log_prob": torch.nn.utils.rnn.pad_sequence(batch.new, batch_first=True),
        "advantages": result.advantages,
        "rollout_is_weights": torch.full_like(result.advantages, 1.5),
    }

    def outcome(junk: float) -> tuple[float, list[float], dict[str, float]]:
        tensors = given | {where: torch.where(mask_BT, given[where], junk)}
        log_prob = tensors.pop("log_prob").clone().requires_grad_()
        token = loss._DATA.set({**result.loss_fields, "ref_log_prob": ref})
        try:
            value, metrics = get_policy_loss_fn(LOSSES[name].loss_mode)(
                log_prob=log_prob,
                response_mask=mask_BT,
                loss_agg_mode=aggregation,
                config=config,
                **tensors,
            )
        finally:
            loss._DATA.reset(token)
        value.backward()
        assert log_prob.grad is not None
        assert not log_prob.grad[~mask_BT].any()
        return float(value.detach()), log_prob.grad[mask_BT].tolist(), metrics

    clean = outcome(0.0)
    assert clean[0] != 0
    for junk in (torch.inf, -torch.inf, torch.nan):
        assert outcome(junk) == clean


def test_a_micro_batch_of_padding_rows_does_not_move_the_mean_weight() -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from verl_covgrpo.verl_hooks import loss

    rollout = Batch().rollout()
    result = build("covgrpo_loss")(rollout)
    token = loss._DATA.set(result.loss_fields)
    try:
        _, metrics = get_policy_loss_fn("covgrpo")(
            old_log_prob=rollout.old_log_probs,
            log_prob=rollout.old_log_probs,
            advantages=result.advantages,
            response_mask=torch.zeros_like(rollout.response_mask),
            config=actor_config("+method=covgrpo_loss"),
        )
    finally:
        loss._DATA.reset(token)
    assert metrics["actor/covgrpo_loss_weight"] == 1.0


# Where verl's own selection moves with the split


ROWS = (5, 2, 7, 3, 6, 4, 5, 3, 8, 2, 6, 5, 4, 7, 3, 6)
SIXTEEN = {
    "micro-batches of 1": micro_batches(16, 1),
    "micro-batches of 4": micro_batches(16, 4),
    "one of 16": micro_batches(16, 16),
    "two ranks": micro_batches(16, 8, ranks=2),
    "two ranks, micro-batches of 4": micro_batches(16, 4, ranks=2),
}


def chosen_tokens(
    batch: Batch, found: list[torch.Tensor], plain: list[torch.Tensor]
) -> frozenset[tuple[int, int]]:
    """The tokens whose gradient is not that of the plain loss."""
    return frozenset(
        (i, t)
        for i, (row, plain_row) in enumerate(zip(found, plain, strict=True))
        for t in range(len(row))
        if abs(float(row[t] - plain_row[t])) > 1e-6
    )


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_ours_chooses_the_same_tokens_in_any_split_and_verls_does_not(name: str) -> None:
    # So little drift that PPO's own clip has no part in it.
    batch = Batch(responses=ROWS, drift=0.1)
    section = "actor_rollout_ref.actor.policy_loss"
    base = build("covgrpo").base_advantages(batch.rollout()) * batch.rollout().response_mask
    plain = batch.gradient(vanilla(), SIXTEEN["one of 16"], base)
    bounds = {"low": 0.1, "high": 5.0} if name == "clip_cov" else {}
    ours = build(f"{name}_exact", share=0.05, **bounds)(batch.rollout())
    own_loss = actor_config("+method=kl_cov_exact", f"{section}.share=0.05")
    our_config = own_loss if name == "kl_cov" else vanilla()
    verls_config = actor_config(
        f"{section}.loss_mode={name}",
        f"{section}.{name}_ratio=0.05",
        *([f"{section}.clip_cov_lb=0.1"] if name == "clip_cov" else []),
    )
    ours_chosen, verls_chosen = set(), set()
    for split in SIXTEEN.values():
        found = batch.gradient(our_config, split, ours.advantages, ours.loss_fields)
        ours_chosen.add(chosen_tokens(batch, found, plain))
        torch.manual_seed(0)  # verl draws from the global generator
        verls_chosen.add(chosen_tokens(batch, batch.gradient(verls_config, split, base), plain))
    tokens = sum(int(mask.sum()) for mask in batch.mask)
    (chosen,) = ours_chosen
    assert len(chosen) == int(0.05 * tokens) == 3
    assert len(verls_chosen) == len(SIXTEEN) - 1  # two of the splits make the same micro-batches


# The configuration class


def test_the_configuration_class_checks_and_travels(loss_config: Callable[..., Any]) -> None:
    from verl.workers.config import PolicyLossConfig

    from verl_covgrpo.verl_hooks import loss_config as classes

    config = loss_config("actor_rollout_ref.actor.policy_loss.scope=group").policy_loss
    assert type(config) is classes.covgrpo_loss
    assert isinstance(config, PolicyLossConfig)
    assert (config.loss_mode, config.scope, config.get("scope")) == ("covgrpo", "group", "group")
    back = pickle.loads(pickle.dumps(config))
    assert type(back) is type(config)
    assert back == config
    assert classes.covgrpo_loss().scope == build("covgrpo_loss").scope  # type: ignore[attr-defined]


def test_an_unknown_configuration_class_is_an_attribute_error() -> None:
    from verl_covgrpo.verl_hooks import loss_config as classes

    with pytest.raises(AttributeError, match="did you mean 'covgrpo_loss'"):
        _ = classes.covgrpo_los
