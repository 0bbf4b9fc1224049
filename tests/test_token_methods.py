"""The token-level methods against the oracle, and the property that each paper claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from batches import REWARDS, VOCABULARY, ragged, rows_of, valid, with_policy_fields
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_covgrpo import MethodError, Reweighted, Rollout, build, registry, stats
from verl_covgrpo.losses import cov_exact, reco
from verl_covgrpo.micro_batch import MicroBatch

METHODS = ("ah_grpo", "sa_ah_grpo", "erpo", "ep_grpo", "reco", "clip_cov_exact", "kl_cov_exact")
CLOSE = {"rtol": 3e-5, "atol": 3e-6}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BASES = ("grpo", "per response", "per token")


def batch_of(
    seed: int,
    groups: int = 6,
    columns: int = 13,
    rewards: str = "binary",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> dict[str, Any]:
    return with_policy_fields(ragged(seed, groups, columns, rewards, dtype), seed) | changes


def run(name: str, batch: dict[str, Any], **parameters: Any) -> Reweighted:
    return build(name, **parameters)(Rollout(**batch))


def base_of(batch: dict[str, Any]) -> torch.Tensor:
    """Return the base as (B, T): what the rollout brings, or grpo."""
    base = build("covgrpo").base_advantages(Rollout(**batch)).float()
    return base.expand(batch["response_mask"].shape)


def with_base(batch: dict[str, Any], kind: str, seed: int) -> dict[str, Any]:
    """Return the batch with a base of its own, some of it exactly 0, or the batch as it is."""
    if kind == "grpo":
        return batch
    generator = torch.Generator().manual_seed(seed)
    mask = batch["response_mask"] if kind == "per token" else batch["response_mask"].any(dim=1)
    base = torch.randn(mask.shape, generator=generator)
    base[base.abs() < 0.2] = 0.0
    base = base.masked_fill(~mask, torch.nan).to(batch["old_log_probs"].dtype)
    return batch | {"base_advantages": base}


@st.composite
def random_batches(draw: st.DrawFn) -> dict[str, Any]:
    """Any rewards, width, and base; scores that are not the rewards."""
    seed = draw(st.integers(0, 10**6))
    batch = batch_of(
        seed,
        draw(st.integers(0, 8)),
        draw(st.integers(1, 30)),
        draw(st.sampled_from(REWARDS)),
        draw(st.sampled_from(DTYPES)),
    )
    generator = torch.Generator().manual_seed(seed + 2)
    batch["scores"] = torch.randint(0, 5, batch["rewards"].shape, generator=generator) / 4
    return with_base(batch, draw(st.sampled_from(BASES)), seed)


def rows(batch: dict[str, Any], name: str) -> list[list[float]]:
    return valid(batch[name], batch["response_mask"])


def log_ratios(batch: dict[str, Any]) -> list[list[float]]:
    return [
        [x - y for x, y in zip(ls, refs, strict=True)]
        for ls, refs in zip(rows(batch, "old_log_probs"), rows(batch, "ref_log_probs"), strict=True)
    ]


def assert_tokens(
    found: torch.Tensor, expected: Sequence[Sequence[float]], mask: torch.Tensor
) -> None:
    assert found.dtype == torch.float32
    assert (found[~mask] == 0).all()
    flat = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    torch.testing.assert_close(found[mask].double(), flat, **CLOSE)


def times(weights: Sequence[Sequence[float]], A: Sequence[Sequence[float]]) -> list[list[float]]:
    return [
        [w * a for w, a in zip(ws, row, strict=True)] for ws, row in zip(weights, A, strict=True)
    ]


# The formulas


@settings(max_examples=60, deadline=None)
@given(
    batch=random_batches(),
    name=st.sampled_from(["ah_grpo", "sa_ah_grpo"]),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    inclusive=st.booleans(),
    normalize=st.booleans(),
    control=st.sampled_from(["none", "neg_scale", "position_decay"]),
)
def test_adaptive_horizon_equals_the_oracle(
    batch: dict[str, Any],
    name: str,
    alpha: float,
    inclusive: bool,
    normalize: bool,
    control: str,
) -> None:
    chosen: dict[str, Any] = {"alpha": alpha, "inclusive": inclusive, "normalize": normalize}
    sign_aware = {"control": control} if name == "sa_ah_grpo" else {}
    A = valid(base_of(batch), batch["response_mask"])
    weights = oracle.ah_weights(
        rows(batch, "entropy"), A, VOCABULARY, **chosen, sign_aware=bool(sign_aware), **sign_aware
    )
    result = run(name, batch, **chosen, **sign_aware)
    assert_tokens(result.advantages, times(weights, A), batch["response_mask"])
    flat = [w for row in weights for w in row]
    signs = [a < 0 for row in A for a in row]
    negative = [w for w, is_negative in zip(flat, signs, strict=True) if is_negative]
    assert result.metrics["weight"] == pytest.approx(math.fsum(flat) / len(flat), rel=1e-6)
    assert result.metrics["negative_weight"] == pytest.approx(
        math.fsum(negative) / len(negative) if negative else 1.0, rel=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(
    batch=random_batches(),
    gamma=st.sampled_from([0.0, 5.0]),
    buckets=st.sampled_from([1, 3, 10]),
    eta=st.sampled_from([0.2, 1.0]),
    gate_outcome=st.booleans(),
    floor=st.sampled_from([0.01, 0.2]),
)
def test_erpo_equals_the_oracle(
    batch: dict[str, Any],
    gamma: float,
    buckets: int,
    eta: float,
    gate_outcome: bool,
    floor: float,
) -> None:
    result = run(
        "erpo",
        batch,
        gamma=gamma,
        buckets=buckets,
        eta=eta,
        gate_outcome=gate_outcome,
        signal_floor=floor,
    )
    expected = oracle.erpo_advantages(
        rows(batch, "entropy"),
        log_ratios(batch),
        valid(base_of(batch), batch["response_mask"]),
        batch["group"],
        gamma,
        buckets,
        eta,
        gate_outcome,
        floor,
    )
    assert_tokens(result.advantages, expected, batch["response_mask"])


@settings(max_examples=60, deadline=None)
@given(
    batch=random_batches(),
    gamma=st.sampled_from([0.0, 5.0]),
    buckets=st.sampled_from([1, 3, 10]),
    eta=st.sampled_from([0.2, 1.0]),
    threshold=st.sampled_from([0.5, 0.15]),
    floor=st.sampled_from([0.01, 0.2]),
)
def test_ep_grpo_equals_the_oracle(
    batch: dict[str, Any],
    gamma: float,
    buckets: int,
    eta: float,
    threshold: float,
    floor: float,
) -> None:
    H = rows(batch, "entropy")
    places = [buckets * p for row in oracle.progress(H) for p in row[:-1]]
    assume(all(abs(place - round(place)) > 1e-9 for place in places))
    result = run(
        "ep_grpo",
        batch,
        gamma=gamma,
        buckets=buckets,
        eta=eta,
        success_threshold=threshold,
        signal_floor=floor,
    )
    expected = oracle.ep_grpo_advantages(
        H,
        log_ratios(batch),
        valid(base_of(batch), batch["response_mask"]),
        batch["rewards"].tolist(),
        batch["scores"].tolist(),
        batch["group"],
        gamma,
        buckets,
        eta,
        threshold,
        floor,
    )
    assert_tokens(result.advantages, expected, batch["response_mask"])


@settings(max_examples=40, deadline=None)
@given(batch=random_batches(), cap=st.sampled_from([1.0, 1.3, 5.0]))
def test_reco_equals_the_oracle(
    batch: dict[str, Any], cap: float
) -> None:
    weights = oracle.reco_weights(rows(batch, "old_log_probs"), batch["group"], cap)
    A = valid(base_of(batch), batch["response_mask"])
    expected = [[w * a for a in row] for w, row in zip(weights, A, strict=True)]
    result = run("reco", batch, cap=cap)
    assert_tokens(result.advantages, expected, batch["response_mask"])


def covariances_of(batch: dict[str, Any]) -> list[list[float]]:
    mask = batch["response_mask"]
    return oracle.covariances(rows(batch, "old_log_probs"), valid(base_of(batch), mask))


def places(flags: torch.Tensor, mask: torch.Tensor) -> set[tuple[int, int]]:
    """Return where (B, T) is true, as row and place in the response."""
    found = valid(flags, mask)
    return {(i, t) for i, row in enumerate(found) for t, x in enumerate(row) if x}


@settings(max_examples=60, deadline=None)
@given(
    batch=random_batches(),
    share=st.sampled_from([2e-4, 0.05, 0.5]),
    low=st.sampled_from([-0.5, 0.1, 1.0]),
    high=st.sampled_from([1.2, 5.0]),
)
def test_clip_cov_drops_candidates_of_the_oracle(
    batch: dict[str, Any], share: float, low: float, high: float
) -> None:
    mask, base = batch["response_mask"], base_of(batch)
    c = covariances_of(batch)
    flat = [x for row in c for x in row]
    assume(all(abs(x - bound) > 1e-7 for x in flat for bound in (low, high)))
    result = run("clip_cov_exact", batch, share=share, low=low, high=high)
    candidates = oracle.clip_cov_candidates(c, low, high)
    k = min(oracle.how_many(share, len(flat)), len(candidates))
    changed = places(result.advantages != base, mask)
    assert changed <= candidates
    # A dropped token whose advantage was 0 anyway shows no change.
    unseen = len(candidates & places(base == 0, mask))
    assert k - unseen <= len(changed) <= k
    kept = [(i, t) in changed for i, row in enumerate(c) for t in range(len(row))]
    expected = base[mask].masked_fill(torch.tensor(kept), 0.0)
    assert torch.equal(result.advantages[mask], expected)
    assert result.advantages.dtype == torch.float32 and (result.advantages[~mask] == 0).all()
    assert result.metrics["candidate_share"] == pytest.approx(len(candidates) / len(flat))
    assert result.metrics["clipped_share"] == pytest.approx(k / len(flat))
    if not unseen:
        dropped = [c[i][t] for i, t in changed]
        mean = math.fsum(dropped) / len(dropped) if dropped else 0.0
        assert result.metrics["clipped_covariance"] == pytest.approx(mean, rel=1e-6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(batch=random_batches(), share=st.sampled_from([2e-3, 0.05, 0.5, 1.0]))
def test_kl_cov_selects_the_largest_of_the_oracle(batch: dict[str, Any], share: float) -> None:
    mask, base = batch["response_mask"], base_of(batch)
    c = covariances_of(batch)
    result = run("kl_cov_exact", batch, share=share)
    selected = result.loss_fields[cov_exact.SELECTED]
    assert selected.dtype == torch.bool and not (selected & ~mask).any()
    found, expected = places(selected, mask), oracle.kl_cov_selected(c, share)
    threshold = min(c[i][t] for i, t in expected)
    assert len(found) == len(expected)
    # They may differ in tokens that lie on the threshold.
    assert all(abs(c[i][t] - threshold) < 1e-7 for i, t in found ^ expected)
    assert torch.equal(result.advantages, torch.where(mask, base, 0.0))
    assert result.metrics["threshold"] == pytest.approx(threshold, rel=1e-6, abs=1e-6)
    mean = math.fsum(c[i][t] for i, t in expected) / len(expected)
    assert result.metrics["penalised_covariance"] == pytest.approx(mean, rel=1e-6, abs=1e-6)
    count = int(mask.sum())
    assert result.metrics["penalised_share"] == pytest.approx(len(expected) / count)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fields_of_any_width(name: str, dtype: torch.dtype) -> None:
    batch = with_policy_fields(ragged(7, groups=12, columns=20, dtype=dtype), 7, dtype)
    exact = {
        key: value.double() if isinstance(value, torch.Tensor) and value.dtype == dtype else value
        for key, value in batch.items()
    }
    found, expected = run(name, batch), run(name, exact)
    torch.testing.assert_close(found.advantages, expected.advantages, **CLOSE)
    for field, value in expected.loss_fields.items():
        assert torch.equal(found.loss_fields[field], value)


# What must not change a result


def equal_results(found: Reweighted, expected: Reweighted) -> None:
    torch.testing.assert_close(found.advantages, expected.advantages, rtol=1e-5, atol=1e-6)
    for name, value in expected.loss_fields.items():
        assert torch.equal(found.loss_fields[name], value)
    mine = {k: v for k, v in found.metrics.items() if k != "seconds"}
    theirs = {k: v for k, v in expected.metrics.items() if k != "seconds"}
    assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-9)


def reordered(result: Reweighted, order: torch.Tensor) -> Reweighted:
    fields = {name: value[order] for name, value in result.loss_fields.items()}
    return Reweighted(
        advantages=result.advantages[order], metrics=result.metrics, loss_fields=fields
    )


# Parameters under which each method has something to do on a small batch.
BUSY: dict[str, dict[str, Any]] = {
    "sa_ah_grpo": {"control": "position_decay", "normalize": True},
    "clip_cov_exact": {"share": 0.1, "low": 0.1},
    "kl_cov_exact": {"share": 0.1},
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    batch = batch_of(seed, groups=10, columns=20)
    order = torch.randperm(len(batch["group"]), generator=torch.Generator().manual_seed(seed))
    expected = run(name, batch, **BUSY.get(name, {}))
    found = run(name, rows_of(batch, order), **BUSY.get(name, {}))
    equal_results(found, reordered(expected, order))


@pytest.mark.parametrize("name", METHODS)
def test_padding_does_not_matter(name: str) -> None:
    """Columns on both sides, and rows."""
    batch = batch_of(3, groups=10, columns=20)
    expected = run(name, batch, **BUSY.get(name, {}))
    size, columns = batch["response_mask"].shape

    def padded(value: torch.Tensor) -> torch.Tensor:
        filling = torch.nan if value.is_floating_point() else False
        if value.ndim == 1:
            return torch.cat([value, torch.zeros(4)])
        wide = torch.full((size + 4, columns + 7), filling, dtype=value.dtype)
        wide[:size, 3 : columns + 3] = value
        return wide

    wider = {
        key: padded(value) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    } | {"group": batch["group"] + ["pad-y"] * 4}
    found = run(name, wider, **BUSY.get(name, {}))
    inside = slice(0, size), slice(3, columns + 3)
    cut = Reweighted(
        advantages=found.advantages[inside],
        metrics=found.metrics,
        loss_fields={key: value[inside] for key, value in found.loss_fields.items()},
    )
    equal_results(cut, expected)
    for padded_BT in (found.advantages, *found.loss_fields.values()):
        assert (padded_BT[~wider["response_mask"]] == 0).all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("elements", [1, 16, 50, 400])
def test_the_size_of_a_chunk_does_not_matter(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(5, groups=10, columns=20)
    expected = run(name, batch, **BUSY.get(name, {}))
    monkeypatch.setattr(stats, "CHUNK_ELEMENTS", elements)
    equal_results(run(name, batch, **BUSY.get(name, {})), expected)


@pytest.mark.parametrize("name", METHODS)
def test_metrics_have_the_same_names_and_are_finite(name: str) -> None:
    names = set()
    for seed, rewards in enumerate(REWARDS):
        metrics = run(name, batch_of(seed, rewards=rewards)).metrics
        names.add(tuple(sorted(metrics)))
        assert all(math.isfinite(value) for value in metrics.values())
        assert all(type(value) is float for value in metrics.values())
    assert len(names) == 1
    reduced_by_verl = ("max", "min", "sum", "total")
    assert [key for key in metrics if any(word in key for word in reduced_by_verl)] == []


@pytest.mark.parametrize("name", METHODS)
def test_one_token_in_the_whole_batch(name: str) -> None:
    batch: dict[str, Any] = {
        "rewards": torch.tensor([1.0, 0.0]),
        "response_mask": torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.bool),
        "group": ["a", "a"],
        "old_log_probs": torch.full((2, 3), -0.5),
        "ref_log_probs": torch.full((2, 3), -0.7),
        "entropy": torch.full((2, 3), 1.0),
        "vocab_size": VOCABULARY,
    }
    result = run(name, batch)
    assert result.advantages.isfinite().all()
    assert all(math.isfinite(value) for value in result.metrics.values())


# What the papers claim


@pytest.mark.parametrize("name", ["ah_grpo", "sa_ah_grpo"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rewards", REWARDS)
def test_without_alpha_it_is_grpo_to_the_bit(name: str, normalize: bool, rewards: str) -> None:
    batch = batch_of(4, groups=20, columns=20, rewards=rewards)
    result = run(name, batch, alpha=0.0, normalize=normalize)
    base = torch.where(batch["response_mask"], base_of(batch), 0.0)
    assert torch.equal(result.advantages, base)
    assert result.metrics["discount"] == result.metrics["weight"] == 1.0


@pytest.mark.parametrize("control", ["none", "neg_scale", "position_decay"])
@pytest.mark.parametrize("kind", BASES)
def test_sign_aware_leaves_what_is_not_negative_untouched(control: str, kind: str) -> None:
    batch = with_base(batch_of(6, groups=20, columns=20), kind, 6)
    mask, base = batch["response_mask"], base_of(batch)
    result = run("sa_ah_grpo", batch, control=control)
    spared = mask & ~(base < 0)
    assert torch.equal(result.advantages[spared], base[spared])
    assert (result.advantages[mask & (base < 0)] > base[mask & (base < 0)]).all()


@pytest.mark.parametrize("control", ["neg_scale", "position_decay"])
def test_the_controls_keep_the_mean_negative_weight(control: str) -> None:
    batch = batch_of(6, groups=20, columns=20)
    plain = run("sa_ah_grpo", batch).metrics["negative_weight"]
    assert plain < 0.9
    assert run("sa_ah_grpo", batch, control=control).metrics["negative_weight"] == pytest.approx(
        plain
    )


def test_the_discount_never_grows_along_a_response() -> None:
    batch = batch_of(8, groups=10, columns=30, base_advantages=None)
    batch["base_advantages"] = torch.ones(batch["response_mask"].shape)
    for row in valid(run("ah_grpo", batch).advantages, batch["response_mask"]):
        assert row == sorted(row, reverse=True)
        assert all(0 < weight <= 1 for weight in row)


def test_a_long_response_keeps_weight_since_entropy_is_normalised() -> None:
    columns = 250
    batch = {
        "rewards": torch.tensor([1.0, 0.0]),
        "response_mask": torch.ones(2, columns, dtype=torch.bool),
        "group": ["a", "a"],
        "entropy": torch.full((2, columns), 0.3),
        "vocab_size": 151_936,
    }
    # With raw entropy this would be (1 - 0.15)^250 = 2e-18.
    last = run("ah_grpo", batch).metrics["final_discount"]
    assert last == pytest.approx((1 - 0.5 * 0.3 / math.log(151_936)) ** columns, rel=1e-6)
    assert last > 0.04


def constant_groups(batch: dict[str, Any]) -> torch.Tensor:
    """Return the rows whose group has one reward, (B,) bool."""
    rewards, group = batch["rewards"].tolist(), batch["group"]
    alike = [
        len({r for r, g in zip(rewards, group, strict=True) if g == own}) == 1 for own in group
    ]
    return torch.tensor(alike)


def test_groups_of_equal_rewards_move_in_ep_grpo_and_not_in_erpo() -> None:
    batch = batch_of(9, groups=20, columns=30)
    sizes = torch.tensor([batch["group"].count(own) for own in batch["group"]])
    alike = constant_groups(batch) & (sizes > 1) & batch["response_mask"].any(dim=1)
    assert int(alike.sum()) >= 5
    assert (run("erpo", batch).advantages[alike] == 0).all()
    revived = run("ep_grpo", batch)
    assert (revived.advantages[alike] != 0).float().mean() > 0.2
    assert revived.metrics["revived_share"] > 0


@pytest.mark.parametrize("name", ["erpo", "ep_grpo"])
@pytest.mark.parametrize("noise", [0.0, 8e-3])
def test_the_reference_itself_adds_exactly_nothing(name: str, noise: float) -> None:
    """Noise: one model in bfloat16 gives other log-probs in another batch."""
    batch = batch_of(10, groups=20, columns=30)
    generator = torch.Generator().manual_seed(0)
    shift = noise * (2 * torch.rand(batch["response_mask"].shape, generator=generator) - 1)
    batch["ref_log_probs"] = batch["old_log_probs"] + shift
    result = run(name, batch)
    assert torch.equal(result.advantages, run(name, batch, eta=0.0).advantages)
    assert result.metrics["process_share"] == result.metrics["process_rms"] == 0.0


@pytest.mark.parametrize("name", ["erpo", "ep_grpo"])
def test_bfloat16_log_probs_of_one_model_add_exactly_nothing(name: str) -> None:
    batch = batch_of(11, groups=20, columns=30)
    exact = batch["old_log_probs"]
    batch["old_log_probs"], batch["ref_log_probs"] = exact.bfloat16(), exact.bfloat16()
    assert run(name, batch).metrics["process_share"] == 0.0


def test_the_gate_is_one_half_where_entropy_does_not_vary() -> None:
    batch = batch_of(12)
    batch["entropy"] = torch.where(batch["response_mask"], 0.7, torch.nan)
    batch["ref_log_probs"] = batch["old_log_probs"]
    base = torch.where(batch["response_mask"], base_of(batch), 0.0)
    for name in ("erpo", "ep_grpo"):
        torch.testing.assert_close(run(name, batch).advantages, 0.5 * base)


def test_a_response_without_entropy_is_in_the_first_bucket() -> None:
    batch = batch_of(13)
    batch["entropy"] = torch.where(batch["response_mask"], 0.0, torch.nan)
    one = run("ep_grpo", batch, buckets=1).advantages
    assert torch.equal(run("ep_grpo", batch, buckets=10).advantages, one)


def test_ep_grpo_judges_a_session_by_its_last_output() -> None:
    batch: dict[str, Any] = {
        # Two sessions of two outputs each; only a session's last output carries its reward.
        "rewards": torch.tensor([0.0, 1.0, 0.0, 1.0]),
        "response_mask": torch.ones(4, 3, dtype=torch.bool),
        "group": ["a"] * 4,
        "final_output": torch.tensor([1, 1, 3, 3]),
        "old_log_probs": -torch.rand(4, 3, generator=torch.Generator().manual_seed(0)),
        "ref_log_probs": torch.full((4, 3), -0.5),
        "entropy": torch.full((4, 3), 0.5),
    }
    found = run("ep_grpo", batch, buckets=1)
    # Both sessions are right: rewards do not differ, and d is 1 everywhere.
    s = (batch["old_log_probs"] - batch["ref_log_probs"]).double()
    expected = 0.2 * (s - s.mean()) / (s.std(correction=0) + 1e-6)
    torch.testing.assert_close(found.advantages.double(), expected, **CLOSE)


def test_reco_weights_have_mean_one_in_each_group() -> None:
    batch = batch_of(14, groups=20, columns=20)
    rollout = Rollout(**batch)
    weights = reco.response_weights(rollout)
    for own in set(batch["group"]):
        kept = [
            float(w)
            for w, g, n in zip(weights, batch["group"], rollout.lengths.tolist(), strict=True)
            if g == own and n
        ]
        if kept:
            assert math.fsum(kept) / len(kept) == pytest.approx(1.0)


def test_reco_weights_of_hopeless_responses_stay_finite() -> None:
    batch = batch_of(15)
    batch["old_log_probs"] = batch["old_log_probs"] * 1e4
    result = run("reco", batch)
    assert result.advantages.isfinite().all()
    assert result.metrics["capped_share"] >= 0


# The losses


def micro(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, **fields: torch.Tensor
) -> MicroBatch:
    def clipped(_: torch.Tensor) -> Any:
        raise AssertionError("these losses do not clip")

    return MicroBatch(
        log_probs=log_probs,
        old_log_probs=old,
        advantages=advantages,
        response_mask=torch.ones_like(advantages, dtype=torch.bool),
        fields=fields,
        clipped_loss=clipped,
        aggregate=torch.sum,
    )


def gradient_of(name: str, micro_batch: MicroBatch, **parameters: Any) -> torch.Tensor:
    loss, metrics = build(name, **parameters).policy_loss(micro_batch)
    loss.backward()
    assert all(math.isfinite(value) for value in metrics.values())
    grad = micro_batch.log_probs.grad
    assert grad is not None
    return grad


@given(
    p=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8),
    drift=st.floats(-1.0, 0.0),
)
@settings(max_examples=50, deadline=None)
def test_recos_gradient_keeps_the_sign_of_the_advantage(p: list[float], drift: float) -> None:
    new = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
    old = new.detach() + drift
    advantages = torch.tensor([[(-1.0) ** t for t in range(len(p))]], dtype=torch.float64)
    grad = gradient_of("reco", micro(new, old, advantages))
    assert torch.equal(grad.sign(), -advantages.sign())
    assert ((grad.abs() >= 0.8 - 1e-9) & (grad.abs() <= 1.2 + 1e-9)).all()


def test_reco_on_policy_is_the_policy_gradient() -> None:
    new = torch.log(torch.tensor([[0.9, 0.5, 0.01, 1.0]])).requires_grad_()
    advantages = torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    grad = gradient_of("reco", micro(new, new.detach(), advantages))
    torch.testing.assert_close(grad, -advantages)


def test_reco_stays_finite_at_both_ends() -> None:
    new = torch.tensor([[0.0, -80.0, 0.0, -80.0]]).requires_grad_()
    old = torch.tensor([[-80.0, 0.0, 0.0, -80.0]])
    grad = gradient_of("reco", micro(new, old, torch.ones(1, 4)))
    assert grad[0].tolist() == pytest.approx([-1.2, -0.8, -1.0, -1.0])


@pytest.mark.parametrize("q", [0.5, 1e-3, 2e-6, 1e-6, 1e-9, 0.0])
def test_recos_variance_is_floored_at_1e_6_in_one_minus_p(q: float) -> None:
    log_p = torch.tensor(math.log1p(-q), dtype=torch.float64)
    expected = math.log1p(-q) + math.log(max(q, 1e-6))
    assert float(reco.log_variance(log_p)) == pytest.approx(expected, rel=1e-9)


def test_kl_cov_penalises_where_selected_and_clips_nowhere() -> None:
    new = torch.tensor([[-0.5, -1.0, -3.0]]).requires_grad_()
    old = torch.tensor([[-1.0, -0.5, -0.5]])
    advantages = torch.tensor([[1.0, -2.0, 3.0]])
    selected = torch.tensor([[True, True, False]])
    grad = gradient_of(
        "kl_cov_exact", micro(new, old, advantages, **{cov_exact.SELECTED: selected}), coef=0.25
    )
    r = (new.detach() - old).exp()
    expected = -advantages * r + torch.tensor([[0.25, -0.25, 0.0]])
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("change", [{"seed": 1}, {"step": 1}])
def test_another_seed_or_step_draws_other_tokens(change: dict[str, int]) -> None:
    batch = batch_of(16, groups=20, columns=30)
    parameters = {"share": 0.02, "low": 0.1}
    first = run("clip_cov_exact", batch, **parameters).advantages
    assert torch.equal(first, run("clip_cov_exact", batch, **parameters).advantages)
    if "seed" in change:
        other = run("clip_cov_exact", batch, **parameters, **change)
    else:
        other = run("clip_cov_exact", batch | change, **parameters)
    assert not torch.equal(first, other.advantages)


# Errors


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("ah_grpo", "entropy"),
        ("sa_ah_grpo", "vocab_size"),
        ("erpo", "ref_log_probs"),
        ("ep_grpo", "entropy"),
        ("reco", "old_log_probs"),
        ("kl_cov_exact", "old_log_probs"),
    ],
)
def test_a_missing_field_is_named(name: str, field: str) -> None:
    assert field in registry.get(name).needs
    with pytest.raises(MethodError, match=f"needs {field}"):
        run(name, batch_of(0) | {field: None})


@pytest.mark.parametrize("factor", [1.5, -0.5])
def test_an_entropy_that_no_softmax_has_is_refused(factor: float) -> None:
    batch = batch_of(0)
    wrong = torch.full(batch["response_mask"].shape, factor * math.log(VOCABULARY))
    with pytest.raises(MethodError, match=r"over a vocabulary of 50 it lies between 0 and 3\.912"):
        run("ah_grpo", batch | {"entropy": wrong})


def test_an_entropy_beyond_the_bound_by_rounding_alone_is_fine() -> None:
    batch = batch_of(0)
    entropy = torch.full(batch["response_mask"].shape, math.log(VOCABULARY)).bfloat16() * 1.004
    result = run("ah_grpo", batch | {"entropy": entropy}, alpha=1.0)
    assert (result.advantages == 0).all()


def test_a_vocabulary_of_one_is_refused() -> None:
    with pytest.raises(MethodError, match="vocab_size is 1"):
        run("ah_grpo", batch_of(0) | {"vocab_size": 1})


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("ah_grpo", {"alpha": 1.5}, r"alpha is 1.5; it must lie in \[0.0, 1.0\]"),
        ("sa_ah_grpo", {"control": "neg_scal"}, "did you mean 'neg_scale'"),
        ("erpo", {"buckets": 0}, "buckets is 0"),
        ("ep_grpo", {"eta": -1.0}, "eta is -1.0"),
        ("reco", {"ratio_low": 0.0}, "ratio_low is 0.0; it must be greater than 0"),
        ("reco", {"ratio_high": 0.9}, "ratio_high is 0.9"),
        ("reco", {"cap": 0.5}, "cap is 0.5"),
        ("clip_cov_exact", {"low": 6.0}, "low is 6.0, above high, 5.0"),
        ("clip_cov_exact", {"share": 2.0}, "share is 2.0"),
        ("kl_cov_exact", {"coef": -1.0}, "coef is -1.0"),
    ],
)
def test_parameters_out_of_range_are_refused(
    name: str, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(MethodError, match=words):
        build(name, **parameters)
