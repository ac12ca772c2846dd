"""Files appear whole or not at all (pitfall 26)."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc

import pytest

from exporter import files
from exporter.errors import BadInput, Usage

INTERRUPTIONS = (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), SystemExit(1))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("fault", INTERRUPTIONS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("before", [None, b"old"], ids=["new", "existing"])
def test_an_interrupted_file_leaves_what_was_there(tmp_path, fault, before):
    path = tmp_path / "file with spaces \u00e9"
    if before is not None:
        path.write_bytes(before)

    def write_half():
        with files.atomic_write(path) as file:
            file.write(b"half")
            file.flush()
            raise fault

    with pytest.raises(type(fault)):
        write_half()
    assert names_in(tmp_path) == ([] if before is None else [path.name])
    assert before is None or path.read_bytes() == before


def test_a_file_is_not_visible_before_it_is_whole(tmp_path):
    path = tmp_path / "file"
    with files.atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"half"
    files.write_text(path, "\u00e9\n")
    assert path.read_bytes() == b"\xc3\xa9\n"
    assert names_in(tmp_path) == ["file"]


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path):
    old = os.umask(0o027)
    try:
        files.write_bytes(tmp_path / "file", b"x")
        with files.atomic_directory(tmp_path / "folder") as folder:
            files.write_bytes(folder / "inner", b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("fault", INTERRUPTIONS, ids=lambda fault: type(fault).__name__)
def test_an_interrupted_folder_leaves_nothing(tmp_path, fault):
    def write_half():
        with files.atomic_directory(tmp_path / "out") as folder:
            (folder / "a" / "b").mkdir(parents=True)
            (folder / "a" / "file").write_bytes(b"x")
            raise fault

    with pytest.raises(type(fault)):
        write_half()
    assert names_in(tmp_path) == []


def make_ours(folder):
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "old").write_text("old")
    return folder


def test_force_replaces_a_folder_of_ours_only_at_the_end(tmp_path):
    target = make_ours(tmp_path / "out")
    with files.atomic_directory(target, force=True) as folder:
        (folder / "new").write_text("new")
        assert names_in(target) == ["manifest.json", "old"]
    assert names_in(target) == ["new"]
    assert names_in(tmp_path) == ["out"]


def test_a_failed_replacement_keeps_the_old_folder(tmp_path):
    target = make_ours(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt), files.atomic_directory(target, force=True):
        raise KeyboardInterrupt
    assert names_in(target) == ["manifest.json", "old"]
    assert names_in(tmp_path) == ["out"]


def test_a_rename_that_fails_half_way_puts_the_old_folder_back(tmp_path, monkeypatch):
    target = make_ours(tmp_path / "out")
    rename, calls = os.rename, []

    def second_fails(source, destination):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="Input/output"), files.atomic_directory(target, force=True) as folder:
        (folder / "new").write_text("new")
    assert names_in(target) == ["manifest.json", "old"]
    assert names_in(tmp_path) == ["out"]


def test_what_is_not_ours_is_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    make_ours(tmp_path / "ours")
    for name, force in (("home", False), ("home", True), ("file", False), ("file", True), ("ours", False)):
        with pytest.raises(Usage), files.atomic_directory(tmp_path / name, force=force):
            pytest.fail("the refusal has to come before the work")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "x"
    assert names_in(tmp_path) == ["file", "home", "ours"]


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with files.atomic_directory(tmp_path / "link") as folder:
        (folder / "new").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert names_in(tmp_path / "empty") == ["new"]


def test_folders_above_the_target_are_made(tmp_path):
    with files.atomic_directory(tmp_path / "a" / "b" / "out") as folder:
        (folder / "new").write_text("new")
    assert names_in(tmp_path / "a" / "b") == ["out"]


def test_a_folder_that_fills_up_meanwhile_is_not_lost(tmp_path):
    target = tmp_path / "out"

    def fill():
        with files.atomic_directory(target):
            target.mkdir()
            (target / "somebody's").write_text("x")

    with pytest.raises(Usage):
        fill()
    assert names_in(target) == ["somebody's"]
    assert names_in(tmp_path) == ["out"]


def test_ctrl_c_during_a_real_build_leaves_nothing(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from exporter.files import atomic_directory\n"
        "with atomic_directory(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'engine').write_bytes(b'half'); print('ready', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert len(names_in(tmp_path)) == 1  # the temporary folder
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (5 << 20) + 3])
def test_hash_agrees_with_hashlib(tmp_path, size):
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    record = files.record_file(tmp_path / "file")
    assert record == files.FileRecord(hashlib.sha256(data).hexdigest(), size)


def test_hashing_needs_little_memory(tmp_path):
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(200 << 20)
    tracemalloc.start()
    files.sha256_file(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20  # the buffer is 1 MiB


def test_combined_hash_is_what_sha256sum_would_give(tmp_path):
    """Independent of our code: sha256sum of the sorted lines that sha256sum prints."""
    for name, text in (("b", "1"), ("a", "2"), ("c d", "3")):
        (tmp_path / name).write_text(text)
    lines = "".join(
        f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n"
        for name, text in (("a", "2"), ("b", "1"), ("c d", "3"))
    )
    records = {name: files.record_file(tmp_path / name) for name in ("c d", "b", "a")}
    assert files.combined_sha256(records) == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("bad", ["", "ab", "AB" * 32, "g" * 64, "ab" * 33])
def test_what_is_no_hash_is_refused(bad):
    with pytest.raises(ValueError, match="sha256"):
        files.FileRecord(bad, 1)
    with pytest.raises(ValueError, match="size"):
        files.FileRecord("ab" * 32, -1)


def test_bounded_read_refuses_pipes_devices_folders_and_giants(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "giant").write_bytes(b"x" * 101)
    (tmp_path / "fits").write_bytes(b"x" * 100)
    start = time.perf_counter()
    for name in ("pipe", "zero", "giant", "missing", ".", "nul\0"):
        with pytest.raises(BadInput):
            files.read_bounded(tmp_path / name, 100)
    assert time.perf_counter() - start < 5  # opening the pipe would wait for a writer
    assert files.read_bounded(tmp_path / "fits", 100) == b"x" * 100


def test_link_or_copy_links_follows_links_and_replaces(tmp_path):
    (tmp_path / "blob").write_bytes(b"data")
    (tmp_path / "snapshot").symlink_to("blob")  # what a hub cache looks like
    target = tmp_path / "target"
    target.write_bytes(b"old")
    files.link_or_copy(tmp_path / "snapshot", target)
    assert not target.is_symlink()
    assert target.samefile(tmp_path / "blob")
    files.link_or_copy(tmp_path / "blob", target)  # already the same file: nothing may be left over
    assert names_in(tmp_path) == ["blob", "snapshot", "target"]


def test_link_or_copy_copies_where_links_are_impossible(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"data")

    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    files.link_or_copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"data"
    assert not (tmp_path / "target").samefile(tmp_path / "source")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        files.link_or_copy(tmp_path / "source", tmp_path / "other")
    assert names_in(tmp_path) == ["source", "target"]
