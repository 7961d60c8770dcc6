"""What a panel of loss curves shows: means, the range of the seeds, and what lies outside the picture."""

import json
import math
import re
from itertools import combinations

import polars as pl

from completep.measure import figures
from completep.report import charts
from completep.rules.table import Role
from completep.stats import mean_and_range

VALUES = [0.25, 0.5, 1.0, 2.0]


def layers(seeds, losses):
    """The marks of one curve, by kind, with the rows that each draws."""
    frame = pl.DataFrame([{"lr": v, "seed": s, "depth": 2, "loss": losses(v, s)} for v in VALUES for s in range(seeds)])
    means = mean_and_range(frame, "depth", "lr")
    x, colour = charts.log2_x("lr", VALUES, "lr"), charts.by_order("depth", "depth", [2])
    spec = charts.loss_curves(means, x, "lr", colour, "depth", "title", span=(2.0, 3.0)).to_dict()
    return [(layer["mark"], spec["datasets"][layer["data"]["name"]], layer["encoding"]) for layer in spec["layer"]]


def of_kind(drawn, kind, **properties):
    return [
        (rows, encoding)
        for mark, rows, encoding in drawn
        if mark["type"] == kind and all(mark.get(k) == v for k, v in properties.items())
    ]


def test_a_band_reaches_from_the_lowest_seed_to_the_highest():
    drawn = layers(3, lambda value, seed: 2.1 + 0.1 * seed)
    ((rows, encoding),) = of_kind(drawn, "area")
    assert (encoding["y"]["field"], encoding["y2"]["field"]) == ("lowest", "highest")
    assert [(round(r["lowest"], 6), round(r["highest"], 6)) for r in rows] == [(2.1, 2.3)] * 4
    ((rows, encoding),) = of_kind(drawn, "line")
    assert [round(r["loss"], 6) for r in rows] == [2.2] * 4


def test_one_seed_has_no_band():
    assert not of_kind(layers(1, lambda value, seed: 2.5), "area")


def test_what_diverged_is_filled_and_what_is_above_the_picture_is_hollow():
    losses = {0.25: 2.5, 0.5: 2.2, 1.0: 3.7, 2.0: math.nan}
    drawn = layers(2, lambda value, seed: losses[value])
    ((rows, _),) = of_kind(drawn, "point", shape="triangle-up", filled=True)
    assert [r["lr"] for r in rows] == [2.0]
    ((rows, encoding),) = of_kind(drawn, "point", shape="triangle-up", filled=False)
    assert [(r["lr"], r["loss"], r["actual"]) for r in rows] == [(1.0, 3.0, 3.7)]
    assert any(tip["field"] == "actual" for tip in encoding["tooltip"])
    assert not of_kind(layers(2, lambda value, seed: 2.5), "point", shape="triangle-up")


def lab(colour):
    """CIELAB, in which distances are about as large as they look."""
    linear = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in linear)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.0888,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_every_role_has_a_colour_of_its_own():
    """No two are closer than the closest two of Okabe and Ito's."""
    assert len(charts.MANY_COLOURS) >= len(Role)
    closest = [
        min(math.dist(lab(a), lab(b)) for a, b in combinations(colours, 2))
        for colours in (charts.OKABE_ITO, charts.MANY_COLOURS)
    ]
    assert closest[1] == closest[0] > 20


def test_a_figure_of_all_roles_uses_them():
    rows = [{"rules": "mup", "size": n, "line": str(role), "value": 1.0 + n} for role in Role for n in (32, 64)]
    panel = figures._size_panel(pl.DataFrame(rows), "mup", "width", "role", "PASS", True).to_dict()
    ranges = re.findall(r'"range": (\[[^]]*\])', json.dumps(panel))
    assert charts.MANY_COLOURS in [json.loads(found) for found in ranges]
