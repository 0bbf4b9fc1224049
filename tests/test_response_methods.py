"""Methods that look at whole responses, at the course of training, or at a judge's score."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from batches import REWARDS, ragged, rows_of, valid, with_policy_fields
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_covgrpo import MethodError, Reweighted, Rollout, build, groups, stats
from verl_covgrpo.losses import sent
from verl_covgrpo.registry import Method

METHODS = ("arm", "ha_dw", "pos_adv", "dagrpo", "sent")
PARAMETERS: dict[str, dict[str, Any]] = {"dagrpo": {"score_key": "judge", "delta": 2.0}}
CLOSE = {"rtol": 3e-5, "atol": 3e-6}
RANDOM = {
    "seed": st.integers(0, 10**6),
    "groups": st.integers(0, 8),
    "columns": st.integers(1, 30),
    "rewards": st.sampled_from(REWARDS),
}


def batch_of(seed: int, groups: int = 6, columns: int = 13, rewards: str = "binary") -> Any:
    batch = with_policy_fields(ragged(seed, groups, columns, rewards), seed)
    generator = torch.Generator().manual_seed(seed + 5)
    judge = torch.randint(1, 11, batch["rewards"].shape, generator=generator).float()
    return batch | {"extras": {"judge": judge}}


def method(name: str, **parameters: Any) -> Method:
    return build(name, **PARAMETERS.get(name, {}) | parameters)


def run(name: str, batch: dict[str, Any], **parameters: Any) -> Reweighted:
    return method(name, **parameters)(Rollout(**batch))


def base_of(batch: dict[str, Any]) -> list[float]:
    return build("covgrpo").base_advantages(Rollout(**batch)).squeeze(1).double().tolist()


def empty_rows(batch: dict[str, Any]) -> list[bool]:
    return (~batch["response_mask"].any(dim=1)).tolist()


def assert_rows(result: Reweighted, per_row: list[float], mask: torch.Tensor) -> None:
    expected = torch.tensor(per_row, dtype=torch.float64).unsqueeze(1).expand(mask.shape)
    assert result.advantages.dtype == torch.float32
    assert (result.advantages[~mask] == 0).all()
    torch.testing.assert_close(result.advantages[mask].double(), expected[mask], **CLOSE)


def shares(batch: dict[str, Any], threshold: float = 0.5) -> tuple[dict[Any, float], float]:
    """The share of right responses of each real group, and of the batch, by loops."""
    empty = empty_rows(batch)
    real = {g for g, e in zip(batch["group"], empty, strict=True) if not e}
    right: dict[Any, list[bool]] = {g: [] for g in batch["group"]}
    for g, r in zip(batch["group"], batch["rewards"].tolist(), strict=True):
        right[g].append(r > threshold)
    everything = [x for g in real for x in right[g]]
    per_group = {g: sum(right[g]) / len(right[g]) if g in real else 0.0 for g in right}
    return per_group, sum(everything) / len(everything)


# arm


@settings(max_examples=50, deadline=None)
@given(**RANDOM, alpha=st.sampled_from([0.3, 1.0]), share=st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_arm_equals_the_oracle(
    seed: int, groups: int, columns: int, rewards: str, alpha: float, share: float
) -> None:
    batch = batch_of(seed, groups, columns, rewards)
    shifts = oracle.arm_shifts(
        valid(batch["old_log_probs"], batch["response_mask"]),
        batch["rewards"].tolist(),
        batch["group"],
        alpha,
        share,
        0.5,
    )
    expected = [a + s for a, s in zip(base_of(batch), shifts, strict=True)]
    assert_rows(run("arm", batch, alpha=alpha, share=share), expected, batch["response_mask"])


def test_arm_leaves_all_wrong_groups_untouched_and_moves_all_right_ones() -> None:
    batch = batch_of(3, groups=20)
    wrong, right = (
        torch.tensor([shares(batch)[0][g] == share for g in batch["group"]]) for share in (0.0, 1.0)
    )
    mask, result = batch["response_mask"], run("arm", batch).advantages
    base = torch.tensor(base_of(batch), dtype=torch.float32).unsqueeze(1).expand(mask.shape)
    assert bool((mask & wrong.unsqueeze(1)).any())
    assert torch.equal(result[wrong], torch.where(mask, base, 0.0)[wrong])
    sizes = torch.tensor([batch["group"].count(g) for g in batch["group"]])
    moved = right & (sizes > 1) & mask.any(dim=1)
    assert (result[moved][mask[moved]] != 0).float().mean() > 0.5


# ha_dw


@settings(max_examples=50, deadline=None)
@given(
    **RANDOM,
    scale=st.sampled_from([1.3, 1.0]),
    history=st.lists(st.floats(0, 1), max_size=14),
)
def test_ha_dw_equals_the_oracle(
    seed: int, groups: int, columns: int, rewards: str, scale: float, history: list[float]
) -> None:
    batch = batch_of(seed, groups, columns, rewards)
    made = method("ha_dw", scale=scale)
    made.load_state_dict({"anchor": "hard", "history": history})
    p, y = shares(batch)
    C = statistics.fmean(history[-10:]) if history else y
    expected = [
        oracle.ha_dw_weight(a, p[g], C, scale) * a
        for a, g in zip(base_of(batch), batch["group"], strict=True)
    ]
    result = made(Rollout(**batch))
    assert_rows(result, expected, batch["response_mask"])
    assert result.metrics["anchor"] == pytest.approx(C)
    assert result.metrics["right_share"] == pytest.approx(y)
    assert made.state_dict()["history"][-1] == pytest.approx(y)


def test_ha_dws_check_values() -> None:
    """C = 0.5, p = 0.25, lambda 1.3: 1.669 for a right response, 1.012 for a wrong one."""
    batch = {
        "rewards": torch.tensor([1.0, 0.0, 0.0, 0.0]),
        "response_mask": torch.ones(4, 2, dtype=torch.bool),
        "group": ["a"] * 4,
    }
    made = method("ha_dw")
    made.load_state_dict({"anchor": "hard", "history": [0.5]})
    ratio = made(Rollout(**batch)).advantages / torch.tensor(base_of(batch)).unsqueeze(1)
    assert ratio[0].tolist() == pytest.approx([1.669] * 2, abs=5e-4)
    assert ratio[1].tolist() == pytest.approx([1.012] * 2, abs=5e-4)


def anchors(made: Method, ys: list[float]) -> list[float]:
    """The anchors of batches in which these shares were right."""
    found = []
    for y in ys:
        batch = {
            "rewards": (torch.arange(20) < round(20 * y)).float(),
            "response_mask": torch.ones(20, 1, dtype=torch.bool),
            "group": list(range(20)),
        }
        found.append(made(Rollout(**batch)).metrics["anchor"])
    return found


def test_the_hard_anchor_is_the_mean_of_the_last_batches_before() -> None:
    ys = [0.1, 0.5, 0.9, 0.3, 0.7]
    found = anchors(method("ha_dw", window=3), ys)
    expected = [0.1] + [statistics.fmean(ys[max(0, t - 3) : t]) for t in range(1, 5)]
    assert found == pytest.approx(expected)


def test_the_kalman_anchor_follows_its_recursion() -> None:
    ys = [0.1, 0.5, 0.9, 0.3, 0.7, 0.7, 0.2]
    gain, floor, window = 2.0, 0.05, 3
    expected: list[float] = []
    C, seen = ys[0], [ys[0]]
    for y in ys:
        expected.append(C)
        recent = seen[-window:]
        eta = 1.0
        if len(recent) >= 2:
            mean = sum(recent) / len(recent)
            std = math.sqrt(sum((x - mean) ** 2 for x in recent) / len(recent))
            eta = min(max(gain * std, floor), 1.0)
        C = (1 - eta) * C + eta * y
        seen.append(C)
    made = method("ha_dw", anchor="kalman", gain=gain, floor=floor, window=window)
    assert anchors(made, ys) == pytest.approx(expected)
    assert len({round(C, 6) for C in expected}) > 3


def test_ha_dws_memory_does_not_grow() -> None:
    for anchor in ("hard", "kalman"):
        made = method("ha_dw", anchor=anchor, window=4)
        anchors(made, [0.5] * 20)
        assert len(made.state_dict()["history"]) <= 5


# pos_adv


@pytest.mark.parametrize("rewards", REWARDS)
def test_positive_advantages_alone_are_scaled(rewards: str) -> None:
    batch = batch_of(4, groups=12, rewards=rewards)
    made = method("pos_adv")
    made.load_state_dict({"scale": 0.35})
    expected = [0.35 * a if a > 0 else a for a in base_of(batch)]
    result = made(Rollout(**batch))
    assert_rows(result, expected, batch["response_mask"])
    mask = batch["response_mask"]
    base = torch.tensor(base_of(batch), dtype=torch.float32).unsqueeze(1).expand(mask.shape)
    kept = mask & (base <= 0)
    assert torch.equal(result.advantages[kept], base[kept])


def test_the_entropy_schedule_over_a_simulated_path() -> None:
    batch = batch_of(5)
    made, scale = method("pos_adv", step=0.05, target=0.2), 0.0
    path = [0.5] * 3 + [0.1] * 5 + [0.2] + [0.9] * 30
    for entropy in path:
        batch["entropy"] = torch.full(batch["response_mask"].shape, entropy)
        assert made(Rollout(**batch)).metrics["scale"] == pytest.approx(scale)
        scale = min(max(scale + (-0.05 if entropy < 0.2 else 0.05), 0.0), 1.0)
    assert scale == 1.0


@pytest.mark.parametrize(
    ("progress", "scale"), [(0.0, 0.0), (0.49, 0.0), (0.5, 0.0), (0.75, 0.5), (1.0, 1.0)]
)
def test_the_stage_schedule(progress: float, scale: float) -> None:
    batch = batch_of(6) | {"progress": progress}
    assert run("pos_adv", batch, schedule="stage").metrics["scale"] == pytest.approx(scale)


@pytest.mark.parametrize(
    ("epoch", "epochs", "scale"), [(0, 1, 1.0), (0, 5, 0.0), (2, 5, 0.5), (4, 5, 1.0)]
)
def test_the_epoch_schedule(epoch: int, epochs: int, scale: float) -> None:
    batch = batch_of(6) | {"epoch": epoch, "epochs": epochs}
    assert run("pos_adv", batch, schedule="epoch").metrics["scale"] == pytest.approx(scale)


# dagrpo


@settings(max_examples=60, deadline=None)
@given(**RANDOM, delta=st.sampled_from([0.0, 1.0, 3.0]))
def test_dagrpo_equals_the_oracle(
    seed: int, groups: int, columns: int, rewards: str, delta: float
) -> None:
    batch = batch_of(seed, groups, columns, rewards)
    A, J = base_of(batch), batch["extras"]["judge"].tolist()
    kept = oracle.dagrpo_kept(A, J, batch["group"], empty_rows(batch), delta)
    expected = [a if k else 0.0 for a, k in zip(A, kept, strict=True)]
    assert_rows(run("dagrpo", batch, delta=delta), expected, batch["response_mask"])


def test_dagrpo_on_a_base_of_verls_with_one_value_per_token() -> None:
    batch = batch_of(8, groups=12)
    mask = batch["response_mask"]
    wide = torch.tensor(base_of(batch), dtype=torch.float32).unsqueeze(1) * mask
    found = run("dagrpo", batch | {"base_advantages": wide})
    assert torch.equal(found.advantages, run("dagrpo", batch).advantages)


def test_dagrpos_denominator_does_not_change() -> None:
    """A masked response still counts: its tokens are there, with the advantage 0."""
    batch = batch_of(9, groups=12)
    result = run("dagrpo", batch, delta=9.0)
    assert 0 < result.metrics["kept_share"] < 1
    assert result.metrics["tokens"] == float(batch["response_mask"].sum())


def test_dagrpo_without_a_score_says_what_to_set() -> None:
    batch = batch_of(0)
    with pytest.raises(MethodError, match=r"algorithm.dagrpo.score_key=KEY"):
        build("dagrpo")(Rollout(**batch))
    with pytest.raises(MethodError, match=r"extras\['quality'\], but the rollout has \['judge'\]"):
        build("dagrpo", score_key="quality")(Rollout(**batch))


# sent


@settings(max_examples=50, deadline=None)
@given(**RANDOM, q_entropy=st.sampled_from([0.0, 0.5, 0.8, 1.0]), q_cov=st.sampled_from([0.0, 0.8]))
def test_sents_coefficients_equal_the_oracle(
    seed: int, groups: int, columns: int, rewards: str, q_entropy: float, q_cov: float
) -> None:
    batch = batch_of(seed, groups, columns, rewards)
    mask = batch["response_mask"]
    base = torch.tensor(base_of(batch)).unsqueeze(1).expand(mask.shape)
    H = valid(batch["entropy"], mask)
    c = oracle.covariances(valid(batch["old_log_probs"], mask), valid(base, mask))
    result = run("sent", batch, entropy_quantile=q_entropy, covariance_quantile=q_cov)
    beta = result.loss_fields[sent.BETA]
    assert (beta[~mask] == 0).all()
    expected = oracle.sent_betas(H, c, q_entropy, q_cov, 0.2, 0.05)
    flat = torch.tensor([x for row in expected for x in row])
    # A covariance within rounding of the threshold may fall on either side.
    threshold = result.metrics["covariance_threshold"]
    close = torch.tensor([abs(x - threshold) < 1e-6 for row in c for x in row])
    torch.testing.assert_close(beta[mask][~close], flat[~close])


def test_sent_with_one_entropy_everywhere_holds_nothing() -> None:
    batch = batch_of(2)
    batch["entropy"] = torch.where(batch["response_mask"], 0.4, torch.nan)
    result = run("sent", batch)
    assert (result.loss_fields[sent.BETA] == 0).all()
    assert result.metrics["low_entropy_share"] == 0.0


# What must not change a result


def equal_results(found: Reweighted, expected: Reweighted) -> None:
    torch.testing.assert_close(found.advantages, expected.advantages, rtol=1e-5, atol=1e-6)
    for name, value in expected.loss_fields.items():
        torch.testing.assert_close(found.loss_fields[name], value)
    mine = {k: v for k, v in found.metrics.items() if k != "seconds"}
    theirs = {k: v for k, v in expected.metrics.items() if k != "seconds"}
    assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    batch = batch_of(seed, groups=10, columns=20)
    order = torch.randperm(len(batch["group"]), generator=torch.Generator().manual_seed(seed))
    expected = run(name, batch)
    moved = rows_of(batch, order) | {"extras": {"judge": batch["extras"]["judge"][order]}}
    found = run(name, moved)
    fields = {key: value[order] for key, value in expected.loss_fields.items()}
    equal_results(
        found,
        Reweighted(
            advantages=expected.advantages[order], metrics=expected.metrics, loss_fields=fields
        ),
    )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("elements", [1, 50, 400])
def test_the_size_of_a_chunk_does_not_matter(
    name: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(5, groups=10, columns=20)
    expected = run(name, batch)
    monkeypatch.setattr(stats, "CHUNK_ELEMENTS", elements)
    equal_results(run(name, batch), expected)


@pytest.mark.parametrize("name", METHODS)
def test_padding_rows_do_not_matter(name: str) -> None:
    batch = batch_of(3, groups=10, columns=20)
    size = len(batch["group"])
    expected = run(name, batch)

    def padded(value: torch.Tensor) -> torch.Tensor:
        rest = torch.full((4, *value.shape[1:]), 1, dtype=value.dtype)
        return torch.cat([value, rest * 0 if value.dtype == torch.bool else rest])

    more = {k: padded(v) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    more["group"] = batch["group"] + ["pad-y"] * 4
    more["extras"] = {"judge": padded(batch["extras"]["judge"])}
    found = run(name, more)
    cut = Reweighted(
        advantages=found.advantages[:size],
        metrics=found.metrics,
        loss_fields={key: value[:size] for key, value in found.loss_fields.items()},
    )
    equal_results(cut, expected)


@pytest.mark.parametrize("name", METHODS)
def test_metrics_have_the_same_names_and_are_finite(name: str) -> None:
    names = set()
    for seed, rewards in enumerate(REWARDS):
        metrics = run(name, batch_of(seed, rewards=rewards)).metrics
        names.add(tuple(sorted(metrics)))
        assert all(math.isfinite(value) and type(value) is float for value in metrics.values())
    assert len(names) == 1
    reduced_by_verl = ("max", "min", "sum", "total")
    assert [key for key in metrics if any(word in key for word in reduced_by_verl)] == []


def test_a_session_of_several_outputs_is_one_response() -> None:
    rollout = Rollout(
        rewards=torch.tensor([0.0, 1.0, 0.0, 0.0]),
        response_mask=torch.ones(4, 2, dtype=torch.bool),
        group=["a", "a", "a", "a"],
        final_output=torch.tensor([1, 1, 2, 3]),
    )
    assert groups.right(rollout, 0.5).tolist() == [True, True, False, False]
    assert groups.responses(rollout).tolist() == [False, True, True, True]
    p_G, y = groups.share_right(rollout, 0.5)
    assert p_G.tolist() == pytest.approx([1 / 3])
    assert y == pytest.approx(1 / 3)


# Memory

MEMORY = [
    ("ha_dw", {}),
    ("ha_dw", {"anchor": "kalman"}),
    ("pos_adv", {"target": 1.2}),
]


@pytest.mark.parametrize(("name", "parameters"), MEMORY)
def test_stopped_and_resumed_equals_uninterrupted(
    name: str, parameters: dict[str, Any], tmp_path: Path
) -> None:
    """Six batches; and three, a save, a fresh process, a load, and three more: to the bit."""
    import subprocess
    import sys

    from verl_covgrpo.verl_hooks import memory

    made = method(name, **parameters)
    whole = [made(Rollout(**batch_of(seed))).advantages for seed in range(6)]
    first = method(name, **parameters)
    for seed in range(3):
        first(Rollout(**batch_of(seed)))
    memory.save(tmp_path, [first])
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import torch
from test_response_methods import batch_of, method
from verl_covgrpo import Rollout
from verl_covgrpo.verl_hooks import memory
made = method({name!r}, **{parameters!r})
memory.load(Path({str(tmp_path)!r}), [made])
found = [made(Rollout(**batch_of(seed))).advantages for seed in (3, 4, 5)]
torch.save(found, {str(tmp_path / "out")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    rest = torch.load(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[3:], strict=True))
    fresh = method(name, **parameters)
    assert not torch.equal(fresh(Rollout(**batch_of(3))).advantages, whole[3])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "holds no memory of ha_dw"),
        ("{", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 2, "states": {}}', "has format 2, this release of verl-covgrpo reads 1"),
        ('{"format": 1, "states": {"pos_adv": {"scale": 0.1}}}', "holds the memory of pos_adv"),
        ('{"format": 1, "states": {}}', "holds the memory of no method"),
        ('{"format": 1, "states": {"ha_dw": {"scale": 1}}}', "not ['scale']"),
        (
            '{"format": 1, "states": {"ha_dw": {"anchor": "kalman", "history": []}}}',
            "set algorithm.ha_dw.anchor=kalman",
        ),
    ],
)
def test_another_memory_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    from verl_covgrpo.verl_hooks import memory

    if text is not None:
        (tmp_path / memory.FILE).write_text(text)
    with pytest.raises(MethodError) as error:
        memory.load(tmp_path, [method("ha_dw")])
    assert words in str(error.value)


def test_a_save_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_covgrpo.verl_hooks import memory

    made = method("pos_adv")
    made.load_state_dict({"scale": 0.25})
    memory.save(tmp_path, [made])
    saved = (tmp_path / memory.FILE).read_text()
    assert json.loads(saved)["states"] == {"pos_adv": {"scale": 0.25}}

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", killed)
    made.load_state_dict({"scale": 0.5})
    with pytest.raises(KeyboardInterrupt):
        memory.save(tmp_path, [made])
    assert (tmp_path / memory.FILE).read_text() == saved
