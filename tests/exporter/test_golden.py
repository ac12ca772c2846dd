"""Golden sets: written from arrays, read lazily, and refused when they are not exactly what was recorded."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from exporter.errors import BadInput
from exporter.files import combined_sha256, record_file, sha256_file
from exporter.validation import metrics
from exporter.validation.evidence import METRICS
from exporter.validation.golden import open_golden, rounds_exactly
from exporter.validation.golden_format import HEADER_BYTES, encode_header, layout
from exporter.validation.golden_writer import write_golden
from tests.exporter.samples import (
    DTYPES,
    GRIDS,
    SHA,
    WIDTH,
    WRONG,
    add_case,
    origin_of,
    pixels_of,
    tower,
    write_sample_golden,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_sample_golden(tmp_path_factory.mktemp("set") / "golden")


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "golden")


def edit_json(folder, edit):
    path = folder / "golden.json"
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_what_was_computed(tmp_path, dtype):
    golden = open_golden(write_sample_golden(tmp_path / "golden", dtype))
    assert [case.name for case in golden.header.cases] == [f"grid{i}-{j}" for i in range(3) for j in range(2)]
    assert golden.header.weights_sha256 == SHA
    for index, case in enumerate(golden.header.cases):
        grids, frames, seed = GRIDS[index // 2], 1 + index // 2 % 2, 10 * (index // 2) + index % 2
        pixels = pixels_of(grids, frames, seed, dtype)
        r, native = tower(pixels, dtype=dtype), tower(pixels, dtype, dtype)
        assert (case.grid_hws, case.frames, case.rows) == (grids, frames, len(r))
        assert np.array_equal(golden.pixel_values(case), pixels)
        assert np.array_equal(golden.reference(case), r)
        assert golden.grid_hws(case).tolist() == [list(grid) for grid in grids]
        assert golden.grid_hws(case).dtype == np.int64
        error = np.linalg.norm((native - r).astype(np.float64)) / np.linalg.norm(r.astype(np.float64))
        assert case.floor.relative_l2 == pytest.approx(error, rel=1e-12)
        assert golden.floor_tokens(case).max() == pytest.approx(case.floor.worst_token, rel=1e-6)
        assert (dtype == "float32") == (error == 0)


def test_the_file_is_a_safetensors_file_that_others_read(good):
    golden = open_golden(good)
    with safe_open(good / "golden.safetensors", framework="numpy") as file:
        expected, size = layout(golden.header.cases, WIDTH)
        assert set(file.keys()) == set(expected) - {"__metadata__"}
        assert file.metadata() == {"format": "kvit-golden-1"}
        for case in golden.header.cases:
            assert np.array_equal(file.get_tensor(f"{case.name}/reference"), golden.reference(case))
            assert file.get_tensor(f"{case.name}/pixel_values").dtype == np.float32
            for entry in case.directions:
                key = f"{case.name}/direction/{entry.fault}"
                assert np.array_equal(file.get_tensor(key), golden.direction(case, entry.fault))
    assert (good / "golden.safetensors").stat().st_size == 8 + HEADER_BYTES + size


def test_directions_hold_the_difference_and_the_honest_spread(good):
    golden = open_golden(good)
    with_directions = [case for case in golden.header.cases if case.directions]
    assert [case.name for case in with_directions] == ["grid1-0", "grid1-1"]
    for case in with_directions:
        pixels = golden.pixel_values(case)
        r, native = tower(pixels, dtype="bfloat16"), tower(pixels, "bfloat16", "bfloat16")
        assert tuple(entry.fault for entry in case.directions) == WRONG
        for entry in case.directions:
            wrong = tower(pixels, dtype="bfloat16", wrong=entry.fault).astype(np.float32)
            d = (wrong - r).astype(np.float64)
            assert np.array_equal(golden.direction(case, entry.fault), wrong - r)
            assert entry.size == pytest.approx(np.linalg.norm(d) / np.linalg.norm(r), rel=1e-6)
            score = abs(((native - r) * d).sum() / (d * d).sum())
            # one honest run may score near 0 by luck: an error without direction scatters by |e| / (|d| sqrt(n))
            error = native.astype(np.float64) - r
            white = np.linalg.norm(error) / np.linalg.norm(d) / np.sqrt(d.size)
            # and one whose rows are independent by the root of the sum of <e_i, d_i>^2 over <d, d>
            by_rows = np.linalg.norm((error * d).sum(axis=1)) / (d * d).sum()
            assert entry.spread == pytest.approx(max(score, white, by_rows), rel=1e-6)


def test_a_given_spread_counts_when_it_is_larger_and_a_wrong_model_without_effect_is_listed(tmp_path):
    pixels = pixels_of(((18, 18),), 1, 0, "bfloat16")
    r, native = tower(pixels), tower(pixels, "bfloat16")
    wrong = [("scale", r * np.float32(1.1)), ("nothing", r), ("softsign", tower(pixels, wrong="softsign"))]
    with write_golden(tmp_path / "golden", origin_of("bfloat16")) as writer:
        case = writer.add(
            "a", "photo", grid_hws=[(18, 18)], pixel_values=pixels, reference=r, native=native,
            wrong_outputs=iter(wrong), spreads={"scale": 0.3, "softsign": 0.0},
        )  # fmt: skip
    assert case.blind_to == ("nothing",)
    spreads = {entry.fault: entry.spread for entry in case.directions}
    assert spreads["scale"] == 0.3
    assert 0 < spreads["softsign"] < 0.3
    assert open_golden(tmp_path / "golden").header.cases == (case,)


def test_a_wrong_model_within_the_rounding_of_the_reference_cannot_accuse(tmp_path):
    """Both d and y - r hold the reference's own rounding; if d is little else, an honest artifact scores about 0.5."""
    random = np.random.default_rng(0)
    pixels = pixels_of(((18, 18),), 1, 0, "float32")
    exact = random.standard_normal((81, WIDTH))

    def rounded_run():
        return (exact * (1 + 3e-7 * random.standard_normal(exact.shape))).astype(np.float32)

    reference, artifact, wrong = rounded_run(), rounded_run(), rounded_run()
    far = (exact * (1 + 3e-5 * random.standard_normal(exact.shape))).astype(np.float32)
    score = metrics.direction_score(artifact, reference, wrong - reference)
    assert 0.4 < score < 0.6
    with write_golden(tmp_path / "golden", origin_of("float32")) as writer:
        case = writer.add(
            "a", "noise", grid_hws=[(18, 18)], pixel_values=pixels, reference=reference,
            wrong_outputs=[("noise", wrong), ("far", far)],
        )  # fmt: skip
    spreads = {entry.fault: entry.spread for entry in case.directions}
    sizes = {entry.fault: entry.size for entry in case.directions}
    assert spreads["noise"] > 0.5  # informs only: above 0.1
    assert spreads["far"] < 1e-3
    for fault in ("noise", "far"):
        assert spreads[fault] == pytest.approx((5e-7 / sizes[fault]) ** 2, rel=1e-12)


def test_the_input_hash_covers_inputs_weights_and_settings(tmp_path):
    def digest(name, seed=0, grids=((2, 2),), **changes):
        with write_golden(tmp_path / name, dataclasses.replace(origin_of("float32"), **changes)) as writer:
            add_case(writer, "a", grids, 1, seed, directions=False)
        return open_golden(tmp_path / name).header.inputs_sha256

    first = digest("first")
    assert digest("again") == first
    settings = dataclasses.replace(origin_of("float32").settings, threads=2)
    others = [
        digest("pixels", seed=1),
        digest("weights", weights_sha256="ef" * 32),
        digest("settings", settings=settings),
        digest("turned", grids=((2, 4),)),
        digest("as_square", grids=((4, 2),)),
    ]
    assert len({first, *others}) == 6


def test_identity_is_that_of_both_files(good, copy):
    golden = open_golden(good)
    names = ("golden.json", "golden.safetensors")
    assert golden.sha256 == combined_sha256({name: record_file(good / name) for name in names})
    edit_json(copy, lambda value: value["settings"].update(seed=1))
    assert open_golden(copy).sha256 != golden.sha256


BAD_CASES = {
    "unrounded pixels": {"pixel_values": np.full((1, 4, 588), 1 + 2**-12, np.float32)},
    "pixels of another shape": {"pixel_values": np.zeros((1, 8, 588), np.float32)},
    "nan in pixels": {"pixel_values": np.full((1, 4, 588), np.nan, np.float32)},
    "reference of another shape": {"reference": np.ones((4, WIDTH), np.float32)},
    "nan in the reference": {"reference": np.full((1, WIDTH), np.nan, np.float32)},
    "zeros for a reference": {"reference": np.zeros((1, WIDTH), np.float32)},
    "infinite native output": {"native": np.full((1, WIDTH), np.inf, np.float32)},
    "zeros for a native output": {"native": np.zeros((1, WIDTH), np.float32)},
    "no native output": {"native": None},
    "nan in a wrong output": {"wrong_outputs": [("x", np.full((1, WIDTH), np.nan, np.float32))]},
    "wrong output of another shape": {"wrong_outputs": [("x", np.ones((WIDTH, 1), np.float32))]},
}


@pytest.mark.parametrize("change", BAD_CASES.values(), ids=BAD_CASES)
def test_a_case_that_could_not_be_judged_is_not_recorded(tmp_path, change):
    ones = np.ones((1, WIDTH), np.float32)
    case = {"pixel_values": np.ones((1, 4, 588), np.float32), "reference": ones, "native": ones * np.float32(1.01)}
    with pytest.raises(BadInput), write_golden(tmp_path / "golden", origin_of("bfloat16")) as writer:
        writer.add("a", "noise", grid_hws=[(2, 2)], **(case | change))
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_taken_once(tmp_path):
    with write_golden(tmp_path / "g", origin_of("float32")) as writer:
        add_case(writer, "a", ((2, 2),), 1, 0, directions=False)
        with pytest.raises(ValueError, match="called a"):
            add_case(writer, "a", ((2, 2),), 1, 1, directions=False)


def test_tf32_is_refused(copy):
    edit_json(copy, lambda value: value["settings"].update(tf32=True))
    with pytest.raises(BadInput, match="TF32"):
        open_golden(copy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_check_agrees_with_ml_dtypes(dtype):
    values = np.array([0, 1, 1 + 2**-7, 1 + 2**-10, 1 + 2**-23, 65504, 65536, 1e-8, 1e38], np.float32)
    target = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    for value in values:
        with np.errstate(over="ignore"):
            same = float(value.astype(target)) == float(value)
        assert rounds_exactly(np.array([value]), dtype) is same


def test_pixels_of_another_dtype_are_refused_on_reading(copy):
    edit_json(copy, lambda value: value.update(dtype="float16"))
    golden = open_golden(copy)
    # bf16 keeps numbers below 2**-14 with more digits than fp16 does, and of 588 x 324 normal draws some lie there
    with pytest.raises(BadInput, match="not float16"):
        golden.pixel_values(golden.header.cases[2])


def swap_files(folder):
    write_sample_golden(folder.parent / "other", "float32")
    (folder / "golden.safetensors").write_bytes((folder.parent / "other" / "golden.safetensors").read_bytes())


def set_header_length(length):
    def damage(folder):
        data = bytearray((folder / "golden.safetensors").read_bytes())
        data[:8] = length.to_bytes(8, "little")
        (folder / "golden.safetensors").write_bytes(data)

    return damage


def edit_header(edit):
    """Change the safetensors header and the recorded hash with it, as only a deliberate hand would."""

    def damage(folder):
        path = folder / "golden.safetensors"
        data = bytearray(path.read_bytes())
        header = json.loads(data[8 : 8 + HEADER_BYTES])
        edit(header)
        data[8 : 8 + HEADER_BYTES] = json.dumps(header).encode().ljust(HEADER_BYTES)
        path.write_bytes(data)
        edit_json(folder, lambda value: value["tensors"].update(sha256=sha256_file(path)))

    return damage


def edited(edit):
    return lambda folder: edit_json(folder, edit)


def truncate(name, keep):
    def damage(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def sparse_giant(folder):
    with open(folder / "golden.safetensors", "r+b") as file:
        file.truncate(1 << 40)
    edit_json(folder, lambda value: value["tensors"].update(size=1 << 40))


DAMAGES = {
    "no json": lambda folder: (folder / "golden.json").unlink(),
    "no arrays": lambda folder: (folder / "golden.safetensors").unlink(),
    "empty json": truncate("golden.json", 0),
    "half a json": truncate("golden.json", 0.5),
    "empty arrays": truncate("golden.safetensors", 0),
    "half the arrays": truncate("golden.safetensors", 0.5),
    "arrays without their end": truncate("golden.safetensors", 0.999),
    "swapped files": swap_files,
    "giant header": set_header_length(1 << 62),
    "giant header of the sign bit": set_header_length((1 << 64) - 1),
    "small header": set_header_length(2),
    "sparse giant": sparse_giant,
    "schema 2": edited(lambda v: v.update(schema_version=2)),
    "schema text": edited(lambda v: v.update(schema_version="1")),
    "no schema": edited(lambda v: v.pop("schema_version")),
    "giant width": edited(lambda v: v.update(width=1 << 60)),
    "negative width": edited(lambda v: v.update(width=-96)),
    "giant grid": edited(lambda v: v["cases"][0].update(grid_hws=[[512, 512]] * 4000)),
    "odd grid": edited(lambda v: v["cases"][0].update(grid_hws=[[3, 3]])),
    "negative grid": edited(lambda v: v["cases"][0].update(grid_hws=[[-2, -2]])),
    "turned grid": edited(lambda v: v["cases"][4].update(grid_hws=[[6, 4], [8, 6]])),
    "five frames": edited(lambda v: v["cases"][0].update(frames=5)),
    "negative floor": edited(lambda v: v["cases"][0]["floor"].update(relative_l2=-1.0)),
    "parent path for a name": edited(lambda v: v["cases"][0].update(name="../../etc/passwd")),
    "absolute path for a name": edited(lambda v: v["cases"][0].update(name="/etc/passwd")),
    "another name": edited(lambda v: v["cases"][0].update(name="other")),
    "two of one name": edited(lambda v: v["cases"].append(v["cases"][0])),
    "a case less": edited(lambda v: v["cases"].pop()),
    "no cases": edited(lambda v: v.update(cases=[])),
    "a direction less": edited(lambda v: v["cases"][2]["directions"].pop()),
    "a direction twice": edited(lambda v: v["cases"][2]["directions"].append(v["cases"][2]["directions"][0])),
    "a direction of no size": edited(lambda v: v["cases"][2]["directions"][0].update(size=0)),
    "unknown dtype": edited(lambda v: v.update(dtype="int8")),
    "unknown key": edited(lambda v: v.update(more=1)),
    "no hash": edited(lambda v: v.update(inputs_sha256="")),
    "other dtype in the header": edit_header(lambda h: h["grid0-0/reference"].update(dtype="F16")),
    "other shape in the header": edit_header(lambda h: h["grid0-0/reference"].update(shape=[WIDTH, 1])),
    "other offsets in the header": edit_header(
        lambda h: h["grid0-0/reference"].update(data_offsets=[0, h["grid0-0/reference"]["data_offsets"][1]])
    ),
    "offsets of the wrong sign": edit_header(lambda h: h["grid0-0/floor"].update(data_offsets=[-4, 0])),
    "array left out of the header": edit_header(lambda h: h.pop("grid2-1/floor")),
    "array added to the header": edit_header(lambda h: h.update(more=h["grid0-0/floor"])),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_set_is_refused_in_one_line_and_little_memory(copy, damage):
    damage(copy)
    tracemalloc.start()
    with pytest.raises(BadInput) as caught:
        open_golden(copy)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
    assert len(caught.value.format_message()) < 500


def test_every_bit_of_both_files_counts(good, tmp_path):
    """100 random bits in each file: a flip is refused, or falls on a value that the reader takes as the changed set."""
    draw = random.Random(0)
    original = open_golden(good).sha256
    for name in ("golden.json", "golden.safetensors"):
        data = (good / name).read_bytes()
        folder = shutil.copytree(good, tmp_path / name)
        for _ in range(100):
            position, bit = draw.randrange(len(data)), draw.randrange(8)
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            (folder / name).write_bytes(changed)
            try:
                golden = open_golden(folder)
            except BadInput as error:
                assert "\n" not in error.format_message()  # noqa: PT017 - one of many
            else:
                # a digit of a floor, say; the manifest's hash of this file is what catches it
                assert name == "golden.json"
                assert golden.sha256 != original


def test_without_hashing_the_structure_is_still_checked(copy):
    data = bytearray((copy / "golden.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "golden.safetensors").write_bytes(data)
    assert open_golden(copy, check_hash=False).header.width == WIDTH
    truncate("golden.safetensors", 0.9)(copy)
    with pytest.raises(BadInput, match="bytes"):
        open_golden(copy, check_hash=False)


def test_arrays_that_are_not_finite_or_vanish_meanwhile_are_refused(copy):
    golden = open_golden(copy)
    case = golden.header.cases[0]
    start = layout(golden.header.cases, WIDTH)[0][f"{case.name}/reference"]["data_offsets"][0]
    with open(copy / "golden.safetensors", "r+b") as file:
        file.seek(8 + HEADER_BYTES + start)
        file.write(np.array([np.nan], "<f4").tobytes())
    with pytest.raises(BadInput, match="not finite"):
        golden.reference(case)
    truncate("golden.safetensors", 0.5)(copy)
    with pytest.raises(BadInput, match="cut short"):
        golden.reference(golden.header.cases[-1])
    (copy / "golden.safetensors").unlink()
    with pytest.raises(BadInput, match="cannot read"):
        golden.reference(case)


def test_only_the_asked_array_is_in_memory(tmp_path):
    """64 MiB of cases; writing and reading hold little more than one case."""
    rows = 128 * 128 // 4
    pixels = np.zeros((1, 128 * 128, 588), np.float32)[:, : 4 * rows]
    reference = np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32)
    one_case = pixels.nbytes + reference.nbytes
    tracemalloc.start()
    with write_golden(tmp_path / "golden", origin_of("float32")) as writer:
        for index in range(4):
            writer.add(str(index), "noise", grid_hws=[(128, 128)], pixel_values=pixels, reference=reference)
    _, writing = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    golden = open_golden(tmp_path / "golden")
    for case in golden.header.cases:
        golden.pixel_values(case)
    _, reading = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert writing < 2.5 * one_case  # the pixels' bytes for the hash, and float64 chunks
    assert reading < 2.5 * one_case


def test_too_many_cases_for_the_header_are_refused(tmp_path):
    case = open_golden(write_sample_golden(tmp_path / "golden")).header.cases[2]
    assert len(encode_header([case], WIDTH)) == 8 + HEADER_BYTES
    with pytest.raises(BadInput, match="too many"):
        encode_header([dataclasses.replace(case, name=f"c{i}") for i in range(2000)], WIDTH)


def test_the_floor_has_all_four_metrics(good):
    golden = open_golden(good)
    for case in golden.header.cases:
        found = metrics.measure(tower(golden.pixel_values(case), "bfloat16", "bfloat16"), golden.reference(case))
        for metric in METRICS:
            assert getattr(case.floor, metric) == pytest.approx(getattr(found.measured, metric), rel=1e-12)
            assert getattr(case.floor, metric) > 0
