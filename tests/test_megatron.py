"""Our losses in verl's Megatron engine, as far as a CPU goes.

What runs here is the engine's own code from the model's output to what Megatron's schedule gets,
with megatron-core installed and the actor's `McoreActorConfig`. No model is split: the output is
made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from test_loss_hook import SPLITS, Batch, actor_config, nested

from verl_covgrpo import build, methods, registry

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.verl

PROMPTS = (2, 4, 1, 3, 2, 6)
"""With the responses an even number of tokens, so that two ranks share them exactly."""


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron's parallel state on one rank over gloo."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def engine(per_token: bool, context_parallel: int = 1) -> Any:
    """Verl's engine with what `postprocess_micro_batch_func` reads, and nothing else."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    made = object.__new__(MegatronEngineWithLMHead)
    made.tf_config = SimpleNamespace(calculate_per_token_loss=per_token)
    made.engine_config = SimpleNamespace(
        dynamic_context_parallel=False,
        use_remove_padding=True,
        context_parallel_size=context_parallel,
    )
    return made


class Schedule:
    """Runs micro-batches through the engine's function as Megatron's schedule does, on one rank.

    The loss of a micro-batch is divided by their number; under per-token loss every gradient is
    divided by the tokens of all of them in the end.
    """

    def __init__(self, batch: Batch, config: Any, per_token: bool, context_parallel: int = 1):
        self.batch, self.config, self.per_token = batch, config, per_token
        self.engine = engine(per_token, context_parallel)
        self.context_parallel = context_parallel

    def data(
        self,
        rows: list[int],
        micro_batches: int,
        advantages: torch.Tensor,
        fields: Mapping[str, torch.Tensor],
    ) -> TensorDict:
        from verl.utils import tensordict_utils as tu

        batch, lengths = self.batch, self.batch.responses
        travelled = {
            name: nested([value[i, : lengths[i]] for i in rows])
            if name.endswith("_BT")
            else value[rows]
            for name, value in fields.items()
        }
        data = TensorDict(
            {
                "input_ids": nested([torch.zeros(PROMPTS[i] + lengths[i]).long() for i in rows]),
                "prompts": nested([torch.zeros(PROMPTS[i]).long() for i in rows]),
                "responses": nested([torch.zeros(lengths[i]).long() for i in rows]),
                "response_mask": nested([batch.mask[i] for i in rows]),
                "old_log_probs": nested([batch.old[i] for i in rows]),
                "advantages": nested([advantages[i, : lengths[i]] for i in rows]),
                "ref_log_prob": nested([batch.ref[i] for i in rows]),
                **travelled,
            },
            batch_size=len(rows),
        )
        tu.assign_non_tensor(
            data,
            dp_size=1,
            num_micro_batch=micro_batches,
            batch_num_tokens=sum(int(mask.sum()) for mask in batch.mask),
            routed_num_tokens=sum(PROMPTS) + sum(lengths),
            global_batch_size=len(lengths),
        )
        return data

    def gradient(
        self,
        micro_batches: list[list[int]],
        advantages: torch.Tensor,
        fields: Mapping[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        from verl.workers.utils.losses import ppo_loss

        leaves = [row.clone().requires_grad_() for row in self.batch.new]
        tokens = 0
        for rows in micro_batches:
            parts = [
                part
                for i in rows
                for part in (torch.zeros(PROMPTS[i] - 1), leaves[i], torch.zeros(1))
            ]
            offsets = torch.tensor([0] + [PROMPTS[i] + len(leaves[i]) for i in rows]).cumsum(0)
            output = torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)
            returned = self.engine.postprocess_micro_batch_func(
                {"log_probs": output},
                self.data(rows, len(micro_batches), advantages, fields),
                forward_only=False,
                loss_function=partial(ppo_loss, self.config),
            )
            if self.per_token:
                loss, local_tokens, report = returned
                assert local_tokens.dtype == torch.int
                tokens += int(local_tokens) * self.context_parallel
            else:
                loss, report = returned
                loss = loss / len(micro_batches)
            assert report["metrics"]["actor/pg_loss"] is not None
            loss.backward()
        scale = tokens if self.per_token else 1
        return [leaf.grad / scale for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("context_parallel", [1, 2])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", methods())
def test_the_engine_gives_the_gradient_of_the_loss(
    name: str, per_token: bool, context_parallel: int, one_rank: None
) -> None:
    """Whatever the split into micro-batches, the regime, and the ranks of a context group.

    Every rank of a context group sees whole responses with whole masks, and counts its share of the
    tokens; here the shares are added up as Megatron does.
    """
    method = registry.get(name)
    overrides = [f"+method={name}"] if method.loss_mode else []
    config = actor_config("model_engine=megatron", *overrides)
    assert type(config).__name__ == "McoreActorConfig"
    batch = Batch()
    parameters = {"score_key": "judge", "delta": 0.0} if name == "dagrpo" else {}
    result = build(name, **parameters)(
        batch.rollout(
            extras={"judge": batch.rewards},
            ref_log_probs=torch.nn.utils.rnn.pad_sequence(batch.ref, batch_first=True),
            entropy=torch.nn.utils.rnn.pad_sequence(batch.entropy, batch_first=True),
            vocab_size=300,
        )
    )
    expected = batch.gradient(config, SPLITS["one"], result.advantages, result.loss_fields)
    assert max(float(row.abs().max()) for row in expected) > 1e-4
    schedule = Schedule(batch, config, per_token, context_parallel)
    whole = [[0, 1, 2, 3, 4, 5]]
    several = [[[0, 1, 2], [3, 4, 5]], [[4, 0], [5], [2, 1, 3]]]
    for split in [whole] if context_parallel > 1 else [whole, *several]:
        found = schedule.gradient(split, result.advantages, result.loss_fields)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_verl_loads_its_megatron_engine_with_the_plugin(one_rank: None) -> None:
    from verl.workers.config import McoreActorConfig
    from verl.workers.engine.base import EngineRegistry

    assert "megatron" in EngineRegistry._engines["language_model"]
    assert isinstance(actor_config("model_engine=megatron", "+method=reco"), McoreActorConfig)
