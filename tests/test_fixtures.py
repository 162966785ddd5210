"""Saved cases: bit for bit there and back, and one clear sentence for whatever else is found in a file."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.fixtures import FixtureError, Record, decimals, dumps, loads, read, write
from attncheck.fixtures import format as module
from attncheck.fixtures.arrays import INLINE_ELEMENTS, hex_float, parse_hex
from attncheck.oracle.case import Case, Presentation
from attncheck.oracle.definition import define
from attncheck.oracle.formats import FORMATS
from attncheck.oracle.result import OUTPUTS

SEEN = {"candidate": "my_kernel.py:attention", "property": "dQ", "sentence": "dQ violated: ±2.1e-7", "seed": 0}


def answers(case: Case) -> dict[str, np.ndarray | None]:
    answer = define(case)
    return {name: None if getattr(answer, name) is None else decimals(getattr(answer, name)) for name in OUTPUTS}


def small() -> Record:
    """A case with every field in use, and a file short enough to cut at every byte."""
    one = np.array([[[[1.5]]]], dtype=np.float16)
    case = Case(
        one,
        one,
        one,
        do=one,
        dlse=np.array([[[0.25]]], dtype=np.float32),
        scale=0.5,
        softcap=2.0,
        causal="bottom-right",
        window=(None, 3),
        alibi_slopes=np.array([-0.125], dtype=np.float32),
        q_lengths=(1,),
        k_lengths=(1,),
        mask=np.array([True]),
        bias=np.array([[-np.inf]], dtype=np.float16),
        sinks=np.array([-1.5], dtype=np.float32),
        dropout=0.25,
        keep=np.array([True]),
    )
    shown = Presentation("mask", (1, 2), (3,), ("sliced", "transposed", "expanded", "contiguous"), "nan", 2, True)
    return Record(case, shown, answers(case), SEEN)


def replace_case(record: Record, **changes: Any) -> Record:
    case = replace(record.case, **changes)
    return Record(case, record.presentation, answers(case), record.seen)


def large(dtype: str = "float32") -> Record:
    """A case whose arrays go to the file beside the document."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 1, 8, 600)).astype(FORMATS[dtype].dtype) for _ in range(3))
    return Record(Case(q, k, v, mask=rng.random((8, 8)) < 0.7), seen=SEEN)


def same(a: Record, b: Record) -> bool:
    return a.case == b.case and a.presentation == b.presentation and dumps(a) == dumps(b)


# -- there and back --------------------------------------------------------------------------


def bit_patterns(dtype: str) -> np.ndarray:
    """Every kind of finite number a format has, the ends of each kind among them."""
    form = FORMATS[dtype]
    width = form.dtype.itemsize * 8
    edges = [0.0, form.smallest, form.tiny - form.smallest, form.tiny, 1.0, 1 + 2 * form.unit, form.max, 1 / 3]
    array = np.array(edges + [-x for x in edges], dtype=np.float64).astype(form.dtype)
    bits = np.random.default_rng(1).integers(0, 2**16, (64, 4), dtype=np.uint16).view(f"u{width // 8}").ravel()
    drawn = bits.view(form.dtype)
    with np.errstate(invalid="ignore"):  # of the NaNs, which are left out
        return np.concatenate([array, drawn[np.isfinite(drawn.astype(np.float64))]])


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_float_comes_back_bit_for_bit(dtype: str) -> None:
    values = bit_patterns(dtype)
    assert np.signbit(values.astype(np.float64))[values.astype(np.float64) == 0].any()  # -0.0 is among them
    q = values.reshape(1, 1, -1, 1)
    record = Record(Case(q, q, q, do=q, bias=np.where(values == values[1], -np.inf, values).astype(q.dtype)))
    text, arrays = dumps(record)
    assert arrays is None
    back = loads(text)
    for name in ("q", "k", "v", "do", "bias"):
        there, here = getattr(back.case, name), getattr(record.case, name)
        assert there.dtype == here.dtype and there.tobytes() == here.tobytes()
    assert same(back, record)


@pytest.mark.parametrize("dtype", FORMATS)
def test_large_arrays_lie_beside_and_come_back(dtype: str, tmp_path: Path) -> None:
    record = large(dtype)
    path = write(record, tmp_path)
    (beside,) = [p for p in tmp_path.iterdir() if p != path]
    assert beside.name == f"{hashlib.sha256(beside.read_bytes()).hexdigest()[:16]}.safetensors"
    assert path.stat().st_size < 2000
    assert same(read(path), record)
    text, arrays = dumps(record)
    assert same(loads(text, arrays), record)
    assert write(record, tmp_path) == path and len(list(tmp_path.iterdir())) == 2


def test_large_answers_and_masks_lie_beside_too(tmp_path: Path) -> None:
    q = np.zeros((1, 1, INLINE_ELEMENTS + 1, 1), dtype=np.float32)
    k = np.zeros((1, 1, 1, 1), dtype=np.float32)
    case = Case(q, k, k, mask=(np.arange(INLINE_ELEMENTS + 1) % 3 == 0)[:, None])
    o = np.full(q.shape, "0.1234567890123456789012345678901234567", dtype=object)
    record = Record(case, expected={"o": o, "lse": np.full(q.shape[:3], "-inf", dtype=object)})
    back = read(write(record, tmp_path))
    assert same(back, record)
    assert back.expected["o"] is not None and back.expected["o"].tolist() == o.tolist()


@pytest.mark.parametrize("shape", [(0, 1, 2, 3), (1, 2, 0, 3), (1, 1, 2, 2)])
@pytest.mark.parametrize("keys", [0, 3])
def test_empty_axes_come_back(shape: tuple[int, ...], keys: int) -> None:
    q = np.ones(shape, dtype=np.float32)
    k = np.ones((shape[0], 1, keys, shape[3]), dtype=np.float32)
    case = Case(q, k, k, mask=np.ones((shape[2], keys), dtype=bool))
    assert same(loads(dumps(Record(case))[0]), Record(case))


def test_a_record_says_what_it_holds() -> None:
    record = small()
    text, _ = dumps(record)
    document = json.loads(text)
    assert list(document) == ["format", "version", "digest", "arrays", "case", "presentation", "expected", "seen"]
    assert (document["format"], document["version"]) == ("attncheck-case", 1)
    assert document["case"]["q"] == {"dtype": "float16", "shape": [1, 1, 1, 1], "data": [[[["0x1.8p+0"]]]]}
    assert document["case"]["mask"]["data"] == "1"
    assert document["case"]["bias"]["data"] == [["-inf"]]
    assert document["expected"]["lse"] == {"shape": [1, 1, 1], "data": [[["-1.5"]]]}  # the sink alone
    row = dumps(replace_case(small(), sinks=None))[0]
    assert json.loads(row)["expected"]["lse"]["data"] == [[["-inf"]]]
    assert "±2.1e-7" in text  # readable as it is


def test_a_changed_number_is_one_changed_line() -> None:
    q = np.arange(24, dtype=np.float32).reshape(1, 1, 4, 6) + 1 / 3
    changed = q.copy()
    changed[0, 0, 2, 1] += 1
    texts = [dumps(Record(Case(x, q, q)))[0].splitlines() for x in (q, changed)]
    differing = [a for a, b in zip(*texts, strict=True) if a != b]
    assert len(differing) == 2  # the row, and the digest
    assert len([line for line in texts[0] if "digest" in line]) == 1


def test_every_field_of_a_case_is_saved() -> None:
    assert set(json.loads(dumps(small())[0])["case"]) == {f.name for f in fields(Case)}
    arrays = {f.name for f in fields(Case) if "ndarray" in str(f.type)}
    assert arrays == module._ARRAYS, "a new array field needs a place in the format, and a new version"
    others = {f.name for f in (*fields(Case), *fields(Presentation))} - arrays
    assert others == module._FLOATS | module._TUPLES | set(module._KINDS) | {"causal", "route", "poison"}


def test_hex_floats_are_exact_or_refused() -> None:
    for x in (0.0, -0.0, 5e-324, -1.5, 2.0**-1022, 1.7976931348623157e308, 0.1):
        for text in (hex_float(x), x.hex()):
            assert parse_hex(text, "x").hex() == x.hex()
    for text in (
        "1.5",
        "0x1p+9999",
        "0x1.00000000000001p+0",
        "0x1.0000000000001p-1060",
        "nan",
        "inf",
        "0X1P+0",
        1.5,
        " 0x1p+0",
    ):
        with pytest.raises(FixtureError, match="x is "):
            parse_hex(text, "x")


# -- what was seen ---------------------------------------------------------------------------


def test_what_was_seen_comes_back_with_infinities_as_words() -> None:
    seen = {"property": "dK", "worst": {"ratio": float("inf"), "got": "nan", "allowed": float("nan"), "index": (0, 1)}}
    back = loads(dumps(replace(small(), seen=seen))[0])
    assert back.seen == {
        "property": "dK",
        "worst": {"ratio": "inf", "got": "nan", "allowed": "nan", "index": [0, 1]},
    }
    assert float(back.seen["worst"]["ratio"]) == float("inf")


@pytest.mark.parametrize("seen", [{"x": object()}, {"x": {1: 2}}, {"x": b"bytes"}, {"x": np.float32(1)}])
def test_what_is_not_plain_data_is_refused_and_nothing_is_written(seen: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FixtureError, match="seen cannot be written as JSON"):
        write(replace(small(), seen=seen), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_text_that_utf8_cannot_hold_still_comes_back(tmp_path: Path) -> None:
    record = replace(small(), seen={"sentence": "half a pair \ud800, and \x00"})
    assert read(write(record, tmp_path)).seen == record.seen


# -- writing ---------------------------------------------------------------------------------


def test_names_are_the_property_and_a_digest(tmp_path: Path) -> None:
    record = small()
    first = write(record, tmp_path / "deep" / "er")
    assert first.name.startswith("dq-") and len(first.stem) == len("dq-") + 8
    assert write(record, first.parent) == first  # the same failure, the same file
    others = [
        replace(record, seen={**SEEN, "candidate": "another"}),
        replace(record, presentation=Presentation()),
        replace(record, seen={**SEEN, "property": "empty rows / ../x"}),
        replace(record, seen={}),
    ]
    paths = [write(other, first.parent) for other in others]
    assert len({first, *paths}) == 5
    assert paths[2].name.startswith("empty-rows-x-") and paths[3].name.startswith("case-")
    assert all(path.parent == first.parent for path in paths)
    assert write(record, tmp_path, "by-name") == tmp_path / "by-name.json"


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(small(), tmp_path, "case")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(FixtureError, match=r"case\.json cannot be written: No space left on device"):
                write(replace(small(), seen={}), tmp_path, "case")
        assert [p.name for p in tmp_path.iterdir()] == ["case.json"] and path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FixtureError, match=r"cannot be written: (File exists|Not a directory)"):
        write(small(), tmp_path / "file" / "folder")
    with pytest.raises(FixtureError, match="cannot be written"):
        write(small(), tmp_path / "file")


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"p": None}, "expected has the unknown output 'p'; outputs are o, lse"),
        (
            {"o": np.array([["0"]], dtype=object)},
            r"expected o has shape \(1, 1\); for this case it must be \(1, 1, 1, 1\)",
        ),
        ({"dq": np.array([[[["x"]]]], dtype=object)}, r"expected dq holds 'x' at \[0, 0, 0, 0\]; it must be a decimal"),
        ({"o": np.array([[[["-inf"]]]], dtype=object)}, "expected o holds '-inf'"),
        ({"o": np.array([[[[0.5]]]], dtype=object)}, "expected o holds 0.5"),
    ],
)
def test_answers_that_do_not_fit_the_case_are_refused(expected: Any, message: str) -> None:
    with pytest.raises(FixtureError, match=message):
        replace(small(), expected=expected)
    plain = Case(small().case.q, small().case.k, small().case.v)
    with pytest.raises(FixtureError, match="expected holds dv, which this case does not ask for"):
        Record(plain, expected={"dv": small().expected["dv"]})


# -- hostile documents -----------------------------------------------------------------------


def changed(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return change


def without(*path: str) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        del document[path[-1]]

    return change


NAN = float("nan")
Q = ("case", "q")
BAD: dict[str, tuple[Callable[[Any], None], str]] = {
    "another format": (changed("format", to="onnx"), "format is 'onnx'; a saved case says 'attncheck-case'"),
    "no format": (without("format"), "format is null"),
    "newer": (changed("version", to=2), "version is 2, but this attncheck reads 1; upgrade attncheck"),
    "older": (changed("version", to=0), "version is 0, which is no longer read; save the case again"),
    "version of another type": (changed("version", to="1"), "version is '1'; it must be an integer"),
    "version true": (changed("version", to=True), "version is True; it must be an integer"),
    "unknown field": (changed("extra", to=1), "the document has the unknown field 'extra'"),
    "missing field": (without("seen"), "the document lacks the field 'seen'"),
    "unknown case field": (changed("case", "rotary", to=0.5), "case has the unknown field 'rotary'"),
    "missing case field": (without("case", "bias"), "case lacks the field 'bias'"),
    "case of another type": (changed("case", to=[1]), r"case is \[1\]; it must be an object with the fields q, k, v"),
    "missing q": (changed("case", "q", to=None), "case.q is null; it must be an array"),
    "array of another type": (
        changed("case", "q", to=1.0),
        "case.q is 1.0; it must be an object with the fields dtype",
    ),
    "another dtype": (changed(*Q, "dtype", to="int8"), "case.q.dtype is 'int8'; accepted are float64"),
    "dtype of another type": (changed(*Q, "dtype", to=[]), r"case.q.dtype is \[\]; accepted are"),
    "dtype of another array": (changed(*Q, "dtype", to="float32"), "case: k is float16 but q is float32"),
    "q bool": (changed("case", "q", to={"dtype": "bool", "shape": [1], "data": "1"}), "q has shape"),
    "shape disagrees": (
        changed(*Q, "shape", to=[1, 1, 2, 1]),
        r"case.q.data\[0\]\[0\] has 1 entries, but .* must have 2",
    ),
    "shape with fewer axes": (
        changed(*Q, "shape", to=[1, 1, 1]),
        r"case.q.data\[0\]\[0\]\[0\] is \['0x1.8p\+0'\]; it must be a hex",
    ),
    "shape with more axes": (
        changed(*Q, "shape", to=[1] * 5),
        "case.q.shape is .*; it must be a list of one to four sizes",
    ),
    "shape empty": (changed(*Q, "shape", to=[]), r"case.q.shape is \[\]"),
    "shape negative": (
        changed(*Q, "shape", to=[1, 1, -1, 1]),
        "case.q.shape holds -1; sizes must be integers from 0 to",
    ),
    "shape float": (changed(*Q, "shape", to=[1, 1, 1.0, 1]), "case.q.shape holds 1.0"),
    "shape true": (changed(*Q, "shape", to=[1, 1, True, 1]), "case.q.shape holds True"),
    "shape huge": (changed(*Q, "shape", to=[1, 1, 10**30, 1]), "case.q.shape holds 1000000000000000000000000000000;"),
    "shape huge beside 0": (
        changed("case", "q", to={"dtype": "float16", "shape": [0, 2**20, 2**20, 1], "data": []}),
        "an array may have at most 2147483648 elements",
    ),
    "shape NaN": (changed(*Q, "shape", to=[1, 1, NAN, 1]), "the document holds NaN, which is not a number of JSON"),
    "Infinity": (changed("seen", "x", to=-float("inf")), "the document holds -Infinity"),
    "decimal float": (
        changed(*Q, "data", 0, 0, 0, 0, to="1.5"),
        r"case.q.data\[0\]\[0\]\[0\]\[0\] is '1.5'; it must be a hex",
    ),
    "number": (changed(*Q, "data", 0, 0, 0, 0, to=1.5), "is 1.5; it must be a hexadecimal float such as"),
    "not representable": (
        changed(*Q, "data", 0, 0, 0, 0, to="0x1.0001p+0"),
        "is '0x1.0001p.0', which float16 cannot represent",
    ),
    "too large": (changed(*Q, "data", 0, 0, 0, 0, to="0x1p+16"), r"is '0x1p\+16', which float16 cannot represent"),
    "beyond float64": (changed(*Q, "data", 0, 0, 0, 0, to="0x1p+2000"), "which is beyond float64"),
    "infinite q": (
        changed(*Q, "data", 0, 0, 0, 0, to="-inf"),
        r"case: q holds -inf at \[0, 0, 0, 0\]; it must be finite",
    ),
    "NaN word": (changed("case", "bias", "data", 0, 0, to="nan"), "case.bias.data.* is 'nan'"),
    "a bool of 2": (changed("case", "mask", "data", to="2"), r"case.mask.data\[0\] is '2'; it must be 0 or 1"),
    "a bool list": (
        changed("case", "mask", "data", to=[True]),
        r"case.mask.data is \[True\]; it must be a string of 0 and 1",
    ),
    "mask too short": (
        changed("case", "mask", "data", to=""),
        "case.mask.data has 0 entries, but by its shape it must have 1",
    ),
    "mask of floats": (changed("case", "mask", "dtype", to="float16"), "case.mask.data is '1'; it must be a list"),
    "another number": (
        changed(*Q, "data", 0, 0, 0, 0, to="0x1p+0"),
        "digest is '.*', but the case's is .*: it was changed",
    ),
    "another digest": (changed("digest", to="0" * 64), "digest is '0000"),
    "digest of another type": (changed("digest", to=None), "digest is null"),
    "scale decimal": (changed("case", "scale", to=0.5), "case.scale is 0.5; it must be a hexadecimal float"),
    "scale too wide": (changed("case", "scale", to="0x1.00000001p+0"), "case: scale is 1.0000000002328306; .* float32"),
    "causal of another word": (
        changed("case", "causal", to="left"),
        "case: causal is 'left'; accepted are None, 'top-left'",
    ),
    "causal of another type": (changed("case", "causal", to=True), "case.causal is True; it must be null or a string"),
    "window of another type": (
        changed("case", "window", to={"left": 1}),
        "case.window is .*; it must be null or a list",
    ),
    "window negative": (changed("case", "window", to=[-1, 1]), r"case: window is \(-1, 1\)"),
    "lengths beyond": (
        changed("case", "k_lengths", to=[2]),
        "case: k_lengths holds 2; lengths must be integers from 0 to 1",
    ),
    "lengths too many": (changed("case", "q_lengths", to=[1] * 10**5), "case: q_lengths is .* batch entries"),
    "route": (
        changed("presentation", "route", to="fast"),
        "presentation: route is 'fast'; accepted are 'flags', 'mask'",
    ),
    "route null": (changed("presentation", "route", to=None), "presentation: route is None"),
    "blocks of 0": (changed("presentation", "q_blocks", to=[0]), r"presentation: q_blocks is \(0,\)"),
    "presentation lacking": (without("presentation", "route"), "presentation lacks the field 'route'"),
    "expected lacking": (without("expected", "lse"), "expected lacks the field 'lse'"),
    "expected unknown": (changed("expected", "p", to=None), "expected has the unknown field 'p'"),
    "expected number": (
        changed("expected", "o", "data", 0, 0, 0, 0, to=0.0),
        "expected.o.data.* is 0.0; it must be a decimal",
    ),
    "expected endless": (changed("expected", "o", "data", 0, 0, 0, 0, to="1" * 2000), "it must be a decimal number"),
    "expected shape": (changed("expected", "o", to={"shape": [1], "data": ["1"]}), r"expected o has shape \(1,\)"),
    "expected too early": (changed("expected", "o", "data", 0, 0, 0, 0, to="-inf"), "expected o holds '-inf'"),
    "seen list": (changed("seen", to=[]), r"seen is \[\]; it must be an object"),
    "arrays word": (changed("arrays", to="x"), "arrays is 'x'; it must be an object with the fields file, sha256"),
    "tensor that is not there": (
        changed("case", "q", to={"dtype": "float16", "shape": [1, 1, 1, 1], "tensor": "q"}),
        "case.q.tensor is 'q'; the arrays' file holds nothing",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_document_gives_one_sentence(name: str, tmp_path: Path) -> None:
    change, message = BAD[name]
    document = json.loads(dumps(small())[0])
    change(document)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FixtureError, match=message) as caught:
        read(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}: ") and "\n" not in sentence and len(sentence) < 800


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the document is not complete JSON"),
        (b"null", "format is null"),
        (b"[]", "format is null"),
        (b"\xff\xfe{}", "the document is not UTF-8 text: invalid start byte at byte 0"),
        (b'{"format": "\xe9"}', "not UTF-8 text"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"a":' * 10**5, "nested too deeply"),
        (b'{"format": "attncheck-case", "format": "x"}', "the field 'format' is given twice"),
        (b'{"version": ' + b"9" * 10**5 + b"}", "the document is not complete JSON"),
        (pickle.dumps({"format": "attncheck-case"}), "not UTF-8 text"),
    ],
)
def test_what_is_not_a_document_gives_one_sentence(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(FixtureError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


@pytest.mark.parametrize("depth", range(850, 1000, 10))
def test_nesting_just_below_what_the_parser_takes_is_refused_too(depth: int) -> None:
    document = json.loads(dumps(small())[0])
    for where in (changed("case", "q", to=0), changed("seen", to=0), changed("version", to=0), changed("digest", to=0)):
        nested = copy.deepcopy(document)
        where(nested)
        text = json.dumps(nested).replace(": 0,", ": " + "[" * depth + "]" * depth + ",", 1)
        with pytest.raises(FixtureError):
            loads(text)


def test_files_that_are_no_files_give_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FixtureError, match="is a folder; it must be a file"):
        read(tmp_path)
    with pytest.raises(FixtureError, match=r"none\.json cannot be read: No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(FixtureError, match="cannot be read"):
        read("a\0b")
    with pytest.raises(FixtureError, match="is not a regular file"):
        read("/dev/zero")


def test_a_bomb_is_refused_by_its_size_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.json"
    with open(path, "wb") as file:
        file.truncate(100 * 10**6)

    def must_not_open(*_: object, **__: object) -> None:
        raise AssertionError("the bomb was opened")

    monkeypatch.setattr("builtins.open", must_not_open)
    with pytest.raises(FixtureError, match=r"bomb\.json has 100000000 bytes; at most 16777216 are read"):
        read(path)
    with pytest.raises(FixtureError, match="at most 16777216 are read"):
        loads(b" " * (2**24 + 1))


def test_a_case_too_large_to_answer_is_refused() -> None:
    q = np.zeros((1, 1, 2**16, 1), dtype=np.float16)
    text, arrays = dumps(Record(Case(q, q, q)))
    with pytest.raises(FixtureError, match=r"case has 4294967296 \(row, key\) pairs; at most 1073741824 are read"):
        loads(text, arrays)


# -- the file beside -------------------------------------------------------------------------


def beside(tmp_path: Path) -> tuple[Path, dict[str, Any], Path]:
    path = write(large("bfloat16"), tmp_path, "case")
    document = json.loads(path.read_text())
    return path, document, tmp_path / document["arrays"]["file"]


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "x.safetensors", "", None, 3, ["a"]])
def test_only_a_file_beside_the_document_is_ever_opened(name: Any, tmp_path: Path) -> None:
    path, document, _ = beside(tmp_path)
    document["arrays"]["file"] = name
    path.write_text(json.dumps(document))
    with pytest.raises(FixtureError, match=r"arrays\.file is .*; by its sha256 it must be '[0-9a-f]{16}\.safetensors'"):
        read(path)


def test_a_hash_that_is_none_or_another_is_refused(tmp_path: Path) -> None:
    path, document, arrays = beside(tmp_path)
    for bad in ("../x", "F" * 64, None, 5):
        document["arrays"]["sha256"] = bad
        path.write_text(json.dumps(document))
        with pytest.raises(FixtureError, match=r"arrays\.sha256 is .*; it must be 64 hexadecimal digits"):
            read(path)
    path, document, arrays = beside(tmp_path)
    data = bytearray(arrays.read_bytes())
    data[-1] ^= 1
    arrays.write_bytes(data)
    with pytest.raises(
        FixtureError, match=r"[0-9a-f]{16}\.safetensors has the SHA-256 [0-9a-f]{64}; the document says"
    ):
        read(path)
    arrays.unlink()
    with pytest.raises(FixtureError, match=r"safetensors cannot be read: No such file"):
        read(path)
    with pytest.raises(FixtureError, match="which is missing"):
        loads(path.read_bytes())
    with open(arrays, "wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(FixtureError, match="has 1073741825 bytes; at most 1073741824 are read"):
        read(path)


def test_tensors_that_disagree_with_the_document_are_refused() -> None:
    text, arrays = dumps(large("bfloat16"))
    assert arrays is not None
    for change, message in (
        (changed("case", "q", "tensor", to="o"), "case.q.tensor is 'o'; the arrays' file holds"),
        (changed("case", "q", "tensor", to=["q"]), r"case.q.tensor is \['q'\]"),
        (
            changed("case", "q", "dtype", to="float16"),
            "case.q.tensor is bfloat16 in the arrays' file; the document says float16",
        ),
        (changed("case", "q", "shape", to=[1, 1, 600, 8]), r"has shape \(1, 1, 8, 600\) in the arrays' file"),
        (changed("case", "q", "tensor", to="k"), "digest is"),
        (changed("case", "q", "data", to=[]), "case.q has the unknown field 'data'"),
    ):
        document = json.loads(text)
        change(document)
        with pytest.raises(FixtureError, match=message):
            loads(json.dumps(document), arrays)


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFC00000, 0x7F800000])
def test_a_nan_smuggled_in_as_a_tensor_is_refused(bits: int) -> None:
    text, arrays = dumps(large())
    assert arrays is not None
    damaged = arrays[:-4] + bits.to_bytes(4, "little")
    document = json.loads(text)
    sha256 = hashlib.sha256(damaged).hexdigest()
    document["arrays"] = {"file": f"{sha256[:16]}.safetensors", "sha256": sha256}
    with pytest.raises(FixtureError, match=r"case: v holds (nan|inf) at \[0, 0, 7, 599\]; it must be finite"):
        loads(json.dumps(document), damaged)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_damaged_file_of_arrays_with_a_right_hash_raises_nothing_else(data: st.DataObject) -> None:
    text, arrays = dumps(large())
    assert arrays is not None
    header = 8 + int.from_bytes(arrays[:8], "little")
    place = data.draw(st.integers(0, header - 1), label="place")
    damaged = bytearray(arrays)
    damaged[place] = data.draw(st.integers(0, 255), label="byte")
    if data.draw(st.booleans(), label="cut"):
        del damaged[place:]
    document = json.loads(text)
    sha256 = hashlib.sha256(damaged).hexdigest()
    document["arrays"] = {"file": f"{sha256[:16]}.safetensors", "sha256": sha256}
    if bytes(damaged) == arrays:
        return
    with pytest.raises(FixtureError):
        loads(json.dumps(document), bytes(damaged))


# -- damage ----------------------------------------------------------------------------------


def test_cut_at_any_byte_it_is_refused() -> None:
    text, _ = dumps(small())
    data = text.encode()
    for length in range(len(data) - 1):  # the last byte is the final newline
        with pytest.raises(FixtureError):
            loads(data[:length])
    assert same(loads(data[:-1]), small())


@settings(max_examples=1500, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_byte_changed_it_is_refused_or_still_holds_the_same_case(data: st.DataObject) -> None:
    raw = bytearray(DAMAGED)
    place = data.draw(st.integers(0, len(raw) - 1), label="place")
    raw[place] = data.draw(st.integers(0, 255), label="byte")
    try:
        record = loads(bytes(raw))
    except FixtureError as error:
        assert "\n" not in str(error)
    else:
        assert record.case == small().case


DAMAGED = dumps(small())[0].encode()


def test_a_document_from_before_packed_batches_is_read() -> None:
    record = replace(small(), presentation=Presentation(route="mask"))
    text, _ = dumps(record)
    document = json.loads(text)
    del document["presentation"]["packed"]
    assert loads(json.dumps(document)).presentation == record.presentation
    del document["presentation"]["route"]
    with pytest.raises(FixtureError, match="presentation lacks the field 'route'"):
        loads(json.dumps(document))
