"""Engines that were built before, found by everything that they depend on. An entry is one file and its record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.errors import BadInput
from exporter.files import FileRecord, link_or_copy, record_file, write_text
from exporter.manifest import Manifest, PluginRecord
from exporter.records import read_record, to_text
from exporter.trt.flavor import Flavor
from exporter.trt.job import BuildJob, Built

_SCHEMA_VERSION = 1
_RECORD, _ENGINE = "record.json", "engine"


@dataclass(frozen=True)
class Entry:
    """What the cache keeps beside an engine.

    Attributes:
        schema_version: of this file.
        depends_on: everything that the key was made from.
        engine: hash and size of the engine.
        built: what its build did.
    """

    schema_version: int
    depends_on: Mapping[str, Any]
    engine: FileRecord
    built: Built


def dependencies(
    source: Manifest, job: BuildJob, flavor: Flavor, plugin: PluginRecord | None, gpu: str | None, program: str
) -> dict[str, Any]:
    """List everything that an engine depends on.

    Args:
        source: manifest of the ONNX artifact; its identity covers weights and graph.
        job: the build, without its paths.
        flavor: that builds.
        plugin: in the engine.
        gpu: name and capability of the GPU whose kernels are measured; None where none are.
        program: version of this program.

    Returns:
        Plain values.
    """
    options = dataclasses.asdict(job)
    for path in ("onnx", "engine", "timing_cache"):
        del options[path]
    made = {
        "program": program,
        "weights": source.source.weights_sha256,
        "config": source.source.config_sha256,
        "onnx": source.artifact_sha256,
        "tensorrt": str(flavor),
        "gpu": gpu,
        "plugin": None if plugin is None else dataclasses.asdict(plugin),
        "options": options,
    }
    plain: dict[str, Any] = json.loads(json.dumps(made))
    return plain


class EngineCache:
    """A folder of engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _place(self, depends_on: Mapping[str, Any]) -> Path:
        text = json.dumps(depends_on, sort_keys=True)
        return self._folder / hashlib.sha256(text.encode()).hexdigest()

    def fetch(self, depends_on: Mapping[str, Any], target: Path) -> Built | None:
        """Give an engine that was built from exactly this its second name.

        Args:
            depends_on: see `dependencies`.
            target: where the engine shall appear.

        Returns:
            What its build did; None where there is no such engine, or it is not what was put there.
        """
        place = self._place(depends_on)
        try:
            entry = read_record(Entry, place / _RECORD, _SCHEMA_VERSION)
            intact = record_file(place / _ENGINE) == entry.engine and entry.depends_on == depends_on
        except (BadInput, OSError):
            return None
        if not intact:
            return None
        link_or_copy(place / _ENGINE, target)
        return entry.built

    def store(self, depends_on: Mapping[str, Any], engine: Path, built: Built) -> None:
        """Keep an engine.

        Args:
            depends_on: see `dependencies`.
            engine: the finished file.
            built: what its build did.

        Raises:
            OSError: the folder cannot be written.
        """
        place = self._place(depends_on)
        place.mkdir(parents=True, exist_ok=True)
        (place / _RECORD).unlink(missing_ok=True)  # a record says that the engine beside it is whole
        link_or_copy(engine, place / _ENGINE)
        write_text(place / _RECORD, to_text(Entry(_SCHEMA_VERSION, depends_on, record_file(engine), built)))
