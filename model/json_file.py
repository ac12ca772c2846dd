"""Reads the JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.errors import ConfigError


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read a file that holds one JSON object.

    Args:
        path: the file.

    Returns:
        The object; None if there is no such file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(document).__name__}; download it again")
    return document
