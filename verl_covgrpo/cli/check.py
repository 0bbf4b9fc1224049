"""`verl-covgrpo check`: is a launch right, what does it take, and what does it change in verl?

Everything that can be known before a GPU is there: verl's own validation and ours, the
configuration classes of its workers, how batch and model divide over the GPUs, the model's context,
and an estimate of memory. docs/checking.md has the formulas.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from verl_covgrpo.demo.settings import recipes_folder
from verl_covgrpo.errors import MethodError, did_you_mean

GIB = 1 << 30
STOCK = "verl"
"""The name under which verl's own configuration is checked."""


# Models


@dataclass(frozen=True)
class Model:
    """The dimensions of a decoder, as its configuration states them."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    positions: int
    tied: bool = False
    qkv_bias: bool = True
    experts: int = 0
    experts_per_token: int = 0
    """0: dense. `intermediate_size` is then that of one expert."""

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return self.layers * self.experts * 3 * self.hidden_size * self.intermediate_size

    @property
    def dense_parameters(self) -> int:
        """All other parameters."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (2 * self.heads + 2 * self.kv_heads)
        if self.qkv_bias:
            attention += d * (self.heads + 2 * self.kv_heads)
        feed_forward = h * self.experts if self.experts else 3 * h * self.intermediate_size
        embeddings = self.vocab_size * h * (1 if self.tied else 2)
        return embeddings + self.layers * (attention + feed_forward + 2 * h) + h

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters


MODELS = {
    "Qwen/Qwen2.5-Math-1.5B": Model(1536, 28, 12, 2, 128, 8960, 151936, 4096, tied=True),
    "Qwen/Qwen2.5-Math-7B": Model(3584, 28, 28, 4, 128, 18944, 152064, 4096),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Model(1536, 28, 12, 2, 128, 8960, 151936, 131072),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Model(3584, 28, 28, 4, 128, 18944, 152064, 131072),
    "Qwen/Qwen2.5-3B-Instruct": Model(2048, 36, 16, 2, 128, 11008, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-32B": Model(5120, 64, 40, 8, 128, 27648, 152064, 131072),
    "Qwen/Qwen3-8B": Model(4096, 36, 32, 8, 128, 12288, 151936, 40960, qkv_bias=False),
    "Qwen/Qwen3-30B-A3B": Model(
        2048,
        48,
        32,
        4,
        128,
        768,
        151936,
        40960,
        qkv_bias=False,
        experts=128,
        experts_per_token=8,
    ),
}
"""By the last part of the path a local copy is found too."""


def model_of(path: str) -> Model | None:
    """Return the dimensions of a model: from its local config.json, else from the table."""
    local = Path(path).expanduser() / "config.json"
    if local.is_file():
        return _from_config(json.loads(local.read_text()))
    if path in MODELS:
        return MODELS[path]
    by_name = {name.rpartition("/")[2]: model for name, model in MODELS.items()}
    return by_name.get(path.rstrip("/").rpartition("/")[2])


def _from_config(config: dict[str, Any]) -> Model | None:
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        return Model(
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["moe_intermediate_size" if experts else "intermediate_size"],
            vocab_size=config["vocab_size"],
            positions=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
            qkv_bias=config.get("attention_bias", config.get("model_type", "").startswith("qwen2")),
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
        )
    except KeyError:
        return None


# What is checked


@dataclass
class Findings:
    """What a check found."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    size: dict[str, str] = field(default_factory=dict)
    """What a step takes."""
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes per GPU."""


def compose(recipe: str, overrides: Sequence[str]) -> DictConfig:
    """Compose a recipe as verl's entry point does.

    Args:
        recipe: "verl", the name of one of our recipes, or a path to a YAML.

    Raises:
        MethodError: no such recipe, or overrides that Hydra refuses.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    try:
        if recipe == STOCK:
            with hydra.initialize_config_module("verl.trainer.config", version_base=None):
                return hydra.compose("ppo_trainer", overrides=list(overrides))
        path = recipe_file(recipe)
        with hydra.initialize_config_dir(str(path.parent), version_base=None):
            return hydra.compose(path.stem, overrides=list(overrides))
    except HydraException as error:
        raise MethodError(f"Hydra refuses the launch: {error}") from None


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in recipes_folder().glob("*/*.yaml"))


def recipe_file(recipe: str) -> Path:
    """Return the YAML of a recipe.

    Raises:
        MethodError: there is none.
    """
    for path in (Path(recipe), recipes_folder() / recipe / f"{recipe}.yaml"):
        if path.is_dir():
            path = path / f"{path.name}.yaml"
        if path.suffix in (".yaml", ".yml") and path.is_file():
            return path.resolve()
    names = recipe_names()
    raise MethodError(
        f"no recipe {recipe!r}{did_you_mean(recipe, names)}: give a path to a YAML, {STOCK!r} for "
        f"verl's own configuration, or one of: {', '.join(names)}"
    )


def check(config: DictConfig, gpu_memory: float = 80.0) -> Findings:
    """Check a composed launch; `gpu_memory` is that of one GPU, in GiB."""
    found = Findings()
    _validate(config, found)
    _instantiate(config, found)
    layout = Layout.of(config)
    _batches(config, layout, found)
    path = str(config.actor_rollout_ref.model.path)
    model = model_of(path)
    if model is None:
        found.notes.append(
            f"the dimensions of {path} are not known here: context, split and memory are not "
            "checked (give a local path that holds its config.json)"
        )
        return found
    _context(config, model, found)
    _split(config, layout, model, found)
    _memory(config, layout, model, gpu_memory, found)
    return found


def _validate(config: DictConfig, found: Findings) -> None:
    """Verl's own validation, ours before it."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils import config as verl_config

    try:
        with _quiet():
            verl_config.validate_config(
                config=config,
                use_reference_policy=need_reference_policy(config),
                use_critic=need_critic(config),
            )
    except SystemExit as error:
        found.problems.append(str(error.code).removeprefix("verl-covgrpo: "))
    except Exception as error:
        found.problems.append(f"verl's own validation: {error}")


def _instantiate(config: DictConfig, found: Findings) -> None:
    """The configuration classes that verl's trainer and workers make."""
    from verl.utils.config import omega_conf_to_dataclass

    from verl_covgrpo import registry
    from verl_covgrpo.verl_hooks.selection import MARKER

    algorithm = OmegaConf.to_container(config.algorithm, resolve=True)
    assert isinstance(algorithm, dict)
    for key in (MARKER, *registry.names()):  # verl's own class refuses keys that it does not know
        algorithm.pop(key, None)
    actor_rollout_ref = config.actor_rollout_ref
    sections = {
        "algorithm": OmegaConf.create(algorithm),
        "actor_rollout_ref.actor": actor_rollout_ref.actor,
        "actor_rollout_ref.rollout": actor_rollout_ref.rollout,
        "actor_rollout_ref.ref": _as_the_worker_reads_it(actor_rollout_ref),
    }
    for name, section in sections.items():
        try:
            with _quiet():
                omega_conf_to_dataclass(section)
        except Exception as error:
            found.problems.append(f"{name}: {_one_line(error)}")


def _as_the_worker_reads_it(actor_rollout_ref: DictConfig) -> DictConfig:
    """The reference policy's section with the names that verl's worker gives it."""
    ref = OmegaConf.create(OmegaConf.to_container(actor_rollout_ref.ref, resolve=True))
    assert isinstance(ref, DictConfig)
    ref.ppo_mini_batch_size = actor_rollout_ref.actor.ppo_mini_batch_size
    for theirs, name in (
        ("log_prob_micro_batch_size", "ppo_micro_batch_size"),
        ("log_prob_micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu"),
        ("log_prob_use_dynamic_bsz", "use_dynamic_bsz"),
        ("log_prob_max_token_len_per_gpu", "ppo_max_token_len_per_gpu"),
    ):
        ref[name] = ref.pop(theirs, None)
    return ref


@dataclass(frozen=True)
class Layout:
    """How the actor is split over GPUs."""

    gpus: int
    megatron: bool
    tensor: int
    pipeline: int
    context: int
    expert: int
    sequence: int
    """Ulysses sequence parallelism, FSDP alone."""

    @classmethod
    def of(cls, config: DictConfig) -> Layout:
        actor = config.actor_rollout_ref.actor
        gpus = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
        if str(actor.strategy) == "megatron":
            m = actor.megatron
            return cls(
                gpus,
                True,
                int(m.tensor_model_parallel_size),
                int(m.pipeline_model_parallel_size),
                int(m.context_parallel_size),
                int(m.expert_model_parallel_size),
                1,
            )
        sequence = int(actor.get("ulysses_sequence_parallel_size", 1) or 1)
        return cls(gpus, False, 1, 1, 1, 1, sequence)

    @property
    def model_parallel(self) -> int:
        return self.tensor * self.pipeline * self.context * self.sequence

    @property
    def data_parallel(self) -> int:
        return max(1, self.gpus // self.model_parallel)


def _batches(config: DictConfig, layout: Layout, found: Findings) -> None:
    data, actor, rollout = (
        config.data,
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
    )
    batch, mini, n = int(data.train_batch_size), int(actor.ppo_mini_batch_size), int(rollout.n)
    if layout.gpus % layout.model_parallel:
        found.problems.append(
            f"{layout.gpus} GPUs (trainer.nnodes x trainer.n_gpus_per_node) cannot be divided by "
            f"{layout.model_parallel} (tensor x pipeline x context x sequence parallel)"
        )
    if mini > batch or batch % mini:
        found.problems.append(
            f"data.train_batch_size={batch} prompts cannot be divided into mini-batches of "
            f"actor.ppo_mini_batch_size={mini}"
        )
    for name, prompts in (("data.train_batch_size", batch), ("actor.ppo_mini_batch_size", mini)):
        if prompts * n % layout.data_parallel:
            found.problems.append(
                f"{name}={prompts} x rollout.n={n} responses cannot be divided over "
                f"{layout.data_parallel} data-parallel ranks"
            )
    parallel = int(rollout.tensor_model_parallel_size)
    per_node = int(config.trainer.n_gpus_per_node)
    if parallel > per_node or per_node % parallel:
        found.problems.append(
            f"rollout.tensor_model_parallel_size={parallel} does not divide the {per_node} GPUs of "
            "a node"
        )
    longest = int(data.max_prompt_length) + int(data.max_response_length)
    if actor.use_dynamic_bsz:
        room = int(actor.ppo_max_token_len_per_gpu) * layout.sequence * layout.context
        if room < longest:
            found.problems.append(
                f"actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} holds no "
                f"response of {longest} tokens (prompt and response)"
            )
    found.size = {
        "prompts per step": f"{batch:,}",
        "responses per step": f"{batch * n:,}",
        "updates per step": f"{-(-batch // mini) * int(actor.ppo_epochs)}",
        "tokens per step, at most": f"{batch * n * longest:,}",
        "data-parallel ranks": f"{layout.data_parallel} of {layout.gpus} GPUs",
        "vLLM or SGLang replicas": f"{layout.gpus // max(1, parallel)}",
    }


def _context(config: DictConfig, model: Model, found: Findings) -> None:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    prompt, response = int(data.max_prompt_length), int(data.max_response_length)
    if prompt + response > model.positions:
        found.problems.append(
            f"data.max_prompt_length={prompt} + data.max_response_length={response} is more than "
            f"the {model.positions} positions of the model: set data.max_response_length="
            f"{max(0, model.positions - prompt)}"
        )
    longest = rollout.get("max_model_len")
    if longest is not None and longest < prompt + response:
        found.problems.append(
            f"rollout.max_model_len={longest} is less than the {prompt + response} tokens of "
            "prompt and response"
        )
    if longest is not None and longest > model.positions:
        found.problems.append(
            f"rollout.max_model_len={longest} is more than the model's {model.positions} positions"
        )


def _split(config: DictConfig, layout: Layout, model: Model, found: Findings) -> None:
    """Whether heads, layers and experts divide."""
    rollout_parallel = int(config.actor_rollout_ref.rollout.tensor_model_parallel_size)
    for what, size, parts in (
        ("attention heads over the actor's tensor parallel", model.heads, layout.tensor),
        ("attention heads over the rollout's tensor parallel", model.heads, rollout_parallel),
        ("attention heads over sequence parallel", model.heads, layout.sequence),
        ("layers over pipeline parallel", model.layers, layout.pipeline),
    ):
        if size % parts:
            found.problems.append(f"{size} {what} of {parts}: not divisible")
    if layout.expert > 1 and (not model.experts or model.experts % layout.expert):
        found.problems.append(
            f"{model.experts} experts over expert parallel of {layout.expert}: not divisible"
        )
    if layout.expert > 1 and (layout.gpus // layout.pipeline) % layout.expert:
        found.problems.append(
            f"expert parallel of {layout.expert} does not divide the "
            f"{layout.gpus // layout.pipeline} GPUs of a pipeline stage"
        )


def _memory(
    config: DictConfig, layout: Layout, model: Model, gpu_memory: float, found: Findings
) -> None:
    """Bytes per GPU; see docs/checking.md."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    lora = _lora_parameters(config, model)
    trained = lora or model.parameters
    if layout.megatron:
        stage = layout.tensor * layout.pipeline
        dense = model.dense_parameters / stage
        experts = model.expert_parameters / (layout.expert * layout.pipeline)
        held = dense + experts
        # The distributed optimizer shares out fp32 weights and moments over data parallel.
        expert_ranks = max(1, layout.gpus // (layout.expert * layout.pipeline))
        optimizer = 12 * (dense / (layout.data_parallel * layout.context) + experts / expert_ranks)
        weights, gradients = 2 * held, 4 * held
        offload = actor.megatron
    else:
        weights = 4 * model.parameters / layout.gpus
        gradients, optimizer = 4 * trained / layout.gpus, 8 * trained / layout.gpus
        offload = actor.fsdp_config
    longest = int(config.data.max_prompt_length) + int(config.data.max_response_length)
    tokens = (
        int(actor.ppo_max_token_len_per_gpu)
        if actor.use_dynamic_bsz
        else int(actor.ppo_micro_batch_size_per_gpu or 1) * longest
    )
    checkpoints = 2 * tokens * model.hidden_size * model.layers / layout.pipeline / layout.tensor
    logits = 2 * 4 * tokens * model.vocab_size / layout.tensor
    parallel = int(rollout.tensor_model_parallel_size)
    rollout_weights = 2 * model.parameters / parallel
    cache = float(rollout.gpu_memory_utilization) * gpu_memory * GIB - rollout_weights
    per_token = 2 * 2 * model.layers * model.head_dim * max(1, model.kv_heads / parallel)
    found.memory = {
        "actor weights": weights,
        "gradients": gradients,
        "optimiser": optimizer,
        "activations kept for the backward pass": checkpoints,
        "logits and their gradient": logits,
        "rollout weights": rollout_weights,
        "KV cache": max(0.0, cache),
    }
    found.size["parameters"] = f"{model.parameters / 1e9:.2f} billion"
    if lora:
        found.size["LoRA parameters"] = f"{lora / 1e6:.0f} million"
    found.size["tokens in a replica's KV cache"] = f"{max(0, int(cache // per_token)):,}"
    training = weights + gradients + optimizer + checkpoints + logits
    if cache < per_token * longest:
        found.problems.append(
            f"the KV cache of a replica holds {max(0, int(cache // per_token))} tokens, less than "
            f"one response of {longest}: raise rollout.gpu_memory_utilization or "
            "rollout.tensor_model_parallel_size"
        )
    if training > gpu_memory * GIB:
        found.problems.append(
            f"training needs about {training / GIB:.0f} GiB per GPU, more than {gpu_memory:.0f}: "
            "more GPUs, a larger split, or fewer tokens per micro-batch"
        )
    resting = 0.0
    if not offload.param_offload:
        resting += weights
    if not offload.optimizer_offload:
        resting += optimizer
    if resting + float(rollout.gpu_memory_utilization) * gpu_memory * GIB > gpu_memory * GIB:
        found.problems.append(
            f"during the rollout {resting / GIB:.0f} GiB of the actor stay on the GPU beside "
            f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}: switch on "
            "param_offload and optimizer_offload, or lower it"
        )


def _lora_parameters(config: DictConfig, model: Model) -> int:
    """Parameters of the adapters, on all linear layers; 0 without LoRA."""
    rank = int(config.actor_rollout_ref.model.get("lora_rank", 0) or 0)
    h, d = model.hidden_size, model.head_dim
    q, kv, f = model.heads * d, model.kv_heads * d, model.intermediate_size
    shapes = [(h, q), (h, kv), (h, kv), (q, h), (h, f), (h, f), (f, h)]
    return model.layers * rank * sum(inner + outer for inner, outer in shapes)


# What it changes


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration as {"a.b": value}, resolved where that is possible."""
    if isinstance(config, DictConfig):
        try:
            config = OmegaConf.to_container(config, resolve=True)
        except Exception:
            config = OmegaConf.to_container(config, resolve=False)
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        leaves.update(
            flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
        )
    return leaves


def differences(config: DictConfig, other: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in other, value here)} where they differ; "" where there is none."""
    here, there = flat(config), flat(other)
    keys = dict.fromkeys((*there, *here))
    pairs = {key: (there.get(key, ""), here.get(key, "")) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


# The command


def examine(recipe: str, overrides: Sequence[str], gpu_memory: float, console: Console) -> int:
    """Print what was found; return the exit status, 1 where something is wrong."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    try:
        with _quiet():
            import verl  # noqa: F401  loads the plugin

            config = compose(recipe, overrides)
            plain = compose(recipe, [o for o in overrides if not o.startswith("+method=")])
            stock = compose(STOCK, _engine(config))
            found = check(config, gpu_memory)
    except MethodError as error:
        console.print(f"problem  {error}", style="red", markup=False, soft_wrap=True)
        return 1
    by_method = differences(config, plain)
    table = Table("setting", "verl's default", "this launch", title="What it changes")
    for key, (default, value) in differences(config, stock).items():
        name, style = (f"{key}  (the method)", "bold") if key in by_method else (key, "")
        table.add_row(name, str(default), str(value), style=style)
    console.print(table)
    table = Table("", "", title="A step", show_header=False)
    for key, text in found.size.items():
        table.add_row(key, text)
    console.print(table)
    if found.memory:
        title = f"Memory per GPU of {gpu_memory:.0f} GiB, estimated"
        table = Table("", "GiB", title=title)
        for key, size in found.memory.items():
            table.add_row(key, f"{size / GIB:.1f}")
        console.print(table)
    for note in found.notes:
        console.print(f"note     {note}", markup=False, soft_wrap=True)
    for problem in found.problems:
        console.print(f"problem  {problem}", style="red", markup=False, soft_wrap=True)
    if not found.problems:
        console.print("all well")
    return 1 if found.problems else 0


def _engine(config: DictConfig) -> list[str]:
    return (
        ["model_engine=megatron"] if config.actor_rollout_ref.actor.strategy == "megatron" else []
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
