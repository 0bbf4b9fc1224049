"""The token-level methods against the oracle, and the property that each paper claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from batches import REWARDS, VOCABULARY, ragged, rows_of, valid, with_policy_fields
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from verl_covgrpo import MethodError, Reweighted, Rollout, build, registry, signals, stats
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
    groups, columns = draw(st.integers(0, 8)), draw(st.integers(1, 30))
    rewards, dtype = draw(st.sampled_from(REWARDS)), draw(st.sampled_from(DTYPES))
    base = draw(st.sampled_from(BASES))
    note(f"{seed=} {groups=} {columns=} {rewards=} {dtype=} {base=}")
    batch = batch_of(seed, groups, columns, rewards, dtype)
    generator = torch.Generator().manual_seed(seed + 2)
    batch["scores"] = torch.randint(0, 5, batch["rewards"].shape, generator=generator) / 4
    return with_base(batch, base, seed)


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
    expected_N = torch.tensor(flat(expected), dtype=torch.float64)
    torch.testing.assert_close(found[mask].double(), expected_N, **CLOSE)


def mean(values: Sequence[float], default: float = 1.0) -> float:
    return math.fsum(values) / len(values) if values else default


def mean_and_rms(values: Sequence[float]) -> tuple[float, float]:
    return mean(values), math.sqrt(mean([x * x for x in values]))


def flat(x: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in x for value in row]


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
    negative = [w for w, a in zip(flat(weights), flat(A), strict=True) if a < 0]
    assert result.metrics["weight"] == pytest.approx(mean(flat(weights)), rel=1e-6)
    assert result.metrics["negative_weight"] == pytest.approx(mean(negative), rel=1e-6)


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
def test_reco_equals_the_oracle(batch: dict[str, Any], cap: float) -> None:
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
    count = int(mask.sum())
    assume(all(abs(x - bound) > 1e-7 for x in flat(c) for bound in (low, high)))
    result = run("clip_cov_exact", batch, share=share, low=low, high=high)
    candidates = oracle.clip_cov_candidates(c, low, high)
    k = min(oracle.how_many(share, count), len(candidates))
    changed = places(result.advantages != base, mask)
    assert changed <= candidates
    # A dropped token whose advantage was 0 anyway shows no change.
    unseen = len(candidates & places(base == 0, mask))
    assert k - unseen <= len(changed) <= k
    kept = [(i, t) in changed for i, row in enumerate(c) for t in range(len(row))]
    expected = base[mask].masked_fill(torch.tensor(kept), 0.0)
    assert torch.equal(result.advantages[mask], expected)
    assert result.advantages.dtype == torch.float32 and (result.advantages[~mask] == 0).all()
    assert result.metrics["candidate_share"] == pytest.approx(len(candidates) / count)
    assert result.metrics["clipped_share"] == pytest.approx(k / count)
    if not unseen:
        dropped = mean([c[i][t] for i, t in changed], 0.0)
        assert result.metrics["clipped_covariance"] == pytest.approx(dropped, rel=1e-6, abs=1e-6)


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
    held = mean([c[i][t] for i, t in expected])
    assert result.metrics["penalised_covariance"] == pytest.approx(held, rel=1e-6, abs=1e-6)
    assert result.metrics["penalised_share"] == pytest.approx(len(expected) / int(mask.sum()))


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


def measured(result: Reweighted) -> dict[str, float]:
    """Return the metrics but the time."""
    assert result.metrics["seconds"] >= 0
    return {k: v for k, v in result.metrics.items() if k != "seconds"}


@pytest.mark.parametrize("name", ["ah_grpo", "sa_ah_grpo"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_the_adaptive_horizon(name: str, normalize: bool, seed: int) -> None:
    batch = batch_of(seed, groups=12, columns=40)
    A = valid(base_of(batch), batch["response_mask"])
    H = rows(batch, "entropy")
    aware = name == "sa_ah_grpo"
    D = oracle.ah_weights(H, A, VOCABULARY, 0.8)
    w = oracle.ah_weights(H, A, VOCABULARY, 0.8, normalize=normalize, sign_aware=aware)
    erased = mean([float(x < 0.1) for x in flat(w)])
    assert erased > 0
    expected = {
        "discount": mean(flat(D)),
        "final_discount": mean([row[-1] for row in D if row]),
        "weight": mean(flat(w)),
        "negative_weight": mean([x for x, a in zip(flat(w), flat(A), strict=True) if a < 0]),
        "erased_share": erased,
        "normalized_entropy": mean(flat(H)) / math.log(VOCABULARY),
        "tokens": float(len(flat(H))),
    }
    found = measured(run(name, batch, alpha=0.8, normalize=normalize))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["erpo", "ep_grpo"])
@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_gate_and_process(name: str, kind: str, seed: int) -> None:
    batch = with_base(batch_of(seed, groups=12, columns=25), kind, seed)
    H, s = rows(batch, "entropy"), log_ratios(batch)
    A = valid(base_of(batch), batch["response_mask"])
    rewards, group = batch["rewards"].tolist(), batch["group"]
    gate = flat(oracle.entropy_gate(H, group, 5.0))
    if name == "erpo":
        found = oracle.erpo_advantages(H, s, A, group, 5.0, 10, 0.2, True, 0.01)
    else:
        found = oracle.ep_grpo_advantages(H, s, A, rewards, rewards, group, 5.0, 10, 0.2, 0.5, 0.01)
    process = [x - w * a for x, w, a in zip(flat(found), gate, flat(A), strict=True)]
    adds = [abs(x) > 1e-9 for x in process]
    gate_mean, gate_rms = mean_and_rms(gate)
    expected = {
        "gate": gate_mean,
        "gate_std": math.sqrt(gate_rms**2 - gate_mean**2),
        "process_rms": mean_and_rms(process)[1],
        "process_share": mean(adds),
        "tokens": float(len(gate)),
    }
    if name == "ep_grpo":
        alike = constant_groups(batch).tolist()
        of_token = [own for own, row in zip(alike, H, strict=True) for _ in row]
        revived = [own and more for own, more in zip(of_token, adds, strict=True)]
        assert 0 < sum(revived) < sum(adds)
        expected["revived_share"] = mean(revived)
    assert measured(run(name, batch)) == pytest.approx(expected, rel=1e-5)


def test_the_std_of_a_gate_that_hardly_varies() -> None:
    batch = batch_of(0, groups=150, columns=900)
    gate = flat(oracle.entropy_gate(rows(batch, "entropy"), batch["group"], 0.01))
    expected = statistics.pstdev(gate)
    assert expected < 0.003
    found = run("erpo", batch, gamma=0.01).metrics["gate_std"]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("cap", [1.1, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_reco(cap: float, seed: int) -> None:
    batch = batch_of(seed, groups=12)
    batch["old_log_probs"] = batch["old_log_probs"] * 3
    l, A = rows(batch, "old_log_probs"), valid(base_of(batch), batch["response_mask"])  # noqa: E741
    w = oracle.reco_weights(l, batch["group"], cap)
    free = oracle.reco_weights(l, batch["group"], math.inf)
    kept = [x for x, row in zip(w, l, strict=True) if row]
    signed = [(x, a) for x, row in zip(w, A, strict=True) for a in row]
    middle, rms = mean_and_rms(kept)
    expected = {
        "weight_std": math.sqrt(rms**2 - middle**2),
        "capped_share": mean([x > cap for x, row in zip(free, l, strict=True) if row], 0.0),
        "positive_weight": mean([x for x, a in signed if a > 0]),
        "negative_weight": mean([x for x, a in signed if a < 0]),
        "tokens": float(len(signed)),
    }
    assert measured(run("reco", batch, cap=cap)) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), columns=st.integers(1, 12))
def test_ep_grpo_of_sessions_equals_the_oracle(seed: int, columns: int) -> None:
    """Rewards and scores of all but the last outputs are noise."""
    batch = batch_of(seed, groups=8, columns=columns)
    generator = torch.Generator().manual_seed(seed)
    batch["scores"] = torch.randint(0, 2, batch["rewards"].shape, generator=generator).float()
    final = list(range(len(batch["group"])))
    seen: dict[str, int] = {}
    for row, own in enumerate(batch["group"]):
        if own in seen and torch.rand((), generator=generator) < 0.4:
            final[row] = seen[own]
        else:
            seen[own] = row
    batch["final_output"] = torch.tensor(final)
    H = rows(batch, "entropy")
    shares = [10 * p for row in oracle.progress(H) for p in row[:-1]]
    assume(all(abs(share - round(share)) > 1e-9 for share in shares))
    # As if every output had the reward and the score of the last one.
    rewards, scores = (batch[name][final].tolist() for name in ("rewards", "scores"))
    expected = oracle.ep_grpo_advantages(
        H,
        log_ratios(batch),
        valid(base_of(batch), batch["response_mask"]),
        rewards,
        scores,
        batch["group"],
        5.0,
        10,
        0.2,
        0.5,
        0.01,
    )
    assert_tokens(run("ep_grpo", batch).advantages, expected, batch["response_mask"])


DEFAULTS: dict[str, dict[str, Any]] = {
    "ah_grpo": {"alpha": 0.5, "inclusive": True, "normalize": False},
    "sa_ah_grpo": {"alpha": 0.5, "inclusive": True, "normalize": False, "control": "none"},
    "erpo": {"gamma": 5.0, "buckets": 10, "eta": 0.2, "gate_outcome": True, "signal_floor": 1e-2},
    "ep_grpo": {
        "gamma": 5.0,
        "buckets": 10,
        "eta": 0.2,
        "success_threshold": 0.5,
        "signal_floor": 1e-2,
    },
    "reco": {"cap": 5.0, "ratio_low": 0.8, "ratio_high": 1.2},
    "clip_cov_exact": {"share": 2e-4, "low": 1.0, "high": 5.0, "seed": 0},
    "kl_cov_exact": {"share": 2e-3, "coef": 1.0},
}


@pytest.mark.parametrize("name", METHODS)
def test_the_defaults_are_those_of_the_papers(name: str) -> None:
    assert registry.parameters(name) == {"base": "grpo", **DEFAULTS[name]}


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_rows_does_not_matter(name: str, dtype: torch.dtype, seed: int) -> None:
    """In bfloat16 many tokens have the same covariance."""
    batch = batch_of(seed, groups=10, columns=20, dtype=dtype)
    order = torch.randperm(len(batch["group"]), generator=torch.Generator().manual_seed(seed))
    expected = run(name, batch, **BUSY.get(name, {}))
    found = run(name, rows_of(batch, order), **BUSY.get(name, {}))
    equal_results(found, reordered(expected, order))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("junk", [0.0, -1e30, 1e30, torch.inf, torch.nan])
def test_what_is_masked_does_not_matter(name: str, kind: str, junk: float) -> None:
    batch = with_base(batch_of(17, groups=10, columns=20), kind, 17)
    mask = batch["response_mask"]
    filled = {
        key: torch.where(mask if value.ndim == 2 else mask.any(dim=1), value, junk)
        for key, value in batch.items()
        if isinstance(value, torch.Tensor) and key not in ("rewards", "response_mask")
    }
    assert len(filled) == (3 if kind == "grpo" else 4)
    expected = run(name, batch, **BUSY.get(name, {}))
    found = run(name, batch | filled, **BUSY.get(name, {}))
    assert torch.equal(found.advantages, expected.advantages)
    assert (found.advantages[~mask] == 0).all()
    for field, value in expected.loss_fields.items():
        assert torch.equal(found.loss_fields[field], value)
    assert measured(found) == measured(expected)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_batch_gives_the_same_result_and_stays_as_it_was(name: str) -> None:
    batch = with_base(batch_of(18, groups=10, columns=20), "per token", 18)
    before = {k: v.clone() for k, v in batch.items() if isinstance(v, torch.Tensor)}
    method, rollout = build(name, **BUSY.get(name, {})), Rollout(**batch)
    results = [method(rollout), method(rollout), run(name, batch, **BUSY.get(name, {}))]
    for result in results[1:]:
        assert torch.equal(result.advantages, results[0].advantages)
        assert measured(result) == measured(results[0])
        for field, value in results[0].loss_fields.items():
            assert torch.equal(result.loss_fields[field], value)
    for key, value in before.items():
        torch.testing.assert_close(batch[key], value, rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.parametrize("name", ["ah_grpo", "sa_ah_grpo"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_batch_that_is_discounted_to_nothing_is_finite(name: str, sign: float) -> None:
    """With alpha = 1 and the highest entropy everywhere no weight is left to normalise by."""
    batch = batch_of(4)
    mask = batch["response_mask"]
    batch["entropy"] = torch.full(mask.shape, math.log(VOCABULARY))
    batch["base_advantages"] = torch.full(mask.shape[:1], sign)
    result = run(name, batch, alpha=1.0, normalize=True)
    assert result.advantages.isfinite().all()
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("control", ["neg_scale", "position_decay"])
def test_the_controls_keep_the_mean_negative_weight(control: str) -> None:
    batch = batch_of(6, groups=20, columns=20)
    plain = run("sa_ah_grpo", batch).metrics["negative_weight"]
    assert plain < 0.9
    assert run("sa_ah_grpo", batch, control=control).metrics["negative_weight"] == pytest.approx(
        plain
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_controls_keep_the_negative_mass_and_take_the_horizon_away(seed: int) -> None:
    """Seen in the advantages: each is its weight times the base."""
    batch = batch_of(seed, groups=20, columns=20, rewards="normal")
    mask, base = batch["response_mask"], base_of(batch).double()
    negative = mask & (base < 0)
    place = mask.cumsum(dim=1)
    weight = {
        control: run("sa_ah_grpo", batch, control=control).advantages.double() / base
        for control in ("none", "neg_scale", "position_decay")
    }
    plain = weight["none"][negative]
    for control in ("neg_scale", "position_decay"):
        assert float(weight[control][negative].mean()) == pytest.approx(float(plain.mean()))
    torch.testing.assert_close(
        weight["neg_scale"][negative], plain.mean().expand(plain.shape), rtol=1e-6, atol=0
    )
    for rank in place[negative].unique():
        here = negative & (place == rank)
        kept, own = weight["position_decay"][here], weight["none"][here]
        torch.testing.assert_close(kept, own.mean().expand(own.shape), rtol=1e-6, atol=0)


@pytest.mark.parametrize("inclusive", [False, True])
def test_the_discount_never_grows_along_a_response(inclusive: bool) -> None:
    batch = batch_of(8, groups=10, columns=30)
    batch["base_advantages"] = torch.ones(batch["response_mask"].shape)
    result = run("ah_grpo", batch, inclusive=inclusive)
    for row in valid(result.advantages, batch["response_mask"]):
        assert row == sorted(row, reverse=True)
        assert all(0 < weight <= 1 for weight in row)
        assert inclusive or row[:1] in ([], [1.0])


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


@pytest.mark.parametrize("entropy", [0.1, 0.3, 0.5, 0.7, 1.3])
@pytest.mark.parametrize("buckets", [1, 2, 5, 10])
def test_equal_entropies_are_cut_like_ranks(entropy: float, buckets: int) -> None:
    """After k of n tokens p = k / n: where K p is whole, rounding must not decide."""
    for n in (10, 20, 30, 50, 100, 400):
        rollout = Rollout(
            rewards=torch.zeros(1),
            response_mask=torch.ones(1, n),
            group=["a"],
            entropy=torch.full((1, n), entropy),
        )
        found = signals.buckets_by_progress(rollout, buckets).of_column[0]
        expected = [min(buckets * k // n, buckets - 1) for k in range(1, n + 1)]
        assert found.tolist() == [expected], n


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


@pytest.mark.parametrize("cap", [1.0, 1.5])
def test_reco_caps_the_weights(cap: float) -> None:
    batch = batch_of(14, groups=20, columns=20)
    batch["base_advantages"] = torch.ones(batch["response_mask"].shape)
    mask = batch["response_mask"]
    free, capped = (run("reco", batch, cap=c).advantages for c in (1e9, cap))
    assert float(free.max()) > cap
    assert torch.equal(capped, free.clamp(max=cap))
    assert (capped[mask] > 0).all()


def test_reco_weights_of_hopeless_responses_stay_finite() -> None:
    batch = batch_of(15)
    batch["old_log_probs"] = batch["old_log_probs"] * 1e4
    result = run("reco", batch)
    assert result.advantages.isfinite().all()
    assert result.metrics["capped_share"] >= 0


@pytest.mark.parametrize("share", [2e-4, 0.03, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_drops_exactly_as_many_as_it_should(share: float, seed: int) -> None:
    batch = batch_of(seed, groups=20, columns=30)
    mask = batch["response_mask"]
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(mask.shape, generator=generator)
    base += 0.1 * base.sign()
    batch["base_advantages"] = base
    candidates = oracle.clip_cov_candidates(covariances_of(batch), 0.5, 2.0)
    dropped = places(
        run("clip_cov_exact", batch, share=share, low=0.5, high=2.0).advantages != base, mask
    )
    assert dropped <= candidates
    assert len(dropped) == min(oracle.how_many(share, int(mask.sum())), len(candidates))


@pytest.mark.parametrize("name", ["clip_cov_exact", "kl_cov_exact"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_equal_covariance_are_told_apart_without_the_row(name: str, seed: int) -> None:
    """Each row's log-probs are alike but for the last, so that 24 tokens have the same c > 0."""
    log_probs = torch.full((12, 5), -0.5)
    log_probs[:, -1] = -1.0 - 0.01 * torch.arange(12)
    batch = {
        "rewards": torch.tensor([1.0, 0.0] * 6),
        "response_mask": torch.ones(12, 5, dtype=torch.bool),
        "group": [row // 6 for row in range(12)],
        "old_log_probs": log_probs,
    }
    c = covariances_of(batch)
    assert sum(x == c[0][0] for x in flat(c)) == 24 and sum(x > c[0][0] for x in flat(c)) == 6
    parameters = {"share": 10 / 60} | ({"low": 0.0} if name == "clip_cov_exact" else {})

    def chosen(order: torch.Tensor) -> torch.Tensor:
        reordered_batch = rows_of(batch, order)
        result = run(name, reordered_batch, **parameters)
        if name == "clip_cov_exact":
            return result.advantages != base_of(reordered_batch)
        return result.loss_fields[cov_exact.SELECTED]

    first = chosen(torch.arange(12))
    assert int(first.sum()) == 10
    if name == "kl_cov_exact":  # the 6 that are larger, and 4 of the 24
        assert [c[i][t] for i, t in places(first, batch["response_mask"])].count(c[0][0]) == 4
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(chosen(order), first[order])


def test_clip_cov_without_a_candidate_is_the_base() -> None:
    batch = batch_of(19)
    result = run("clip_cov_exact", batch, low=1e6, high=1e7)
    assert torch.equal(result.advantages, torch.where(batch["response_mask"], base_of(batch), 0.0))
    assert result.metrics["candidate_share"] == result.metrics["clipped_share"] == 0
    assert result.metrics["clipped_covariance"] == 0


def test_clip_cov_draws_every_candidate_as_often() -> None:
    batch = batch_of(20, groups=3, columns=8)
    mask, base = batch["response_mask"], base_of(batch)
    candidates = oracle.clip_cov_candidates(covariances_of(batch), 0.1, 5.0)
    assert not candidates & places(base == 0, mask) and len(candidates) >= 8
    times_drawn = dict.fromkeys(candidates, 0)
    draws, k = 300, oracle.how_many(0.05, int(mask.sum()))
    rollout = Rollout(**batch)
    for seed in range(draws):
        result = build("clip_cov_exact", share=0.05, low=0.1, seed=seed)(rollout)
        for place in places(result.advantages != base, mask):
            times_drawn[place] += 1
    share = k / len(candidates)
    spread = math.sqrt(draws * share * (1 - share))
    assert all(abs(n - draws * share) < 4.5 * spread for n in times_drawn.values())


# The losses


def micro(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    **fields: torch.Tensor,
) -> MicroBatch:
    """Return a micro-batch whose losses are added up over the valid tokens."""
    mask = torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask

    def clipped(_: torch.Tensor) -> Any:
        raise AssertionError("these losses do not clip")

    def aggregate(losses: torch.Tensor, corrected: bool = True) -> torch.Tensor:
        assert corrected, "the loss is one of the policy gradient: corrected"
        return torch.where(mask, losses, 0.0).sum()

    return MicroBatch(
        log_probs=log_probs,
        old_log_probs=old,
        advantages=advantages,
        response_mask=mask,
        fields=fields,
        clipped_loss=clipped,
        aggregate=aggregate,
    )


def gradient_of(name: str, micro_batch: MicroBatch, **parameters: Any) -> torch.Tensor:
    micro_batch.log_probs.retain_grad()
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


def drifted(seed: int, size: float) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a batch in float64 without masked garbage, and log-probs after some updates."""
    batch = with_base(batch_of(seed, rewards="normal", dtype=torch.float64), "per token", seed)
    mask = batch["response_mask"]
    for name in ("old_log_probs", "base_advantages"):
        batch[name] = torch.where(mask, batch[name], 0.0)
    generator = torch.Generator().manual_seed(seed)
    drift = size * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    return batch, (batch["old_log_probs"] + drift).clamp(max=0).requires_grad_()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([0.0, 0.1, 1.0]),
    low=st.sampled_from([0.3, 0.8, 1.0]),
    high=st.sampled_from([1.0, 1.2, 4.0]),
)
def test_recos_loss_equals_the_oracle(seed: int, size: float, low: float, high: float) -> None:
    batch, log_probs = drifted(seed, size)
    mask, old, A = batch["response_mask"], batch["old_log_probs"], batch["base_advantages"]
    method = build("reco", ratio_low=low, ratio_high=high)
    loss, metrics = method.policy_loss(micro(log_probs, old, A, mask))
    loss.backward()
    now, was = valid(log_probs.detach(), mask), valid(old, mask)
    losses, slopes = oracle.reco_losses(now, was, valid(A, mask), low, high)
    assert float(loss.detach()) == pytest.approx(math.fsum(flat(losses)), rel=1e-6, abs=1e-9)
    grad = log_probs.grad
    assert grad is not None and (grad[~mask] == 0).all()
    assert grad[mask].tolist() == pytest.approx(flat(slopes), rel=1e-6)
    pairs = list(zip(flat(now), flat(was), strict=True))
    ratios = [oracle.reco_ratio(x, y) for x, y in pairs]
    assume(all(abs(r - bound) > 1e-9 for r in ratios for bound in (low, high)) or size == 0.0)
    expected = {
        "ppo_kl": mean([y - x for x, y in pairs]),
        "reco_ratio": mean([min(max(r, low), high) for r in ratios]),
    }
    assert metrics.keys() == expected.keys() | {"pg_clipfrac"}
    assert {k: metrics[k] for k in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
    clipped = mean([r < low or r > high for r in ratios]) if size else 0.0
    assert metrics["pg_clipfrac"] == pytest.approx(clipped, rel=1e-6)


def test_reco_on_policy_is_the_policy_gradient() -> None:
    new = torch.log(torch.tensor([[0.9, 0.5, 0.01, 1.0]])).requires_grad_()
    advantages = torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    grad = gradient_of("reco", micro(new, new.detach(), advantages))
    torch.testing.assert_close(grad, -advantages)


@pytest.mark.parametrize("far", [-50.0, -80.0, -500.0])
def test_reco_stays_finite_at_both_ends(far: float) -> None:
    new = torch.tensor([[0.0, far, 0.0, far]]).requires_grad_()
    old = torch.tensor([[far, 0.0, 0.0, far]])
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


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([0.1, 1.0]),
    share=st.sampled_from([2e-3, 0.3, 1.0]),
    coef=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_loss_of_kl_cov_equals_the_oracle(
    seed: int, size: float, share: float, coef: float
) -> None:
    batch, log_probs = drifted(seed, size)
    mask, old, A = batch["response_mask"], batch["old_log_probs"], batch["base_advantages"]
    fields = run("kl_cov_exact", batch, share=share).loss_fields
    loss, metrics = build("kl_cov_exact", share=share, coef=coef).policy_loss(
        micro(log_probs, old, A, mask, **fields)
    )
    loss.backward()
    now, was = valid(log_probs.detach(), mask), valid(old, mask)
    selected = oracle.kl_cov_selected(oracle.covariances(was, valid(A, mask)), share)
    losses, slopes = oracle.kl_cov_losses(now, was, valid(A, mask), selected, coef)
    assert float(loss.detach()) == pytest.approx(math.fsum(flat(losses)), rel=1e-6, abs=1e-9)
    grad = log_probs.grad
    assert grad is not None and (grad[~mask] == 0).all()
    assert grad[mask].tolist() == pytest.approx(flat(slopes), rel=1e-6)
    count = int(mask.sum())
    moved = [abs(now[i][t] - was[i][t]) for i, t in selected]
    expected = {
        "ppo_kl": mean([y - x for x, y in zip(flat(now), flat(was), strict=True)]),
        "kl_cov_exact_penalty": coef * math.fsum(moved) / count,
    }
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)


def selection_of(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a field for kl_cov_exact that selects every other column, masked ones too."""
    return {cov_exact.SELECTED: (torch.arange(mask.shape[1]) % 2 == 0).expand(mask.shape)}


@pytest.mark.parametrize("name", ["reco", "kl_cov_exact"])
@pytest.mark.parametrize("where", ["old_log_probs", "advantages", "log_probs"])
def test_what_is_masked_does_not_reach_the_loss(name: str, where: str) -> None:
    """No gradient either: one nan there would be in every weight of the model."""
    mask = torch.tensor([[True, True, False, True, False]])
    fields = {
        "log_probs": torch.tensor([[-0.4, -1.0, -2.0, -0.1, -0.7]]),
        "old_log_probs": torch.tensor([[-0.5, -0.9, -0.3, -0.1, -0.2]]),
        "advantages": torch.tensor([[1.0, -0.5, 0.0, 2.0, 0.0]]),
    }

    def outcome(junk: float) -> tuple[float, list[float], list[float], dict[str, float]]:
        given = fields | {where: torch.where(mask, fields[where], junk)}
        log_probs = given["log_probs"].clone().requires_grad_()
        batch = micro(
            log_probs, given["old_log_probs"], given["advantages"], mask, **selection_of(mask)
        )
        loss, metrics = build(name).policy_loss(batch)
        loss.backward()
        grad = log_probs.grad
        assert grad is not None
        return float(loss.detach()), grad[mask].tolist(), grad[~mask].tolist(), metrics

    clean = outcome(0.0)
    assert clean[2] == [0.0, 0.0]
    for junk in (1e30, torch.inf, -torch.inf, torch.nan):
        assert outcome(junk) == clean


@pytest.mark.parametrize("name", ["reco", "kl_cov_exact"])
def test_the_losses_have_the_same_metrics_at_each_call(name: str) -> None:
    names = set()
    for mask in (torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.bool)):
        for drift in (0.0, 3.0):
            new = torch.tensor([[-0.5, -1.0, -3.0]]).requires_grad_()
            batch = micro(new, new.detach() - drift, torch.ones(1, 3), mask, **selection_of(mask))
            loss, metrics = build(name).policy_loss(batch)
            assert loss.isfinite() and loss.requires_grad
            assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
            names.add(frozenset(metrics))
    assert len(names) == 1
    words = ("max", "min", "sum", "total")
    assert [key for key in names.pop() if any(word in key for word in words)] == []


@pytest.mark.parametrize("name", ["reco", "kl_cov_exact"])
def test_a_split_into_micro_batches_adds_up(name: str) -> None:
    batch, log_probs = drifted(21, 0.3)
    mask, A = batch["response_mask"], batch["base_advantages"]
    selected = run("kl_cov_exact", batch, share=0.2).loss_fields[cov_exact.SELECTED]

    def loss_of(part: slice) -> torch.Tensor:
        fields = {cov_exact.SELECTED: selected[part]}
        old = batch["old_log_probs"][part]
        loss, _ = build(name).policy_loss(
            micro(log_probs[part], old, A[part], mask[part], **fields)
        )
        return loss

    whole = loss_of(slice(None))
    parts = [loss_of(slice(i, i + 3)) for i in range(0, len(mask), 3)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_another_seed_or_step_draws_other_tokens() -> None:
    batch = batch_of(16, groups=20, columns=30)

    def drawn(seed: int, step: int) -> torch.Tensor:
        result = run("clip_cov_exact", batch | {"step": step}, share=0.02, low=0.1, seed=seed)
        return result.advantages

    draws = [drawn(seed, step) for seed in range(3) for step in range(3)]
    assert torch.equal(draws[0], drawn(0, 0)) and torch.equal(draws[-1], drawn(2, 2))
    for i, one in enumerate(draws):
        assert not any(torch.equal(one, other) for other in draws[:i])


# Errors


NEEDS = {
    "ah_grpo": ("entropy", "vocab_size"),
    "sa_ah_grpo": ("entropy", "vocab_size"),
    "erpo": ("entropy", "old_log_probs", "ref_log_probs"),
    "ep_grpo": ("entropy", "old_log_probs", "ref_log_probs"),
    "reco": ("old_log_probs",),
    "clip_cov_exact": ("old_log_probs",),
    "kl_cov_exact": ("old_log_probs",),
}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in NEEDS.items() for field in fields]
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
        ("sa_ah_grpo", {"alpha": -0.1}, "alpha is -0.1"),
        ("ep_grpo", {"buckets": 0}, "buckets is 0"),
        ("erpo", {"eta": -1.0}, "eta is -1.0"),
        ("erpo", {"gamma": -1.0}, "gamma is -1.0"),
        ("ep_grpo", {"signal_floor": -1.0}, "signal_floor is -1.0"),
        ("kl_cov_exact", {"share": 2.0}, "share is 2.0"),
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


@pytest.mark.parametrize("name", ["clip_cov_exact", "kl_cov_exact"])
def test_a_complete_tie_is_broken_by_the_prompt(name: str) -> None:
    """Alike in everything but the prompt: the same prompt is chosen in any order of rows."""
    batch: dict[str, Any] = {
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "group": ["b", "b", "a", "a"],
        "response_mask": torch.ones(4, 1, dtype=torch.bool),
        "old_log_probs": torch.tensor([[-0.1], [-1.0], [-0.1], [-1.0]]),
    }
    parameters: dict[str, Any] = {"share": 0.25} | (
        {"low": 0.0} if name == "clip_cov_exact" else {}
    )
    chosen = set()
    for order in ([0, 1, 2, 3], [2, 3, 0, 1], [3, 1, 0, 2]):
        moved = rows_of(batch, torch.tensor(order))
        result = run(name, moved, **parameters)
        if name == "kl_cov_exact":
            marked = result.loss_fields[cov_exact.SELECTED].any(dim=1)
        else:
            marked = (result.advantages == 0).any(dim=1)
        assert int(marked.sum()) == 1
        row = int(marked.nonzero())
        chosen.add((moved["group"][row], float(moved["rewards"][row])))
    assert len(chosen) == 1
