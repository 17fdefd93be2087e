"""Pages: whole, self-contained, and every name in them escaped."""

import math
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

from outeffhop.lab.report.heat_map import heat_map
from outeffhop.lab.report.html import Section, page, table
from outeffhop.lab.report.outliers_page import number, outlier_page
from outeffhop.outliers.outlier_report import Channel, HeadStats, OutlierReport, TensorStats

EVIL = "<script>alert('1 & 2')</script>"


def tensor(name, value=3.0, non_finite=0):
    return TensorStats(
        name, 1, 1, 8, value, value, value, value, 3.0, 1, 8, non_finite, (), (Channel(5, 1, 2.0),), True
    )


class Balanced(HTMLParser):
    VOID = ("meta", "br", "wbr")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(text):
    parsed = Balanced(text)
    assert not parsed.open
    assert "<script" not in text
    for _, attributes in parsed.seen:
        assert not attributes.keys() & {"src", "href"}  # nothing is fetched
    return parsed


def test_a_page_escapes_what_it_is_given():
    text = page(EVIL, [Section(EVIL, table([EVIL], [[EVIL]]), EVIL)])
    check(text)
    assert text.count("&lt;script&gt;") == 6  # title, h1, h2, remark, th, td


def test_heat_map_colours_every_value_and_names_its_place():
    text = heat_map([EVIL, "b"], ["0", "1"], [[1.0, 10.0], [None, math.nan]], logarithmic=True, corner="layer")
    shown = ElementTree.fromstring(text.replace("<wbr>", ""))
    assert [th.text for th in shown.iter("th")] == ["layer", "0", "1", EVIL, "b"]
    cells = list(shown.iter("td"))
    assert [td.text for td in cells] == ["1", "10", None, "nan"]
    assert [td.get("style") for td in cells[:2]] == [
        "background: #440154; color: #ffffff",
        "background: #fde725; color: #111111",
    ]
    assert [td.get("class") for td in cells] == [None, None, "none", "broken"]
    assert cells[1].get("title") == f"{EVIL}, layer 1: 10.0"


def test_heat_map_of_nothing_and_of_one_value():
    assert not list(ElementTree.fromstring(heat_map([], [], [])).iter("td"))
    (only,) = ElementTree.fromstring(heat_map(["a"], ["0"], [[0.0]], logarithmic=True)).iter("td")
    assert only.get("style").startswith("background: #440154")  # the low end: there is nothing to compare with


def test_a_long_name_may_be_broken_at_its_dots():
    assert ">layers.<wbr>0.<wbr>&lt;b&gt;_<wbr>x</th>" in heat_map(["layers.0.<b>_x"], [], [[]])


def test_the_outlier_page_shows_layers_heads_and_what_is_broken():
    heads = [HeadStats(f"m.layers.{i}.attn", 4, (0.25, 0.5), None, (0.1, 0.9), (0.75, 1.0)) for i in range(2)]
    tensors = [tensor("m.layers.0.fc"), tensor("m.layers.1.fc", math.nan, 4), tensor("m.norm"), tensor(f"m.{EVIL}")]
    report = OutlierReport("Net", "outeffhop", 1, "paper", (), tuple(tensors), tuple(heads))
    text = outlier_page(report, EVIL)
    check(text)
    for word in (
        "m.layers.1.fc (4)",
        "Inf norm: m.layers",
        "Kurtosis",
        "No-op mass",
        "layer 1",
        "prefers-color-scheme",
    ):
        assert word in text
    assert "special" not in text  # not known here
    assert "Inf norm" not in outlier_page(OutlierReport("Net", "x", 1, "paper", (), (tensor("m.norm"),), ()))


def test_numbers_keep_three_digits_and_no_exponent_below_thousands():
    written = {999.4: "999", 999.6: "1000", 1000.4: "1000", 0.01234: "0.0123", 23341.2: "23341", None: "none"}
    assert {value: number(value) for value in written} == written
