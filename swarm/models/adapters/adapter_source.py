"""An adapter's files, in a local folder or a repository on the hub. Only safetensors are read, up to a size limit."""

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
"""LoRA of rank 64 on all linear modules of a model of 405 billion parameters takes 3.3 GB."""


@dataclass(frozen=True)
class AdapterSource:
    """The place where an adapter's files are.

    Attributes:
        name: local folder or hub id.
        revision: branch, tag or commit of a hub repository.
        cache_dir: folder for files from the hub.
    """

    name: str
    revision: str | None = None
    cache_dir: str | Path | None = None

    def config(self) -> Any:
        """The parsed JSON of the config file. Raises `AdapterError` if the file is missing or unreadable."""
        path = self._fetch(CONFIG_FILE, MAX_CONFIG_BYTES)
        if path is None:
            raise AdapterError(f"{self.name} has no {CONFIG_FILE}, so it is not an adapter")
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise AdapterError(f"{CONFIG_FILE} of {self.name} cannot be read: {_first_line(error)}") from error

    def weights(self) -> Path:
        """Path of the safetensors file. Raises `AdapterError` if it is missing; the message names a pickled file."""
        path = self._fetch(WEIGHTS_FILE, MAX_WEIGHTS_BYTES)
        if path is not None:
            return path
        for name in PICKLED_WEIGHTS_FILES:
            if self._has(name):
                raise AdapterError(
                    f"the weights of {self.name} are in {name}, a pickled file, which can run code when opened; only "
                    "safetensors are read. Save it with PEFT again: model.save_pretrained(FOLDER)"
                )
        raise AdapterError(f"{self.name} has no {WEIGHTS_FILE}")

    @property
    def _folder(self) -> Path:
        return Path(self.name).expanduser()

    def _fetch(self, file: str, limit: int) -> Path | None:
        """The local path of a file, or None if there is no such file."""
        if self._folder.is_dir():
            path = self._folder / file
            size = path.stat().st_size if path.is_file() else None
        else:
            planned = self._dry_run(file)
            size = planned.file_size if planned is not None else None
        if size is None:
            return None
        if size > limit:
            raise AdapterError(f"{file} of {self.name} is {size} bytes long; at most {limit} are allowed")
        return path if self._folder.is_dir() else Path(self._download(file))

    def _has(self, file: str) -> bool:
        return (self._folder / file).is_file() if self._folder.is_dir() else self._dry_run(file) is not None

    def _dry_run(self, file: str) -> Any:
        """What downloading a file would fetch; None if the repository has no such file."""
        return self._download(file, dry_run=True)

    def _download(self, file: str, **options: Any) -> Any:
        try:
            return hf_hub_download(self.name, file, revision=self.revision, cache_dir=self.cache_dir, **options)
        except HFValidationError:
            raise AdapterError(f"{self.name!r} is neither a local folder nor an adapter's name on the hub") from None
        except LocalEntryNotFoundError as error:  # unlike its base class, it means that the hub did not answer
            raise AdapterError(
                f"{self.name} is not a local folder, and the hub cannot be reached: {_first_line(error)}"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, OSError) as error:
            raise AdapterError(f"the hub has no {self.name} (or it is private): {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
