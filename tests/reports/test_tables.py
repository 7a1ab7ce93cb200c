"""The one look of `describe`, `plan`, `status` and `doctor`."""

from __future__ import annotations

import html
import re

import keras
import pytest

import keras_strategies as ks
from keras_strategies.text_tables import Table

pytestmark = pytest.mark.one_backend


def table(**options) -> Table:
    rows = (("dense/kernel", "12"), ("bias", "1800"))
    return Table(
        "a model", ("variable", "steps"), rows, frozenset({"steps"}), **options
    )


def test_the_text_of_a_table() -> None:
    text = str(
        table(totals=(("total", "1812"),), facts=(("speed", "3.0 ms"),), note="A note.")
    )
    assert text.splitlines() == [
        "a model",
        "-------------------",
        "variable      steps",
        "-------------------",
        "dense/kernel     12",
        "bias          1,800",
        "-------------------",
        "total         1,812",
        "-------------------",
        "speed  3.0 ms",
        "A note.",
    ]


def test_a_table_in_a_notebook_has_the_cells_of_its_text() -> None:
    shown = table(totals=(("<total>", "1812"),), facts=(("speed", "3.0 ms"),))
    cells = re.findall(r"<(?:td|th|caption)[^>]*>([^<]*)<", shown._repr_html_())
    words = re.sub(r"-{2,}", " ", str(shown)).split()
    assert html.unescape(" ".join(cells)).split() == words
    assert 'style="text-align:right">1,800<' in shown._repr_html_()


def test_describe_and_plan_begin_alike() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="m")
        model.compile("sgd", "mse")
        return model

    strategy = ks.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = build()
    described = str(strategy.describe(model)).splitlines()
    planned = str(strategy.plan(build, ((8, 4), (8, 2)))).splitlines()
    assert described[0] == "OneDeviceStrategy: 1 replica, model 'm'"
    assert planned[0] == f"{described[0]}, 10 parameters"
    for lines in (described, planned):
        assert lines[1] == lines[3] == "-" * max(map(len, lines[:-1]))
        assert re.fullmatch("variable +shape +dtype +.* +bytes per device", lines[2])
