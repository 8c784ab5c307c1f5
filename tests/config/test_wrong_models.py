"""Models that no engine can serve: `prism-serve check` says so in one line, with the remedy."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers.models import BPE, WordLevel

from kvcached.weights import checkpoint
from prism.cli.exit_codes import run
from prism.cli.serve import check, up
from prism.engines import vllm
from tests.config.model_edits import (
    FP8,
    GENERATION,
    INDEX,
    LLAMA3,
    LONGROPE,
    TEMPLATE,
    WEIGHTS,
    WRONG_TP,
    Edit,
    Q,
    both,
    content,
    cut,
    damage,
    half_an_index,
    keys,
    more_tokens,
    of_family,
    of_yaml,
    renamed,
    tensor,
    tokenizer_of,
    twice,
    without,
    without_layer,
)
from tests.config.wrong_layers import LAYERS
from tests.frontend.tiny_model import make_whole_model

GOOD: dict[str, Any] = {
    "devices": [{"name": f"host:{i}", "capacity": "64MiB", "page": "64KiB"} for i in range(2)],
    "models": [{"name": "a", "path": "m"}],
    "engine": {"adapter": "sglang", "static": "1MiB"},
    "frontend": {"port": 0},
}
# Name -> change, and the line of `check`, in which {m} is the model's folder. A line that ends with
# ... is longer.
WRONG: dict[str, tuple[Edit, str]] = {
    "no config.json": (
        without("config.json"),
        "models[0].path: {m} does not have config.json; give a directory in Hugging Face's"
        " layout (config.json, tokenizer.json, *.safetensors)",
    ),
    "config.json is not JSON": (
        content("config.json", b"{"),
        "models[0].path: cannot read {m}/config.json: Expecting property name enclosed in"
        " double quotes: line 1 column 2 (char 1); repair the file",
    ),
    "config.json is a list": (
        content("config.json", b"[]"),
        "models[0].path: {m}/config.json is not a JSON object; repair the file",
    ),
    "config.json is nested without an end": (
        content("config.json", b"[" * 100_000),
        "models[0].path: cannot read {m}/config.json: maximum recursion depth exceeded while"
        " decoding a JSON array from a unicode string; repair the file",
    ),
    "a size is text": (
        keys(hidden_size="32"),
        'models[0].path: {m}/config.json has hidden_size "32", which is not a whole number of'
        " at least 1; correct the file",
    ),
    "a size is negative": (
        keys(num_attention_heads=-4),
        "models[0].path: {m}/config.json has num_attention_heads -4, which is not a whole"
        " number of at least 1; correct the file",
    ),
    "a size is zero": (
        keys(num_hidden_layers=0),
        "models[0].path: {m}/config.json has num_hidden_layers 0, which is not a whole number"
        " of at least 1; correct the file",
    ),
    "a size is huge": (
        keys(vocab_size=2**40),
        "models[0].path: {m}/config.json has vocab_size 1099511627776, which is not a whole"
        " number of at most 2147483647; correct the file",
    ),
    "a size is not a number": (
        keys(intermediate_size=float("nan")),
        "models[0].path: {m}/config.json has intermediate_size NaN, which is not a whole"
        " number of at least 1; correct the file",
    ),
    "a size is true": (
        keys(num_hidden_layers=True),
        "models[0].path: {m}/config.json has num_hidden_layers true, which is not a whole"
        " number of at least 1; correct the file",
    ),
    "no architecture": (
        keys(architectures=...),
        "models[0].path: {m}/config.json names architecture 'none', which does not generate"
        " text; give a causal language model",
    ),
    "an unknown architecture": (
        keys(architectures=["FooForCausalLM"]),
        "models[0].path: {m}/config.json names FooForCausalLM, which the installed SGLang"
        " cannot serve; give another model or upgrade it",
    ),
    "the architecture of an encoder": (
        keys(architectures=["BertModel"]),
        "models[0].path: {m}/config.json names architecture 'BertModel', which does not"
        " generate text; give a causal language model",
    ),
    "two architectures, the first of another family": (
        keys(architectures=["Qwen3ForCausalLM", "LlamaForCausalLM"]),
        "models[0].path: {m}/config.json names Qwen3ForCausalLM, which is not an architecture"
        " of model_type 'llama'; correct one of them",
    ),
    "no model_type": (
        keys(model_type=...),
        "models[0].path: {m}/config.json lacks model_type; complete the file",
    ),
    "an unknown model_type": (
        keys(model_type="foo"),
        'models[0].path: {m}/config.json has model_type "foo", a family whose sizes are not'
        " known; give a model of ...",
    ),
    "the model_type of another family": (
        keys(model_type="qwen2"),
        "models[0].path: {m}/config.json names LlamaForCausalLM, which is not an architecture"
        " of model_type 'qwen2'; correct one of them",
    ),
    "heads that do not divide hidden_size": (
        keys(num_attention_heads=5, num_key_value_heads=5),
        "models[0].path: {m}/config.json has hidden_size 32 for 5 heads, which does not"
        " divide it; correct one of them",
    ),
    "heads that share no K and V heads": (
        keys(num_key_value_heads=3),
        "models[0].path: {m}/config.json has 4 query heads for 3 K and V heads, which does"
        " not divide them; correct one of them",
    ),
    "an odd head_dim": (
        keys(head_dim=7),
        "models[0].path: {m}/config.json has head_dim 7, which is not even; correct the file",
    ),
    "another head_dim than the files": (
        keys(head_dim=16),
        "models[0].path: {m} has model.layers.0.self_attn.k_proj.weight of shape [16, 32],"
        " but config.json gives [32, 32], by its heads and hidden_size; correct config.json"
        " or the files",
    ),
    "another hidden_size than the files": (
        keys(hidden_size=64),
        "models[0].path: {m} has model.embed_tokens.weight of shape [300, 32], but"
        " config.json gives [300, 64], by vocab_size and hidden_size; correct config.json or"
        " the files",
    ),
    "another vocab_size than the files": (
        keys(vocab_size=400),
        "models[0].path: {m} has model.embed_tokens.weight of shape [300, 32], but"
        " config.json gives [400, 32], by vocab_size and hidden_size; correct config.json or"
        " the files",
    ),
    "another intermediate_size than the files": (
        keys(intermediate_size=128),
        "models[0].path: {m} has 9280 parameters in layer 0, but config.json describes 15424;"
        " correct its heads, biases, experts or intermediate_size, or complete the files",
    ),
    "fewer layers than the files": (
        keys(num_hidden_layers=1),
        "models[0].path: {m} has tensors of 2 layers, but config.json describes 1; correct"
        " the number of layers",
    ),
    "more layers than the files": (
        keys(num_hidden_layers=3),
        "models[0].path: {m} lacks the tensors of layer 2, but config.json describes 3;"
        " correct the number of layers, or complete the files",
    ),
    "biases that the files lack": (
        keys(attention_bias=True),
        "models[0].path: {m} has 9280 parameters in layer 0, but config.json describes 9376;"
        " correct its heads, biases, experts or intermediate_size, or complete the files",
    ),
    "an activation that SGLang does not compute": (
        keys(hidden_act="gelu"),
        "models[0].path: {m}/config.json has hidden_act 'gelu', but SGLang computes silu for"
        " llama; give another model",
    ),
    "an epsilon that is text": (
        keys(rms_norm_eps="1e-6"),
        'models[0].path: {m}/config.json has rms_norm_eps "1e-6", which is not a number of at'
        " least 0; correct the file",
    ),
    **LAYERS,
    "no positions": (
        keys(max_position_embeddings=0),
        "models[0].path: {m}/config.json has max_position_embeddings 0, which is not a whole"
        " number of at least 1; correct the file",
    ),
    "an unknown dtype": (
        keys(dtype="int4"),
        'models[0].path: {m}/config.json has dtype "int4", which is not one of float32,'
        " bfloat16, float16; correct the file",
    ),
    "quantized weights": (
        keys(**FP8),
        "models[0].path: {m} has weights quantized by fp8, whose kernels need GPUs: give GPUs as"
        " devices, or other weights",
    ),
    "quantized weights deep in config.json": (
        keys(parts=[{"decoder": FP8}]),
        "models[0].path: {m} has weights quantized by fp8, whose kernels need GPUs: give GPUs as"
        " devices, or other weights",
    ),
    "quantized weights by ModelOpt": (
        content("hf_quant_config.json", b"{}"),
        "models[0].path: {m} has weights quantized by modelopt, whose kernels need GPUs: give GPUs"
        " as devices, or other weights",
    ),
    "quantized weights that no key names": (
        tensor(Q, (32, 32), np.int8),
        "models[0].path: {m} has model.layers.1.self_attn.q_proj.weight in int8; give an"
        " unquantized checkpoint",
    ),
    "an untied model without lm_head": (
        keys(tie_word_embeddings=False),
        "models[0].path: {m} lacks lm_head.weight, but config.json has tie_word_embeddings"
        " false; complete the files, or correct config.json to true",
    ),
    "an end that is text": (
        keys(eos_token_id="</s>"),
        'models[0].path: {m}/config.json has eos_token_id "</s>", which is not a token\'s number,'
        " or a list of them; correct the file",
    ),
    "an end outside of the vocabulary": (
        keys(eos_token_id=5000),
        "models[0].path: {m}/config.json has eos_token_id 5000, which is not a token of the"
        " vocabulary of 300 tokens; correct the file",
    ),
    "more experts for a token than there are": (
        of_family("mixtral", "MixtralForCausalLM", num_local_experts=2, num_experts_per_tok=4),
        "models[0].path: {m}/config.json routes a token to 4 of 2 experts; correct one of them",
    ),
    "no weights": (
        without(WEIGHTS),
        "models[0].path: {m} does not have *.safetensors; save the weights in that format",
    ),
    "an index that names a missing shard": (
        content(INDEX, b'{"weight_map": {"x": "model-2.safetensors"}}'),
        "models[0].path: {m}/model-2.safetensors: No such file or directory; download it again",
    ),
    "an index of half of the shards": (
        half_an_index,
        "models[0].path: {m} lacks self_attn.k_proj.weight of layer 1; complete the files",
    ),
    "an index that lists nothing": (
        content(INDEX, b"{}"),
        "models[0].path: {m}/model.safetensors.index.json is damaged ('weight_map'); download"
        " it again",
    ),
    "a truncated shard": (
        cut,
        "models[0].path: {m}/model.safetensors is damaged or not complete: it has 58276"
        " bytes, but its header describes 58376; download it again",
    ),
    "a header that is not JSON": (
        damage(b'"model', b"x"),
        "models[0].path: {m}/model.safetensors is damaged or not complete: its header is not"
        " valid JSON: Expecting property name enclosed in double quotes: line 1 column 2"
        " (char 1); download it again",
    ),
    "a dtype that safetensors lack": (
        damage(b'"F16"', b'"F17"'),
        "models[0].path: {m}/model.safetensors is damaged or not complete: tensor"
        " model.embed_tokens.weight: 'F17'; download it again",
    ),
    "a layer without q_proj": (
        tensor(Q, None),
        "models[0].path: {m} lacks self_attn.q_proj.weight of layer 1; complete the files",
    ),
    "a layer without its norm": (
        tensor("model.layers.0.input_layernorm.weight", None),
        "models[0].path: {m} lacks input_layernorm.weight of layer 0; complete the files",
    ),
    "no last norm": (
        tensor("model.norm.weight", None),
        "models[0].path: {m} has 9600 parameters outside of its layers, but config.json"
        " describes 9632; complete the files, which have model.embed_tokens.weight",
    ),
    "no embedding": (
        tensor("model.embed_tokens.weight", None),
        "models[0].path: {m} lacks the embedding (embed_tokens.weight); complete the files",
    ),
    "no tensors of a layer": (
        without_layer,
        "models[0].path: {m} lacks the tensors of layer 0, but config.json describes 2;"
        " correct the number of layers, or complete the files",
    ),
    "a tensor of another shape": (
        tensor(Q, (16, 32)),
        "models[0].path: {m} has model.layers.1.self_attn.q_proj.weight of shape [16, 32],"
        " but other layers have [32, 32]; correct config.json or the files",
    ),
    "names of another loader": (
        renamed("self_attn.q_proj", "attention.query"),
        "models[0].path: {m} has model.layers.0.attention.query.weight, a name that the loader of"
        " llama does not know; save the weights with the names that transformers gives them",
    ),
    "names of another MLP": (
        renamed(".mlp.", ".ffn."),
        "models[0].path: {m} has model.layers.0.ffn.down_proj.weight, a name that the loader of"
        " llama does not know; save the weights with the names that transformers gives them",
    ),
    "names of another norm": (
        renamed("input_layernorm", "ln_in"),
        "models[0].path: {m} has model.layers.0.ln_in.weight, a name that the loader of llama does"
        " not know; save the weights with the names that transformers gives them",
    ),
    "a transposed tensor": (
        tensor("model.layers.1.mlp.down_proj.weight", (64, 32)),
        "models[0].path: {m} has model.layers.1.mlp.down_proj.weight of shape [64, 32], but"
        " other layers have [32, 64]; correct config.json or the files",
    ),
    "no tokenizer": (
        without("tokenizer.json"),
        "models[0].path: {m} does not have tokenizer.json; save the fast tokenizer there",
    ),
    "a tokenizer that is not JSON": (
        content("tokenizer.json", b"{"),
        "models[0].path: cannot load {m}/tokenizer.json: Cannot instantiate Tokenizer from"
        " buffer: EOF while parsing an object at line 1 column 1; save the fast tokenizer"
        " again",
    ),
    "a tokenizer of another version": (
        keys("tokenizer.json", version="9.0"),
        "models[0].path: cannot load {m}/tokenizer.json: Cannot instantiate Tokenizer from"
        " buffer: Unknown tokenizer version '9.0' at line 1 column 17; save the fast"
        " tokenizer again",
    ),
    "a tokenizer with more tokens than the model": (
        more_tokens,
        "models[0].path: {m}/tokenizer.json has token 328 ('<more39>'), but config.json has"
        " vocab_size 300; save the model's own tokenizer there",
    ),
    "a tokenizer that makes no tokens": (
        tokenizer_of(BPE({"word": 0}, [])),
        "models[0].path: {m}/tokenizer.json makes no tokens of the text 'PrismMark'; save the"
        " model's own tokenizer there",
    ),
    "a tokenizer that lacks letters": (
        tokenizer_of(WordLevel({"word": 0})),
        "models[0].path: {m}/tokenizer.json cannot encode the text 'PrismMark': WordLevel error:"
        " Missing [UNK] token from the vocabulary; save the model's own tokenizer there",
    ),
    "settings of the tokenizer that are a list": (
        content(TEMPLATE, b"[]"),
        "models[0].path: {m}/tokenizer_config.json is not a JSON object; repair the file",
    ),
    "an end that is not a token": (
        keys(TEMPLATE, eos_token="<|nope|>"),
        'models[0].path: {m}/tokenizer_config.json has eos_token "<|nope|>", which is not a'
        " token of tokenizer.json; correct one of them",
    ),
    "a template with a mistake": (
        keys(TEMPLATE, chat_template="{% for %}"),
        "models[0].path: {m}: the chat template is not valid Jinja: Expected an expression,"
        " got 'end of statement block' (line 1); repair it",
    ),
    "a template that cannot be read": (
        content("chat_template.jinja", b"\xff{{ messages }}"),
        "models[0].path: cannot read {m}/chat_template.jinja: 'utf-8' codec can't decode byte"
        " 0xff in position 0: invalid start byte; repair the file",
    ),
    "a template that is a number": (
        keys(TEMPLATE, chat_template=5),
        "models[0].path: {m}: chat_template is not text; repair tokenizer_config.json",
    ),
    "a template that refuses users": (
        keys(TEMPLATE, chat_template="{{ raise_exception('no\\nusers') }}"),
        "models[0].path: {m}: the chat template fails for a message of a user: no users; repair it",
    ),
    "a template that leaves users out": (
        keys(TEMPLATE, chat_template="hello"),
        "models[0].path: {m}: the chat template leaves out the user's message; repair it",
    ),
    "a default that is text": (
        keys(GENERATION, temperature="0.7"),
        'models[0].path: {m}/generation_config.json has temperature "0.7", which is not a'
        " number; correct the file",
    ),
    "a default that is true": (
        keys(GENERATION, top_p=True),
        "models[0].path: {m}/generation_config.json has top_p true, which is not a number;"
        " correct the file",
    ),
    "a default that is not a number": (
        keys(GENERATION, top_k=float("nan")),
        "models[0].path: {m}/generation_config.json has top_k NaN, which is not a number;"
        " correct the file",
    ),
    "a default that is negative": (
        keys(GENERATION, temperature=-0.5),
        "models[0].path: {m}/generation_config.json has temperature -0.5, which must be >= 0;"
        " correct the file",
    ),
    "an end of generation outside of the vocabulary": (
        keys(GENERATION, eos_token_id=[0, 9999]),
        "models[0].path: {m}/generation_config.json has eos_token_id 9999, which is not"
        " a token of the vocabulary of 300 tokens; correct the file",
    ),
    "settings of generation that are a list": (
        content(GENERATION, b"[]"),
        "models[0].path: {m}/generation_config.json is not a JSON object; repair the file",
    ),
    "a longer context than the model's": (
        of_yaml(context_length=1000),
        "models[0].context_length: 1000 is more than the 256 tokens that {m}/config.json has,"
        " by its positions or its sliding window; lower it, or leave the key out",
    ),
    "an unknown dtype in the YAML": (
        of_yaml(dtype="int8"),
        "models[0].dtype: unknown value 'int8'; choose one of auto, float32, bfloat16, float16",
    ),
    **WRONG_TP,
    "an adapter's path that is wrong": (
        of_yaml(lora=[{"name": "x", "path": "nowhere"}]),
        "models[0].lora[0].path: cannot read {folder}/nowhere/adapter_config.json: No such"
        " file or directory; give the folder of an adapter in PEFT's format",
    ),
    "embeddings of a family without": (
        both(
            of_family("gpt2", "GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=2, n_positions=256),
            of_yaml(embeddings=True),
        ),
        "models[0].path: {m}/config.json names GPT2LMHeadModel, for which SGLang makes no"
        " embeddings; give another model or set embeddings: false",
    ),
    "dimensions that are not a list": (
        both(keys(matryoshka_dimensions=5), of_yaml(embeddings=True)),
        "models[0].embeddings: {m}/config.json has matryoshka_dimensions 5, which is not a"
        " list of numbers of 1 to 32; correct the file",
    ),
    "an unknown tool parser": (
        of_yaml(tool_parser="foo"),
        "models[0].tool_parser: 'foo' is unknown; give auto, none or one of ...",
    ),
    "an unknown reasoning parser": (
        of_yaml(reasoning_parser="foo"),
        "models[0].reasoning_parser: 'foo' is unknown; give auto, none or one of ...",
    ),
    "a path that is not a folder": (
        of_yaml(path="m/config.json"),
        "models[0].path: {m}/config.json is not a directory, and 'm/config.json' is not"
        " ORG/NAME of a model hub; correct the path",
    ),
    "two models of one name": (
        twice,
        "models[1].name: 'a' is used twice; rename one",
    ),
    "an unknown adapter": (
        of_yaml(adapter="vlm"),
        "models[0].adapter: unknown value 'vlm'; choose one of fake, sglang, vllm",
    ),
    "a family that vLLM does not serve": (
        both(
            of_family("qwen3_5_text", "Qwen3_5ForCausalLM", full_attention_interval=2),
            of_yaml(adapter="vllm"),
        ),
        "models[0].path: {m}/config.json has model_type 'qwen3_5_text', which vllm engines do not"
        " serve; they serve ...",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_whole_model(tmp_path / "m")
    return tmp_path


def written(folder: Path, edit: Edit) -> Path:
    data = copy.deepcopy(GOOD)
    edit(folder / "m", data)
    path = folder / "prism.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "lacks", lambda _device: "")


def check_line(said: str, path: Path, line: str) -> None:
    """Compares what was said with an expected line, which may end before its end, with `...`."""
    folder, begin = path.parent, line.removesuffix("...")
    expected = f"error: {path}: {begin.format(m=folder / 'm', folder=folder)}"
    assert said.count("\n") == 1
    assert said.startswith(expected)
    assert line != begin or said == f"{expected}\n"


@pytest.mark.parametrize("name", WRONG)
def test_check_says_what_is_wrong_in_one_line(
    folder: Path, with_vllm: None, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    edit, line = WRONG[name]
    path = written(folder, edit)
    with pytest.raises(SystemExit) as ended:
        run(lambda: check(config=path), "error")
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    check_line(said.err, path, line)


@pytest.mark.parametrize("name", ["heads that share no K and V heads", "a layer without q_proj"])
def test_the_command_says_the_same(folder: Path, short_dir: Path, name: str) -> None:
    edit, line = WRONG[name]
    path = written(folder, edit)
    command = [sys.executable, "-c", "from prism.cli.serve import main; main()", "check"]
    done = subprocess.run(
        [*command, "--config", str(path)],
        env={**os.environ, "TMPDIR": str(short_dir)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    check_line(done.stderr, path, line)


@pytest.mark.parametrize("name", ["a template with a mistake", "a template that refuses users"])
def test_starting_says_the_same_as_check(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    edit, line = WRONG[name]
    path = written(folder, edit)
    with pytest.raises(SystemExit) as ended:
        run(lambda: up(config=path), "error")
    assert ended.value.code == 2
    check_line(capsys.readouterr().err, path, line)


ACCEPTED: dict[str, Edit] = {
    "as it is": keys(),
    "without a chat template": keys(TEMPLATE, chat_template=...),
    "a tied model that stores lm_head again": tensor("lm_head.weight", (300, 32)),
    "buffers and biases that engines ignore": both(
        tensor("model.layers.0.self_attn.rotary_emb.inv_freq", (4,)),
        tensor("model.layers.0.self_attn.q_proj.bias", (32,)),
    ),
    "a layer that predicts further tokens": both(
        keys(num_nextn_predict_layers=1), tensor("model.layers.2.eh_proj.weight", (32, 64))
    ),
    "defaults that mean none": keys(GENERATION, temperature=None, top_k=0, eos_token_id=[0]),
    "positions of Llama 3": keys(rope_scaling={**LLAMA3, "original_max_position_embeddings": 128}),
    "keys of positions that are null": keys(
        rope_scaling={**LLAMA3, "original_max_position_embeddings": 128, "attention_factor": None}
    ),
    "LongRoPE": keys(rope_scaling=LONGROPE, original_max_position_embeddings=128),
    "LongRoPE for a part of a head": keys(
        rope_scaling={**LONGROPE, "short_factor": [1.0] * 2, "long_factor": [1.0] * 2},
        partial_rotary_factor=0.5,
    ),
    "a tensor that no loader knows, in addition": tensor("model.layers.0.extra.scale", (4, 4)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_engines_can_serve_is_accepted(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    check(config=written(folder, ACCEPTED[name]))
    assert capsys.readouterr().err == ""


def test_headers_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks twice. The headers are read again the second time, when the file may have changed."""
    read, original = list[Path](), checkpoint._read_header
    monkeypatch.setattr(
        checkpoint, "_read_header", lambda path: (read.append(path), original(path))[1]
    )
    path = written(folder, keys())
    for turn in range(2):
        check(config=path)
        assert len(read) == turn + 1
