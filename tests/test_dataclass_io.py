"""Dataclasses from JSON: every type that is used, errors that name the field, and reports as files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from outeffhop._dataclass_io import JsonReport, from_json_value


@dataclass(frozen=True)
class Inner:
    number: float = 0.0


@dataclass(frozen=True)
class Outer:
    count: int
    kind: Literal["a", "b"] = "a"
    pair: tuple[float, float] | None = None
    many: tuple[int, ...] = ()
    inner: Inner = Inner()
    each: Sequence[Inner] = ()
    by_name: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    mixed: dict[str, int | float | bool | str] = field(default_factory=dict)
    name: str | tuple[str, ...] = ""
    flag: bool = False
    anything: Any = None


def test_every_type_comes_back():
    given = {
        "count": 3,
        "kind": "b",
        "pair": [1, "5e-1"],
        "many": [1, 2],
        "inner": {"number": "inf"},
        "each": [{}, {"number": 2}],
        "by_name": {"x": [1, "-inf"]},
        "mixed": {"i": 1, "f": 1.5, "e": "1e-1", "b": True, "s": "text"},
        "name": ["x", "y"],
        "flag": True,
        "anything": [{"any": None}],
    }
    found = from_json_value(Outer, given)
    assert found == Outer(
        count=3,
        kind="b",
        pair=(1.0, 0.5),
        many=(1, 2),
        inner=Inner(math.inf),
        each=(Inner(), Inner(2.0)),
        by_name={"x": (1.0, -math.inf)},
        mixed={"i": 1, "f": 1.5, "e": 0.1, "b": True, "s": "text"},
        name=("x", "y"),
        flag=True,
        anything=[{"any": None}],
    )
    assert [type(v) for v in found.mixed.values()] == [int, float, float, bool, str]
    assert from_json_value(Outer, {"count": 3, "pair": None}) == Outer(3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": True}, "count=True: must be an integer"),
        ({"count": 1.0}, r"count=1\.0: must be an integer"),
        ({"count": None}, "count=None: must be an integer"),
        ({"kind": "c"}, "kind='c': must be 'a' or 'b'"),
        ({"pair": [1]}, r"pair=\[1\]: must be a list of 2 numbers"),
        ({"pair": [1, "x"]}, r"pair\[1\]='x': must be a number"),
        ({"many": 3}, "many=3: must be a list"),
        ({"inner": 3}, "inner=3: must be a mapping"),
        ({"inner": {"number": True}}, r"inner\.number=True: must be a number"),
        ({"inner": {"nummber": 1}}, r"inner\.nummber is unknown; did you mean 'number'\?"),
        ({"each": [{}, {"number": None}]}, r"each\[1\]\.number=None: must be a number"),
        ({"by_name": {"x": 1}}, r"by_name\.x=1: must be a list"),
        ({"by_name": {"x\n": 1}}, r"by_name\.'x\\n'=1: must be a list"),
        ({"by_name": {1: []}}, r"by_name=\{1: \[\]\}: must be a mapping"),
        ({"mixed": {"x": [1]}}, r"mixed\.x=\[1\]: must be an integer or a number or true or false or a string"),
        ({"name": 1}, "name=1: must be a string or a list"),
        ({"flag": 1}, "flag=1: must be true or false"),
        ({"x\n": 1}, r"'x\\n' is unknown"),
    ],
)
def test_an_error_names_the_field_and_its_value(change, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        from_json_value(Outer, {"count": 3, **change})


def test_what_is_missing_or_not_a_mapping():
    with pytest.raises(ValueError, match=r"^count is missing"):
        from_json_value(Outer, {})
    with pytest.raises(ValueError, match=r"^\[1\]: must be a mapping"):
        from_json_value(Outer, [1])


def test_a_huge_value_is_shown_in_part():
    with pytest.raises(ValueError, match="count=") as caught:
        from_json_value(Outer, {"count": [["x" * 1000] * 1000] * 1000})
    assert len(str(caught.value)) < 500


@dataclass(frozen=True)
class Report(JsonReport):
    FORMAT = "test.report.1"
    DERIVED = ("twice",)

    value: float

    @property
    def twice(self):
        return 2 * self.value


@dataclass(frozen=True)
class Plain(JsonReport):
    value: float


@pytest.mark.parametrize("kind", [Report, Plain])
def test_a_report_is_saved_and_loaded(kind, tmp_path):
    kind(1.5).save(tmp_path / "new" / "report.json")
    assert kind.load(tmp_path / "new" / "report.json") == kind(1.5)
    assert kind.from_json(kind(-math.inf).to_json()) == kind(-math.inf)
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        kind.load(tmp_path / "none.json")


def test_the_format_and_what_is_derived_are_written():
    assert Report(1.5).to_json() == '{\n "format": "test.report.1",\n "twice": 3.0,\n "value": 1.5\n}\n'
    assert Plain(1.5).to_json() == '{\n "value": 1.5\n}\n'


def test_another_format_is_refused(tmp_path):
    for text, said in (
        ('{"format": "test.report.2", "value": 1}', "format='test.report.2': must be 'test.report.1'"),
        ('{"value": 1}', "format=None: must be 'test.report.1'"),
        ("[]", r"\[\]: must be a mapping"),
        ("{", "not JSON"),
    ):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ValueError, match=rf"report\.json: not a valid Report: {said}"):
            Report.load(tmp_path / "report.json")
