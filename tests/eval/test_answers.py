"""The answer is found where a person would see it, and nowhere else."""

from __future__ import annotations

import time

import pytest

from halfbyte.eval.answers import boxed, gsm8k, letter, mathematical


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{x = \boxed{3}}", "x = 3"),
        (r"\boxed 7", "7"),
        (r"\boxed{ 7 }", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ \frac{1}{2} \right\}", None),
        (r"\boxed{1} and then \boxed{2", "1"),
        (r"\boxed{}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_closed_box_counts_with_the_boxes_in_it_opened(text: str, found: str | None) -> None:
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 42.", "42"),
        ("The final answer is: $\\frac{1}{2}$. I hope it is correct.", "\\frac{1}{2}"),
        ("**Answer:** 7 apples", "7 apples"),
        ("Answer: $x^2$ since $x > 0$", "x^2"),
        ("The answer is 5 since $x > 0$.", "5"),
        ("The answer is:\n\n$$\n12\n$$", "12"),
        ("The answer is 3. Wait, no.\nThe answer is 4.", "4"),
        ("Hence\n\\[ x = 3 \\]", "x = 3"),
        ("so in all that is 3 + 4 = 7", "7"),
        ("(3, 4]", "(3, 4]"),
        ("- **42**", "42"),
        ("答案是 12。", "12"),
        ("答えは 12", "12"),
        ("La respuesta final es 12.", "12"),
    ],
)
def test_without_a_box_an_announced_answer_counts_or_a_last_line_of_mathematics(text: str, found: str) -> None:
    assert mathematical(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n\n",
        "I do not know.",
        "Let us look at the 3 cases.",
        "x is positive, so we can divide by",
        "The answer is not easy to see",
        "\\boxed{}",
        "We get \\boxed{4",
        "<think>\nIt is 4, I think. The answer is 4",
        "题目没有给出图形。",
        "$$",
    ],
)
def test_a_text_without_an_answer_has_none(text: str) -> None:
    assert mathematical(text) is None


@pytest.mark.parametrize("text", ["\\boxed{", "the answer is ", "answer is (", "answer: $", "\\text{"])
def test_a_text_that_repeats_itself_for_ever_is_read_at_once(text: str) -> None:
    start = time.monotonic()
    assert "7" not in (mathematical(text * 10_000) or "")
    assert letter(text * 10_000, ["a", "b"]) is None
    assert mathematical("\\boxed{" * 2_000 + "7" + "}" * 2_000) == "7"
    assert time.monotonic() - start < 5  # seconds; read once for each box it took minutes


def test_what_is_said_after_thinking_goes_before_what_was_thought() -> None:
    assert mathematical("<think>\\boxed{1}</think> \\boxed{2}") == "2"
    assert mathematical("<think>\\boxed{1}</think> Done.") == "1"
    assert mathematical("thought without its opening tag \\boxed{1}</think>The answer is \\boxed{2}.") == "2"
    assert mathematical("<think>maybe \\boxed{1}") == "1"
    assert mathematical("<think>maybe</think>The answer is 3") == "3"


def test_gsm8ks_mark_goes_before_words_and_after_a_box() -> None:
    assert gsm8k("He has 3 + 4 = 7 eggs.\n#### 7") == "7"
    assert gsm8k("#### 5\nThe answer is 6\n#### 1,234") == "1,234"
    assert gsm8k("\\boxed{8}\n#### 7") == "8"
    assert gsm8k("The answer is 9.") == "9"
    assert gsm8k("nothing") is None


CHOICES = ["10 m", "20 m", "a mixture", "$x^2$"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{B) 20 m}", "B"),
        (r"\boxed{\text{(B) 20 m}}", "B"),
        (r"\boxed{20 m}", "B"),
        (r"\boxed{x^2}", "D"),
        (r"first \boxed{A}, but \boxed{C}", "C"),
        ("The answer is (C).", "C"),
        ("**Answer: D**", "D"),
        ("The answer is C because it is larger.", "C"),
        ("The correct answer is A since 10 < 20.", "A"),
        ("Answer: B. It is 20 m.", "B"),
        ("the answer is a mixture", "C"),
        ("正确答案是 B", "B"),
        ("so it must be the second one.\n\n(B)", "B"),
        ("**B**", "B"),
        (r"\boxed{E}", None),
        (r"\boxed{30 m}", None),
        (r"\boxed{Both}", None),
        ("The answer is a bit unclear.", None),
        ("A good question. Because it depends", None),
        ("The answer is A good one? Hard to say", None),
        ("<think>The answer is B", None),
        ("", None),
    ],
)
def test_a_letter_is_read_where_one_is_named(text: str, found: str | None) -> None:
    assert letter(text, CHOICES) == found


def test_a_letter_beyond_the_choices_is_none() -> None:
    assert letter(r"\boxed{J}", ["x"] * 10) == "J"
    assert letter(r"\boxed{J}", ["x"] * 9) is None
