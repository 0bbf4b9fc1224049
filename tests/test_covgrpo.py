"""covgrpo against the oracle, its published vectors and what must not change its result."""

import math
from typing import Any

import pytest
import torch
from batches import REWARDS, ragged, rows_of, valid
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import covgrpo_metrics, covgrpo_weights

from verl_covgrpo import MethodError, Reweighted, Rollout, build, stats
from verl_covgrpo.losses.covgrpo import FROZEN, weights

SCOPES = ("batch", "group")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def run(batch: dict[str, Any], scope: str, name: str = "covgrpo", **changes: Any) -> Reweighted:
    return build(name, scope=scope)(Rollout(**batch | changes))


def base_of(batch: dict[str, Any]) -> torch.Tensor:
    return build("covgrpo").base_advantages(Rollout(**batch)).squeeze(1)


def expected_advantages(batch: dict[str, Any], base: torch.Tensor, scope: str) -> torch.Tensor:
    """Return what the oracle gives, (B, T); the base is (B,) or (B, T)."""
    mask = batch["response_mask"]
    A = valid(base, mask)
    l = valid(batch["old_log_probs"], mask)  # noqa: E741
    scopes = batch["group"] if scope == "group" else [0] * len(A)
    weights = covgrpo_weights(l, A, scopes)
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    flat = [w * a for ws, row in zip(weights, A, strict=True) for w, a in zip(ws, row, strict=True)]
    expected[mask.bool()] = torch.tensor(flat, dtype=torch.float64)
    return expected


def per_token_base(batch: dict[str, Any], seed: int) -> torch.Tensor:
    """Return a base that varies within a response; where the mask is 0 also nan."""
    mask = batch["response_mask"]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(mask.shape, generator=generator)
    return values.masked_fill(~mask & (values > 0.5), torch.nan)


# The formula


VECTOR = {
    "rewards": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0],
    "group": [0, 0, 0, 0, 1, 1],
    "l": [[0.1, 2, 0.5], [0.05, 0.7, 1.5, 3], [0.2], [1, 0.01], [0.3] * 4, [2.5, 0.4]],
    "batch": [
        [0.894822, 0.550684, 1.131563],
        [-0.724132, -1.184489, -0.813620, -0.021737],
        [-0.864347],
        [1.178582, 0.828028],
        [0.888893] * 4,
        [-0.187429, -0.881945],
    ],
    "group_scope": [
        [0.848753, 0.615062, 1.129003],
        [-0.808242, -1.213333, -1.010748, -0.094205],
        [-0.927743],
        [1.237566, 0.775584],
        [0.852527] * 4,
        [-0.021069, -0.811459],
    ],
}


@pytest.mark.parametrize(("scope", "key"), [("batch", "batch"), ("group", "group_scope")])
def test_the_vector(scope: str, key: str) -> None:
    mask, log_probs = torch.zeros(6, 5), torch.full((6, 5), torch.nan)
    for i, row in enumerate(VECTOR["l"]):
        mask[i, : len(row)] = 1
        log_probs[i, : len(row)] = -torch.tensor(row)
    result = run(
        {
            "rewards": torch.tensor(VECTOR["rewards"]),
            "response_mask": mask,
            "group": VECTOR["group"],
            "old_log_probs": log_probs,
        },
        scope,
    )
    flat = [a for row in VECTOR[key] for a in row]
    assert result.advantages.dtype == torch.float32
    assert result.advantages[mask.bool()].tolist() == pytest.approx(flat, abs=1.5e-6)
    assert (result.advantages[~mask.bool()] == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(0, 12),
    columns=st.integers(1, 40),
    rewards=st.sampled_from(REWARDS),
    scope=st.sampled_from(SCOPES),
    per_token=st.booleans(),
)
def test_equals_the_oracle(
    seed: int, groups: int, columns: int, rewards: str, scope: str, per_token: bool
) -> None:
    batch = ragged(seed, groups, columns, rewards)
    base = per_token_base(batch, seed) if per_token else base_of(batch)
    result = run(batch, scope, base_advantages=base)
    expected = expected_advantages(batch, base, scope)
    torch.testing.assert_close(result.advantages.double(), expected, **CLOSE)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_log_probs_of_any_width(dtype: torch.dtype, scope: str) -> None:
    batch = ragged(seed=11, groups=20, columns=30, dtype=dtype)
    expected = expected_advantages(batch, base_of(batch), scope)
    torch.testing.assert_close(run(batch, scope).advantages.double(), expected, **CLOSE)


@pytest.mark.parametrize("scope", SCOPES)
def test_log_probs_that_hardly_vary(scope: str) -> None:
    """The mean is subtracted exactly: float32 of the mean alone would be off by 1% of s here."""
    batch = ragged(seed=12, groups=20, columns=30)
    batch["old_log_probs"] = -1.3 + 1e-5 * batch["old_log_probs"]
    expected = expected_advantages(batch, base_of(batch), scope)
    torch.testing.assert_close(run(batch, scope).advantages.double(), expected, **CLOSE)


@pytest.mark.parametrize("scope", SCOPES)
def test_more_tokens_than_a_chunk_holds(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged(seed=13, groups=20, columns=40)
    whole = run(batch, scope).advantages
    for elements in (1, 64, 1000):
        monkeypatch.setattr(stats, "CHUNK_ELEMENTS", elements)
        torch.testing.assert_close(run(batch, scope).advantages, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rewards", ["binary", "fractional", "normal"])
@pytest.mark.parametrize("per_token", [False, True])
def test_metrics_equal_the_oracle(per_token: bool, rewards: str, scope: str) -> None:
    batch = ragged(seed=14, groups=15, columns=20, rewards=rewards)
    base = per_token_base(batch, 14) if per_token else base_of(batch)
    metrics = run(batch, scope, base_advantages=base).metrics
    assert metrics.pop("seconds") >= 0
    mask = batch["response_mask"]
    scopes = batch["group"] if scope == "group" else [0] * len(mask)
    expected = covgrpo_metrics(valid(batch["old_log_probs"], mask), valid(base, mask), scopes)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_metrics_are_finite_and_always_there() -> None:
    keys = set()
    for rewards in REWARDS:
        for scope in SCOPES:
            for name in ("covgrpo", "covgrpo_loss"):
                metrics = run(ragged(seed=2, rewards=rewards), scope, name).metrics
                assert all(math.isfinite(value) for value in metrics.values())
                keys.add(frozenset(metrics))
    assert len(keys) == 1
    for key in keys.pop():
        assert not any(word in key for word in ("max", "min", "sum", "total"))
        assert not key.endswith("lr")


def test_the_loss_reports_the_same_metrics() -> None:
    for scope in SCOPES:
        batch = ragged(seed=4)
        ours, loss = (run(batch, scope, name).metrics for name in ("covgrpo", "covgrpo_loss"))
        assert ours | {"seconds": 0.0} == loss | {"seconds": 0.0}


# Where every weight is 1


@pytest.mark.parametrize("scope", SCOPES)
def test_equal_log_probs_give_verls_grpo_to_the_bit(scope: str) -> None:
    verl = pytest.importorskip("verl.trainer.ppo.core_algos")
    generator = torch.Generator().manual_seed(0)
    batch = ragged(seed=21, rewards="normal")
    # A value no power of two divides, and rows without a token that hold anything.
    value = -math.log(3)
    filled = torch.full_like(batch["old_log_probs"], value)
    batch["old_log_probs"] = torch.where(batch["response_mask"], filled, torch.nan)
    batch["rewards"] = torch.randn(len(batch["group"]), generator=generator)
    theirs, _ = verl.compute_grpo_outcome_advantage(
        batch["rewards"].unsqueeze(1), batch["response_mask"].long(), batch["group"]
    )
    result = run(batch, scope)
    assert torch.equal(result.advantages, theirs)
    assert result.metrics["effective_share"] == 1 and result.metrics["weight_std"] == 0


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e9 / 3])
def test_an_advantage_that_does_not_vary_keeps_its_value(
    value: float, scope: str, per_token: bool
) -> None:
    """Also where float64 cannot hold the mean, so that A - mean A is not 0; empty rows aside."""
    batch = ragged(seed=22)
    mask = batch["response_mask"]
    base = torch.full(mask.shape if per_token else mask.shape[:1], value, dtype=torch.float64)
    result = run(batch, scope, base_advantages=base)
    assert torch.equal(result.advantages, torch.where(mask, torch.tensor(value), 0.0))
    assert result.metrics["covariance_std"] == 0


@pytest.mark.parametrize("per_token", [False, True])
def test_one_scope_without_a_kernel_leaves_the_others_alone(per_token: bool) -> None:
    """The third group of the batch has equal rewards, and so weights of 1 and advantages of 0."""
    batch = ragged(seed=23, rewards="normal")
    base = base_of(batch) + 0.0
    if per_token:
        base = base.unsqueeze(1).expand(batch["response_mask"].shape).clone()
    frozen = run(batch, "group", "covgrpo_loss", base_advantages=base).loss_fields[FROZEN]
    equal = [g == "prompt-2" for g in batch["group"]]
    assert equal.count(True) == 3
    for constant, (_, _, inv_s, norm) in zip(equal, frozen.tolist(), strict=True):
        if constant:
            assert (inv_s, norm) == (0.0, 1.0)
    assert (frozen[:, 2] > 0).any()


def test_two_responses_of_one_token_have_no_spread() -> None:
    """Both have the same c, so s is 0 although neither l nor A is constant."""
    batch = {
        "rewards": torch.tensor([1.0, 0.0]),
        "response_mask": torch.ones(2, 1),
        "group": ["a", "a"],
        "old_log_probs": torch.tensor([[-0.3], [-2.7]]),
    }
    for scope in SCOPES:
        result = run(batch, scope)
        assert torch.equal(result.advantages.squeeze(1), base_of(batch))
        assert result.metrics["effective_share"] == 1


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_kernel_that_vanishes_is_left_out(per_token: bool, columns: int) -> None:
    """The c of all tokens differ by 1 part in 10^5, and lie 10^5 s from zero: w is 0 everywhere."""
    base = torch.tensor([1.0, 1.0, -1.0, -1.0])
    log_probs = torch.tensor([[1.0], [1.00001], [-1.0], [-1.00001]])
    mask = torch.zeros(4, columns)
    mask[:, 0] = 1
    batch = {
        "rewards": torch.zeros(4),
        "response_mask": mask,
        "group": ["a"] * 4,
        "old_log_probs": log_probs.expand(4, columns),
        "base_advantages": base.unsqueeze(1).expand(4, columns) if per_token else base,
    }
    result = run(batch, "group")
    assert torch.equal(result.advantages[:, 0], base)
    assert result.metrics["effective_share"] == 1 and result.metrics["suppressed_share"] == 0
    assert 0 < result.metrics["covariance_std"] < 1e-4
    frozen = run(batch, "group", "covgrpo_loss").loss_fields[FROZEN]
    assert frozen[:, 2:].tolist() == [[0.0, 1.0]] * 4


# What must not matter


@pytest.mark.parametrize("scope", SCOPES)
def test_row_order_does_not_matter(scope: str) -> None:
    batch = ragged(seed=31, groups=20)
    order = torch.randperm(len(batch["group"]), generator=torch.Generator().manual_seed(1))
    expected = run(batch, scope).advantages[order]
    actual = run(rows_of(batch, order), scope).advantages
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
def test_padding_does_not_matter(scope: str) -> None:
    batch = ragged(seed=32)
    expected = run(batch, scope)
    rows, columns = batch["response_mask"].shape
    mask = torch.zeros(rows + 4, columns + 9, dtype=torch.bool)
    mask[:rows, 3 : columns + 3] = batch["response_mask"]  # columns on both sides
    log_probs = torch.full(mask.shape, torch.nan)
    log_probs[:rows, 3 : columns + 3] = batch["old_log_probs"]
    padded = {
        "rewards": torch.cat((batch["rewards"], torch.ones(4))),
        "response_mask": mask,
        "group": batch["group"] + ["pad-y"] * 4,
        "old_log_probs": log_probs,
    }
    actual = run(padded, scope)
    inside = actual.advantages[:rows, 3 : columns + 3]
    torch.testing.assert_close(inside, expected.advantages, rtol=1e-6, atol=1e-7)
    assert (actual.advantages[~mask] == 0).all()
    seconds = {"seconds": 0.0}
    assert actual.metrics | seconds == pytest.approx(expected.metrics | seconds, rel=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
def test_the_names_of_the_groups_do_not_matter(scope: str) -> None:
    batch = ragged(seed=33)
    names = {g: i for i, g in enumerate(reversed(sorted(set(batch["group"]))))}
    renamed = batch | {"group": [names[g] for g in batch["group"]]}
    assert torch.equal(run(batch, scope).advantages, run(renamed, scope).advantages)


def test_a_group_depends_on_itself_alone() -> None:
    batch = ragged(seed=34, groups=8)
    own = torch.tensor([i for i, g in enumerate(batch["group"]) if g == "prompt-1"])
    alone = run(rows_of(batch, own), "batch").advantages
    torch.testing.assert_close(run(batch, "group").advantages[own], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rewards", REWARDS)
def test_a_base_per_token_equals_one_per_response(rewards: str, scope: str) -> None:
    batch = ragged(seed=35, groups=12, rewards=rewards)
    base = base_of(batch)
    mask = batch["response_mask"]
    tokens = torch.where(mask, base.unsqueeze(1), torch.nan)
    one, many = (run(batch, scope, base_advantages=b) for b in (base, tokens))
    torch.testing.assert_close(many.advantages, one.advantages, rtol=1e-6, atol=1e-7)
    seconds = {"seconds": 0.0}
    assert many.metrics | seconds == pytest.approx(one.metrics | seconds, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", ["covgrpo", "covgrpo_loss"])
def test_a_base_may_hold_anything_in_empty_rows(name: str) -> None:
    batch = ragged(seed=36)
    base = base_of(batch)
    dirty = torch.where(batch["response_mask"].any(1), base, torch.nan)
    clean, other = (run(batch, "batch", name, base_advantages=b) for b in (base, dirty))
    assert torch.equal(clean.advantages, other.advantages)


def test_the_rollout_is_left_as_it_was() -> None:
    batch = ragged(seed=37)
    before = {name: value.clone() for name, value in batch.items() if name != "group"}
    rollout = Rollout(**batch)
    first = build("covgrpo")(rollout).advantages.clone()
    assert torch.equal(build("covgrpo")(rollout).advantages, first)
    for name, value in before.items():
        assert torch.equal(batch[name].nan_to_num(), value.nan_to_num())


def test_the_number_of_threads_is_given_back() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        run(ragged(seed=38), "batch")
        with pytest.raises(MethodError):
            run(ragged(seed=38), "batch", old_log_probs=None)
        with pytest.raises(MethodError):
            Rollout(**ragged(seed=38) | {"rewards": torch.zeros(1)})
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


# The loss


def loss_weights(
    batch: dict[str, Any], result: Reweighted, log_probs: torch.Tensor
) -> torch.Tensor:
    mask = batch["response_mask"]
    return weights(log_probs, result.advantages, mask, result.loss_fields[FROZEN])


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_weighs_like_the_estimator(per_token: bool, rewards: str, scope: str) -> None:
    batch = ragged(seed=41, groups=15, rewards=rewards)
    if per_token:
        batch["base_advantages"] = per_token_base(batch, 41)
    frozen = run(batch, scope, "covgrpo_loss")
    weights_BT = loss_weights(batch, frozen, batch["old_log_probs"])
    assert weights_BT.dtype == torch.float32 and torch.isfinite(weights_BT).all()
    expected = run(batch, scope).advantages
    torch.testing.assert_close(frozen.advantages * weights_BT, expected, rtol=5e-6, atol=1e-7)


def test_the_loss_leaves_the_advantages_alone() -> None:
    batch = ragged(seed=42)
    mask = batch["response_mask"]
    base = base_of(batch)
    result = run(batch, "batch", "covgrpo_loss")
    assert torch.equal(result.advantages, torch.where(mask, base.unsqueeze(1), 0.0))
    assert result.loss_fields[FROZEN].shape == (len(mask), 4)


@pytest.mark.parametrize("scope", SCOPES)
def test_the_micro_batch_does_not_matter(scope: str) -> None:
    batch = ragged(seed=43, groups=20)
    result = run(batch, scope, "covgrpo_loss")
    generator = torch.Generator().manual_seed(0)
    drift = 0.1 * torch.randn(batch["old_log_probs"].shape, generator=generator)
    log_probs = batch["old_log_probs"] + drift
    whole = loss_weights(batch, result, log_probs)
    for size in (1, 4, 16):
        parts = [
            weights(
                log_probs[i : i + size],
                result.advantages[i : i + size],
                batch["response_mask"][i : i + size].long(),
                result.loss_fields[FROZEN][i : i + size],
            )
            for i in range(0, len(log_probs), size)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_the_loss_follows_the_current_policy() -> None:
    """One token by hand, with mean l, mean A, 1/s and norm as frozen."""
    frozen = torch.tensor([[-1.0, 0.5, 2.0, 1.25]])
    weight = weights(torch.tensor([[-1.6]]), torch.tensor([[1.0]]), torch.ones(1, 1), frozen)
    assert weight.item() == pytest.approx(1.25 * math.exp(-((-0.6 * 0.5 * 2.0) ** 2) / 2))


def test_the_loss_is_finite_whatever_the_log_probs() -> None:
    """In the first row A is its mean at the second token; the second row has no kernel."""
    frozen = torch.tensor([[-1.0, 0.5, 2.0, 1.25], [-1.0, 0.5, 0.0, 1.0], [0.0] * 4])
    log_probs = torch.tensor(
        [[-torch.inf, -torch.inf, -1.0], [-torch.inf, -1.0, torch.nan], [0.0] * 3]
    )
    advantages = torch.tensor([[1.0, 0.5, torch.nan], [1.0, 0.5, torch.nan], [torch.nan] * 3])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    result = weights(log_probs, advantages, mask, frozen)
    assert result.tolist() == [[0.0, 1.25, 1.0], [1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_weights_carry_no_gradient_and_change_nothing(dtype: torch.dtype) -> None:
    batch = ragged(seed=44)
    result = run(batch, "batch", "covgrpo_loss")
    log_probs = batch["old_log_probs"].to(dtype).requires_grad_()
    before = log_probs.detach().clone()
    assert not loss_weights(batch, result, log_probs).requires_grad
    assert torch.equal(log_probs.detach().nan_to_num(), before.nan_to_num())


# verl's loss


@pytest.mark.parametrize("seed", range(4))
def test_weighting_the_advantage_is_weighting_verls_clipped_loss(seed: int) -> None:
    """Per token, with every branch of the clip and the dual clip taken."""
    verl = pytest.importorskip("verl.trainer.ppo.core_algos")
    config = pytest.importorskip("verl.workers.config").FSDPActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )
    batch = ragged(seed=50 + seed, groups=10)
    mask = batch["response_mask"].long()
    frozen = run(batch, "batch", "covgrpo_loss")
    old = batch["old_log_probs"].masked_fill(mask == 0, 0.0)
    generator = torch.Generator().manual_seed(seed)
    new = old + torch.randn(old.shape, generator=generator)
    weights_BT = loss_weights(batch, frozen, new)
    advantages = frozen.advantages

    def loss(A: torch.Tensor, keep: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        value, _ = verl.compute_policy_loss_vanilla(
            old, new, A, keep, config=config, rollout_is_weights=scale
        )
        return value

    ratio = (new - old).exp()
    clipped = ratio.clamp(0.8, 1.28) != ratio
    dual = (advantages < 0) & (ratio > 3)
    assert (clipped & (mask == 1)).any() and (dual & (mask == 1)).any()
    torch.testing.assert_close(
        loss(advantages * weights_BT, mask, None), loss(advantages, mask, weights_BT)
    )
    for row, column in mask.nonzero().tolist():
        one = torch.zeros_like(mask)
        one[row, column] = 1
        torch.testing.assert_close(
            loss(advantages * weights_BT, one, None),
            weights_BT[row, column] * loss(advantages, one, None),
        )


# Errors


@pytest.mark.parametrize("name", ["covgrpo", "covgrpo_loss"])
def test_old_log_probs_are_needed(name: str) -> None:
    with pytest.raises(MethodError, match=r"old_log_probs.*bypass_mode=False"):
        run(ragged(seed=1), "batch", name, old_log_probs=None)
