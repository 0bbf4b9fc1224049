"""A rollout is checked when it is made, and says what is wrong with it."""

import numpy as np
import pytest
import torch
from batches import ragged

from verl_covgrpo import MethodError, Rollout, build, methods

FIELDS = ("old_log_probs", "ref_log_probs", "entropy", "base_advantages")


def fields(**changes: object) -> dict:
    return {
        "rewards": torch.tensor([1.0, 0.0, 0.5]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]),
        "group": ["a", "a", "b"],
        "old_log_probs": -torch.rand(3, 3),
    } | changes


def refused(match: str, **changes: object) -> None:
    with pytest.raises(MethodError, match=match):
        Rollout(**fields(**changes))


def test_what_a_rollout_knows() -> None:
    rollout = Rollout(**fields())
    assert rollout.response_mask.dtype == torch.bool
    assert rollout.lengths.tolist() == [2, 2, 0]
    assert rollout.tokens.end.tolist() == [2, 3, 0]
    assert rollout.tokens.first.tolist() == [0, 0, 0]
    assert rollout.group_index.tolist() == [0, 0, 1] and rollout.num_groups == 2
    assert torch.equal(rollout.scores, rollout.rewards)


# A byte holds 255, two bytes 65535: counts must not wrap around.
@pytest.mark.parametrize("columns", [1, 2, 7, 255, 256, 257, 65_535, 65_536])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_where_the_tokens_are(columns: int, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    wide_BT = torch.rand(7, 2 * columns, generator=generator) < 0.7
    mask_BT = wide_BT[:, ::2]  # rows 4 to 6 stay at random, and nothing is contiguous
    mask_BT[0], mask_BT[1] = True, False
    mask_BT[2] = torch.arange(columns) <= columns // 2
    mask_BT[3] = torch.arange(columns) >= columns // 2
    rollout = Rollout(rewards=torch.zeros(7), response_mask=mask_BT.to(kind), group=["a"] * 7)
    tokens = rollout.tokens
    for row, bits in enumerate(mask_BT.tolist()):
        places = [place for place, bit in enumerate(bits) if bit]
        assert int(tokens.count[row]) == len(places)
        assert int(tokens.end[row]) == (places[-1] + 1 if places else 0)
        assert int(tokens.first[row]) == (places[0] if places else 0)
    for chunk in tokens.chunks:
        valid_rw = mask_BT[chunk.rows][:, : chunk.width]
        ones_rw = torch.ones(valid_rw.shape)
        assert torch.equal(chunk.mask_(ones_rw, 0.0), valid_rw.float())
        ranks_rw = (valid_rw.cumsum(1) - 1)[valid_rw]
        assert torch.equal(chunk.ranks.expand(valid_rw.shape)[valid_rw], ranks_rw)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32])
def test_masks_of_any_kind(kind: torch.dtype) -> None:
    batch = ragged(seed=5)
    expected = Rollout(**batch)
    rollout = Rollout(**batch | {"response_mask": batch["response_mask"].to(kind)})
    assert torch.equal(rollout.response_mask, expected.response_mask)
    assert torch.equal(rollout.lengths, batch["response_mask"].sum(1))


@pytest.mark.parametrize(
    "group",
    [
        ["x", "y", "x"],
        np.array(["x", "y", "x"], dtype=object),
        np.array([7, 3, 7]),
        torch.tensor([7, 3, 7]),
        [("p", 1), ("p", 2), ("p", 1)],
    ],
)
def test_groups_of_any_hashable(group: object) -> None:
    rollout = Rollout(**fields(group=group))
    assert rollout.group_index.tolist() == [0, 1, 0] and rollout.num_groups == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floats_of_any_width(dtype: torch.dtype) -> None:
    values = torch.full((3, 3), -2.0, dtype=dtype)
    values[0, 2] = torch.nan  # the mask is 0 here
    rollout = Rollout(**fields(old_log_probs=values))
    assert rollout.require("old_log_probs").dtype == dtype


def test_whole_numbers_are_rewards() -> None:
    assert Rollout(**fields(rewards=torch.tensor([1, 0, 2]))).rewards.tolist() == [1.0, 0.0, 2.0]


def test_no_valid_token() -> None:
    refused("no valid token anywhere", response_mask=torch.zeros(3, 3))
    refused("no valid token anywhere", response_mask=torch.zeros(3, 0))


@pytest.mark.parametrize("value", [2, -1, 3])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.float32])
def test_a_mask_that_is_not_zero_or_one(kind: torch.dtype, value: int) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=kind)
    mask[1, 2] = value
    refused(f"0/1, but has {value}.* row 1, column 2", response_mask=mask)


def test_a_mask_whose_wrong_values_cancel() -> None:
    refused("row 0, column 0", response_mask=torch.tensor([[3, -1, 1], [1, 1, 1], [0, 0, 0]]))
    refused("row 0, column 0", response_mask=torch.tensor([[1.5, 0.5, 0], [1, 1, 1], [0, 0, 0]]))


def test_a_wrong_mask_far_down_is_found() -> None:
    mask = torch.ones(3000, 200, dtype=torch.int64)
    mask[2999, 199] = 7
    batch = {"rewards": torch.zeros(3000), "response_mask": mask, "group": [0] * 3000}
    with pytest.raises(MethodError, match="row 2999, column 199"):
        Rollout(**batch)


@pytest.mark.parametrize("name", ["rewards", "response_mask", "old_log_probs", "scores"])
def test_what_is_no_tensor_of_numbers(name: str) -> None:
    refused(f"{name} is not numeric", **{name: ["a", "b", "c"]})
    refused(f"{name} is complex", **{name: torch.zeros(3, 3, dtype=torch.complex64)})
    if name in ("rewards", "response_mask"):
        refused(f"{name} is not numeric", **{name: None})


@pytest.mark.parametrize("bad", [None, 5, np.array(5)])
def test_a_group_that_is_no_list(bad: object) -> None:
    refused("group must hold a prompt id for every row", group=bad)


def test_a_group_with_pandas_missing_value() -> None:
    pandas = pytest.importorskip("pandas")
    refused("group has <NA> in row 1", group=["a", pandas.NA, "b"])


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("name", methods())
def test_whole_numbers_are_a_base(name: str, kind: torch.dtype) -> None:
    batch = ragged(seed=3)
    mask_BT = batch["response_mask"]
    base_BT = torch.arange(mask_BT.numel()).view(mask_BT.shape).remainder(2).to(kind)
    given = {
        "old_log_probs": batch["old_log_probs"],
        "ref_log_probs": batch["old_log_probs"],
        "entropy": torch.rand(mask_BT.shape),
        "vocab_size": 100,
        "extras": {"judge": batch["rewards"]},
    }
    parameters = {"score_key": "judge"} if name == "dagrpo" else {}
    whole, floating = (
        build(name, **parameters)(Rollout(**batch | given | {"base_advantages": base}))
        for base in (base_BT, base_BT.float())
    )
    assert torch.equal(whole.advantages, floating.advantages)


def test_shapes_that_disagree() -> None:
    refused(r"rewards .*\(2,\).*response_mask is \(3, 3\)", rewards=torch.zeros(2))
    refused(r"rewards must be \(B,\).*\(3, 3\)", rewards=torch.zeros(3, 3))
    refused(r"response_mask must be \(B, T\)", response_mask=torch.ones(3))
    refused("group has 2 entries, but rewards has 3", group=["a", "b"])
    refused(r"old_log_probs .*\(3, 4\).*\(3, 3\)", old_log_probs=torch.zeros(3, 4))
    refused(r"entropy must be \(B, T\)", entropy=torch.zeros(3))
    refused(r"scores must be \(B,\)", scores=torch.zeros(4))
    refused(r"base_advantages .*\(4,\)", base_advantages=torch.zeros(4))
    refused(r"extras\['judge'\] .*\(4,\)", extras={"judge": torch.zeros(4)})


@pytest.mark.parametrize("bad", [None, float("nan"), np.float64("nan")])
def test_a_group_that_is_none_or_nan(bad: object) -> None:
    refused("group has .* in row 2", group=["a", "a", bad])


def test_a_group_that_is_not_hashable() -> None:
    refused("hashable", group=[["a"], ["a"], ["b"]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rewards_count_in_every_row(bad: float) -> None:
    """Row 2 has no valid token, and its reward is in its group's mean all the same."""
    refused("rewards has .* in row 2", rewards=torch.tensor([1.0, 0.0, bad]))
    refused("scores has .* in row 1", scores=torch.tensor([1.0, bad, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", FIELDS)
def test_values_must_be_finite_at_valid_tokens(name: str, bad: float, dtype: torch.dtype) -> None:
    values = torch.zeros(3, 3, dtype=dtype)
    values[1, 1] = bad  # the mask is 0 here
    Rollout(**fields(**{name: values}))
    values[1, 2] = bad
    refused(f"{name} has .* row 1, column 2", **{name: values})


def test_opposite_infinities_do_not_hide() -> None:
    values = torch.zeros(3, 3)
    values[0, 0], values[1, 2] = torch.inf, -torch.inf
    refused("row 0, column 0", old_log_probs=values)


def test_extras_must_be_finite_at_valid_tokens() -> None:
    Rollout(**fields(extras={"judge": torch.tensor([1.0, 2.0, torch.nan])}))  # row 2 is empty
    refused("judge.* row 1", extras={"judge": torch.tensor([1.0, torch.nan, 1.0])})
    per_token = torch.zeros(3, 3)
    per_token[0, 1] = torch.nan
    refused("judge.* row 0, column 1", extras={"judge": per_token})
    refused("not numeric", extras={"judge": ["good", "bad", "good"]})


def test_last_outputs() -> None:
    Rollout(**fields(final_output=torch.tensor([1, 1, 2])))
    refused("row numbers from 0 to 2", final_output=torch.tensor([1, 1, 3]))
    refused("row 0 is row 1", final_output=torch.tensor([1, 0, 2]))
    refused("row 2 is row 1", final_output=torch.tensor([1, 1, 1]))  # another group
    refused("row numbers", final_output=torch.tensor([1.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("old_log_probs", "bypass_mode=False"),
        ("ref_log_probs", "use_kl_loss=True"),
        ("entropy", "bypass_mode=False"),
        ("vocab_size", "hf_config"),
    ],
)
def test_a_missing_field_names_the_setting(name: str, setting: str) -> None:
    rollout = Rollout(**fields(old_log_probs=None))
    with pytest.raises(MethodError, match=f"{name}.*{setting}"):
        rollout.require(name)


def test_a_rollout_leaves_the_graph() -> None:
    log_probs = torch.zeros(3, 3, requires_grad=True)
    assert not Rollout(**fields(old_log_probs=log_probs)).require("old_log_probs").requires_grad
