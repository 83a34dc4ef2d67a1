"""Where an adapter's files are: a local folder or a repository of the hub. Only safetensors, and only up to a size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from swarm.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_WEIGHTS_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 4 << 30
"""Of the weights' file. LoRA of rank 64 on all linear modules of a model of 405 billion parameters takes 3.3 GB."""


@dataclass(frozen=True)
class AdapterSource:
    """Attributes:
    name: local folder or hub id.
    revision: branch, tag or commit of a hub repository.
    cache_dir: where hub files are kept.
    """

    name: str
    revision: str | None = None
    cache_dir: str | Path | None = None

    def config(self) -> Any:
        """What is in its config file. Raises `AdapterError` if there is none that can be read."""
        path = self._fetch(CONFIG_FILE, MAX_CONFIG_BYTES)
        if path is None:
            raise AdapterError(f"{self.name} has no {CONFIG_FILE}, so it is no adapter")
        try:
            return json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{CONFIG_FILE} of {self.name} cannot be read: {_line(error)}") from error

    def weights(self) -> Path:
        """The safetensors file. Raises `AdapterError` if there is none, by name if it is pickled."""
        path = self._fetch(WEIGHTS_FILE, MAX_WEIGHTS_BYTES)
        if path is not None:
            return path
        for name in PICKLED_WEIGHTS_FILES:
            if self._has(name):
                raise AdapterError(
                    f"{self.name} has its weights as {name}, which is pickled and can run code when it is opened; only "
                    "safetensors are read. Save it with PEFT again: model.save_pretrained(FOLDER)"
                )
        raise AdapterError(f"{self.name} has no {WEIGHTS_FILE}")

    @property
    def _folder(self) -> Path:
        return Path(self.name).expanduser()

    def _fetch(self, file: str, limit: int) -> Path | None:
        """The local path of one file, None if there is no such file."""
        if self._folder.is_dir():
            path = self._folder / file
            size = path.stat().st_size if path.is_file() else None
        else:
            planned = self._plan(file)
            size = planned.file_size if planned is not None else None
        if size is None:
            return None
        if size > limit:
            raise AdapterError(f"{file} of {self.name} is {size} bytes long; at most {limit} are read")
        return path if self._folder.is_dir() else Path(self._download(file))

    def _has(self, file: str) -> bool:
        return (self._folder / file).is_file() if self._folder.is_dir() else self._plan(file) is not None

    def _plan(self, file: str) -> Any:
        """What downloading a file would bring; None if the repository has no such file."""
        return self._download(file, dry_run=True)

    def _download(self, file: str, **options: Any) -> Any:
        try:
            return hf_hub_download(self.name, file, revision=self.revision, cache_dir=self.cache_dir, **options)
        except HFValidationError:
            raise AdapterError(f"{self.name!r} is neither a local folder nor an adapter's name on the hub") from None
        except LocalEntryNotFoundError as error:  # of all missing files, only this one may exist on the hub
            raise AdapterError(
                f"{self.name} is no local folder, and the hub cannot be reached: {_line(error)}"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, OSError) as error:
            raise AdapterError(f"the hub has no {self.name} (or it is private): {_line(error)}") from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
