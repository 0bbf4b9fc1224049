"""Problem sets, from small local copies of each source's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

import pandas

from verl_covgrpo import data
from verl_covgrpo.data import DataError

GSM8K = [
    {"question": "Tom has 3 apples and buys 4.", "answer": "3+4=<<3+4=7>>7\n#### 7"},
    {"question": "A car costs $1,000 twice.", "answer": "It is 2,000.\n#### 2,000"},
    {"question": "It gets colder.", "answer": "#### -5"},
]
MATH = [
    {
        "problem": "What is $1/2$?",
        "solution": r"It is $\boxed{\frac{1}{2}}$.",
        "level": "Level 1",
        "type": "Algebra",
    },
    {"problem": "Where?", "solution": r"$\boxed{[0,1)}$", "level": "Level 2", "type": "Algebra"},
]
OPEN_RS = [
    {"problem": "What is $2^3$?", "solution": "It is 8.", "answer": "8", "level": "Easy"},
    {"problem": "And $x$?", "solution": "...", "answer": "\\frac{x}{2}", "level": "Hard"},
]


def dapo(index: str, question: str, answer: str) -> dict[str, Any]:
    head = 'Solve it. The last line should be "Answer: $Answer".'
    tail = 'Remember to put your answer on its own line after "Answer:".'
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{head}\n\n{question}\n\n{tail}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


DAPO = [
    dapo("a", "How many?\n\nCount them.", "34"),
    dapo("b", "How far?", "113"),
    dapo("a", "How many?\n\nCount them.", "34"),
]


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def parquet(path: Path, records: list[dict[str, Any]]) -> None:
    pandas.DataFrame(records).to_parquet(path)


def read(path: Path) -> list[dict[str, Any]]:
    return pandas.read_parquet(path).to_dict("records")


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """Local copies: JSON lines and parquet, as the sources come."""
    for name in data.SOURCES:
        (tmp_path / name).mkdir()
    lines(tmp_path / "gsm8k" / "train.jsonl", GSM8K)
    lines(tmp_path / "gsm8k" / "test.jsonl", GSM8K[:1])
    parquet(tmp_path / "math" / "train-00000-of-00001.parquet", MATH)
    parquet(tmp_path / "math" / "test-00000-of-00001.parquet", MATH[1:])
    parquet(tmp_path / "open_rs" / "train-00000-of-00001.parquet", OPEN_RS)
    parquet(tmp_path / "dapo_math_17k" / "dapo-math-17k.parquet", DAPO)
    return tmp_path


EXPECTED = {
    "gsm8k": ({"train": 3, "test": 1}, ["7", "2000", "-5"]),
    "math": ({"train": 2, "test": 1}, [r"\frac{1}{2}", "[0,1)"]),
    "open_rs": ({"train": 2}, ["8", r"\frac{x}{2}"]),
    "dapo_math_17k": ({"train": 2}, ["34", "113"]),
}


@pytest.mark.parametrize("name", data.SOURCES)
def test_a_local_copy_of_each_source(name: str, copies: Path, tmp_path: Path) -> None:
    counts, answers = EXPECTED[name]
    out = tmp_path / "out"
    assert data.write(name, out, source=copies / name) == counts
    rows = read(out / "train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == answers
    for index, row in enumerate(rows):
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert row["data_source"] == data.SOURCES[name].path
        assert row["extra_info"] == {"split": "train", "index": index}
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert message["content"].endswith(f"\n\n{data.INSTRUCTION}")


def test_dapos_own_instruction_is_taken_off(copies: Path, tmp_path: Path) -> None:
    data.write("dapo_math_17k", tmp_path / "out", copies / "dapo_math_17k", instruction="")
    texts = [row["prompt"][0]["content"] for row in read(tmp_path / "out" / "train.parquet")]
    assert texts == ["How many?\n\nCount them.", "How far?"]


def test_the_same_source_gives_the_same_bytes(copies: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        data.write("gsm8k", tmp_path / out, copies / "gsm8k")
    first, second = (tmp_path / out / "train.parquet" for out in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_progress_is_told(copies: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    data.write("open_rs", tmp_path / "out", copies / "open_rs", progress=lambda *x: told.append(x))
    assert told == [("train", 1, 2), ("train", 2, 2)]


@pytest.mark.parametrize("name", data.SOURCES)
def test_offline_it_says_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=rf"Couldn't reach the hub\).*data {name} --source FOLDER"):
        data.write(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_number_of_rows_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(GSM8K)
    )
    with pytest.raises(DataError, match="has 3 rows in train, expected 7473"):
        data.write("gsm8k", tmp_path)


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("gsm8k", {"question": "?", "answer": "seven"}, "no number after ####"),
        ("gsm8k", {"question": "?"}, "not in the format of openai/gsm8k"),
        ("math", {"problem": "?", "solution": "half"}, "no boxed answer"),
        ("open_rs", {"question": "?", "answer": "1"}, "it has ['answer', 'question']"),
    ],
)
def test_a_record_in_another_format_is_named(
    name: str, record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    lines(tmp_path / "train.jsonl", [record])
    with pytest.raises(DataError) as error:
        data.write(name, tmp_path / "out", tmp_path)
    assert words in str(error.value)
    assert f"record 0 of {name} (train)" in str(error.value)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no file of \.parquet, \.jsonl, \.json"):
        data.write("gsm8k", tmp_path / "out", tmp_path)


def test_an_unknown_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"did you mean 'gsm8k'"):
        data.write("gms8k", tmp_path)


# reasoning-gym


def test_a_task_of_reasoning_gym(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    entries = data.problems("chain_sum", 5, seed=3, config={"min_terms": 2})
    assert entries == data.problems("chain_sum", 5, seed=3, config={"min_terms": 2})
    rows = data.reasoning_rows("chain_sum", entries, "train")
    found = read(data.write_parquet(rows, tmp_path / "deep" / "train.parquet"))
    assert [row["data_source"] for row in found] == ["reasoning_gym/chain_sum"] * 5
    assert [row["extra_info"]["index"] for row in found] == list(range(5))

    from verl_covgrpo.rewards.reasoning_gym import compute_score

    for row in found:
        answer = row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], answer, answer, row["extra_info"]) == 1.0


@pytest.mark.parametrize(
    ("task", "config", "words"),
    [
        ("chain_sun", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"terms": 2}, "chain_sum: .*terms"),
        ("chain_sum", {"min_terms": -1}, "chain_sum: "),
    ],
)
def test_a_wrong_task_or_setting_is_refused(task: str, config: dict[str, Any], words: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=words):
        data.problems(task, 3, seed=0, config=config)


# The command


def command(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from verl_covgrpo.cli import app

    done = CliRunner().invoke(app, ["data", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_the_command_writes_a_copy(copies: Path, tmp_path: Path) -> None:
    status, text = command(
        "gsm8k", "--source", str(copies / "gsm8k"), "--output", str(tmp_path / "out")
    )
    assert status == 0, text
    assert "gsm8k train" in text and "100%" in text
    assert f"       3  {tmp_path}/out/train.parquet" in text
    assert len(read(tmp_path / "out" / "test.parquet")) == 1


def test_the_command_writes_a_task(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    status, text = command(
        "chain_sum",
        *("--output", str(tmp_path), "--size", "7", "--test-size", "3", "--setting", "max_terms=2"),
    )
    assert status == 0, text
    train, test = (read(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (7, 3)
    prompts = [row["prompt"][0]["content"] for row in train]
    assert not set(prompts) & {row["prompt"][0]["content"] for row in test}
    assert all(text.count("+") + text.count("-") == 1 for text in prompts)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    status, text = command("gsm9k", "--output", str(tmp_path))
    assert status == 1
    assert "did you mean 'gsm8k'" in text
