"""A llama.cpp server on a model folder, for tests: python llama_server.py FOLDER GGUF writes GGUF and serves it.

The weights are written as float32, so that llama.cpp computes in float32 as transformers does on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_gguf(folder: Path, path: Path) -> None:
    """Writes a Llama with a byte-level BPE tokenizer as GGUF, as llama.cpp's own converter does."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        for part, count in (("q_proj.weight", heads), ("k_proj.weight", kv_heads)):
            if name.endswith(part):  # GGUF has the two halves that rotary positions turn interleaved
                rows, columns = values.shape
                values = values.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, folder: Path) -> None:
    import gguf

    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    known = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    tokens = sorted(known, key=known.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if one in special else gguf.TokenType.NORMAL for one in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(known[settings["bos_token"]])
    writer.add_eos_token_id(known[settings["eos_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))


@contextmanager
def serving(folder: Path, work: Path, *, seconds: float = 120.0) -> Iterator[str]:
    """The base URL of a server on a model folder, in a process of its own that ends with the block, however it ends.

    Args:
        folder: SmolLM2 as safetensors.
        work: For the GGUF file and the log.
        seconds: How long it may take until it listens.
    """
    log = work / "server.log"
    with log.open("w") as errors:
        command = [sys.executable, __file__, str(folder), str(work / "model.gguf")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield _address(process, log, time.monotonic() + seconds)
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str], log: Path, deadline: float) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()  # nothing else is printed there
    if not line.startswith("http") or time.monotonic() > deadline:
        raise RuntimeError(f"the server did not start: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")
    return f"{line}/v1"


def main(folder: Path, path: Path) -> None:
    """Writes and serves until killed."""
    import xllamacpp

    write_gguf(folder, path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel = 4096, 2
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.ui = params.warmup = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
