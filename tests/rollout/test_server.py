"""What the rollout server refuses before vLLM is asked, and how: requests, clients, ports, settings."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import ConfigError, ModelError
from megarl.rollout.server import Access, bind, is_loopback
from megarl.rollout.server_engine import load_tokenizer
from megarl.rollout.server_requests import FIELDS, MAX_PROMPTS, RequestError, parse_request
from megarl.rollout.server_settings import ServerSettings, check_device, check_settings
from megarl.types import SamplingSettings
from tests.megatron.models import random_qwen2

DEFAULTS = SamplingSettings(temperature=0.7, top_p=0.9, top_k=5, max_response_tokens=16, stop_token_ids=(3,))
VOCABULARY = 100


def parse(request: object) -> object:
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    return parse_request(body, DEFAULTS, VOCABULARY)


def test_what_a_request_leaves_out_is_the_servers():
    asked = parse({"prompts": ["a"]})
    assert (asked.prompts, asked.sampling, asked.seed) == (["a"], DEFAULTS, None)


def test_a_request_may_set_everything():
    messages = [{"role": "user", "content": "b"}]
    values = {"max_new_tokens": 4, "temperature": 0, "top_p": 1, "top_k": -1, "seed": 7, "stop_token_ids": [1, 99]}
    asked = parse({"prompts": ["a", messages]} | values)
    assert asked.prompts == ["a", messages]
    assert asked.sampling == SamplingSettings(0.0, 1.0, -1, 4, (1, 99))
    assert asked.seed == 7


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b'{"prompts": ["a"], "seed": ' + b"1" * 5000 + b"}", "no JSON"),
        ([], "no JSON object"),
        ({}, "no prompts"),
        ({"prompts": []}, "no prompts"),
        ({"prompts": "a"}, "no prompts"),
        ({"prompt": ["a"]}, r"unknown field 'prompt'[\s\S]*did you mean prompts"),
        ({"prompts": ["a"], "max_tokens": 3}, r"unknown field 'max_tokens'[\s\S]*max_new_tokens"),
        ({"prompts": [3]}, r"prompts\[0\] is neither"),
        ({"prompts": ["a", []]}, r"prompts\[1\] is neither"),
        ({"prompts": [[{"role": "user"}]]}, r"prompts\[0\] is neither"),
        ({"prompts": [[{"role": "user", "content": None}]]}, r"prompts\[0\] is neither"),
        (b'{"prompts": ["\\ud800"]}', r"prompts\[0\] is no Unicode"),
        ({"prompts": ["a"], "max_new_tokens": 17}, "from 1 to 16"),
        ({"prompts": ["a"], "max_new_tokens": 0}, "from 1 to 16"),
        ({"prompts": ["a"], "max_new_tokens": 1.5}, "no whole number"),
        ({"prompts": ["a"], "temperature": -1}, "temperature is out of range"),
        ({"prompts": ["a"], "temperature": True}, "temperature is out of range"),
        (b'{"prompts": ["a"], "temperature": NaN}', "temperature is out of range"),
        (b'{"prompts": ["a"], "temperature": 1e999}', "temperature is out of range"),
        ({"prompts": ["a"], "top_p": 0}, "top_p is out of range"),
        ({"prompts": ["a"], "top_k": 0}, "top_k is out of range"),
        ({"prompts": ["a"], "seed": -1}, "seed is out of range"),
        ({"prompts": ["a"], "seed": 10**300}, "seed is out of range"),
        ({"prompts": ["a"], "stop_token_ids": [100]}, "from 0 to 99"),
        ({"prompts": ["a"], "stop_token_ids": 3}, "no token ids"),
    ],
)
def test_a_malformed_request_is_the_clients_fault(request_, message):
    with pytest.raises(RequestError, match=message) as refused:
        parse(request_)
    assert refused.value.status == 400


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), st.none() | st.integers() | st.floats() | st.text())
)
def test_no_request_is_the_servers_fault(request_):
    try:
        asked = parse(request_)
    except RequestError as refused:
        assert refused.status == 400
    else:
        assert asked.prompts


def test_too_many_prompts_are_too_large_a_request():
    assert len(parse({"prompts": ["a"] * MAX_PROMPTS}).prompts) == MAX_PROMPTS
    with pytest.raises(RequestError, match="too many prompts") as refused:
        parse({"prompts": ["a"] * (MAX_PROMPTS + 1)})
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True)]
    + [("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.evil.example", False), ("", False)],
)
def test_which_hosts_are_this_machine_alone(host, own):
    assert is_loopback(host) == own


def client(host: str = "localhost", token: str = "", content: str = "application/json") -> SimpleNamespace:
    """As much of a request as is looked at."""
    headers = {"content-type": content} | ({"authorization": token} if token else {})
    return SimpleNamespace(method="POST", headers=headers, url=SimpleNamespace(hostname=host, path="/generate"))


@pytest.mark.parametrize(
    ("token", "request_", "status"),
    [
        ("", client(), None),
        ("", client(content="application/json; charset=utf-8"), None),
        ("", client(content="text/plain"), 415),  # what a web page can send without asking
        ("", client(host="evil.example"), 403),  # a web page whose name was given this machine's address
        ("sesame-sesame-1", client(), 401),
        ("sesame-sesame-1", client(token="Bearer wrong"), 401),
        ("sesame-sesame-1", client(token="Basic sesame-sesame-1"), 401),
        ("sesame-sesame-1", client(token="Bearer sesame-sesame-1x"), 401),
        ("sesame-sesame-1", client(token="Bearer sésame"), 401),
        ("sesame-sesame-1", client(token="Bearer sesame-sesame-1", host="node7"), None),
    ],
)
def test_who_may_generate(token, request_, status):
    if status is None:
        Access(token).check(request_)
        return
    with pytest.raises(RequestError) as refused:
        Access(token).check(request_)
    assert refused.value.status == status
    assert not token or token not in str(refused.value)


def test_a_port_that_listens_is_taken_and_0_finds_a_free_one():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert port > 0
        with pytest.raises(ConnectionRefusedError):  # it is held, and nobody waits in a queue before the server is ready
            socket.create_connection(("127.0.0.1", port), timeout=5)
        first.listen()
        with pytest.raises(ConfigError, match=rf"can't have its port[\s\S]*127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="can't have its port"):
        bind("192.0.2.1", 0)  # an address of documentation, nobody's


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    random_qwen2(directory, vocab=61, hidden=128, ffn=192, spread=0.1)
    return directory


def on_cpu(model: Path, **changes) -> ServerSettings:
    return replace(ServerSettings(str(model), str(model), max_concurrent=4, max_prompt_tokens=24, max_new_tokens=8), **changes)


def test_sizes_follow_from_the_models_config(model):
    served = check_settings(on_cpu(model))
    config = json.loads((model / "config.json").read_text())
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 32 * 4
    assert (served.vocabulary, served.dtype) == (61, "float32")
    assert served.kv_cache_bytes == (4 * 1 + 1) * 128 * token
    assert check_settings(on_cpu(model, block_size=32)).kv_cache_bytes == (4 * 1 + 1) * 32 * token
    assert check_settings(on_cpu(model, dtype="bfloat16")).kv_cache_bytes == served.kv_cache_bytes // 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_dir": "meta-llama/Llama-2-7b-hf"}, ModelError, r"no such directory[\s\S]*hf download meta-llama/Llama-2-7b-hf"),
        ({"tokenizer_dir": "some/tokenizer"}, ModelError, r"--tokenizer_name_or_path[\s\S]*hf download some/tokenizer"),
        ({"max_prompt_tokens": 10**6}, ModelError, r"model's positions[\s\S]*1000008 = 1000000 \(--max_prompt_length\)"),
        ({"block_size": 16}, ConfigError, r"block size[\s\S]*multiple of 32[\s\S]*--block_size 32"),
        ({"device": "cuda:0"}, ConfigError, r"no CUDA device[\s\S]*--device cpu"),
        ({"device": "tpu"}, ConfigError, "unknown device"),
        ({"device": "cpu:0"}, ConfigError, "unknown device"),
    ],
)
@pytest.mark.usefixtures("without_gpu")
def test_settings_that_can_not_work_are_refused_before_vllm_is_loaded(model, changes, error, message):
    with pytest.raises(error, match=message):
        check_settings(on_cpu(model, **changes))


@pytest.fixture
def without_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")


def test_cuda_and_its_number_are_compared_with_the_machine():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    check_device("cuda")
    check_device("cuda:0")
    with pytest.raises(ConfigError, match="no such CUDA device"):
        check_device("cuda:99")


def test_a_model_without_weights_is_refused(model, tmp_path):
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match="without weights"):
        check_settings(on_cpu(tmp_path / "bare"))


def test_stop_tokens_are_the_models_own(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    for written, expected in (('{"eos_token_id": [5, 11]}', (5, 11)), ('{"eos_token_id": 7}', (7,)), ("{}", ())):
        file.write_text(written)
        assert check_settings(on_cpu(tmp_path / "model")).stop_token_ids == expected
    for written in ("[", "[]", '{"eos_token_id": "end"}'):
        file.write_text(written)
        with pytest.raises(ModelError, match="generation_config.json"):
            check_settings(on_cpu(tmp_path / "model"))


def test_a_foreign_tokenizer_is_refused(model, tmp_path):
    served = check_settings(on_cpu(model))
    with pytest.raises(ModelError, match="can't be loaded"):
        load_tokenizer(str(tmp_path), served)
    from transformers import Qwen2Tokenizer

    Qwen2Tokenizer(vocab={chr(256 + i): i for i in range(70)}, merges=[]).save_pretrained(tmp_path / "large")
    with pytest.raises(ModelError, match=r"ids that the model doesn't know[\s\S]*at most 61"):
        load_tokenizer(str(tmp_path / "large"), served)
