"""How a model's authors mean its hidden states to become one embedding: read from the folder, never guessed.

Sentence-transformers describe it in modules.json, whose Pooling module has a folder with a config.json of its own. A
decoder without such a description is pooled at its last token, which is the only one that has seen the whole prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from static_graphs.load_errors import ModelLoadError

_SERVED = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_MODULES = ("Transformer", "Pooling", "Normalize")
"""What an embedding runs through here."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """`kind` None: the model's embeddings cannot be made here, for `reason`."""

    kind: Literal["last", "mean"] | None
    reason: str = ""


def own_pooling(folder: Path) -> Embedding:
    """The model's own way. Raises ModelLoadError for a description that cannot be read."""
    modules = _read(folder / "modules.json")
    if modules is None:
        return Embedding("last")
    kinds = [(str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    other = next((kind for kind, _ in kinds if kind not in _MODULES), None)
    if other is not None:
        return Embedding(None, f"its modules.json has a module {other}, which is not served")
    pooling = next((path for kind, path in kinds if kind == "Pooling"), None)
    if pooling is None:
        return Embedding("last")
    config = _read(folder / pooling / "config.json") or {}
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) == 1 and modes[0] in _SERVED:
        return Embedding("last" if _SERVED[modes[0]] == "last" else "mean")
    named = " and ".join(mode.removeprefix("pooling_mode_") for mode in modes) or "nothing"
    return Embedding(None, f"it pools by {named}, and only last and mean are served: --pooling chooses one of them")


def matryoshka_sizes(config: Any) -> tuple[int, ...] | None:
    """Sizes that an embedding may be cut to, by the names that model configs use; (): any; None: it may not."""
    sizes = getattr(config, "matryoshka_dimensions", None)
    if sizes:
        return tuple(sorted(int(size) for size in sizes))
    return () if getattr(config, "is_matryoshka", False) else None


def _read(path: Path) -> Any:
    """None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
