"""The demo's models: a tiny Qwen2 that is warm-started here, and SmolLM2-135M-Instruct."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(folder: Path) -> Any:
    """A Qwen2 tokenizer whose vocabulary is the 256 bytes (no merges) and three special tokens."""
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {character: i for i, character in enumerate(bytes_to_unicode().values())}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


@dataclass(frozen=True)
class TinySettings:
    """Size and warm start of the tiny model; the cache is keyed by these."""

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    batch_size: int = 64
    learning_rate: float = 2e-3
    target_accuracy: float = 0.42
    limit_s: float = 80.0
    seed: int = 0


def new_model(tokenizer: Any, settings: TinySettings) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(settings.seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=4 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        use_sliding_window=False,
    )
    return Qwen2ForCausalLM(config)


def supervised_batch(tokenizer: Any, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    rows = []
    for question, answer in pairs:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        p = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        a = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        rows.append((p, a))
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, (p, a) in enumerate(rows):
        ids[i, : len(p) + len(a)] = torch.tensor(p + a)
        labels[i, len(p) : len(p) + len(a)] = torch.tensor(a)
        mask[i, : len(p) + len(a)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@torch.no_grad()
def sample_accuracy(model, tokenizer, items, score, greedy=False, n=256, new=8):
    model.eval()
    items = items[:n]
    tokenizer.padding_side = "left"
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False) for q, _ in items]
    enc = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    kw = dict(do_sample=False) if greedy else dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    out = model.generate(**enc, max_new_tokens=new, **kw)
    texts = tokenizer.batch_decode(out[:, enc["input_ids"].shape[1]:], skip_special_tokens=True)
    model.train()
    return sum(score(t, a) for t, (_, a) in zip(texts, items)) / len(items), texts
