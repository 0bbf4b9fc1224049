"""Boxed-answer maths: awkward answers, threads, and comparisons that would never end."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")
pytest.importorskip("pebble")

from verl_covgrpo.rewards import accuracy_format, math
from verl_covgrpo.rewards.math import boxed_answer, compute_score

RIGHT = [
    (r"so \boxed{42}", "42"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{\dfrac{3}{4}}", "3/4"),
    (r"\boxed{0.750}", r"\frac{3}{4}"),
    (r"\boxed{-\frac{1}{3}}", r"-\frac13"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{18\text{ cm}}", "18"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{25\%}", r"25\%"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{(1, 2]}", "(1,2]"),
    (r"\boxed{[0,\infty)}", r"[0, \infty)"),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"),
    (r"\boxed{(3,-2)}", "(3, -2)"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{\pi}", r"\pi"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"first \boxed{3}, no: \boxed{4}", "4"),
    (r"\fbox{12}", "12"),
    (r"the answer is \boxed 5.", "5"),
    (r"\boxed{ 42 }", r"\boxed{42}"),
    (r"\boxed{\text{(B)}}", "B"),
    ("$$\n\\boxed{\n17\n}\n$$", "17"),
]

WRONG = [
    (r"\boxed{41}", "42"),
    (r"42", "42"),
    ("", "42"),
    (r"\boxed{}", "42"),
    (r"\boxed{42", "42"),
    (r"\boxed{\frac{1}{2}", "0.5"),
    (r"first \boxed{4}, no: \boxed{3}", "4"),
    (r"\boxed{(1,2)}", "(1,2]"),
    (r"\boxed{\frac{1}{3}}", "0.33"),
    (r"\boxed{-5}", "5"),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}"),
    (r"\boxed{(2,3)}", "(3,2)"),
    (r"\boxed{x^2}", "x^3"),
    (r"\boxed{\notacommand{}}", "42"),
    (r"\boxed{}}}{{", "42"),
    ("\\boxed{\x00}", "42"),
    (r"\boxed", "42"),
]


@pytest.mark.parametrize(("response", "reference"), RIGHT)
def test_right(response: str, reference: str) -> None:
    assert compute_score("math", response, reference) == 1.0


@pytest.mark.parametrize(("response", "reference"), WRONG)
def test_wrong(response: str, reference: str) -> None:
    score = compute_score("math", response, reference)
    assert (score, type(score)) == (0.0, float)


@pytest.mark.parametrize("filling", ["x", "\\boxed{1} ", "{", "}", "\\", "\\boxed{"])
def test_a_hundred_thousand_characters(filling: str) -> None:
    text = (filling * 100_000)[:100_000]
    start = time.perf_counter()
    assert compute_score("math", text, "42") == 0.0
    assert compute_score("math", text + r"} \boxed{42}", "42") == 1.0
    assert compute_score("math", rf"\boxed{{{'7' * 100_000}}}", "42") == 0.0
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{1} and \boxed{2", None),
        ("no box", None),
    ],
)
def test_what_stands_in_the_box(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def test_a_comparison_that_takes_too_long_is_wrong_and_the_next_one_goes_on() -> None:
    compute_score("math", r"\boxed{\frac{2}{4}}", "0.5")  # the process is up
    start = time.perf_counter()
    endless = r"\boxed{10^{10^{10^{10}}} + 9^{9^{9^{9}}}}"
    assert compute_score("math", endless, r"7^{7^{7^{7^{7}}}} + 1", timeout=1.0) == 0.0
    assert time.perf_counter() - start < 15
    assert compute_score("math", r"\boxed{\frac{3}{6}}", "0.5") == 1.0


def test_many_threads_at_once_and_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an alarm in a reward worker")

    monkeypatch.setattr(signal, "alarm", refuse)
    cases = [(r, g, 1.0) for r, g in RIGHT] + [(r, g, 0.0) for r, g in WRONG]
    with ThreadPoolExecutor(16) as threads:
        scores = list(threads.map(lambda case: compute_score("math", case[0], case[1]), cases * 3))
    assert scores == [score for _, _, score in cases * 3]


# Accuracy plus format

THOUGHT = "I add them up.</think>The answer is "


@pytest.mark.parametrize(
    ("response", "accuracy", "in_format"),
    [
        (THOUGHT + r"\boxed{4}", 1.0, 1.0),
        ("<think>" + THOUGHT + r"\boxed{4}.", 1.0, 1.0),
        (THOUGHT + r"\boxed{5}", 0.0, 1.0),
        (r"\boxed{4}", 1.0, 0.0),
        (r"<think>\boxed{4}</think>", 1.0, 0.0),
        (THOUGHT + THOUGHT + r"\boxed{4}", 1.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_accuracy_plus_format(response: str, accuracy: float, in_format: float) -> None:
    found = accuracy_format.compute_score("open_rs", response, "4")
    score = accuracy + 0.5 * in_format
    assert found == {"score": score, "acc": accuracy, "format": in_format}


def test_weights_and_format_are_parameters() -> None:
    found = accuracy_format.compute_score(
        "open_rs",
        r"<answer>\boxed{4}</answer>",
        "4",
        accuracy_weight=2.0,
        format_weight=0.1,
        format_pattern="<answer>.*</answer>",
    )
    assert found == {"score": pytest.approx(2.1), "acc": 1.0, "format": 1.0}


def test_a_long_response_out_of_format_is_found_out_quickly() -> None:
    start = time.perf_counter()
    text = "<think>" + "a b " * 25_000
    assert accuracy_format.compute_score("open_rs", text, "4")["format"] == 0.0
    assert time.perf_counter() - start < 5


def test_the_judge_is_one_process_for_all() -> None:
    assert math._judge() is math._judge()


def test_in_a_thread_of_a_ray_worker() -> None:
    """As verl's reward workers call it."""
    ray = pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="cov-ray-")  # short: Ray's sockets go there
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        _temp_dir=folder,
        log_to_driver=False,
        logging_level="ERROR",
    )

    @ray.remote
    class Worker:
        async def score(self, response: str, reference: str) -> float:
            import asyncio

            from verl_covgrpo.rewards.math import compute_score

            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, compute_score, "math", response, reference)

    try:
        worker = Worker.remote()
        cases = [*RIGHT[:6], *WRONG[:6]]
        scores = ray.get([worker.score.remote(*case) for case in cases], timeout=120)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    assert scores == [1.0] * 6 + [0.0] * 6
