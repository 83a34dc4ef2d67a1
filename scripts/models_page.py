"""Prints docs/models.md: which families and formats are served, and by which test that is known (`make models`)."""

from __future__ import annotations

import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from swarm.errors import UnsupportedModel
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.cutting import families
from tests import popular_models, test_images, test_published_models, wrappers, zoo
from tests.models import test_all_families
from tests.models.checkpoints import gguf_layouts, packed_layouts

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
WIDTH = 118

HEAD = """# Models

`make models` prints this page, from the tables of the tests and from what transformers {version} knows. A model is
served from its published files: give `swarm server` its name on the hub, or its folder. What cannot be served is
refused when its config is read, before anything is joined or loaded.

How it is known that a family works:

- **servers**: its texts are those of transformers' own load of the same files, over three servers, with beams, padding,
  guesses, early exits, a session of another length beside, and a server that dies (`tests/test_published_models.py`,
  `tests/test_families.py`).
- **spans**: in one process, cut into three spans, it computes what the whole model does (`tests/models`).
- **rule**: its layers keep only what a server can keep. Each load compares a short session of these blocks with the
  same texts computed in one piece, and takes a slower way if a fast one is wrong.
"""


def page() -> str:
    """The page's text."""
    logging.set_verbosity(logging.CRITICAL)
    lines = [HEAD.format(version=transformers.__version__), *_families(), *_wrappers(), *_formats()]
    lines += [*_popular(), *_refused()]
    return "\n".join(lines) + "\n"


def _families() -> Iterator[str]:
    served = set(test_published_models.MODELS) | set(zoo.REPRESENTATIVES)
    tested = {*zoo.TABLE, *zoo.HYBRIDS, *test_all_families.FAMILIES}
    known = [name for name, problem in causal_families() if not problem and name not in wrappers.TABLE]
    yield f"## {len(known)} families of language models\n"
    ways = {name: "servers" if name in served else "spans" if name in tested else "rule" for name in known}
    for way in ("servers", "spans", "rule"):
        yield _listed(way, [name for name in known if ways[name] == way])


def _wrappers() -> Iterator[str]:
    yield f"\n## {len(families.WRAPPERS)} wrappers, which add images or sound to a language model\n"
    yield "Texts are served. [Images](python.md#images) are served over three servers, as texts are:\n"
    yield _listed("images", sorted(test_images.KINDS))
    yield "\nOther images, and sound, are not yet. Texts:\n"
    for way, is_served in (("servers", True), ("spans", False)):
        kinds = [kind for kind in wrappers.TABLE if (kind in test_published_models.MODELS) == is_served]
        yield _listed(way, sorted(kinds))


def _listed(way: str, names: Sequence[str]) -> str:
    return textwrap.fill(
        f"- **{way}**: {', '.join(names) or 'none'}", WIDTH, subsequent_indent="  ", break_on_hyphens=False
    )


def _formats() -> Iterator[str]:
    yield "\n## Formats of weights\n"
    types = ", ".join(gguf_layouts.TYPES)
    gguf = f"GGUF of {', '.join(sorted(gguf_layouts.FAMILIES))} ({types}; K and IQ types as transformers unpacks them)"
    names = ", ".join([*packed_layouts.LAYOUTS, "MXFP4 of gpt_oss", "bitsandbytes", gguf])
    where = "[quantization.md](quantization.md#checkpoints-that-are-packed)"
    text = f"Besides plain weights, these are read ({where}): {names}."
    yield textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _popular() -> Iterator[str]:
    models = popular_models.MODELS
    yield f"\n## The {len(models)} models that people run most\n"
    served = sum(not one.refused for one in models)
    yield f"{served} are served. `tests/test_popular_models.py` tries each as a tiny checkpoint in the layout of its"
    yield "files: its texts are those of transformers, or it is refused in these words.\n"
    yield "| model | type | tried with | why not |\n| --- | --- | --- | --- |"
    for one in models:
        layout = "" if one.refused else one.layout or "plain weights"
        kind = one.published.get("model_type", one.kind.partition(" ")[0])
        yield f"| {one.name} | {kind} | {layout} | {_words(one) if one.refused else ''} |"


def _words(model: popular_models.Popular) -> str:
    """In which words a model is refused."""
    with tempfile.TemporaryDirectory() as folder:
        popular_models.save(model, Path(folder) / "model")
        try:
            open_checkpoint(Path(folder) / "model")
        except UnsupportedModel as error:
            return str(error)
    raise ValueError(f"{model.name} is not refused")


def _refused() -> Iterator[str]:
    refused = [(name, problem) for name, problem in causal_families() if problem]
    yield f"\n## {len(refused)} families that are refused\n"
    yield "Encoders, models of an encoder and a decoder, and these, each in the words that a user sees:\n"
    yield "| family | why |\n| --- | --- |"
    for name, problem in refused:
        if "encoder" not in problem:
            yield f"| {name} | {problem} |"


def causal_families() -> Iterator[tuple[str, str]]:
    """Each family for which transformers has a causal language model, and why it is refused; empty if it is not."""
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = wrappers.config_of(name) if name in wrappers.TABLE else _config(name)
            families.check_supported(families.text_config(config))
            yield name, ""
        except UnsupportedModel as error:
            yield name, str(error)
        except Exception as error:  # noqa: BLE001  (some families' default configs are not valid)
            yield name, f"its default config is not valid: {(str(error).splitlines() or [''])[0]}"


def _config(name: str) -> PreTrainedConfig:
    if name == "gemma4_text":  # by default, it is that of the two sizes that are refused
        return test_all_families.config_of(name)
    return zoo.config_of(name) if name in zoo.TABLE or name in zoo.HYBRIDS else CONFIG_MAPPING[name]()


if __name__ == "__main__":
    sys.stdout.write(page())
