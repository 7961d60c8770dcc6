"""Ranges as people write them, and every way to write them wrongly."""

import math

import pytest

from completep.errors import UserError
from completep.tuning.settings import make_tuning
from completep.tuning.space import parse_dimension, parse_space


def values(text):
    return parse_space([text])[0].values


def test_octaves():
    assert values("lr=2^-10..2^-5") == tuple(2.0**e for e in range(-10, -4))
    assert values("lr=2^-3..2^-2:0.5") == (0.125, pytest.approx(2**-2.5, abs=1e-12), 0.25)
    assert values("lr=0.001..0.004") == (0.001, 0.002, 0.004)
    assert values("lr=1..8:octaves:1") == (1.0, 2.0, 4.0, 8.0)


def test_a_line_and_choices():
    assert values("dropout=0..0.3:linear:0.1") == (0.0, 0.1, 0.2, 0.3)
    assert values("x=0..1:linear") == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert values("act=gelu,relu") == ("gelu", "relu")
    assert values("batch=32,8,16") == (8, 16, 32)
    assert parse_dimension("lr", [0.1, 0.01]).values == (0.01, 0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "is not a range"),
        ("lr=-1e308..1e308:linear", "no values that a run can have"),
        ("lr=1e-300,1e300", "1e-300 is not a value that a run can have"),
        ("lr=1e-300..1e-290", "is not a value that a run can have"),
        ("lr=2^-5..2^-10", "ends below its start"),
        ("lr=0..1", "octaves must be above 0"),
        ("lr=2^-5..2^-5", "only one value"),
        ("lr=0.1", "only one value"),
        ("lr=", "empty value"),
        ("lr=a..b", "is not a number"),
        ("lr=0^-1..1", "is not a number"),
        ("lr=1..2:linear:0", "does not make 2 to 1000 values"),
        ("lr=1..2:linear:1e-9", "does not make 2 to 1000 values"),
        ("lr=1..2:1:2", "too many parts"),
        ("lr=nan..1", "is not a number"),
        ("seed=1..2", "is a reserved name"),
        ("a b=1..2", "cannot be the name"),
    ],
)
def test_what_is_no_range_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        parse_space([text])


def test_an_empty_space_is_refused():
    with pytest.raises(UserError, match="nothing to search"):
        parse_space({})


@pytest.mark.parametrize("text", ["lr=2^-10..2^-5", "x=0..0.3:linear:0.1", "b=8,16,32", "z=0,1,2"])
def test_a_place_leads_back_to_its_value(text):
    d = parse_space([text])[0]
    places = [d.place(v) for v in d.values]
    assert places == sorted(places)
    assert min(places) > 0
    assert [d.at(p) for p in places] == pytest.approx(list(d.values), abs=1e-12)


def test_steps_on_a_line_are_octaves_apart():
    d = parse_space(["x=0..0.3:linear:0.1"])[0]
    assert math.log2(d.place(0.2) / d.place(0.1)) == pytest.approx(1)


@pytest.mark.parametrize("text", ["0,1,10,20", "4,8,16,32", "-3,5,6"])
def test_the_best_choice_is_one_of_the_choices(text):
    d = parse_dimension("x", text)
    for value in d.values:
        assert d.at(d.place(value)) == value
        assert d.at(1.1 * d.place(value)) == value  # an optimum that a fit puts beside it


def test_three_dots_are_a_typing_mistake():
    with pytest.raises(UserError, match="three dots"):
        parse_dimension("lr", "2^-9...2^-4")


def test_too_many_values_are_refused():
    with pytest.raises(UserError, match=r"lr has 200000 values"):
        parse_space({"lr": [i + 0.5 for i in range(200_000)]})


@pytest.mark.parametrize("name", ["seeds", "most_seeds", "trials"])
def test_absurd_numbers_of_runs_are_refused(name):
    content = {"command": "python x.py {lr}", "loss": "output:(.*)", "space": {"lr": "1..8"}}
    with pytest.raises(UserError, match=f"{name}=50000000 is too many"):
        make_tuning({**content, name: 50_000_000})
