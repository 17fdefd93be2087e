"""Series: splits by rows, scaling by the training rows, windows without leaks."""

import gzip

import numpy as np
import pytest
import torch

from outeffhop.lab.data import prepare
from outeffhop.lab.data.builtin import synthetic_series
from outeffhop.lab.data.series import load_series, read_csv
from outeffhop.lab.data.specs import parse


def write_csv(file, rows, series=2):
    """Column k at row r holds r + 1000·k, so that a value tells where it came from."""
    names = ",".join(f"x{k}" for k in range(series))
    body = "".join(f"t{r}," + ",".join(str(r + 1000 * k) for k in range(series)) + "\n" for r in range(rows))
    file.write_bytes((gzip.compress if file.suffix == ".gz" else bytes)(f"date,{names}\n{body}".encode()))
    return str(file)


def unscaled(data, values):
    how = data.about["preprocessing"]
    return values.double() * torch.tensor(how["std"]) + torch.tensor(how["mean"])


BENCHMARKS = {
    "ETTh1.csv": (17420, (8640, 2880, 2880)),
    "ETTh2.csv": (17420, (8640, 2880, 2880)),
    "ETTm1.csv": (69680, (34560, 11520, 11520)),
    "WTH.csv": (35064, (20160, 7200, 7200)),
    "other.csv": (1000, (700, 100, 200)),
    "other.csv.gz": (1003, (702, 101, 200)),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_splits_and_windows(tmp_path, name):
    rows, splits = BENCHMARKS[name]
    data = prepare(write_csv(tmp_path / name, rows), "forecasting", in_len=48, out_len=24)
    train, validation, test = splits
    # every row after the first in_len of train, and every row of the others, is forecast
    assert (len(data.train), len(data.validation), len(data.test)) == (train - 71, validation - 23, test - 23)
    starts = {"train": 0, "validation": train - 48, "test": train + validation - 48}
    for split, start in starts.items():
        windows = getattr(data, split)
        for index in (0, len(windows) - 1):
            sample = windows[index]
            assert sample["past_values"].shape == (48, 2)
            assert sample["future_values"].shape == (24, 2)
            both = unscaled(data, torch.cat([sample["past_values"], sample["future_values"]]))
            expected = torch.arange(72, dtype=torch.float64) + start + index
            torch.testing.assert_close(both[:, 0], expected, rtol=1e-5, atol=0.02)
            torch.testing.assert_close(both[:, 1], expected + 1000, rtol=1e-5, atol=0.02)
        assert start + len(windows) - 1 + 72 == sum(splits[: 1 + ["train", "validation", "test"].index(split)])
    assert data.changes == {"num_series": 2, "in_len": 48, "out_len": 24}


def test_scaling_knows_the_training_rows_alone(tmp_path):
    file = tmp_path / "a.csv"
    write_csv(file, 1000)
    before = prepare(str(file), "forecasting")
    lines = file.read_text().splitlines()
    lines[701:] = [f"t,{9e6},{-9e6}" for _ in lines[701:]]  # all but the 700 training rows
    file.write_text("\n".join(lines))
    after = prepare(str(file), "forecasting")
    assert after.about["preprocessing"] == before.about["preprocessing"]
    for index in (0, len(before.train) - 1):
        assert after.train[index]["future_values"].equal(before.train[index]["future_values"])
    rows = torch.arange(700.0)
    assert before.about["preprocessing"]["mean"] == pytest.approx([rows.mean().item(), rows.mean().item() + 1000])
    assert before.about["preprocessing"]["std"][0] == pytest.approx(rows.std(correction=0).item())


def test_a_series_that_stands_still_stays_finite(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("date,x,y\n" + "".join(f"t,{i % 7},5\n" for i in range(500)))
    sample = prepare(str(file), "forecasting").test[0]
    assert sample["past_values"].isfinite().all()
    assert (sample["past_values"][:, 1] == 0).all()


def test_rounding_is_no_deviation_of_a_series_that_stands_still(tmp_path):
    file = tmp_path / "a.csv"  # the mean of seven hundred 0.1 is not 0.1: their deviation is 4e-16
    file.write_text("date,x\n" + "".join(f"t,{0.1 if i < 700 else 0.2}\n" for i in range(1000)))
    data = prepare(str(file), "forecasting")
    assert data.about["preprocessing"]["std"] == [1.0]
    assert data.test[100]["future_values"].numpy() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("2020-01-01 00:00,0.5,7\n2020-01-01 01:00,0.6,8\n", "has no header: its first line is .*0.5.*add the names"),
        ("0,1,2\n1,5,6\n", "has no header"),
        ("date;x;y\nt0;1;2\n", "with commas; its first line is .'date;x;y'"),
        ("", "needs a header"),
        ("date,x\n", "has a header but no rows"),
        ("date\n1\n", "needs at least one series beside its dates"),
        ("date,x,y\nt0,1,2\nt1,nan,2\n", r"a\.csv, row 3, column 'x': 'nan' is not a finite number"),
        ("date,x,y\nt0,1,2\n\nt1,1,\n", r"a\.csv, row 4, column 'y': '' is not a finite number"),
        ("x,y\n1,2\nnan,3\n", r"a\.csv, row 3, column 'x': 'nan' is not a finite number"),
        ("date,x,y\nt0,1,inf\n", "column 'y': 'inf'"),
        ("date,x,y\nt0,1\n", r"a\.csv, row 2: 2 values, but the header has 3"),
    ],
)
def test_wrong_files_are_named(tmp_path, content, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_csv(tmp_path / "a.csv")


@pytest.mark.parametrize("header", ["date,0,1", ",0,1", "date,x,y"])
def test_whole_numbers_may_be_names(tmp_path, header):
    (tmp_path / "a.csv").write_text(f"{header}\nt0,1,2\n")
    assert read_csv(tmp_path / "a.csv")[1] == header.split(",")[1:]


@pytest.mark.parametrize(
    ("content", "dates", "names"),
    [
        ("load,wind\n3.5,1\n2.5,2\n", ["0", "1"], ["load", "wind"]),
        ("load,wind\n2.5,1\n3.7,2\n", ["0", "1"], ["load", "wind"]),  # it increases, but by no fixed step
        ("load\n3.5\n2.5\n", ["0", "1"], ["load"]),
        ("n,wind\n7,1\n8,2\n", ["7", "8"], ["wind"]),  # the numbers of the rows
        ("time,wind\n0.5,1\n0.7,2\n", ["0.5", "0.7"], ["wind"]),
        ("when,wind\nMonday,1\nTuesday,2\n", ["Monday", "Tuesday"], ["wind"]),
    ],
)
def test_a_first_column_without_dates_is_a_series(tmp_path, content, dates, names):
    (tmp_path / "a.csv").write_text(content)
    found, series, values = read_csv(tmp_path / "a.csv")
    assert (found, series) == (dates, names)
    rows = [line.split(",")[-len(names) :] for line in content.splitlines()[1:]]
    assert values.tolist() == [[float(text) for text in row] for row in rows]


def test_a_file_of_windows(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbf"date, local","x"\r\n"1 May, noon","1.5"\r\n')
    dates, names, values = read_csv(file)
    assert (dates, names, values.tolist()) == (["1 May, noon"], ["x"], [[1.5]])


@pytest.mark.parametrize(
    ("dates", "message"),
    [
        ([5.0, 3.5, 4.0], "numbers in the first column do not increase, so they are not dates"),
        (["2020-01-03", "2020-01-02", "2020-01-01"], "goes back in time, from 2020-01-03 to 2020-01-01: sort"),
        (["2020-01-02T00:00Z", "2020-01-01 12:00"], "goes back in time"),
    ],
)
def test_what_is_not_in_order_of_time_is_refused(tmp_path, dates, message):
    (tmp_path / "a.csv").write_text("date,x\n" + "".join(f"{date},{i}\n" for i, date in enumerate(dates)))
    with pytest.raises(ValueError, match=message):
        load_series(parse(str(tmp_path)))


@pytest.mark.parametrize(
    "dates",
    [
        [0, 1, 2],
        [1.5e9, 1.5e9, 1.6e9],
        ["2020-10-25 02:00", "2020-10-25 02:30", "2020-10-25 02:00"],  # the clocks go back
        ["02.01.2020", "01.02.2020", "01.03.2020"],
    ],
)
def test_dates_of_any_kind_are_taken(tmp_path, dates):
    (tmp_path / "a.csv").write_text("date,x\n" + "".join(f"{date},{i}\n" for i, date in enumerate(dates)))
    assert load_series(parse(str(tmp_path))).dates == [str(date) for date in dates]


def test_too_few_rows(tmp_path):
    with pytest.raises(ValueError, match=r"has 140 rows in train, too few for one window of in_len=130 and out_len=24"):
        prepare(write_csv(tmp_path / "a.csv", 200), "forecasting", in_len=130)
    with pytest.raises(ValueError, match="has 500 rows, but the usual splits of ETTH need 14400"):
        prepare(write_csv(tmp_path / "ETTh1.csv", 500), "forecasting")


def test_several_csv_files(tmp_path):
    write_csv(tmp_path / "a.csv", 10)
    write_csv(tmp_path / "b.csv", 10)
    with pytest.raises(ValueError, match="contains 2 csv files: give one"):
        load_series(parse(str(tmp_path)))


@pytest.mark.parametrize("name", ["in_len", "out_len"])
@pytest.mark.parametrize("value", [0, 48.0, "48"])
def test_lengths_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: must be an integer of at least 1"):
        prepare("builtin:series", "forecasting", **{name: value})


def test_the_synthetic_series_is_what_its_formula_says():
    dates, values = synthetic_series()
    assert values.shape == (4000, 7)
    assert (dates[0], dates[25]) == ("2020-01-01T00", "2020-01-02T01")
    assert np.array_equal(values, synthetic_series()[1])
    assert not np.array_equal(values, synthetic_series(seed=1)[1])
    spectrum = np.abs(np.fft.rfft(values[: 168 * 23] - values[: 168 * 23].mean(0), axis=0)) ** 2
    hours = 168 * 23 / np.arange(1, len(spectrum))
    strongest = {round(float(hours[i])) for i in spectrum[1:].argmax(0)}
    assert strongest <= {24, 168}
    noise = values[24 * 7 :] - values[: -24 * 7]  # both waves cancel: what is left is noise and trend
    assert 0.8 < np.corrcoef(noise[1:, 0], noise[:-1, 0])[0, 1] < 0.95
    coupled = np.corrcoef(noise.T) - np.eye(7)
    assert np.abs(coupled).max() > 0.1


def test_a_repeat_of_the_day_before_beats_the_mean_on_the_synthetic_series():
    data = prepare("builtin:series", "forecasting", in_len=48, out_len=24)
    samples = [data.test[i] for i in range(0, len(data.test), 10)]
    past = torch.stack([s["past_values"] for s in samples])
    future = torch.stack([s["future_values"] for s in samples])
    assert (past[:, -24:] - future).square().mean() < 0.7 * future.square().mean()
