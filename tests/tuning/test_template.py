"""From a template to the words of one run: arithmetic, quoting, and what is refused."""

import pytest

from completep.errors import UserError
from completep.tuning.template import Template

NAMES = {"width": 64, "depth": 2, "lr": 2**-8, "m_N": 2.0, "m_L": 1.5, "seed": 0, "folder": "/a b/c", "act": "gelu"}


def test_words_are_filled():
    t = Template("python train.py --n_embd={width} --heads {width//16} {4*width} {depth%2} --lr {lr} -o {folder}")
    assert t.fill(NAMES) == (
        "python", "train.py", "--n_embd=64", "--heads", "4", "256", "0", "--lr", "0.00390625", "-o", "/a b/c",
    )  # fmt: skip
    assert t.names == {"width", "depth", "lr", "folder"}


def test_floats_are_exact_and_whole_ones_have_no_point():
    assert Template("{m_N} {m_L} {lr}").fill(NAMES | {"lr": 0.1 + 0.2}) == ("2", "1.5", "0.30000000000000004")
    assert Template("{width*m_N}").fill(NAMES) == ("128",)


def test_a_value_is_one_argument_whatever_it_holds():
    assert Template("run --act {act}").fill({"act": "a; rm -rf / $(x) 'b"}) == ("run", "--act", "a; rm -rf / $(x) 'b")


def test_quotes_and_braces():
    assert Template("sh -c 'echo {{x}} {seed}'").fill(NAMES) == ("sh", "-c", "echo {x} 0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("python 'train.py", "cannot be read"),
        ("run {}", "not a name"),
        ("run {width/2}", "not a name"),
        ("run {width**2}", "not a name"),
        ("run {open('x')}", "not a name"),
        ("run {width.real}", "not a name"),
        ("run '{width if 1 else 2}'", "not a name"),
        ("run {1.5*width}", "not a name"),
        ("run {width:>4}", "not a name"),
        ("run {3}", "not a name"),
        ("run {width", "single {"),
        ("run width}", "single }"),
    ],
)
def test_what_cannot_be_read_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        Template(text).check(NAMES)


def test_an_unknown_name_has_a_suggestion():
    with pytest.raises(UserError, match=r"unknown name \{widht\}\n.*did you mean \{width\}"):
        Template("run {widht}").check(NAMES)


@pytest.mark.parametrize(
    ("text", "said"), [("{width//seed}", "divides by 0"), ("{lr*width}", "not both whole"), ("{act+width}", "not both")]
)
def test_arithmetic_that_has_no_answer_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        Template(text).fill(NAMES)


def test_a_number_of_many_digits_is_refused():
    with pytest.raises(UserError, match="too large"):
        Template("{width*width*width*width*width*width*width*width*width*width*width}").fill(NAMES)


@pytest.mark.parametrize("text", ["{width" + "+1" * 1500 + "}", "{width*" + "9" * 400 + "}", "{" + "x" * 200_000 + "}"])
def test_a_placeholder_too_long_to_be_meant_is_refused(text):
    with pytest.raises(UserError, match="characters") as caught:
        Template(f"run {text}").fill(NAMES)
    assert len(str(caught.value)) < 1000


def test_a_product_past_every_float_is_refused():
    with pytest.raises(UserError, match="is too large"):
        Template("{width*" + "9" * 150 + "}").fill(NAMES)
