"""Files that appear whole or not at all, their hashes, and copies that cost nothing where the disk allows it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from exporter.errors import BadInput, Usage

_CHUNK = 1 << 20  # bytes hashed at a time: large enough for full speed, small enough not to matter

# A folder that holds none of these was not written by this program, so --force does not delete it.
OUR_MARKERS = ("manifest.json", "golden.json")


@dataclass(frozen=True)
class FileRecord:
    """What identifies the content of one file.

    Attributes:
        sha256: 64 lower-case hexadecimal digits.
        size: bytes.
    """

    sha256: str
    size: int

    def __post_init__(self) -> None:
        check_sha256(self.sha256)
        if self.size < 0:
            raise ValueError(f"a size of {self.size} bytes")


def check_sha256(text: str) -> None:
    """Refuse a text that is not a sha256 in lower-case hexadecimal.

    Args:
        text: what was found where a hash belongs.

    Raises:
        ValueError: it is something else.
    """
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{text[:80]!r} is not a sha256 of 64 lower-case hexadecimal digits")


def _temporary_sibling(path: Path) -> Path:
    """Return an unused hidden name in the same folder, hence on the same file system."""
    return path.parent / f".{path.name[:100]}.{secrets.token_hex(6)}.part"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path for a writer that wants a path; rename it to ``path`` when the block ends well.

    Args:
        path: where the file shall appear; its folder must exist.

    Yields:
        A path in the same folder, not yet existing.

    Raises:
        OSError: the file cannot be written. Nothing is left in that case, nor after any other exception.
    """
    temporary = _temporary_sibling(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        # Renaming one hard link over another of the same file does nothing (POSIX), so the name may outlive success.
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears at ``path``, on the disk and whole, when the block ends well.

    Args:
        path: where the file shall appear.

    Yields:
        The open temporary file.
    """
    with atomic_path(path) as temporary, open(temporary, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # else a power cut can leave the new name with an empty file


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Args:
        path: where the file shall appear.
        data: its content.
    """
    with atomic_write(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole or not at all.

    Args:
        path: where the file shall appear.
        text: its content.
    """
    write_bytes(path, text.encode("utf-8"))


def _check_replaceable(target: Path, force: bool) -> None:
    """Refuse a target that holds somebody's data."""
    if not target.exists():
        return
    if not target.is_dir():
        raise Usage(f"{target} is a file; give a folder that does not exist yet")
    names = [entry.name for entry in target.iterdir()]
    if not names:
        return
    if not force:
        raise Usage(f"{target} is not empty; choose another folder, or --force to replace it")
    if not set(names) & set(OUR_MARKERS):
        raise Usage(f"{target} was not written by kvit-export, so --force does not delete it; choose another folder")


def _swap_in(temporary: Path, target: Path) -> None:
    """Rename a finished folder to its place; put an older one back if that fails."""
    if not target.exists():
        os.rename(temporary, target)
        return
    old = _temporary_sibling(target)
    os.rename(target, old)
    try:
        os.rename(temporary, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_directory(target: Path, force: bool = False) -> Iterator[Path]:
    """Build a folder under a temporary name beside its place and rename it when the block ends well.

    Args:
        target: the folder that shall appear. It may exist if it is empty, or with ``force`` if it is one of ours.
        force: replace an existing folder of ours.

    Yields:
        The temporary folder to fill.

    Raises:
        Usage: the target holds something that must not be replaced; raised before anything is built.
    """
    place = Path(os.path.realpath(target))  # a link to a folder stays a link to the new folder
    _check_replaceable(place, force)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_sibling(place)
    temporary.mkdir()
    try:
        yield temporary
        _check_replaceable(place, force)  # an hour may have passed since the first look
        _swap_in(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """Hash a file of any size in bounded memory.

    Args:
        path: the file.

    Returns:
        64 lower-case hexadecimal digits.
    """
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def record_file(path: Path) -> FileRecord:
    """Return the hash and size of a file.

    Args:
        path: the file.

    Returns:
        Its record, as a manifest holds it.
    """
    return FileRecord(sha256_file(path), path.stat().st_size)


def combined_sha256(records: Mapping[str, FileRecord]) -> str:
    """Hash a set of named files into one identity, independent of the order in which they are given.

    Args:
        records: record by file name.

    Returns:
        sha256 over the lines ``SHA256  NAME`` in order of the names, as ``sha256sum`` prints them.
    """
    lines = [f"{records[name].sha256}  {name}\n" for name in sorted(records)]
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a whole small file; never more than ``limit`` bytes and never from a device or a pipe.

    Args:
        path: the file.
        limit: most bytes that such a file may have.

    Returns:
        Its content.

    Raises:
        BadInput: it is missing, unreadable, not a regular file or too large.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path} is not a regular file")
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise BadInput(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > limit:
        raise BadInput(f"{path} is larger than the {limit} bytes that such a file may have")
    return data


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or a copy where the file system has no hard links or the names lie on two disks.

    Args:
        source: the existing file; a symbolic link is followed.
        target: where it shall appear; an existing file is replaced.
    """
    original = Path(os.path.realpath(source))  # on Linux a hard link to a symbolic link is a symbolic link
    with atomic_path(target) as temporary:
        try:
            os.link(original, temporary)
        except OSError:
            shutil.copyfile(original, temporary)
