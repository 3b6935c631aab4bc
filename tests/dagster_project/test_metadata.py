import base64
import math
from xml.etree import ElementTree

import numpy as np

from dagster_project.lib.metadata import chart, numbers, svg, table


def test_numbers_are_flat_finite_and_rounded():
    found = numbers({"a": {"b": np.float64(1 / 3), "c": np.int64(2)}, "d": math.nan, "e": "text", "f": True})
    assert {key: value.value for key, value in found.items()} == {"a.b": 0.333333, "a.c": 2}


def test_tables_take_rows_of_different_columns():
    value = table([{"a": 1, "b": 0.5}, {"a": 2, "c": "x"}])
    assert [(c.name, c.type) for c in value.schema.columns] == [("a", "int"), ("b", "float"), ("c", "string")]
    assert value.records[1].data == {"a": 2, "b": None, "c": "x"}
    assert table([]).records == []


def test_chart_is_a_picture_in_markdown():
    text = chart("Loss", {"loss": [1.0, 0.5, math.nan, 0.25]}, ["first", "last"]).value
    picture = base64.b64decode(text.partition("base64,")[2].rstrip(")"))
    root = ElementTree.fromstring(picture)
    line = next(e for e in root.iter() if e.tag.endswith("polyline"))
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert len(points) == 3
    assert points[0][0] == 56
    assert points[-1][0] == 464
    assert points[0][1] < points[1][1] < points[2][1], "falling values run down the page"


def test_chart_survives_constants_single_points_and_nothing():
    for series in ({"a": [2.0, 2.0]}, {"a": [1.0]}, {"a": []}, {}):
        assert ElementTree.fromstring(svg("t <&>", series)) is not None
