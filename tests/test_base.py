"""The base advantage is verl's grpo to the bit."""

import numpy as np
import pytest
import torch
from batches import REWARDS, ragged
from oracle import grpo as oracle_grpo

from verl_covgrpo import Rollout
from verl_covgrpo.base import grpo
from verl_covgrpo.registry import build

SIZES = [*range(1, 66), 100, 127, 128, 129, 200, 255, 256, 257, 1000, 33000]


def draw(kind: str, count: int, generator: torch.Generator) -> torch.Tensor:
    if kind == "binary":
        return torch.randint(0, 2, (count,), generator=generator).float()
    if kind == "fractional":
        return torch.randint(0, 7, (count,), generator=generator).float() * 0.1
    normal = torch.randn(count, generator=generator)
    return {"normal": normal, "offset": 1000 + normal, "tiny": 1e-7 * normal}[kind]


def shuffled_groups(sizes: list[int], generator: torch.Generator) -> torch.Tensor:
    index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return index[torch.randperm(len(index), generator=generator)]


def is_constant(rewards: torch.Tensor, index: torch.Tensor, groups: int) -> torch.Tensor:
    """Return whether each row belongs to a group of several rows with equal rewards."""
    wide = rewards.double()
    high = torch.full((groups,), -torch.inf).double().scatter_reduce(0, index, wide, "amax")
    low = torch.full((groups,), torch.inf).double().scatter_reduce(0, index, wide, "amin")
    return ((high == low) & (torch.bincount(index, minlength=groups) > 1))[index]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("kind", ["binary", "fractional", "normal", "offset", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_grpo_equals_verl_to_the_bit(dtype: torch.dtype, kind: str, by_std: bool) -> None:
    verl = pytest.importorskip("verl.trainer.ppo.core_algos")
    generator = torch.Generator().manual_seed(len(kind))
    random_sizes = torch.randint(1, 65, (400,), generator=generator).tolist()
    sizes = SIZES + random_sizes if dtype == torch.float32 else SIZES[:-1] + random_sizes[:40]
    index = shuffled_groups(sizes, generator)
    rewards = draw(kind, len(index), generator).to(dtype)

    expected, _ = verl.compute_grpo_outcome_advantage(
        rewards.unsqueeze(1).clone(),
        torch.ones(len(index), 1, dtype=torch.int64),
        index.numpy(),
        norm_adv_by_std_in_grpo=by_std,
    )
    advantages = grpo(rewards, index, len(sizes), by_std)

    constant = is_constant(rewards, index, len(sizes))
    assert advantages.dtype == expected.dtype
    assert torch.equal(advantages[~constant], expected[~constant, 0])
    assert (advantages[constant] == 0).all()


def test_equal_rewards_give_exactly_zero_where_verl_gives_noise() -> None:
    """0.1 times 12 is the case in which the mean is not the reward."""
    verl = pytest.importorskip("verl.trainer.ppo.core_algos")
    for count in range(2, 65):
        rewards = torch.full((count,), 0.1)
        index = torch.zeros(count, dtype=torch.int64)
        assert torch.equal(grpo(rewards, index, 1), torch.zeros(count))
    noisy = torch.full((3,), 0.1)
    mask = torch.ones(3, 1, dtype=torch.int64)
    theirs, _ = verl.compute_grpo_outcome_advantage(noisy.unsqueeze(1), mask, np.zeros(3))
    assert theirs.abs().max() < 0.2


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("kind", REWARDS)
def test_grpo_follows_its_definition(kind: str, by_std: bool) -> None:
    batch = ragged(seed=3, rewards=kind)
    rollout = Rollout(**batch)
    ours = grpo(rollout.rewards, rollout.group_index, rollout.num_groups, by_std)
    expected = oracle_grpo(batch["rewards"].tolist(), batch["group"], by_std)
    assert ours.tolist() == pytest.approx(expected, abs=1e-5)


def test_groups_without_a_row_are_allowed() -> None:
    rewards = torch.tensor([1.0, 0.0])
    index = torch.tensor([3, 3])
    assert grpo(rewards, index, 5).tolist() == pytest.approx([0.70710, -0.70710], abs=1e-4)


def test_the_setting_of_verl_reaches_the_base() -> None:
    rollout = Rollout(**ragged(seed=1, rewards="fractional"))
    by_std = build("covgrpo").base_advantages(rollout).squeeze(1)
    plain = build("covgrpo", norm_adv_by_std_in_grpo=False).base_advantages(rollout).squeeze(1)
    index, groups = rollout.group_index, rollout.num_groups
    for found, norm_by_std in ((by_std, True), (plain, False)):
        expected = grpo(rollout.rewards, index, groups, norm_by_std)
        assert torch.equal(found, torch.where(rollout.lengths > 0, expected, 0))
    assert not torch.equal(by_std, plain)


def test_the_base_is_taken_from_the_last_output_of_each_session() -> None:
    """Rows 0, 1, 2 are one session; row 4 is the last output of rows 3 and 4, without a token."""
    final = torch.tensor([2, 2, 2, 4, 4, 5, 6])
    mask = torch.ones(7, 3, dtype=torch.bool)
    mask[4] = False
    rollout = Rollout(
        rewards=torch.tensor([9.0, 9.0, 1.0, 9.0, 0.0, 0.0, 1.0]),
        response_mask=mask,
        group=["a"] * 6 + ["b"],
        old_log_probs=-torch.rand(7, 3),
        final_output=final,
    )
    expected = grpo(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64), 1)
    first, _, third = expected.tolist()
    base = build("covgrpo").base_advantages(rollout).squeeze(1)
    assert base[:6].tolist() == [first, first, first, 0.0, 0.0, third]
    assert base[6] == pytest.approx(1.0, abs=1e-5)


def test_sessions_equal_verl_to_the_bit() -> None:
    """The sessions stay in the order in which they first appear, as in verl."""
    verl = pytest.importorskip("verl.trainer.ppo.core_algos")
    generator = torch.Generator().manual_seed(0)
    rows = 60
    final = torch.arange(rows)
    final[:20] = torch.arange(59, 39, -1)
    rewards = torch.randn(rows, generator=generator)
    rollout = Rollout(
        rewards=rewards, response_mask=torch.ones(rows, 2), group=[0] * rows, final_output=final
    )
    last = list(dict.fromkeys(final.tolist()))
    mask = torch.ones(len(last), 1)
    index = np.zeros(len(last))
    theirs, _ = verl.compute_grpo_outcome_advantage(rewards[last].unsqueeze(1), mask, index)
    by_row = dict(zip(last, theirs[:, 0], strict=True))
    expected = torch.stack([by_row[row] for row in final.tolist()])
    assert torch.equal(build("covgrpo").base_advantages(rollout).squeeze(1), expected)
