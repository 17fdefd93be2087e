"""Data files damaged at random, by the command that reads them: right numbers, or one line that names the file."""

import codecs
import gzip
import io
import lzma
import struct

import numpy as np
import pytest
from fuzzing import bytes_like, cases, command, one_line, outcome, refused
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from outeffhop.lab.data import describe, prepare
from outeffhop.lab.data.files import lines
from outeffhop.lab.data.image_files import read_idx
from outeffhop.lab.data.series import read_csv

RANDOM = np.random.default_rng(0)


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def idx(array):
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def picture(form, mode="RGB"):
    buffer = io.BytesIO()
    Image.fromarray(RANDOM.integers(0, 256, (6, 6, 3), dtype=np.uint8)).convert(mode).save(buffer, form)
    return buffer.getvalue()


PICTURES = RANDOM.integers(0, 256, (20, 4, 4), dtype=np.uint8)
LABELS = np.arange(20) % 3
CSV = b"date,a,b\n" + b"".join(b"2024-01-%02d,%d.5,%d\n" % (i % 28 + 1, i, i * i) for i in range(60))
TEXT = "".join(f"Line {i} of a text — with ümlauts.\n" for i in range(80)).encode()

FILES = {  # file → its content when whole; what else a folder of it needs
    "data.txt": (TEXT, {}),
    "data.txt.gz": (gzip.compress(TEXT), {}),
    "data.txt.xz": (lzma.compress(TEXT), {}),
    "data.csv": (CSV, {}),
    "data.csv.gz": (gzip.compress(CSV), {}),
    "images.npz": (npz(x=PICTURES, y=LABELS), {}),
    "bags.npz": (npz(X=RANDOM.random((8, 3)), bag=np.array([1, 1, 2, 2, 3, 3, 4, 4]), y=np.array([0, 1, 0, 1])), {}),
    "train-images-idx3-ubyte": (idx(PICTURES), {"train-labels-idx1-ubyte": idx(LABELS)}),
    "train-labels-idx1-ubyte.gz": (gzip.compress(idx(LABELS)), {"train-images-idx3-ubyte": idx(PICTURES)}),
    "train-images-idx3-ubyte.xz": (lzma.compress(idx(PICTURES)), {"train-labels-idx1-ubyte": idx(LABELS)}),
    "a/1.png": (picture("PNG"), {"a/2.png": picture("PNG"), "b/1.png": picture("PNG")}),
    "a/1.jpg": (picture("JPEG"), {"b/1.png": picture("PNG")}),
    "a/1.bmp": (picture("BMP", "L"), {"b/1.png": picture("PNG")}),
    "a/1.webp": (picture("WEBP"), {"b/1.png": picture("PNG")}),
}


@pytest.mark.parametrize("name", FILES)
@cases(6)
@given(data=st.data())
def test_a_damaged_data_file(name, tmp_path, data):
    whole, others = FILES[name]
    file = tmp_path / "set" / name
    for at, content in {**{tmp_path / "set" / other: c for other, c in others.items()}, file: whole}.items():
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(content)
    damaged = data.draw(bytes_like(whole), label="damaged")
    file.write_bytes(damaged)
    spec = tmp_path / "set" if others else file
    code, out, err = command("data", spec)
    if code:
        one_line(err, str(file), str(spec), file.name)
    else:
        assert str(spec) in out


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".gz", ".xz", ".npz"))])
def test_a_flipped_byte_in_what_is_packed(name, tmp_path):
    whole, others = FILES[name]
    for other, content in others.items():
        (tmp_path / other).write_bytes(content)
    for at in range(12, len(whole) - 30, 9):
        (tmp_path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        found = outcome(lambda: describe(str(tmp_path if others else tmp_path / name)), str(tmp_path))
        assert refused(found) or found["splits"]


@pytest.mark.parametrize("name", FILES)
def test_whole_files_are_read(name, tmp_path):
    whole, others = FILES[name]
    for other, content in {**others, name: whole}.items():
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(content)
    assert command("data", tmp_path if others else tmp_path / name)[0] == 0


@cases(37)
@given(st.binary(max_size=300) | st.text(alphabet='ab,"\n\r01.9e-_ ', max_size=80).map(str.encode) | bytes_like(CSV))
@example(b'date,a\n2024,"' + b"9" * 200_000)
@example(b"date,a\n2024,1e400\n")
@example(b"date,a\n2024,nan\n")
@example(b"date,a\r2024,1\r2025,2")
@example(b"\xef\xbb\xbfdate,a\n2024,1\n")
def test_a_table_of_any_bytes(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.csv"
    file.write_bytes(content)
    found = outcome(lambda: read_csv(file), str(file))
    if not refused(found):
        dates, names, values = found
        assert values.shape == (len(dates), len(names))
        assert np.isfinite(values).all()


@cases(15)
@given(st.lists(st.floats(-1e9, 1e9) | st.floats(-3, 3), min_size=1, max_size=60))
@example([5.0])
def test_a_series_of_any_numbers(tmp_path_factory, values):
    file = tmp_path_factory.getbasetemp() / "numbers.csv"
    file.write_text("date,a\n" + "".join(f"{i},{value!r}\n" for i, value in enumerate(values)))
    found = outcome(lambda: prepare(str(file), "forecasting", in_len=2, out_len=1), str(file))
    if not refused(found):
        assert all(bool(v.isfinite().all()) for part in (found.train, found.test) for v in part[0].values())


@cases(25)
@given(st.binary(max_size=120), st.sampled_from([b"", b"\0\0\x08", b"\0\0\x08\x01\0\0\0", b"\0\0\x08\xff"]))
@example(b"\xff" * 12, b"\0\0\x08\x03")
@example(b"", b"\0\0\x08\x00")
def test_an_idx_of_any_bytes(tmp_path_factory, content, before):
    file = tmp_path_factory.getbasetemp() / "any.idx"
    file.write_bytes(before + content)
    found = outcome(lambda: read_idx(file), str(file))
    if not refused(found):
        assert found.nbytes == len(before + content) - 4 - 4 * found.ndim


@cases(15)
@given(
    st.sampled_from(["uint8", "int64", "uint64", "float32", "bool", "object", "U3", "datetime64[s]"]),
    st.lists(st.integers(0, 5), max_size=5),
    st.sampled_from(["uint8", "int64", "uint64", "float32", "bool", "object"]),
    st.lists(st.integers(0, 5), max_size=2),
    st.sampled_from([0, 1, -1, 2**40]),
)
@example("uint8", [3, 4, 4], "int64", [3], 2**40)
@example("uint8", [3, 4, 4], "uint64", [3], 2**63)
@example("uint8", [3, 4, 4], "int64", [3], -1)
@example("object", [3], "object", [3], 0)
def test_arrays_of_any_kind(tmp_path_factory, dtype, shape, label_dtype, label_shape, label):
    file = tmp_path_factory.getbasetemp() / "any.npz"
    labels = np.zeros(label_shape, label_dtype)
    if labels.size and label_dtype in ("int64", "uint64"):
        labels.flat[0] = abs(label) if label_dtype == "uint64" else min(label, 2**40)
    np.savez(file, x=np.zeros(shape, dtype), y=labels)
    code, _, err = command("data", file)
    if code:
        one_line(err, str(file))
    else:
        assert dtype == "uint8"
        assert len(shape) in (3, 4)


ENCODINGS = ["utf-16", "utf-32", "latin-1", "cp1252", "utf-16-le", "utf-8-sig", "utf-7", "gb18030"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_text_in_odd_encodings(encoding, packed, tmp_path):
    file = tmp_path / f"text.txt{packed}"
    content = ("Zeile für Zeile\n" * 20).encode(encoding)
    file.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packed](content))
    code, _, err = command("data", file)
    if encoding in ("utf-8-sig", "utf-7"):  # UTF-8 as well
        assert code == 0
    else:
        assert code == 2
        one_line(err, str(file))


@cases(25)
@given(st.binary(max_size=200), st.sampled_from(["", ".gz", ".xz"]), st.booleans())
def test_text_of_any_bytes(tmp_path_factory, content, packed, whole):
    file = tmp_path_factory.getbasetemp() / f"any.txt{packed}"
    packer = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packed]
    file.write_bytes(packer(content) if whole else content)
    found = outcome(lambda: "".join(lines(file)), str(file))
    if not refused(found) and whole:
        assert found.encode() == content.removeprefix(codecs.BOM_UTF8)


ANY_NAME = st.text(max_size=12) | st.sampled_from(
    ["builtin:", "hub:", "hub:///", "\0", "~", "~nobody/x", "~no such home", "/dev/null", "."]
)


@cases(20)
@given(ANY_NAME, st.sampled_from([None, "mlm", "classification", "nothing", ""]))
def test_a_spec_of_any_text(tmp_path, monkeypatch, spec, task):
    monkeypatch.chdir(tmp_path)  # "." and "~" may be large folders
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "book.txt").write_text("Some words.\n" * 200)
    if spec.startswith("hub:") and spec.strip("/") != "hub:":
        return  # would go to the network
    arguments = ["data", spec] + ([] if task is None else ["--task", task])
    code, _, err = command(*arguments)
    if code and not spec.startswith("-"):
        one_line(err, repr(spec)[1:-1], spec.partition(":")[0] or "empty", "task")
