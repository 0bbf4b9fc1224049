"""Problem sets as verl reads them: parquet files with data_source, prompt, ability, reward_model
and extra_info, rows in the order of the source.

`verl-covgrpo data NAME` writes them. A source is read with `datasets`: from its hub, or from a
local copy in the same format (a folder or file of parquet, JSON or JSON lines).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_covgrpo.errors import MethodError, did_you_mean
from verl_covgrpo.rewards.math import boxed_answer
from verl_covgrpo.rewards.reasoning_gym import PREFIX

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Called with (split, rows done, rows of the split)."""

INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."


class DataError(MethodError):
    """A problem set that cannot be read, or is not what it should be."""


def row(
    source: str, question: str, answer: str, split: str, index: int, ability: str, **extra: Any
) -> Row:
    """Return one row in verl's schema."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, **extra},
    }


@dataclass(frozen=True)
class Source:
    """Where a problem set comes from, and how one of its records reads."""

    path: str
    """Its name on the hub."""
    problem: Callable[[Row], tuple[str, str]]
    """Question and reference answer of a record."""
    splits: dict[str, str]
    """The file we write -> the split of the source."""
    config: str | None = None
    rows: dict[str, int] = field(default_factory=dict)
    """The file we write -> how many rows it must have; not known for all."""
    key: Callable[[Row], Any] | None = None
    """Records with the same key are one problem, of which the first counts."""


def _gsm8k(record: Row) -> tuple[str, str]:
    answer = record["answer"].rpartition("####")[2].strip().replace(",", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?", answer):
        raise DataError(f"no number after #### in {record['answer'][-80:]!r}")
    return record["question"], answer


def _math(record: Row) -> tuple[str, str]:
    answer = boxed_answer(record["solution"])
    if answer is None:
        raise DataError(f"no boxed answer in {record['solution'][-80:]!r}")
    return record["problem"], answer


def _open_rs(record: Row) -> tuple[str, str]:
    return record["problem"], str(record["answer"]).strip()


def _dapo(record: Row) -> tuple[str, str]:
    """The problem alone: the source wraps it into an instruction of its own, "Answer: ..."."""
    text = record["prompt"][0]["content"]
    head, _, rest = text.partition("\n\n")
    question = rest.rpartition("\n\nRemember to put your answer")[0] or rest
    return (question if "Answer" in head else text).strip(), str(
        record["reward_model"]["ground_truth"]
    ).strip()


SOURCES = {
    "gsm8k": Source(
        "openai/gsm8k",
        _gsm8k,
        {"train": "train", "test": "test"},
        config="main",
        rows={"train": 7473, "test": 1319},
    ),
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval",
        _math,
        {"train": "train", "test": "test"},
        rows={"train": 7500, "test": 5000},
    ),
    "open_rs": Source("knoveleng/open-rs", _open_rs, {"train": "train"}, rows={"train": 7000}),
    "dapo_math_17k": Source(
        "BytedTSinghua-SIA/DAPO-Math-17k",
        _dapo,
        {"train": "train"},
        # The source repeats each problem many times.
        key=lambda record: record["extra_info"]["index"],
    ),
}


def write(
    name: str,
    output: Path,
    source: Path | None = None,
    instruction: str = INSTRUCTION,
    progress: Progress = lambda *_: None,
) -> dict[str, int]:
    """Write a problem set's parquet files; return the number of rows of each.

    Args:
        name: a key of `SOURCES`.
        output: the folder of the files, "train.parquet" and so on.
        source: a local copy of the source, instead of its hub.
        instruction: follows each question.

    Raises:
        DataError: an unknown name, a source that cannot be reached or read, a record without an
            answer, or a count of rows that is not the known one (from the hub alone).
    """
    if name not in SOURCES:
        hint = did_you_mean(name, SOURCES)
        raise DataError(f"unknown problem set {name!r}{hint}; known: {', '.join(SOURCES)}")
    known = SOURCES[name]
    counts = {}
    for split, of_source in known.splits.items():
        records = _load(name, known, of_source, source)
        rows = list(_rows(name, known, split, records, instruction, progress))
        wanted = known.rows.get(split)
        if source is None and wanted is not None and len(rows) != wanted:
            raise DataError(
                f"{known.path} has {len(rows)} rows in {of_source}, expected {wanted}: the source "
                "has changed; compare it, and pass --source with the copy that you want"
            )
        write_parquet(rows, output / f"{split}.parquet")
        counts[split] = len(rows)
    return counts


def _rows(
    name: str,
    known: Source,
    split: str,
    records: Any,
    instruction: str,
    progress: Progress,
) -> Iterator[Row]:
    seen: set[Any] = set()
    for number, record in enumerate(records):
        progress(split, number + 1, len(records))
        if known.key is not None:
            key = known.key(record)
            if key in seen:
                continue
            seen.add(key)
        try:
            question, answer = known.problem(record)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise DataError(
                f"record {number} of {name} ({split}) is not in the format of {known.path}: "
                f"{type(error).__name__} {error}; it has {sorted(record)}"
            ) from error
        except DataError as error:
            raise DataError(f"record {number} of {name} ({split}): {error}") from None
        text = f"{question.strip()}\n\n{instruction}" if instruction else question.strip()
        yield row(known.path, text, answer, split, len(seen) - 1 if seen else number, "math")


def _load(name: str, known: Source, split: str, source: Path | None) -> Any:
    import datasets

    datasets.disable_progress_bars()
    if source is not None:
        files = _local_files(source, split)
        kind = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}[files[0].suffix]
        try:
            return datasets.load_dataset(
                kind, data_files={split: [str(file) for file in files]}, split=split
            )
        except Exception as error:
            raise DataError(f"{files[0]} cannot be read: {error}") from error
    try:
        return datasets.load_dataset(known.path, known.config, split=split)
    except Exception as error:
        raise DataError(
            f"{known.path} could not be loaded ({type(error).__name__}: {_first_line(error)}). "
            f"Without a connection: fetch its files on a machine that has one, and run "
            f"verl-covgrpo data {name} --source FOLDER"
        ) from error


def _local_files(source: Path, split: str) -> list[Path]:
    """The files of a split: those with its name where there are any, else all of a single kind."""
    kinds = (".parquet", ".jsonl", ".json")
    if source.is_file():
        found = [source]
    else:
        found = sorted(path for path in source.rglob("*") if path.suffix in kinds)
        named = [path for path in found if split in path.stem or split in path.parent.name]
        found = named or found
    found = [path for path in found if path.suffix in kinds]
    if not found:
        raise DataError(f"{source} holds no file of {', '.join(kinds)} for the split {split!r}")
    first = found[0].suffix
    return [path for path in found if path.suffix == first]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


# reasoning-gym


def problems(
    task: str, size: int, seed: int, config: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return `size` entries of a reasoning-gym task, the same for the same seed.

    Raises:
        DataError: no such task, or a setting that it does not have.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        hint = did_you_mean(task, [*SOURCES, *DATASETS])
        raise DataError(
            f"{task!r} is neither one of {', '.join(SOURCES)} nor a task of reasoning-gym{hint}"
        )
    try:
        return list(reasoning_gym.create_dataset(task, size=size, seed=seed, **(config or {})))
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(f"reasoning-gym's {task}: {error}") from error


def reasoning_rows(task: str, entries: Iterable[dict[str, Any]], split: str) -> list[Row]:
    """Return entries as rows; the metadata goes along as JSON, for the task's own scorer."""
    return [
        row(
            PREFIX + task,
            entry["question"],
            str(entry["answer"]),
            split,
            index,
            "reasoning",
            entry=json.dumps(
                {"answer": entry["answer"], "metadata": entry["metadata"]}, default=str
            ),
        )
        for index, entry in enumerate(entries)
    ]


def write_reasoning(
    task: str,
    output: Path,
    size: int,
    test_size: int,
    seed: int,
    config: dict[str, Any],
    progress: Progress = lambda *_: None,
) -> dict[str, int]:
    """Write train and test problems of a reasoning-gym task, from different seeds.

    Raises:
        DataError: neither a source of `SOURCES` nor a task, or a setting that the task has not.
    """
    counts = {"train": size, "test": test_size}
    for split, count in counts.items():
        progress(split, 0, count)
        of_split = seed if split == "train" else seed + 1_000_000
        rows = reasoning_rows(task, problems(task, count, of_split, config), split)
        write_parquet(rows, output / f"{split}.parquet")
        progress(split, count, count)
    return counts


def write_parquet(rows: list[Row], path: Path) -> Path:
    """Write rows to a parquet file."""
    import pandas

    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(path)
    return path
