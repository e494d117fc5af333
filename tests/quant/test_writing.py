"""Files of weights written side by side: the same bytes, on the disk at the end, and errors reach the caller."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import modeling_utils

from halfbyte.quant import patches, writing
from halfbyte.quant.writing import WRITERS, on_host, side_by_side
from halfbyte.records import digests, files

FILES = 3 * WRITERS


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _save_in_shards(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that write."""
    threads = set()

    def recorded(*args: Any, **options: Any) -> None:
        threads.add(threading.get_ident())
        save_file(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_utils, "safe_save_file", recorded)
        model.save_pretrained(folder, max_shard_size=80_000)
    return threads


def _write_all(save: Any, folder: Path) -> None:
    with side_by_side(save) as begin:
        for index in range(FILES):
            begin({"weight": torch.ones(8)}, folder / f"{index}.safetensors")


def test_the_files_are_those_of_transformers(
    tiny_llama: Any,
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
) -> None:
    tiny_llama.save_pretrained(tmp_path / "alone", max_shard_size=80_000)
    with patches.shards_side_by_side():
        tiny_llama.save_pretrained(tmp_path / "beside", max_shard_size=80_000)
    found = _content(tmp_path / "beside")
    assert len([name for name in found if name.endswith(".safetensors")]) > 2
    assert found == _content(tmp_path / "alone")
    assert modeling_utils.safe_save_file is save_file


def test_transformers_by_itself_writes_one_file_after_the_other(
    tiny_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When this fails, patches.shards_side_by_side may have become needless.
    assert _save_in_shards(tiny_llama, tmp_path, monkeypatch) == {threading.get_ident()}


def test_at_the_end_all_is_on_the_disk_and_hashed(
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced: list[Path] = []
    sync = files.sync_file

    def recorded(path: Path) -> None:
        synced.append(path)
        sync(path)

    monkeypatch.setattr(writing, "sync_file", recorded)
    paths = [tmp_path / f"{index}.safetensors" for index in range(FILES)]
    with side_by_side(save_file) as save:
        for path in paths:
            save({"weight": torch.ones(8)}, path)
    assert sorted(synced) == sorted(paths)
    monkeypatch.setattr(digests, "CHUNK", "not to be read again")
    assert len(set(digests.file_digests(paths))) == 1


def test_no_more_than_so_many_files_are_written_at_once(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    lock, several = threading.Lock(), threading.Event()
    at_once = most = 0

    def save(tensors: Any, filename: Any, metadata: Any = None) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            if at_once == WRITERS:
                several.set()
        assert several.wait(20), "the files are not written side by side"
        save_file(tensors, filename, metadata)
        with lock:
            at_once -= 1

    _write_all(save, tmp_path)
    assert most == WRITERS


@pytest.mark.parametrize("failing", [0, FILES - 1], ids=["first", "last"])
def test_an_error_in_a_thread_reaches_the_caller_and_nothing_is_written_after_it(
    failing: int,
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
) -> None:
    def save(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if Path(filename).stem == str(failing):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, filename, metadata)

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    threads = threading.active_count()
    with pytest.raises(OSError, match="No space left"):
        _write_all(save, folder)
    assert threading.active_count() == threads
    assert not (folder / f"{failing}.safetensors").exists()


def test_a_file_that_cannot_be_synced_is_an_error(
    tmp_path: Path,
    cache: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(writing, "sync_file", fail)
    with pytest.raises(OSError, match="Input/output"), side_by_side(save_file) as save:
        save({"weight": torch.ones(8)}, tmp_path / "a.safetensors")


def test_an_interruption_waits_for_what_is_being_written(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    started, done = threading.Event(), threading.Event()

    def save(tensors: Any, filename: Any, metadata: Any = None) -> None:
        started.set()
        save_file(tensors, filename, metadata)
        done.set()

    def interrupted() -> None:
        with side_by_side(save) as begin:
            begin({"weight": torch.ones(8)}, tmp_path / "a.safetensors")
            assert started.wait(20)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done.is_set()


def test_a_tensor_that_is_in_host_memory_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert on_host(tensor) is tensor


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int64])
def test_a_tensor_comes_from_a_gpu_as_it_is(dtype: torch.dtype) -> None:
    codes = torch.randint(0, 256, (33, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = on_host(codes.view(dtype).to("cuda"))
    assert (found.device.type, found.dtype) == ("cpu", dtype)
    assert torch.equal(found.view(torch.uint8), codes)
